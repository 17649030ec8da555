"""Whether a living process can drop its CUDA context and use the GPU again: ``python -m lab.context_drop`` on a GPU.

A device that leaves a program keeps its context (`warpwell.pool.agent.spare`). This program tries the alternative: a
process runs a kernel on a device of its own, closes numba-cuda, resets the primary context, and runs the kernel again,
with the same compiled objects and with new ones. Another process measures the free memory of the GPU.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import warpwell as ww
from warpwell.pool.devices import Devices

MIB = 1 << 20


@ww.kernel
def double(x):  # type: ignore[no-untyped-def]
    """Double each item."""
    i = ww.gpu.grid(1)
    x[i] = 2 * x[i]


def run(kernel: Any) -> None:
    """Run a kernel on a device of this process; raise if the result is wrong."""
    with Devices(targets=["cuda"]) as devices:
        x = devices[0].to_device(np.arange(64 * MIB // 8))
        kernel[x.size](x)
        if not np.array_equal(x.copy_to_host(), 2 * np.arange(64 * MIB // 8)):
            raise ValueError("wrong result")


def drop() -> None:
    """Destroy the context of this process, and forget what refers to it."""
    import gc

    from cuda.bindings import driver
    from numba import cuda

    from warpwell.pool.agent.memory_pool import MemoryPool
    from warpwell.targets import fault

    MemoryPool._all.clear()
    fault._free.clear()
    fault._blocks.clear()
    fault._pinned = None
    gc.collect()
    cuda.close()
    print("reset:", driver.cuDevicePrimaryCtxReset(0)[0].name, flush=True)
    print("active:", driver.cuDevicePrimaryCtxGetState(0), flush=True)


def attempt(name: str, call: Callable[[], None]) -> None:
    """Call a function and print the result; wait for the measuring process after it."""
    try:
        call()
        print(f"{name}: passed", flush=True)
    except Exception as error:
        traceback.print_exc(limit=3)
        print(f"{name}: failed, {type(error).__name__}: {error}", flush=True)
    print("measure", flush=True)
    sys.stdin.readline()


def worker() -> None:
    """Run the steps, each followed by a measurement."""
    attempt("nothing used", lambda: None)
    attempt("first run", lambda: run(double))
    attempt("drop", drop)
    attempt("new kernel after the drop", lambda: run(ww.kernel(double.function)))
    attempt("same kernel after the drop", lambda: run(double))
    attempt("second drop", drop)


def main() -> None:
    """Start the worker and print the memory that it uses after each step."""
    from warpwell.targets import GpuDevice

    gpu = GpuDevice(0)
    gpu.enter()
    command = [sys.executable, "-c", "from lab.context_drop import worker; worker()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        start = None
        for line in process.stdout:
            if line != "measure\n":
                print(line, end="")
                continue
            free = gpu.memory_info()[0]
            start = free if start is None else start
            print(f"  the worker uses {(start - free) / MIB:.0f} MiB of the GPU")
            process.stdin.write("\n")
            process.stdin.flush()
    print("worker: exit status", process.returncode)


if __name__ == "__main__":
    main()
