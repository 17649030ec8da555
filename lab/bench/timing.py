"""Timing of kernels and tables of results, shared by the benchmarks."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 touches it on NumPy 2.5
    np.row_stack = np.vstack  # noqa: NPY201 - the old name is the point


def kernel_seconds(kernel: Any, n: int, *args: Any, device: str, arrays: Sequence[Any] = (), runs: int = 5) -> float:
    """Return the median seconds of a launch with `n` threads after one that warms up.

    On a GPU by events around the kernel alone, with the controllers of `arrays` kept awake; elsewhere by
    the clock around the whole launch.
    """
    if device != "cuda":
        times = []
        for _ in range(runs + 1):
            begun = time.perf_counter()
            kernel[n](*args, device=device)
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])
    from numba import cuda

    from warpwell.targets.compiler import run_cuda
    from warpwell.targets.fault import LaunchFlag

    run_cuda.share_fault_page()
    compiled = run_cuda.compiled(kernel, 1, len(args))
    blocks = -(-n // run_cuda.BLOCK_THREADS)
    times = []
    flag = LaunchFlag("cuda")
    for a in arrays:
        a.launch_begins(flag)
    try:
        values = [a.kernel_struct(flag) if hasattr(a, "kernel_struct") else a for a in args]
        for _ in range(runs + 1):
            start, end = cuda.event(), cuda.event()
            start.record()
            run_cuda.configured(compiled, blocks, run_cuda.BLOCK_THREADS, None)(n, 1, 1, *values)
            end.record()
            end.synchronize()
            times.append(cuda.event_elapsed_time(start, end) / 1000)
    finally:
        for a in arrays:
            a.launch_ended(flag)
    return statistics.median(times[1:])


def registers_and_occupancy(kernel: Any, count: int) -> tuple[int, float]:
    """Return registers a thread and the fraction of a multiprocessor's threads that are resident."""
    from warpwell.targets.compiler import run_cuda

    compiled = run_cuda.compiled(kernel, 1, count)
    registers = int(next(iter(compiled.overloads.values())).regs_per_thread)
    # registers are handed out to warps in units of 256; 65,536 of them and 2,048 threads a multiprocessor
    block = -(-registers * 32 // 256) * 256 * (run_cuda.BLOCK_THREADS // 32)
    return registers, min(2048, 65536 // block * run_cuda.BLOCK_THREADS) / 2048


def machine(device: str) -> dict[str, Any]:
    """Return what a result must say of where it comes from."""
    out: dict[str, Any] = {"host": platform.processor() or platform.machine(), "device": device}
    try:
        out["commit"] = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        out["commit"] = "unknown"
    if device == "cuda":
        from numba import cuda

        name = cuda.get_current_device().name
        out["gpu"] = name.decode() if isinstance(name, bytes) else str(name)
    return out


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns."""
    texts = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[k]) for r in texts)) for k, h in enumerate(header)] if texts else []
    print(f"\n{title}", flush=True)
    print("  ".join(str(h).ljust(w) for h, w in zip(header, widths, strict=False)))
    for row in texts:
        print("  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)), flush=True)


def save(path: str | None, result: dict[str, Any]) -> None:
    """Write a result as JSON where a path was given."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=str)


def best(function: Callable[[], float], runs: int = 3) -> float:
    """Return the median of several calls."""
    return statistics.median(function() for _ in range(runs))
