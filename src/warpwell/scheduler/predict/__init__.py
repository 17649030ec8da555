"""What a launch will take, alone and beside others.

=============  ==========================================================================================
identity.py    what a kernel and its size are known by: its code, types, size class
sample.py      one launch as it was measured
peaks.py       memory bandwidth of a device, by name or measured
learner.py     what a scheduler asks: profiles of tasks; learns from those that ran alone
predictor.py   time and class at other sizes of a kernel, by regression
history.py     what was measured, kept in a file by device
rates.py       how fast kernels run together: by class, by two resources, by measured pairs
=============  ==========================================================================================
"""
