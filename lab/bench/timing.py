"""Times of kernels and calls, and cold files, shared by the benchmarks."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import machine as _machine

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 uses the name on NumPy 2.5
    np.row_stack = np.vstack  # noqa: NPY201 - the old name is required


def kernel_times(
    kernel: Any, n: int, *args: Any, device: str, arrays: Sequence[Any] = (), runs: int = 5
) -> list[float]:
    """Return the seconds of `runs` launches with `n` threads, after a launch that compiles.

    On a GPU, events around the kernel measure the times, and the controllers of `arrays` keep running. On a CPU
    the clock is read around the whole launch.
    """
    times = []
    if device != "cuda":
        for _ in range(runs + 1):
            started = time.perf_counter()
            kernel[n](*args, device=device)
            times.append(time.perf_counter() - started)
        return times[1:]
    from numba import cuda

    from warpwell.targets import LaunchFlag
    from warpwell.targets.compiler import run_cuda

    run_cuda.share_fault_page()
    compiled = run_cuda.compiled(kernel.current(), 1, len(args))
    blocks = -(-n // run_cuda.BLOCK_THREADS)
    flag = LaunchFlag("cuda")
    for a in arrays:
        a.launch_begins(flag)
    try:
        values = [a.kernel_struct(flag) if hasattr(a, "kernel_struct") else a for a in args]
        for _ in range(runs + 1):
            start, end = cuda.event(), cuda.event()
            start.record()
            run_cuda.configured(compiled, (blocks,), (run_cuda.BLOCK_THREADS,), None)(n, 1, 1, *values)
            end.record()
            end.synchronize()
            times.append(cuda.event_elapsed_time(start, end) / 1000)
    finally:
        for a in arrays:
            a.launch_ended(flag)
    return times[1:]


def kernel_seconds(kernel: Any, n: int, *args: Any, device: str, arrays: Sequence[Any] = (), runs: int = 5) -> float:
    """Return the median of `kernel_times`."""
    return statistics.median(kernel_times(kernel, n, *args, device=device, arrays=arrays, runs=runs))


def registers_per_thread(kernel: Any, count: int) -> int:
    """Return the registers of a thread of a kernel for a GPU with `count` arguments."""
    from warpwell.targets.compiler import run_cuda

    return int(next(iter(run_cuda.compiled(kernel.current(), 1, count).overloads.values())).regs_per_thread)


def call_times(call: Callable[[], object], runs: int = 3, before: Callable[[], object] = lambda: None) -> list[float]:
    """Return the seconds of `runs` calls after a warm-up call; `before` is called before each call, untimed."""
    times = []
    for _ in range(runs + 1):
        before()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times[1:]


def alternate(
    calls: dict[str, Callable[[], object]], runs: int, finish: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each call, `runs` times in turn after a round that warms up; `finish` ends each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(runs + 1):
        for name, call in calls.items():
            finish()
            started = time.perf_counter()
            call()
            finish()
            if k:
                times[name].append(time.perf_counter() - started)
    return times


def rates(amount: float, times: Sequence[float]) -> list[float]:
    """Return `amount` per second for each time."""
    return [amount / seconds for seconds in times]


def machine(device: str) -> dict[str, Any]:
    """Return facts about the machine, for the benchmarks that write their own JSON."""
    return _machine.facts() | {"device": device, "commit": _machine.commit()[0]}


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns."""
    texts = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[k]) for r in texts)) for k, h in enumerate(header)] if texts else []
    print(f"\n{title}", flush=True)
    print("  ".join(str(h).ljust(w) for h, w in zip(header, widths, strict=False)))
    for row in texts:
        print("  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)), flush=True)


def save(path: str | None, result: dict[str, Any]) -> None:
    """Write a result as JSON if a path is given."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=str)


def drop_file(path: Path) -> None:
    """Sync a file and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_files(folder: Path) -> None:
    """Sync all files of a folder and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            drop_file(path)
