"""Executors of real devices. They start workers and stop them; workers claim blocks in targets/blocks.

In the order in which a launch meets them::

engine.py           Engine, Run, Phase: the protocol of tasks on a device, which both executors share
cpu_executor.py     CpuExecutor: threads of this machine as workers
cuda_executor.py    CudaExecutor: workers on a GPU: how many there are, when they stop; ends
cuda_run.py         CudaRun: one task on the GPU, its form and its control record
gpu.py              Gpu: one GPU with its queues, events and control words
launch_queues.py    LaunchQueue, LaunchQueues: streams whose kernels a native thread launches; it records their ends
cuda_launch.py      Ahead, Records, Order: preparation, control records and order of launches
"""

from __future__ import annotations

from collections.abc import Callable

from ..executor import Executor


def executor_of(device: str) -> Callable[[], Executor]:
    """Return the factory of the executor of "cpu" or "cuda"."""
    # Imported here, because the GPU's executor imports the driver, which takes long.
    if device == "cpu":
        from .cpu_executor import CpuExecutor

        return CpuExecutor
    from .cuda_executor import CudaExecutor

    return CudaExecutor
