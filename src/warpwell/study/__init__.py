"""Traces, workloads and simulation: for comparisons; programs do not need them.

================  =======================================================================================
traces/           kernels and when they arrive, from files or built in
workloads/        programs with NumPy references, for measurements of schedulers
bench/            micro-benchmarks, with ceilings, beside BaM's protocol
simulator.py      the executor in virtual time
replay.py         a trace through an executor
metrics.py        throughput, turnaround, fairness and preemptions of a run
rates.py          how fast kernels run together in simulations: by two resources, by measured pairs
bound.py          the most that any schedule could get out of measured pairs
experiment.py     policies on a trace in the simulator, each a run of its own
counts.py         launches that were measured under a profiler, as samples for the predictor
fitting.py        constants of the cost formula, from measured preemptions
distributions.py  keys as YCSB draws them
ycsb.py           YCSB's workloads on a key-value store
ycsb_run.py       runs a workload and measures latencies
================  =======================================================================================
"""
