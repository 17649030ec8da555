"""Randomized stress tests.

- pool_faults: kills, exits, interrupts and full disks in jobs of ``warpwell run``
- cuda_client: a program that `pool_faults` runs: a CUDA program that does not import Warpwell
- pool_losing: a program that `pool_faults` runs: loses devices of ``ww.devices()``
- marked: finds processes by a mark in their environment
"""
