"""How many launches a second: of a kernel, on a device of a pool, and through the scheduler.

Run it as ``python benchmarks/launches.py`` (devices of this process) and as ``warpwell run --agents 1
benchmarks/launches.py`` (a device of an agent). *Issued* counts until the last call has returned, *done* until the
last kernel has ended. Kernels have 64 threads and do next to nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from warpwell.scheduler import Scheduler

THREADS = 64


@ww.kernel
def nothing(first):
    i = ww.grid(1)
    if i < 0:
        first[i] = 0


@ww.kernel
def read(first, items):
    i = ww.grid(1)
    first[i] = items[i]


def rates(launch: Callable[[], object], wait: Callable[[], object], times: int) -> tuple[float, float]:
    """Return launches a second, issued and done, of the best of three rounds."""
    best = [0.0, 0.0]
    for _ in range(3):
        launch()
        wait()
        begun = time.perf_counter()
        for _ in range(times):
            launch()
        issued = time.perf_counter() - begun
        wait()
        best = [max(best[0], times / issued), max(best[1], times / (time.perf_counter() - begun))]
    return best[0], best[1]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    rows = []

    def measure(what: str, launch: Callable[[], object], wait: Callable[[], object] = lambda: None) -> None:
        rows.append([what, *(round(rate) for rate in rates(launch, wait, options.times))])

    first = np.zeros(THREADS, np.int64)
    launch = nothing[THREADS]
    measure("kernel, NumPy array", lambda: launch(first))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.npy"
        np.save(path, np.arange(1 << 16))
        with ww.open(path, cache="1MiB") as items:
            reads = read[THREADS]
            measure("kernel, NumPy array and array on storage", lambda: reads(first, items))
    device = ww.devices()[0]
    with device:
        there = ww.to_device(first)
        measure(f"kernel, buffer on {device}", lambda: launch(there), device.synchronize)
    with Scheduler() as scheduler:
        last: list[object] = []

        def submit() -> None:
            last[:] = [scheduler.submit(launch, first)]

        measure("task of a scheduler", submit, lambda: last[0].result())  # type: ignore[attr-defined]
    table(f"launches a second, {options.times} at a time", ["what", "issued", "done"], rows)
    save(options.json, {"machine": machine(ww.default_device()), "rows": rows})


if __name__ == "__main__":
    main()
