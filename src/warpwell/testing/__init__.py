"""Conformance suites for new media, transports, executors and policies.

A subclass of a suite says how to make the thing that is tested. Files, suites first:

- media.py             `MediumConformance`: every storage medium
- transports.py        `TransportConformance`: every transport of a pool
- transport_checks.py  ... the programs that its ranks run
- executors.py         `ExecutorConformance`: every executor of the scheduler
- policies.py          `PolicyConformance`: every policy of the scheduler
- emulated_device.py   a device whose memory is behind a copy engine, without a GPU
"""
