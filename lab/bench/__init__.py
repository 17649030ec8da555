"""Benchmarks, one module each, and the runner that measures, stores and compares their figures.

===============  ==================================================================================================
cli.py           ``python -m lab bench``
runner.py        `benchmark`, `Setting`, `Record`; runs a benchmark in fresh processes
schema.py        the JSON format of a result, and its validation
machine.py       facts about the machine; whether other programs keep it busy
compare.py       compares results, or two revisions that run alternately
baseline.py      records the figures that later runs are compared with
page.py          writes docs/figures.md from the stored results
timing.py        times of kernels
micro/           micro-benchmarks with ceilings, compared with the protocol of BaM
===============  ==================================================================================================

A result is ``lab/results/MACHINE/BENCHMARK.json``. The modules named in `SCRIPTS` still have their own options and
print tables.
"""

BENCHMARKS = {
    "micro": (
        "micro.run",
        "reads, writes and sums of the BaM paper, with ceilings",
    ),
    "readme": ("readme", "CPU seconds of the README kernel, from an empty cache and from a filled one"),
    "hits": ("hits", "reads of cached items, compared with raw loads and the protocol of BaM"),
    "misses": ("misses", "pages loaded on demand, prefetch and slices, from host memory"),
    "gather": ("gather", "rows by index, compared with np.take on a CPU and torch.index_select on a GPU"),
    "spans": ("spans", "folds and maps over cached pages, compared with raw loads"),
    "graphs": ("graphs", "graph algorithms by tier; -o gap=FOLDER compares with the GAP benchmark"),
    "taxi": ("taxi", "filters and means over a table of taxi trips, compared with other engines"),
    "kv-host": ("kv_host", "YCSB and batched reads of a store, compared with LMDB and RocksDB"),
    "kv-reads": ("kv_reads", "warm and cold reads of a store, compared with LMDB, Lance, ArrayRecord and WebDataset"),
    "kv-open": ("kv_open", "time and private memory of opening a store, compared with LMDB, RocksDB and others"),
    "kv-device": ("kv_device", "records that kernels retrieve from a store, and overlap with computation"),
    "launches": ("launches", "launches per second: kernels, a pool device, scheduler tasks"),
    "pool-transfer": ("pool_transfer", "pipelined transfers to a pool device (MPI)"),
    "sched-latency": ("sched_latency", "time per scheduled task, compared with plain launches"),
    "sched-share": ("sched_share", "throughput of policies on one GPU (STP: sum of solo times over total time)"),
}
"""Module and summary of each benchmark."""

SCRIPTS = {
    "drive-qemu": ("drive", "reads of a drive emulated by QEMU"),
    "drive-gpu": ("drive_gpu", "kernels on QEMU's controller, with checks"),
    "driver-calls": ("driver_calls", "driver calls of unmodified CUDA programs, compared with the native driver"),
    "file": ("file", "random direct reads of a file, compared with fio"),
    "matrix": ("matrix", "norms and random blocks of a matrix, compared with NumPy and Numba on a memmap"),
    "pool-tables": ("pool_tables", "matrix products and FFTs on a pool device (needs CuPy)"),
    "pool-two": ("pool_two", "two GPUs of a pool: copies, independent work, exchanges"),
    "sched-cost": ("sched_cost", "cost of a preemption for each pair of kernels"),
    "sched-forms": ("sched_forms", "cost and latency of preemptible kernel variants"),
    "sched-pairs": ("sched_pairs", "rates of pairs of kernels that share a GPU"),
    "sched-priority": ("sched_priority", "latency of urgent tasks on a busy GPU"),
    "sched-torch": ("sched_torch", "PyTorch training and inference on one GPU"),
}
"""Module and summary of the benchmarks that parse their own options."""

AGENTS = {"pool-tables": 1, "pool-two": 2}
"""Scripts that run under ``warpwell run``, and the number of agents."""
