"""Stress tests that run for minutes or hours: ``python -m lab campaign NAME``.

==================  ====================================================================================
interleavings.py    seeded interleavings of queues, cache and stores on weak memory; planted faults
models/             the models that it runs, their invariants, and the planted faults
kv_model.py         random operations on a store, compared with a dict
kv_crash.py         kills, power cuts, failed calls and flipped bits in the log of a store
crash/              loads, files and disks for kv_crash
kv_imports.py       imports of image data sets through kills, compared record by record
kv_training.py      training from a store through kills, compared with training from memory
kv_ranks.py         trainers that kv_training starts
digits.py           data and classifier of kv_training
drive_losses.py     kills of QEMU while kernels write to its drive
interrupts.py       Ctrl-C at random moments of programs
interrupts_pool.py  the program with two agents that interrupts starts
pool_faults.py      kills, exits, interrupts and full disks in jobs of ``warpwell run``
pool_losing.py      a program that pool_faults runs: loses devices of ``ww.devices()``
cuda_client.py      a program that pool_faults runs: a CUDA program that does not import Warpwell
marked.py           finds processes by a mark in their environment
sched_order.py      random tasks on overlapping arrays, compared with serial runs
table_corpus.py     files of apache/parquet-testing and arrow-testing, compared with pyarrow
guest/              a Linux guest in QEMU that runs one program, for drives behind an IOMMU
==================  ====================================================================================
"""
