"""Conformance suites for new media and executors.

A subclass of a suite creates the object under test. Files:

- media.py             `MediumConformance`: every storage medium
- executors.py         `ExecutorConformance`: every executor of the scheduler
"""
