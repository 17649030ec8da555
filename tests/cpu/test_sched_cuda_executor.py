"""The GPU's executor over streams and workers of the host: what it does in which order, without a GPU."""

from __future__ import annotations

import random
import time
from typing import Any

from warpwell.scheduler import Ended, Executor, Placement
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


def fake_executor_over(gpu: FakeGpu) -> Any:
    from warpwell.scheduler.cuda_executor import CudaExecutor

    return CudaExecutor(gpu=gpu)
