"""Threads submit tasks that are alike, and cancel, wait and submit in callbacks: each task runs once, or not at all."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from concurrent.futures import CancelledError, wait
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.testing.fake_gpu import fake_executor
from warpwell import errors, gpu
from warpwell.scheduler import Handle, Launch, Policy, Scheduler
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.policy import Decision, View
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.series import SeriesHandle


@ww.kernel
def count(x, by):
    i = gpu.grid(1)
    if i < x.size:
        x[i] += by


class Client:
    """A thread that submits."""

    def __init__(self, scheduler: Scheduler, arrays: list[Any], seed: int) -> None:
        self.random = random.Random(seed)
        self.handles: list[tuple[int, Handle]] = []
        self.asked = self.called = 0
        self._scheduler, self._arrays = scheduler, arrays
        self._mine = seed % len(arrays)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _submit(self, which: int, **options: Any) -> Handle:
        handle = self._scheduler.submit(count[300], self._arrays[which], 1, **options)
        self.handles.append((which, handle))
        return handle

    def _back(self, handle: Any) -> None:
        self.called += 1
        if self.called % 2:
            self._submit(self._mine)

    def _run(self) -> None:
        for _ in range(300):
            chance = self.random.random
            which = self.random.randrange(len(self._arrays)) if chance() < 0.1 else self._mine
            handle = self._submit(which, priority=int(chance() < 0.1))
            if chance() < 0.05:
                self.asked += 1
                handle.add_done_callback(self._back)
            if chance() < 0.05:
                self.random.choice(self.handles)[1].cancel()
            if chance() < 0.02:
                wait([its for _, its in self.handles[-20:]], timeout=0.01)
            if chance() < 0.02:
                assert handle.task.pattern is not None and handle.state is not None
                assert handle.job is None or handle.job.task is handle.task


QUICK = ("lanes", 1)
"""Policy and seed that run in `make test`."""


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        pytest.param(*its, marks=[] if its == QUICK else pytest.mark.slow)
        for its in itertools.product(("lanes", "first-come", "left-over"), range(3))
    ],
)
def test_each_task_runs_once_or_was_cancelled(policy: str, seed: int) -> None:
    arrays = [np.zeros(300) for _ in range(3)]
    with Scheduler("cpu", policy, limit=1 + seed % 2, executor=fake_executor()) as scheduler:
        for array in arrays:
            for _ in range(3):
                scheduler.submit(count[300], array, 0).result(HANG_SECONDS)
        clients = [Client(scheduler, arrays, 10 * seed + k) for k in range(3)]
        for client in clients:
            client.thread.join(HANG_SECONDS)
        until(lambda: all(client.called == client.asked for client in clients))
        done = [0] * len(arrays)
        for which, handle in [entry for client in clients for entry in client.handles]:
            try:
                handle.result(HANG_SECONDS)
            except CancelledError:
                continue
            done[which] += 1
        dispatcher, executor = scheduler._dispatcher, scheduler._executor
        until(lambda: not (dispatcher.core.jobs or executor._runs or dispatcher.core._behind))  # type: ignore[attr-defined]
    assert [(array.min(), array.max()) for array in arrays] == [(its, its) for its in done]


def test_tasks_with_equal_numbers_of_numpy_are_alike() -> None:
    array, going = np.zeros(300), threading.Event()
    with Scheduler("cpu", limit=1, executor=fake_executor()) as scheduler:
        for _ in range(2):
            scheduler.submit(count[300], array, np.int64(1)).result(HANG_SECONDS)
        scheduler._dispatcher._calls_back(lambda: going.wait(HANG_SECONDS))
        handles = [scheduler.submit(count[300], array, np.int64(1)) for _ in range(2)]
        other = scheduler.submit(count[300], array, np.int64(2))
        assert all(isinstance(its, SeriesHandle) for its in handles) and not isinstance(other, SeriesHandle)
        assert handles[0]._series is handles[1]._series  # type: ignore[attr-defined]
        going.set()
        wait([*handles, other])
    assert (array == 6).all()


def test_what_was_taken_in_is_in_the_log_of_a_scheduler_that_fails() -> None:
    def fail() -> None:
        raise ValueError("as a policy may")

    array, going = np.zeros(300), threading.Event()
    scheduler = Scheduler("cpu", limit=1, executor=fake_executor())
    for _ in range(2):
        scheduler.submit(count[300], array, 1).result(HANG_SECONDS)
    scheduler._dispatcher._calls_back(lambda: going.wait(HANG_SECONDS))
    handle = scheduler.submit(count[300], array, 1)
    scheduler._dispatcher._calls_back(fail)
    going.set()
    with pytest.raises(errors.TaskLostError, match="as a policy may"):
        handle.result(HANG_SECONDS)
    scheduler.close()
    assert [event.kind for event in scheduler.log].count("arrive") == 3


def test_a_callback_may_cancel_the_last_of_its_series() -> None:
    class Some(Policy):
        """Launches so many, one at a time."""

        name, left = "some", 3

        def decide(self, view: View) -> list[Decision]:
            job = view.waiting.first()
            if view.running or job is None or not self.left:
                return []
            self.left -= 1
            return [Launch(job)]

    array, policy, going = np.zeros(300), Some(), threading.Event()
    with Scheduler("cpu", policy, limit=1, executor=fake_executor()) as scheduler:
        for _ in range(2):  # from the second one on they are alike
            scheduler.submit(count[300], array, 1).result(HANG_SECONDS)
        scheduler._dispatcher._calls_back(lambda: going.wait(HANG_SECONDS))  # nothing is taken in meanwhile
        first, last = (scheduler.submit(count[300], array, 1) for _ in range(2))
        assert isinstance(first, SeriesHandle) and first._series is last._series  # type: ignore[attr-defined]
        first.add_done_callback(lambda _: last.cancel())
        going.set()
        first.result(HANG_SECONDS)
        until(last.cancelled)
        policy.left = 1
        scheduler.submit(count[300], array, 1, priority=1).result(HANG_SECONDS)
    assert scheduler.failure is None and (array == 4).all()


def test_the_words_of_arguments_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, words = [], CudaExecutor.words
    monkeypatch.setattr(CudaExecutor, "words", lambda its, args: (asked.append(args), words(its, args))[1])
    arrays, launch = [np.zeros(300) for _ in range(2)], count[300]
    with Scheduler("cpu", executor=fake_executor()) as scheduler:
        for array in arrays * 3:  # like the last but one
            scheduler.submit(launch, array, 1).result(HANG_SECONDS)
        for priority in (0, 1):  # like the last one, and like it but for an option
            scheduler.submit(launch, arrays[1], 1, priority=priority).result(HANG_SECONDS)
    assert len(asked) == 8


def test_ctrl_c_while_a_scheduler_is_made_leaves_no_thread() -> None:
    class Interrupted(Learner):
        def meets(self, *about: Any) -> None:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        Scheduler("cpu", analyzer=Interrupted(), executor=fake_executor())
    gc.collect()
    until(lambda: not [its for its in set(threading.enumerate()) - before if its.name == "warpwell-scheduler"])
