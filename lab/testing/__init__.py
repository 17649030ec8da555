"""Devices and conformance suites for tests of the scheduler, and patches that plant faults.

=============  ==================================================================================
policies.py    `PolicyConformance`: tests that every policy passes
fake_gpu.py    a GPU of host threads, for tests without a driver
clock_gpu.py   a GPU whose kernels only take time, to measure the scheduler's own cost
patches.py     reads planted faults from files of patches
=============  ==================================================================================
"""
