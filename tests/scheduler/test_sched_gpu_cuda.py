"""The scheduler's executor on a GPU, and workloads in every form."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from lab.sched.workloads import WORKLOADS, make
from warpwell import errors
from warpwell.scheduler import Profile, Scheduler
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.extend import Ended, Job, Kind, Log, Placement, Request, Task
from warpwell.targets.arrays import to_host, zeros
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.primitives import barrier, block_index, thread_index
from warpwell.testing.executors import ExecutorConformance


class TestCudaExecutor(ExecutorConformance):
    device = "cuda"
    BLOCKS = 30_000
    ROUNDS = 20_000

    def make(self) -> CudaExecutor:
        return CudaExecutor()


class TestCudaExecutorOnTheGpu(TestCudaExecutor):
    """Arrays are there, so that tasks may be put behind others."""

    BLOCKS = 3000  # two workers take 0.4 s

    def zeros(self, n: int) -> Any:
        return zeros("cuda", n, np.int64)

    def host(self, array: Any) -> Any:
        return to_host(array)


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


def test_what_workers_cannot_run_runs_whole() -> None:
    x = np.zeros(200_000, np.int64)
    executor = CudaExecutor()
    job = job_of(returns_before_barrier[x.size], x, 32, 20_000)
    executor.launch(job, Placement())
    executor.preempt(job)
    event = until_event(executor)
    assert isinstance(event, Ended) and event.error is None and (x == 1).all()
    executor.close()


@ww.kernel
def step(x, k):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] = x[i] * 5 + k


def test_short_kernels_go_in_trains_each_once_and_in_order() -> None:
    count = 3000
    x = zeros("cuda", 256 * 132, np.int64)
    profile = Profile(kind=Kind.COMPUTE, seconds=20e-6, source="measured")
    with Scheduler("cuda", "lanes", limit=1, log=Log()) as scheduler:
        # With order="data", a task arrives when its predecessor has ended, so no task is queued after another.
        handles = [scheduler.submit(step[x.size], x, k, profile=profile, order="none") for k in range(count)]
        assert not handles[-1].cancel() or handles[-1].cancelled()
    expected = 0
    for k in range(count - handles[-1].cancelled()):
        expected = (expected * 5 + k) % 2**64
    assert (to_host(x).view(np.uint64) == np.uint64(expected)).all()
    kinds = collections.Counter(event.kind for event in scheduler.log)
    assert kinds["end"] + kinds["cancel"] == count and kinds["launch"] >= kinds["end"]
    assert any("behind" in event.why for event in scheduler.log)


def test_workers_begin_when_each_control_record_was_used_once() -> None:
    executor = CudaExecutor()
    records = executor._records
    records._used += [records._ready.popleft() for _ in range(len(records._ready) - 8)]
    x = zeros("cuda", 256, np.int64)
    for k in range(40):
        executor.launch(job_of(step[x.size], x, k), Placement(workers=1))
        event = until_event(executor)
        assert isinstance(event, Ended) and event.error is None
    assert len(records._used) > 40
    executor.close()


def test_a_kernel_that_the_gpu_refuses_in_a_line_fails_alone() -> None:
    executor = CudaExecutor()
    x = zeros("cuda", 256, np.int64)
    first, second = job_of(step[x.size], x, 1), job_of(step[x.size], x, 2)
    executor.launch(first, Placement(plain=True))
    assert until_event(executor).error is None
    executor.launch(second, Placement(plain=True))
    assert until_event(executor).error is None
    third = job_of(step[x.size], x, 3)
    make_forms = executor._gpu.forms

    def refused(blocks: Any) -> Any:
        forms = make_forms(blocks)
        forms.plain_row()[1] |= 4096 << 32  # threads of a block
        return forms

    executor._gpu.forms = refused
    executor.launch(third, Placement(plain=True))
    error = until_event(executor).error
    assert isinstance(error, errors.ArgumentError), error
    executor._gpu.forms = make_forms
    executor.close()


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_bit_for_bit_as_workers(name: str) -> None:
    from warpwell.scheduler.executors.gpu import Gpu
    from warpwell.targets.blocks.cuda import Forms

    size = 4 * WORKLOADS[name].small
    plain, cut = make(name, size, "cuda"), make(name, size, "cuda")
    plain.run()
    gpu = Gpu()
    gpu.enter()
    stream = gpu.new_stream()
    for step in cut:
        blocks = BlockLaunch(step.launch, step.arguments, "cuda")
        blocks.begin()
        made = Forms(blocks)
        control = blocks.new_control()
        made.start(control.address, 0, 3, stream, 2)
        gpu.synchronize(stream)
        blocks.end()
    for actual, expected in zip(cut.results().values(), plain.results().values(), strict=True):
        assert actual.tobytes() == expected.tobytes()
    cut.check()
