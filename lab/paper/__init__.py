"""The experiments of the source documents on emulated drives, the simulator and the CPU (``python -m lab paper``).

================  ==========================================================================
command.py        options, order of experiments, exit status
documents.json    the statements of each document, with figure, values and quoted sentences
experiment.py     `Experiment`, `Outcome`; runs, repetitions and the verdict
shapes.py         checks of shapes
report.py         the table, the page, JSON
drives.py         emulated drives, scaled down
bam.py            BaM: threads, drives, line sizes, graphs
taxi.py           BaM: taxi queries
scheduling.py     GPU task scheduling: cost formula, decisions, policies
cluster.py        cluster virtualization: transfers, matrix and FFT tables
cluster_job.py    the two processes that measure these
key_value.py      key-value training: overlap, two devices
================  ==========================================================================
"""
