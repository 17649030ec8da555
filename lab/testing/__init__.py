"""Devices and conformance suites for tests of the scheduler.

=============  ==================================================================================
policies.py    `PolicyConformance`: tests that every policy passes
fake_gpu.py    a GPU of host threads, for tests without a driver
clock_gpu.py   a GPU whose kernels only take time, to measure the scheduler's own cost
=============  ==================================================================================
"""
