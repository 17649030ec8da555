"""Launches per second: of a kernel, on a pool device of this process, and through the scheduler.

*Issued* counts until the last call has returned, *done* until the last kernel has completed. Kernels have 64 threads
and do almost nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import warpwell as ww
from lab.bench.runner import Record, Setting, benchmark
from warpwell import gpu
from warpwell.scheduler import Scheduler

THREADS = 64


@ww.kernel
def nothing(first):
    i = gpu.grid(1)
    if i < 0:
        first[i] = 0


@ww.kernel
def read(first, items):
    i = gpu.grid(1)
    first[i] = items[i]


def measure(name: str, launch: Callable[[], object], wait: Callable[[], object], times: int, record: Record) -> None:
    """Record the rates of five rounds."""
    issued, done = [], []
    for k in range(6):
        start = time.perf_counter()
        for _ in range(times if k else 10):
            launch()
        returned = time.perf_counter() - start
        wait()
        if k:
            issued.append(times / returned)
            done.append(times / (time.perf_counter() - start))
    record(f"{name}/issued", issued, "1/s")
    record(f"{name}/done", done, "1/s")


@benchmark("launches", figures=["kernel", "storage", "pool", "scheduler"])
def run(setting: Setting, record: Record) -> None:
    """Measure all of it."""
    times = setting.pick((500, 2000), (1000, 2000), "times")
    first, launch = np.zeros(THREADS, np.int64), nothing[THREADS]
    measure("kernel", lambda: launch(first), lambda: None, times, record)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.npy"
        np.save(path, np.arange(1 << 16))
        with ww.open(path, cache="1MiB") as items:
            reads = read[THREADS]
            measure("storage", lambda: reads(first, items), lambda: None, times, record)
    device = ww.devices()[0]
    with device:
        on_device = ww.to_device(first)
        measure("pool", lambda: launch(on_device), device.synchronize, times, record)
    with Scheduler() as scheduler:
        last: list[object] = []

        def submit() -> None:
            last[:] = [scheduler.submit(launch, first)]

        measure("scheduler", submit, lambda: last[0].result(), times, record)  # type: ignore[attr-defined]
