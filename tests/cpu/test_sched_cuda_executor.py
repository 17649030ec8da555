"""The GPU's executor over streams and workers of the host: what it does in which order, without a GPU."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell.scheduler import Ended, Executor, Job, Placement, Profile, Request, Task, cuda_order
from warpwell.scheduler.watchdog import Watchdog
from warpwell.testing.executors import ExecutorConformance
from warpwell.testing.fake_gpu import FakeGpu, fake_executor


class TestCudaExecutorWithoutGpu(ExecutorConformance):
    def make(self) -> Executor:
        return fake_executor()

    def test_quotas_hold_while_they_change(self) -> None:
        gpu = FakeGpu(resident=6)
        executor = fake_executor_over(gpu)
        job = self.job(executor)
        chance = random.Random(5)
        executor.launch(job, Placement(workers=3))
        ended = False
        while not ended:
            executor.resize(job, chance.choice([1, 2, 3, 4, 5, 6, None]))
            time.sleep(1e-3)
            ended = any(isinstance(event, Ended) for event in executor.poll())
        assert (self.counts(job.task) == 1).all()
        assert 1 <= gpu.made[0].most <= 6
        executor.close()

    def test_a_short_kernel_that_does_not_end_is_stuck(self) -> None:
        """It runs whole, because it was to be over before it could be preempted: so it shows no progress."""
        executor = fake_executor()
        x = np.zeros(2, np.int64)
        task = Task("endless", 1, Profile(seconds=1e-6), endless[1], (x,))
        job = Job(task, Request("endless", [task]), 0.0)
        executor.launch(job, Placement())
        watchdog, until = Watchdog(0.3), time.monotonic() + 30
        while not watchdog.look([job], executor):
            assert time.monotonic() < until
            executor.wait(executor.now() + 0.05)
            assert executor.poll() == []
        x[0] = 1
        while not executor.poll():
            assert time.monotonic() < until
            executor.wait(executor.now() + 0.05)
        executor.close()


@ww.kernel
def endless(x):
    while x[0] == 0:
        ww.backoff(100)


def fake_executor_over(gpu: FakeGpu) -> Any:
    from warpwell.scheduler.cuda_executor import CudaExecutor

    return CudaExecutor(gpu=gpu)


def test_the_second_of_two_launches_waits_until_the_workers_of_the_first_have_begun(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_order, "SOON", 60.0)
    gpu = FakeGpu()
    waited: list[tuple[int, int]] = []
    wait_word = gpu.wait_word

    def waits(stream: Any, address: int, least: int) -> None:
        waited.append((address, least))
        wait_word(stream, address, least)

    gpu.wait_word = waits  # type: ignore[method-assign]
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    first, second, late = (conformance.job(executor) for _ in range(3))
    executor.launch(first, Placement(workers=2))
    until = time.monotonic() + 60
    ended: list[Any] = []
    while executor.progress(first) == 0:  # compiled, in a thread of its own
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-3)
        ended += executor.poll()
    executor.launch(late, Placement(workers=1))
    executor.launch(second, Placement(workers=1))
    while len(ended) < 3:
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-2)
        ended += executor.poll()
    assert all(event.error is None for event in ended)
    assert len(waited) >= 1 and all(least > 0 for _, least in waited)
    executor.close()
