"""Executors of real devices. They start workers and stop them; workers claim blocks in targets/blocks.

In the order in which a launch meets them::

block_executor.py   BlockExecutor, BlockRun, Phase: the base of both executors
cpu_executor.py     CpuExecutor: threads of this machine as workers, slot by slot
cuda_executor.py    CudaExecutor: workers on a GPU: how many there are, when they stop; ends
cuda_run.py         CudaRun: one task on the GPU, its form and its control record
gpu.py              Gpu: one GPU with its lines, events and control words
lines.py            Line, Lines: streams whose kernels a native thread launches, and whose ends it records
cuda_launch.py      Ahead, Pace, Order: what is prepared before a launch, how long it takes, which comes first
"""

from __future__ import annotations

from collections.abc import Callable

from ..executor import Executor


def executor_of(device: str) -> Callable[[], Executor]:
    """Return what makes the executor of "cpu" or "cuda"."""
    # imported here: the GPU's executor imports the driver, and takes as long
    if device == "cpu":
        from .cpu_executor import CpuExecutor

        return CpuExecutor
    from .cuda_executor import CudaExecutor

    return CudaExecutor
