"""The scheduler's executor on a GPU, and workloads in every form."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.scheduler import Job, Placement, Request, Stopped, Task
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.study.workloads import WORKLOADS, make
from warpwell.targets.block import barrier, block_index, thread_index
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.testing.executors import ExecutorConformance, count_and_mix


class TestCudaExecutor(ExecutorConformance):
    device = "cuda"
    BLOCKS = 30_000
    ROUNDS = 20_000

    def make(self) -> CudaExecutor:
        return CudaExecutor(pairs=())


@ww.kernel(block=64)
def returns_before_barrier(x, n, rounds):
    value = 1.0
    for _ in range(rounds):
        value = value * 1.0000001 + 1e-9
    if thread_index() >= n and value != 0:
        return
    barrier()
    if thread_index() == 0:
        x[block_index()] += 1


def job_of(launch: Any, *arguments: Any) -> Job:
    blocks = BlockLaunch(launch, arguments, "cuda").blocks
    task = Task(launch.kernel.__name__, blocks, launch=launch, arguments=arguments)
    return Job(task, Request(task.name, [task]), 0.0)


def until_event(executor: CudaExecutor) -> Any:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        executor.wait(executor.now() + 1)
        events = executor.poll()
        if events:
            return events[0]
    raise AssertionError("no event")


def test_slices_stop_between_them_and_go_on() -> None:
    x = np.zeros(200_000, np.int64)
    executor = CudaExecutor(pairs=())
    job = job_of(returns_before_barrier[x.size], x, 32, 20_000)
    stops = 0
    executor.launch(job, Placement())
    while True:
        if not stops:
            while executor.progress(job) == 0 and not executor.poll():
                pass
        executor.preempt(job)
        event = until_event(executor)
        if not isinstance(event, Stopped):
            break
        assert 0 < event.done < x.size
        stops += 1
        executor.launch(job, Placement())
        time.sleep(3e-3)
        executor.poll()
    assert event.error is None and stops and (x == 1).all()
    executor.close()


def test_partitions_hold_what_they_are_given() -> None:
    executor = CudaExecutor(pairs=(32,))
    parts = executor.capacity.partitions
    assert parts is not None and 32 <= parts["a32"] < executor.capacity.processors
    assert parts["a32"] + parts["b32"] <= executor.capacity.processors
    arrays = []
    for name in ("a32", "b32"):
        n = 256 * 5000
        arrays.append((np.zeros(n, np.int64), np.zeros(n, np.int64)))
        executor.launch(job_of(count_and_mix[n], *arrays[-1], 100), Placement(partition=name))
    ended: list[Any] = []
    until = time.monotonic() + 60
    while len(ended) < len(arrays):
        assert time.monotonic() < until
        executor.wait(executor.now() + 1)
        ended += executor.poll()
    assert all(event.error is None for event in ended)
    assert all((counts == 1).all() for counts, _ in arrays)
    with pytest.raises(errors.ArgumentError, match="a7"):
        executor.launch(job_of(count_and_mix[256], np.zeros(256, np.int64), np.zeros(256, np.int64), 1),
                        Placement(partition="a7"))  # fmt: skip
        until_event(executor)
    executor.close()


@pytest.mark.parametrize("form", ["workers", "slices"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_bit_for_bit_in_every_form(name: str, form: str) -> None:
    from warpwell.targets.blocks.cuda import Forms
    from warpwell.targets.gpu.gpu import Gpu

    size = 4 * WORKLOADS[name].small
    whole, cut = make(name, size, "cuda"), make(name, size, "cuda")
    whole.run()
    gpu = Gpu()
    gpu.enter()
    stream = gpu.stream()
    for step in cut:
        blocks = BlockLaunch(step.launch, step.arguments, "cuda")
        blocks.begin()
        made = Forms(blocks)
        made.prepare()
        if form == "workers":
            control = blocks.new_control()
            made.start(control.address, 0, 3, stream, 2)
        else:
            for first in range(0, blocks.blocks, 7):
                made.start_slice(first, min(7, blocks.blocks - first), stream)
        gpu.synchronize(stream)
        blocks.end()
    for mine, theirs in zip(cut.results().values(), whole.results().values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    cut.check()
