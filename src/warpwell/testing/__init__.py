"""Conformance suites for new media, executors and policies.

A subclass of a suite says how to make the thing that is tested. Files, suites first:

- media.py             `MediumConformance`: every storage medium
- executors.py         `ExecutorConformance`: every executor of the scheduler
- policies.py          `PolicyConformance`: every policy of the scheduler
"""
