"""Predict the time of a launch, solo and with co-runners.

=============  ==========================================================================================
identity.py    the key of a kernel and its size: code, types, size class
record.py      the measurements of a kernel at one size
peaks.py       memory bandwidth of a device, by name or measured
learner.py     profiles of tasks for the scheduler; learns from tasks that ran solo
predictor.py   time and class at other sizes of a kernel, by regression
pairs.py       measured rates of kernels that ran together
history.py     measurements, in a file for each device
rates.py       assumed rates of kernels that run together, by class and order of residency
=============  ==========================================================================================
"""
