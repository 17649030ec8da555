"""Scheduler studies: traces and workloads, a simulator, and comparisons of policies.

================  =======================================================================================
traces/           kernels and their arrivals, from files or built in
workloads/        programs with NumPy references, for measurements of schedulers
simulator.py      the executor in virtual time
replay.py         runs a trace through an executor
metrics.py        throughput, turnaround, fairness and preemptions of a run
rates.py          measured rates of pairs of kernels
bound.py          the upper bound of any schedule, from measured pairs
experiment.py     policies on a trace in the simulator, each a run of its own
policies/         baselines of the patent, only for comparison
recorded.py       traces that a GPU ran, and their replay in the simulator
baseline.py       the default policy, compared with stored results of an earlier revision
fitting.py        constants of the cost formula, from measured preemptions
================  =======================================================================================
"""
