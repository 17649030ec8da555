"""ExecutorConformance: tests that every executor of the scheduler passes; a subclass creates the executor.

The suite needs pytest, which collects a subclass in a test module::

    class TestMine(ExecutorConformance):
        def make(self):
            return MyExecutor()

The tasks are kernels that count how often each index ran, in NumPy arrays. An executor that runs no kernels overrides
`task` and `counts` too.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .. import errors
from ..scheduler.extend import Ended, Executor, Job, Placement, Request, Stopped, Task
from ..targets import kernel
from ..targets.blocks import BlockLaunch
from ..targets.primitives import DEVICE, element_address, fetch_add, grid

EVENT_TIMEOUT_SECONDS = 120.0
"""Maximum time that a test waits for an event, including compilation."""

REQUEST_SECONDS = 20.0
"""Time during which a test preempts and resizes at random. On a machine where threads start later than the next request
arrives, tasks end only after this time."""


@kernel
def count_and_mix(counts, out, rounds):  # type: ignore[no-untyped-def]
    """Add 1 to the index's count, and store a number that takes `rounds` steps to compute."""
    i = grid(1)
    if i < counts.size:
        fetch_add(element_address(counts, i), 1, DEVICE)
        x = i
        for _ in range(rounds):
            x = x * 6364136223846793005 + 1442695040888963407
        out[i] = x


@functools.cache
def mixed(n: int, rounds: int) -> NDArray[np.int64]:
    """Return the values that `count_and_mix` stores in `out`."""
    factor, summand = 1, 0  # of all rounds together, modulo 2**64
    for _ in range(rounds):
        factor = factor * 6364136223846793005 % 2**64
        summand = (summand * 6364136223846793005 + 1442695040888963407) % 2**64
    return (np.arange(n, dtype=np.uint64) * np.uint64(factor) + np.uint64(summand)).view(np.int64)


class ExecutorConformance:
    """Tests that hold for every executor. A subclass implements `make`.

    Attributes
    ----------
    BLOCKS, ROUNDS : int
        Size of a task: it must run for some milliseconds, so that it can be preempted in its middle.
    VIRTUAL : bool
        Whether time is simulated.
    """

    BLOCKS = 400
    ROUNDS = 2000
    VIRTUAL = False

    def make(self) -> Executor:
        """Return a new executor."""
        raise NotImplementedError

    def task(self, executor: Executor, *, rounds: int | None = None) -> Task:
        """Return a new task of `BLOCKS` blocks."""
        n = 256 * self.BLOCKS - 37
        launch = count_and_mix[n]
        arguments = (self.zeros(n), self.zeros(n), self.ROUNDS if rounds is None else rounds)
        blocks = BlockLaunch(launch, arguments, self.device).blocks
        return Task("count_and_mix", blocks, launch=launch, arguments=arguments)

    def counts(self, task: Task) -> NDArray[np.int64] | None:
        """Return the run count of each index of a task, or None if nothing runs."""
        return self.host(task.arguments[0])

    def host(self, array: Any) -> NDArray[np.int64]:
        """Return an argument of a task as an array of NumPy."""
        return np.asarray(array)

    def zeros(self, n: int) -> Any:
        """Return an array for a task."""
        return np.zeros(n, np.int64)

    device = "cpu"

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        """An executor, closed after the test."""
        made = self.make()
        yield made
        made.close()

    # -- steps of tests ---------------------------------------------------------------------------------------------

    def job(self, executor: Executor, **options: Any) -> Job:
        task = self.task(executor, **options)
        return Job(task, Request(task.name, [task]), executor.now())

    def event(self, executor: Executor) -> Ended | Stopped:
        """Wait for one event."""
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while time.monotonic() < limit:
            executor.wait(executor.now() + 1.0)
            events = executor.poll()
            assert len(events) <= 1, events
            if events:
                event = events[0]
                event.job.done = event.done if isinstance(event, Stopped) else event.job.task.blocks
                return event
        raise AssertionError(f"no event in {EVENT_TIMEOUT_SECONDS} s")

    def until_some_are_done(self, executor: Executor, job: Job, more: int = 1) -> bool:
        """Let time pass until more blocks have ended; return whether the job still runs."""
        target = job.done + more
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while executor.progress(job) < target:
            assert time.monotonic() < limit, "no block ends"
            executor.wait(executor.now() + 2e-4)
            if self.has_ended(executor, job):
                return False
        return True

    def stop(self, executor: Executor, mode: str = "drain", *, asks: int = 1) -> tuple[Job, Stopped]:
        """Return a job that was launched and has stopped, with blocks done and blocks left.

        On a busy machine, a task may end before it is preempted; then a longer task is tried.
        """
        for attempt in range(6):
            job = self.job(executor, rounds=self.ROUNDS * 4**attempt)
            executor.launch(job, Placement())
            if self.until_some_are_done(executor, job):
                for _ in range(asks):
                    executor.preempt(job, mode)
                event = self.event(executor)
                assert event.job is job
                if isinstance(event, Stopped):
                    return job, event
                assert event.error is None
        raise AssertionError("every task ended before it was preempted: set larger ROUNDS")

    def has_ended(self, executor: Executor, job: Job) -> bool:
        for event in executor.poll():
            assert isinstance(event, Ended) and event.job is job and event.error is None
            job.done = job.task.blocks
        return job.done == job.task.blocks

    def finish(self, executor: Executor, job: Job) -> None:
        """Wait for the end of a job that runs, and check what it did."""
        event = self.event(executor)
        assert event.job is job and isinstance(event, Ended) and event.error is None, event
        self.check(job.task)

    def check(self, task: Task) -> None:
        """Check that every index ran exactly once, and that the results are correct."""
        counts = self.counts(task)
        if counts is not None:
            assert (counts == 1).all(), np.unique(counts, return_counts=True)
            _, out, rounds = task.arguments
            assert np.array_equal(self.host(out), mixed(len(out), rounds))

    def silent(self, executor: Executor) -> None:
        """Check that the executor reports no further event."""
        executor.wait(executor.now() + 0.05)
        assert executor.poll() == []

    # -- tests -----------------------------------------------------------------------------------------------------

    def test_has_room(self, executor: Executor) -> None:
        capacity = executor.capacity
        assert capacity.processors >= 1 and capacity.blocks >= 1 and capacity.memory >= 1
        assert "drain" in capacity.modes

    def test_a_task_ends_once(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement())
        self.finish(executor, job)
        self.silent(executor)

    def test_time_goes_on(self, executor: Executor) -> None:
        job = self.job(executor)
        before = executor.now()
        executor.launch(job, Placement())
        event = self.event(executor)
        assert 0 <= before <= event.time <= executor.now()

    def test_a_task_goes_on_where_it_stopped(self, executor: Executor) -> None:
        job, event = self.stop(executor)
        assert 0 < event.done < job.task.blocks
        assert executor.progress(job) == event.done
        self.silent(executor)
        assert executor.progress(job) == event.done  # nothing runs any more
        counts = self.counts(job.task)
        if counts is not None and self.device == "cpu":
            assert counts.sum() == min(event.done * 256, counts.size)
        executor.launch(job, Placement())
        self.finish(executor, job)

    def test_asking_twice_is_asking_once(self, executor: Executor) -> None:
        job, _ = self.stop(executor, asks=2)
        self.silent(executor)
        executor.launch(job, Placement())
        self.finish(executor, job)

    def test_a_preemption_right_after_the_launch(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement())
        executor.preempt(job)
        event = self.event(executor)
        if isinstance(event, Stopped):
            assert event.done < job.task.blocks
            executor.launch(job, Placement())
            self.finish(executor, job)
        else:
            assert event.error is None
            self.check(job.task)

    def test_what_is_asked_at_the_end_comes_too_late(self, executor: Executor) -> None:
        job = self.job(executor, rounds=0)
        executor.launch(job, Placement())
        executor.wait(executor.now() + EVENT_TIMEOUT_SECONDS)  # it has ended, and its event was not polled
        executor.preempt(job)
        executor.resize(job, 1)
        self.finish(executor, job)
        self.silent(executor)

    def test_every_launch_has_one_event_whatever_was_asked(self, executor: Executor) -> None:
        rng = random.Random(5)
        jobs = [self.job(executor), self.job(executor)]
        running: set[Job] = set()
        ended: set[Job] = set()
        last_request = time.monotonic() + REQUEST_SECONDS
        limit = last_request + EVENT_TIMEOUT_SECONDS
        while len(ended) < 2:
            assert time.monotonic() < limit, (len(running), len(ended))
            for job in jobs:
                if job in running:
                    choice = rng.randrange(4) if time.monotonic() < last_request else 3
                    if choice == 0:
                        executor.preempt(job)
                    elif choice == 1:
                        executor.resize(job, rng.choice([1, 2, 3, None]), rng.random() < 0.5)
                elif job not in ended:
                    executor.launch(job, Placement(workers=rng.choice([1, 2, None])))
                    running.add(job)
            executor.wait(executor.now() + rng.choice([1e-4, 1e-3, 3e-3]))
            for event in executor.poll():
                assert event.job in running
                running.discard(event.job)
                if isinstance(event, Ended):
                    assert event.error is None
                    ended.add(event.job)
                else:
                    assert event.job.done <= event.done < event.job.task.blocks
                    event.job.done = event.done
        for job in jobs:
            self.check(job.task)
        self.silent(executor)

    def test_a_quota_changes_while_it_runs(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement(workers=1))
        if not self.until_some_are_done(executor, job):
            self.check(job.task)
            return
        executor.resize(job, 3)
        executor.resize(job, 1)
        executor.resize(job, None)
        self.finish(executor, job)

    def test_a_quota_has_a_worker(self, executor: Executor) -> None:
        job, unlimited = self.job(executor), self.job(executor)
        executor.launch(job, Placement())
        with pytest.raises(errors.ArgumentError, match="workers"):
            executor.resize(job, 0)
        with pytest.raises(errors.ArgumentError, match="workers"):
            self.launch_and_fail(executor, unlimited, Placement(workers=0))
        self.finish(executor, job)

    def launch_and_fail(self, executor: Executor, job: Job, placement: Placement) -> None:
        """Launch a job that cannot run: the launch raises the error, or the task ends with it."""
        executor.launch(job, placement)
        event = self.event(executor)
        assert isinstance(event, Ended) and event.job is job
        if event.error is not None:
            raise event.error

    def test_a_job_that_runs_is_not_launched(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement())
        with pytest.raises(errors.SchedulerError, match="runs already"):
            executor.launch(job, Placement())
        self.finish(executor, job)

    def test_a_job_that_does_not_run_is_not_preempted(self, executor: Executor) -> None:
        with pytest.raises(errors.SchedulerError, match="does not run"):
            executor.preempt(self.job(executor))
        job, _ = self.stop(executor)
        with pytest.raises(errors.SchedulerError, match="does not run"):
            executor.preempt(job)
        executor.discard(job)

    def test_progress_never_goes_back(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement())
        last = 0
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while not self.has_ended(executor, job):
            assert time.monotonic() < limit
            done, claimed = executor.progress(job), executor.claimed(job)
            if job.done == 0 and claimed:
                assert last <= done <= claimed <= job.task.blocks
            last = max(last, done)
            executor.wait(executor.now() + 1e-3)
        self.check(job.task)

    def test_two_tasks_run_together(self, executor: Executor) -> None:
        jobs = [self.job(executor, rounds=self.ROUNDS // 8) for _ in range(2)]  # a worker alone takes long
        for job in jobs:
            executor.launch(job, Placement(workers=1))
        ended: set[Job] = set()
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while len(ended) < 2:
            assert time.monotonic() < limit
            executor.wait(executor.now() + 1.0)
            ended |= {e.job for e in executor.poll()}
        for job in jobs:
            self.check(job.task)

    def test_a_stopped_task_may_be_forgotten(self, executor: Executor) -> None:
        job, _ = self.stop(executor)
        next_job = self.job(executor)
        executor.discard(job)
        executor.discard(job)
        executor.launch(next_job, Placement())
        self.finish(executor, next_job)
        self.silent(executor)

    def test_a_mode_that_is_not_there_is_no_loss(self, executor: Executor) -> None:
        job, _ = self.stop(executor, "switch")
        executor.launch(job, Placement())
        self.finish(executor, job)

    def test_what_runs_whole_runs_to_its_end(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement(plain=True))
        executor.preempt(job)
        self.finish(executor, job)
        self.silent(executor)

    def train(self, executor: Executor, count: int, placement: Placement) -> list[Job]:
        """Launch a job and queue other jobs after it; return all, or skip the test."""
        self.finish_one(executor)  # compiled by now
        jobs = [self.job(executor) for _ in range(count)]
        executor.launch(jobs[0], placement)
        for last, job in itertools.pairwise(jobs):
            if not executor.launch_behind(job, placement, last):
                executor.resize(jobs[0], None)  # two workers may take seconds
                self.finish(executor, jobs[0])
                pytest.skip("this executor does not queue a job after another")
        return jobs

    def finish_one(self, executor: Executor) -> None:
        job = self.job(executor)
        executor.launch(job, Placement())
        self.finish(executor, job)

    def ends(self, executor: Executor, count: int) -> list[Ended | Stopped]:
        """Wait for `count` events."""
        limit, found = time.monotonic() + EVENT_TIMEOUT_SECONDS, list(executor.poll())
        while len(found) < count:
            assert time.monotonic() < limit, found
            executor.wait(executor.now() + 1.0)
            found += executor.poll()
        return found

    def again(self, executor: Executor, jobs: list[Job], events: list[Ended | Stopped]) -> None:
        """Launch the stopped jobs again, wait for all jobs, and check their results."""
        for event in events:
            if isinstance(event, Stopped):
                event.job.done = event.done
                executor.launch(event.job, Placement())
                self.finish(executor, event.job)
            else:
                assert event.error is None
        for job in jobs:
            self.check(job.task)
        self.silent(executor)

    @pytest.mark.parametrize("placement", [Placement(plain=True), Placement(workers=2)], ids=["whole", "workers"])
    def test_jobs_behind_each_other_end_in_order(self, executor: Executor, placement: Placement) -> None:
        jobs = self.train(executor, 4, placement)
        events = self.ends(executor, 4)
        assert [event.job for event in events] == jobs
        assert all([isinstance(event, Ended) and event.error is None for event in events])
        assert [event.time for event in events] == sorted(event.time for event in events)
        for job in jobs:
            self.check(job.task)
        self.silent(executor)

    def test_a_job_behind_others_leaves_if_it_has_not_begun(self, executor: Executor) -> None:
        jobs = self.train(executor, 5, Placement(plain=True))
        executor.preempt(jobs[3])
        executor.preempt(jobs[3])
        executor.preempt(jobs[0])  # runs, and so it ends
        events = self.ends(executor, 5)
        assert sorted(event.job.number for event in events) == sorted(job.number for job in jobs)
        stopped = [event for event in events if isinstance(event, Stopped)]
        assert [event.job for event in events if isinstance(event, Ended)] == [
            job for job in jobs if job not in [event.job for event in stopped]
        ]
        assert [event.job for event in stopped] in ([], [jobs[3]]) and all([event.done == 0 for event in stopped])
        self.again(executor, jobs, events)

    def test_workers_behind_others_leave_with_no_block_done(self, executor: Executor) -> None:
        jobs = self.train(executor, 4, Placement(workers=2))
        for job in reversed(jobs):
            executor.preempt(job)
            executor.preempt(job)
        events = self.ends(executor, 4)
        assert {event.job for event in events} == set(jobs)
        if any(isinstance(event, Stopped) and event.job is jobs[0] for event in events):
            assert all(isinstance(event, Stopped) for event in events), "a job began in place of a preempted job"
            assert all(event.done == 0 for event in events if event.job is not jobs[0] and isinstance(event, Stopped))
        self.again(executor, jobs, events)

    def test_who_is_behind_one_that_leaves_begins(self, executor: Executor) -> None:
        first, second, third = self.train(executor, 3, Placement(workers=2))
        executor.preempt(first)
        events = self.ends(executor, 3)
        assert [event.job for event in events] == [first, second, third]
        assert all(isinstance(event, Ended) for event in events[1:])
        self.again(executor, [first, second, third], events)

    @pytest.mark.parametrize("placement", [Placement(plain=True), Placement(workers=3)], ids=["whole", "workers"])
    def test_of_who_leaves_is_told_before_who_takes_its_place(self, executor: Executor, placement: Placement) -> None:
        self.finish_one(executor)  # compiled by now
        first, second = self.job(executor), self.job(executor)
        executor.launch(first, Placement(workers=2))
        executor.preempt(first)
        if not executor.launch_behind(second, placement, first):
            self.again(executor, [first], self.ends(executor, 1))
            pytest.skip("this executor does not start a job in place of a preempted one")
        events = self.ends(executor, 2)
        assert [event.job for event in events] == [first, second] and isinstance(events[1], Ended)
        self.again(executor, [first, second], events)

    @pytest.mark.parametrize("seed", range(4))
    def test_quotas_change_while_others_are_behind(self, executor: Executor, seed: int) -> None:
        rng = random.Random(seed)
        jobs = self.train(executor, 3, Placement(workers=2))
        ended: list[Ended | Stopped] = []
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while len(ended) < 3:
            assert time.monotonic() < limit, ended
            executor.resize(jobs[len(ended)], rng.choice([1, 2, 3, None]), rng.random() < 0.3)
            executor.wait(executor.now() + rng.choice([1e-5, 1e-3, 3e-3]))
            ended += executor.poll()
            assert [event.job for event in ended] == jobs[: len(ended)]
        assert all(isinstance(event, Ended) and event.error is None for event in ended)
        for job in jobs:
            self.check(job.task)
        self.silent(executor)

    @pytest.mark.parametrize("seed", range(4))
    def test_every_launch_behind_others_has_one_event(self, executor: Executor, seed: int) -> None:
        rng = random.Random(seed)
        jobs = self.train(executor, 4, Placement(workers=2))
        running, done = list(jobs), []
        last_request = time.monotonic() + REQUEST_SECONDS
        limit = last_request + EVENT_TIMEOUT_SECONDS
        while running:
            assert time.monotonic() < limit, running
            for job in reversed(running):
                choice = rng.randrange(12) if time.monotonic() < last_request else 11
                if choice == 0:
                    executor.preempt(job)
                elif choice < 4 and job is running[0]:
                    executor.resize(job, rng.choice([1, 2, 3, None]), rng.random() < 0.5)
            executor.wait(executor.now() + rng.choice([1e-5, 1e-3, 3e-3]))
            for event in executor.poll():
                running.remove(event.job)
                if isinstance(event, Ended):
                    assert event.error is None
                    done.append(event.job)
                    continue
                assert event.job.done <= event.done < event.job.task.blocks
                event.job.done = event.done
                placement = Placement(workers=rng.choice([1, 2, None]))
                if not running or not executor.launch_behind(event.job, placement, running[-1]):
                    executor.launch(event.job, placement)
                running.append(event.job)
        assert set(done) == set(jobs) and len(done) == 4
        for job in jobs:
            self.check(job.task)
        self.silent(executor)

    def test_a_cost_is_a_time(self, executor: Executor) -> None:
        job = self.job(executor)
        assert executor.cost(job, []) >= 0
        executor.launch(job, Placement())
        if not self.until_some_are_done(executor, job):
            return
        cost = executor.cost(job, [])
        assert cost >= 0 and math.isfinite(cost)
        self.finish(executor, job)

    def test_waiting_has_an_end(self, executor: Executor) -> None:
        start = executor.now()
        executor.wait(start + 0.05)
        assert executor.now() >= start + 0.05
        executor.wait(executor.now() - 1.0)
        executor.wait(None)  # returns at once, because nothing runs
        assert executor.poll() == []

    def test_waiting_is_ended_by_others(self, executor: Executor) -> None:
        if self.VIRTUAL:
            pytest.skip("virtual time does not wait")
        executor.wake()
        start = time.monotonic()
        executor.wait(executor.now() + EVENT_TIMEOUT_SECONDS)  # woken before it waited
        timer = threading.Timer(0.05, executor.wake)
        timer.start()
        executor.wait(executor.now() + EVENT_TIMEOUT_SECONDS)
        timer.join()
        assert time.monotonic() - start < EVENT_TIMEOUT_SECONDS / 2
        assert executor.poll() == []

    def test_a_task_that_cannot_run_fails_alone(self, executor: Executor) -> None:
        if self.VIRTUAL:
            pytest.skip("a simulation runs nothing")
        bad, good = self.job(executor), self.job(executor)
        bad.task.arguments = (*bad.task.arguments[:2], "not a number")
        executor.launch(bad, Placement())
        executor.launch(good, Placement())
        ended: dict[Job, Ended | Stopped] = {}
        limit = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while len(ended) < 2:
            assert time.monotonic() < limit
            executor.wait(executor.now() + 1.0)
            ended |= {e.job: e for e in executor.poll()}
        failed, fine = ended[bad], ended[good]
        assert isinstance(failed, Ended) and failed.error is not None
        assert isinstance(fine, Ended) and fine.error is None
        self.check(good.task)

    def test_closing_stops_what_runs(self) -> None:
        executor = self.make()
        job = self.job(executor)
        executor.launch(job, Placement())
        self.until_some_are_done(executor, job)
        executor.close()
        executor.close()
