"""Predict the time of a launch, alone and together with others.

=============  ==========================================================================================
identity.py    the key of a kernel and its size: code, types, size class
record.py      the measurements of a kernel at one size
peaks.py       memory bandwidth of a device, by name or measured
learner.py     profiles of tasks for the scheduler; learns from tasks that ran alone
predictor.py   time and class at other sizes of a kernel, by regression
pairs.py       how fast kernels ran together, as it was measured
history.py     measurements, kept in a file for each device
rates.py       how fast kernels run together, by class and order of residency
=============  ==========================================================================================
"""
