"""Scheduler: handles, order, errors, cancelling, closing, stuck kernels, forks and Ctrl-C."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import numba
import numpy as np
import pytest
from tests.harness.ctrl_c import interrupted_everywhere
from tests.harness.preemption import gated
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.dispatcher import Watchdog
from warpwell.scheduler.executors.cpu_executor import CpuExecutor
from warpwell.scheduler.extend import (
    Capacity,
    Hold,
    Job,
    Kind,
    Launch,
    Placement,
    Preempt,
    Request,
    Resize,
    State,
    Task,
)
from warpwell.scheduler.handle import TaskFuture
from warpwell.scheduler.policies import POLICIES
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.report.explain import sentences
from warpwell.scheduler.scheduler import Scheduler
from warpwell.scheduler.service.client import connect
from warpwell.targets import kernel
from warpwell.targets.blocks.control import STOP
from warpwell.targets.compiler import compiled, run_cpu
from warpwell.targets.primitives import DEVICE, element_address, fetch_add, grid

BLOCK = 256


@kernel
def increment(x):
    i = grid(1)
    if i < x.size:
        fetch_add(element_address(x, i), 1, DEVICE)


@kernel
def double(x):
    i = grid(1)
    if i < x.size:
        x[i] = 2 * x[i]


@kernel
def slow(counts, steps):
    i = grid(1)
    if i < counts.size:
        x = i
        for _ in range(steps):
            x = x * 6364136223846793005 + 1442695040888963407
        counts[i] += 1 if x != 1 else 2


@kernel
def beyond(a, y):
    i = grid(1)
    if i < y.size:
        y[i] = a[i + 1]


class Gate:
    """A task that cannot end while its gate is closed."""

    def __init__(self, scheduler: Scheduler, blocks: int = 4, first: int = 0, **options) -> None:
        self.opened = np.array([first], np.int64)
        self.counts = np.zeros(BLOCK * blocks, np.int64)
        self.handle = scheduler.submit(gated[self.counts.size], self.opened, self.counts, **options)

    def open(self) -> None:
        self.opened[0] = 1 << 40


def inside(scheduler: Scheduler, gate: Gate, blocks: int) -> None:
    """Wait until `blocks` blocks of a task have begun."""
    until(lambda: gate.handle.job is not None)
    until(lambda: scheduler.inspect(lambda core: core.executor.claimed(gate.handle.job)) >= blocks)


def scheduler_of(policy=None, **options) -> Scheduler:
    policy = Together() if policy is None else policy
    options.setdefault("executor", lambda: CpuExecutor(threads=3, patience=0.5))
    return Scheduler("cpu", policy, **options)


@pytest.fixture
def scheduler():
    made = scheduler_of()
    yield made
    made.close(cancel=True)


class Together(Policy):
    """Launches whatever fits the limit, in order of arrival, as blocks."""

    name = "together"

    def decide(self, view):
        room = view.limit - len(view.running)
        return [Launch(job) for job in list(view.waiting)[:room]]


class Restless(Policy):
    """Launches what fits, and changes its mind every half millisecond."""

    name = "restless"
    period = 5e-4

    def __init__(self) -> None:
        self.random = np.random.default_rng(4)

    def decide(self, view):
        decisions = []
        for job in view.running:
            choice = self.random.integers(4)
            plain = job.placement is None or job.placement.plain
            if choice == 0 and job.state is State.RUNNING and not plain:
                decisions.append(Preempt(job))
            elif choice == 1:
                decisions.append(Resize(job, int(self.random.integers(1, 4))))
        waiting = list(view.waiting)
        self.random.shuffle(waiting)
        decisions += [Launch(job) for job in waiting[: view.limit - len(view.running)]]
        return decisions


# -- results -------------------------------------------------------------------------------------------------------


def test_a_task_runs_once(scheduler):
    x = np.arange(1000)
    handle = scheduler.submit(double[1000], x)
    assert handle.result(HANG_SECONDS) is None
    assert handle.done() and handle.state is State.DONE and handle.exception() is None and not handle.running()
    assert np.array_equal(x, 2 * np.arange(1000))
    assert handle.job is not None and handle.job.ended >= handle.job.started >= handle.job.arrival
    assert [e.kind for e in scheduler.log] == ["arrive", "launch", "end"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_right_results(name):
    arrays = [np.zeros(BLOCK * (1 + k), np.int64) for k in range(8)]
    with scheduler_of(name) as scheduler:
        handles = [
            scheduler.submit(
                increment[a.size], a, priority=k % 3, profile=Profile(kind=list(Kind)[k % 2], seconds=0.01)
            )
            for k, a in enumerate(arrays)
        ]
        for handle in handles:
            handle.result(HANG_SECONDS)
    assert all((a == 1).all() for a in arrays)


def test_many_threads_submit_while_tasks_are_preempted_at_random():
    arrays = [[np.zeros(BLOCK * 30 + k, np.int64) for k in range(6)] for _ in range(4)]
    rounds, limit = 0, time.monotonic() + HANG_SECONDS
    with scheduler_of(Restless(), limit=3) as scheduler:

        def submit(own_arrays):
            for handle in [scheduler.submit(slow[a.size], a, 4000) for a in own_arrays]:
                handle.result(HANG_SECONDS)

        def stops():
            return [e.kind for e in scheduler.log].count("stop")

        # How often the policy is asked during a task depends on the machine's load: repeat until there were enough.
        while rounds == 0 or (stops() <= 10 and time.monotonic() < limit):
            threads = [threading.Thread(target=submit, args=(own_arrays,)) for own_arrays in arrays]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rounds += 1
        kinds = [e.kind for e in scheduler.log]
    assert all((a == rounds).all() for own_arrays in arrays for a in own_arrays)
    assert kinds.count("end") == 24 * rounds and kinds.count("stop") > 10


def test_futures_of_the_standard_library(scheduler):
    arrays = [np.zeros(BLOCK, np.int64) for _ in range(5)]
    handles = [scheduler.submit(increment[BLOCK], a) for a in arrays]
    done, left = concurrent.futures.wait(handles, HANG_SECONDS)
    assert len(done) == 5 and not left
    assert set(concurrent.futures.as_completed(handles)) == set(handles)


def test_callbacks_may_submit_and_cancel(scheduler):
    x = np.ones(BLOCK, np.int64)
    later = []
    first = scheduler.submit(double[BLOCK], x)
    first.add_done_callback(lambda handle: later.append(scheduler.submit(double[BLOCK], x)))
    first.result(HANG_SECONDS)
    until(lambda: later)
    later[0].result(HANG_SECONDS)
    assert (x == 4).all()


def test_waiting_for_a_result_has_an_end(scheduler):
    gate = Gate(scheduler)
    until(gate.handle.running)
    with pytest.raises(TimeoutError):
        gate.handle.result(0.05)
    assert gate.handle.state is State.RUNNING and gate.handle.running()
    gate.open()
    gate.handle.result(HANG_SECONDS)


# -- order ---------------------------------------------------------------------------------------------------------


def test_a_request_runs_in_order(scheduler):
    x = np.ones(BLOCK, np.int64)
    handles = scheduler.submit_many([(double[BLOCK], x), (increment[BLOCK], x), (double[BLOCK], x)], tenant="t").handles
    for handle in handles:
        handle.result(HANG_SECONDS)
    assert (x == 6).all()
    ends = [h.job.ended for h in handles]
    assert ends == sorted(ends) and handles[1].job.started >= ends[0]


def test_a_task_comes_after_others(scheduler):
    gate = Gate(scheduler)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    x = np.ones(BLOCK, np.int64)
    handle = scheduler.submit(double[BLOCK], x, after=[gate.handle, future])
    gate.open()
    gate.handle.result(HANG_SECONDS)
    time.sleep(0.05)
    assert handle.state is State.WAITING and (x == 1).all()
    future.set_result(None)
    handle.result(HANG_SECONDS)
    assert (x == 2).all()
    # A task that has ended does not delay another one.
    scheduler.submit(double[BLOCK], x, after=handle).result(HANG_SECONDS)
    assert (x == 4).all()


@pytest.mark.parametrize("how", ["fails", "is cancelled", "has failed"])
def test_what_comes_after_a_task_that_did_not_end_well_is_cancelled(scheduler, how):
    before: concurrent.futures.Future[None] = concurrent.futures.Future()
    if how == "has failed":
        before.set_exception(ValueError())
    x = np.ones(BLOCK, np.int64)
    handle = scheduler.submit(double[BLOCK], x, after=before)
    if how == "fails":
        before.set_exception(ValueError())
    elif how == "is cancelled":
        before.cancel()
    with pytest.raises(CancelledError) as caught:
        handle.result(HANG_SECONDS)
    assert handle.state is State.CANCELLED and (x == 1).all()
    ending = "was cancelled" if how == "is cancelled" else "failed (ValueError())"
    assert str(caught.value) == f"task 'double' was cancelled, because a future in after= {ending}"
    assert isinstance(caught.value.__cause__, CancelledError if how == "is cancelled" else ValueError)
    kept = weakref.ref(handle.job)
    del handle, caught, before  # the job has the arrays
    until(lambda: gc.collect() >= 0 and kept() is None)


def test_a_cancelled_task_keeps_no_earlier_one_and_no_frames():
    before, after = (TaskFuture(None, name) for name in ("before", "after"))
    after.after = (before,)
    before.settle(None, cancelled=True)
    after.settle(None, cancelled=True)
    depths = set()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(CancelledError) as caught:
                after.exception()
            depths.add(len(caught.traceback))
        kept = weakref.ref(before)
        del before
        assert kept() is None
    finally:
        gc.enable()
    assert len(depths) == 1 and caught.value.__cause__.__traceback__ is None


@pytest.mark.parametrize("in_request", [True, False])
def test_a_cancelled_task_names_the_failed_one_and_its_error(scheduler, in_request):
    x = np.ones(BLOCK, np.int64)

    def fails(stream):
        raise ValueError("bad input")

    gate = Gate(scheduler)
    launches = [(fails,), (double[BLOCK], x)]
    if in_request:
        first, second = scheduler.submit_many(launches, after=gate.handle).handles
    else:
        first = scheduler.submit(fails, after=gate.handle)
        second = scheduler.submit(double[BLOCK], x, after=first)
    last = scheduler.submit(double[BLOCK], x, after=second, name="last")
    gate.open()
    for call in (last.result, last.exception):
        with pytest.raises(
            CancelledError, match=r"task 'last' was cancelled, because task 'double' was cancelled"
        ) as caught:
            call(HANG_SECONDS)
    cause = caught.value.__cause__
    assert isinstance(cause, CancelledError) and cause.__cause__ is first.exception()
    assert str(cause) == f"task 'double' was cancelled, because task {first.name!r} failed (ValueError('bad input'))"
    texts = [
        text for event, text in sentences(scheduler.log) if event.kind == "cancel" and event.task == second.job.number
    ]
    assert (
        len(texts) == 1 and f"because {first.name} (task {first.job.number}), which comes before it, failed" in texts[0]
    )


@pytest.mark.parametrize("policy", ["lanes", "left-over"])  # workers, and an unmodified launch
def test_compilation_is_not_time_on_the_device(policy, monkeypatch):
    compile_for = run_cpu.compile_for

    def compile_slowly(kernel, driver, *rest):
        if not driver.overloads:
            time.sleep(0.5)
        compile_for(kernel, driver, *rest)

    @kernel
    def fresh(x):
        i = grid(1)
        if i < x.size:
            x[i] = 3

    monkeypatch.setattr(run_cpu, "compile_for", compile_slowly)
    x = np.ones(BLOCK)
    with scheduler_of(policy) as scheduler:
        scheduler.submit(fresh[BLOCK], x).result(HANG_SECONDS)
        (end, text), *_ = [(event.why, text) for event, text in sentences(scheduler.log) if event.kind == "end"]
    assert 0.5 <= end["prepared"] > end["ran"] and "of compilation and copies, and" in text
    assert (x == 3).all()


def test_what_cannot_be_taken_in_when_those_before_it_have_ended_fails_alone(scheduler, monkeypatch):
    core = scheduler._dispatcher.core
    submit = core.submit

    def refuses(request, after):
        if request.name == "bad":
            raise ValueError("refused")
        return submit(request, after)

    monkeypatch.setattr(core, "submit", refuses)
    before: concurrent.futures.Future[None] = concurrent.futures.Future()
    x = np.ones(BLOCK, np.int64)
    bad = scheduler.submit(double[BLOCK], x, after=before, name="bad")
    good = scheduler.submit(double[BLOCK], x, after=before)
    before.set_result(None)
    with pytest.raises(ValueError, match="refused"):
        bad.result(HANG_SECONDS)
    good.result(HANG_SECONDS)
    assert (x == 2).all()


# -- errors --------------------------------------------------------------------------------------------------------


def test_what_device_code_latched_comes_out_of_the_result(scheduler, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(BLOCK))
    y, x = np.zeros(BLOCK, np.int64), np.ones(BLOCK, np.int64)
    with ww.open(tmp_path / "a.npy", device="cpu") as array:
        bad, after, good = (
            *scheduler.submit_many([(beyond[BLOCK], array, y), (double[BLOCK], x)]).handles,
            scheduler.submit(double[BLOCK], x),
        )
        with pytest.raises(errors.IndexRangeError):
            bad.result(HANG_SECONDS)
        with pytest.raises(CancelledError):
            after.result(HANG_SECONDS)
        good.result(HANG_SECONDS)
    assert bad.state is State.FAILED and (x == 2).all()
    kinds = [(e.kind, e.task) for e in scheduler.log]
    assert ("fail", bad.job.number) in kinds and ("cancel", after.job.number) in kinds


def test_a_kernel_that_does_not_compile_fails_alone(scheduler):
    @kernel
    def senseless(x):
        x.no_such_thing()

    bad = scheduler.submit(senseless[BLOCK], np.zeros(BLOCK))
    x = np.ones(BLOCK, np.int64)
    scheduler.submit(double[BLOCK], x).result(HANG_SECONDS)
    assert bad.exception(HANG_SECONDS) is not None and "no_such_thing" in str(bad.exception())


def test_a_kernel_that_cannot_be_cut_runs_whole_and_the_log_says_why(scheduler, monkeypatch):
    from warpwell.targets.blocks.launch import BlockLaunch

    def check(launch):
        launch.reason = errors.TransformError("it asks for the hardware's grid (line 7)", construct="x", line=7)

    monkeypatch.setattr(BlockLaunch, "_check", check)
    x = np.ones(BLOCK, np.int64)
    handle = scheduler.submit(double[BLOCK], x)
    handle.result(HANG_SECONDS)
    launched = next(e for e in scheduler.log if e.kind == "launch")
    assert launched.why["plain"] is True and "line 7" in launched.why["whole"]
    assert (x == 2).all()


class Sparse:
    """As a sparse tensor of PyTorch: it has no memory of its own."""

    dtype = np.dtype(float)

    @property
    def nbytes(self):
        raise RuntimeError("nbytes is not defined for sparse tensors")

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert")


def test_bad_arguments_are_refused_at_once(scheduler):
    x = np.zeros(BLOCK)
    handle = scheduler.submit(double[BLOCK], x)
    for call, message in (
        (lambda: scheduler.submit(double, x), "not a launch"),
        (lambda: scheduler.submit(double[0], x), "no blocks"),
        (lambda: scheduler.submit(double[BLOCK, object()], x), "stream"),
        (lambda: scheduler.submit(double[BLOCK], x, deadline=-1.0), "deadline"),
        (lambda: scheduler.submit(double[BLOCK], x, memory=-1), "memory"),
        (lambda: scheduler.submit(double[BLOCK], x, priority="high"), "priority"),
        (lambda: scheduler.submit(double[BLOCK], x, profile="x"), "give a Profile"),
        (lambda: scheduler.submit(double[BLOCK], x, profile={}), "give a Profile"),
        (lambda: scheduler.submit(double[BLOCK], x, tenant=[], after=handle), "tenant"),
        (lambda: scheduler.submit(double[BLOCK], x, after=[3]), "handles"),
        (lambda: scheduler.submit(double[BLOCK], x, after=3), "handles"),
        (lambda: scheduler.submit(double[BLOCK], x, size=3), "size is 3"),
        (lambda: scheduler.submit(double[BLOCK], Sparse()), "is a Sparse without memory of its own"),
        (lambda: scheduler.submit_many([]), "launches is empty"),
        (lambda: scheduler.submit_many([double[4]]), "is not a tuple of kernel"),
        (lambda: scheduler.submit_many((double[4], np.zeros(4))), "is not a tuple of kernel"),
        (lambda: scheduler_of("no-such-policy"), "first-come"),
        (lambda: scheduler_of(limit=0), "limit"),
        (lambda: scheduler_of(limit=2.5), "limit is 2.5: give an integer"),
        (lambda: scheduler_of(limit=np.nan), "limit is nan: give an integer"),
        (lambda: scheduler_of(limit="2"), "limit is '2': give an integer"),
        (lambda: scheduler_of(stuck_after=np.nan), "stuck_after"),
        (lambda: scheduler_of(stuck_after=np.inf), "stuck_after"),
        (lambda: scheduler_of(stuck_after="5"), "stuck_after"),
        (lambda: scheduler_of(3), "policy is 3"),
        (lambda: scheduler_of(analyzer=3), "analyzer is 3"),
        (lambda: scheduler_of(executor=3), "executor is 3"),
        (lambda: scheduler_of(log=[]), "log is"),
        (lambda: CpuExecutor(2.5), "threads is 2.5: give an integer"),
        (lambda: CpuExecutor(0), "threads is 0: give an integer"),
        (lambda: CpuExecutor(patience=np.nan), "patience is nan: give seconds"),
        (lambda: connect("none.sock", timeout=np.inf), "timeout is inf: give seconds"),
        (lambda: handle.result(np.inf), "timeout is inf: give seconds"),
        (lambda: handle.result("3"), "timeout is '3': give seconds"),
        (lambda: handle.exception(np.nan), "timeout is nan: give seconds"),
        (lambda: scheduler_of(stuck_after=0.0), "stuck_after"),
        (lambda: Scheduler("tpu"), "tpu"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            call()
    handle.result(HANG_SECONDS)


def test_a_task_that_is_too_large_is_refused_and_others_go_on():
    with scheduler_of(tenants={"default": {"memory": 8 * BLOCK}}) as scheduler:
        x = np.ones(BLOCK, np.int64)
        with pytest.raises(errors.TaskMemoryError, match="bytes"):
            scheduler.submit(double[BLOCK], np.zeros(BLOCK + 1))
        scheduler.submit(double[BLOCK], x).result(HANG_SECONDS)
        with pytest.raises(errors.TaskMemoryError):  # submit() accepts the task, and its handle raises
            scheduler.submit(double[BLOCK], np.zeros(BLOCK + 1), after=Gate(scheduler, 2, 9).handle).result(
                HANG_SECONDS
            )
    assert (x == 2).all()


def test_tenants_that_nobody_named_are_refused():
    with scheduler_of(tenants={"a": {"weight": 1.0}}) as scheduler:
        with pytest.raises(errors.QuotaError):
            scheduler.submit(double[BLOCK], np.zeros(BLOCK), tenant="b")
        scheduler.submit(double[BLOCK], np.zeros(BLOCK), tenant="a").result(HANG_SECONDS)


class Wrong(Policy):
    """Launches one task, and then preempts what does not run."""

    name = "wrong"

    def decide(self, view):
        jobs = list(view.waiting)
        return [Launch(jobs[0])] if not view.running else [Preempt(jobs[0])]


def test_submissions_that_nobody_has_taken_in_fail_with_the_scheduler():
    deciding, submitted = threading.Event(), threading.Event()

    class Slow(Wrong):
        def decide(self, view):
            deciding.set()
            submitted.wait(HANG_SECONDS)
            return [Preempt(next(iter(view.waiting)))]

    scheduler = scheduler_of(Slow())
    x = np.ones(BLOCK, np.int64)
    handles = [scheduler.submit(double[BLOCK], x)]
    assert deciding.wait(HANG_SECONDS)
    handles += [scheduler.submit(double[BLOCK], x) for _ in range(3)]
    submitted.set()
    for handle in handles:
        with pytest.raises(errors.SchedulerError):
            handle.result(HANG_SECONDS)


def test_what_is_not_taken_in_yet_is_cancelled_in_the_schedulers_thread(scheduler):
    gate = Gate(scheduler, 4, 0)
    inside(scheduler, gate, 3)
    x, handles, answers = np.ones(BLOCK, np.int64), [], []

    def callback():  # as a done callback does; the submission waits in the queue after it
        thread = threading.Thread(target=lambda: handles.append(scheduler.submit(double[BLOCK], x)))
        thread.start()
        thread.join(HANG_SECONDS)
        answers.append(handles[0].cancel())

    scheduler._dispatcher.call(callback)
    until(lambda: handles[0].cancelled())
    gate.open()
    gate.handle.result(HANG_SECONDS)
    assert answers == [True] and (x == 1).all()


def test_a_policy_that_fails_ends_the_scheduler_and_everybody_is_told():
    scheduler = scheduler_of(Wrong())
    gate = Gate(scheduler, 4, 0)
    inside(scheduler, gate, 3)
    x = np.ones(BLOCK, np.int64)
    try:
        second = scheduler.submit(double[BLOCK], x)
        with pytest.raises(errors.TaskLostError, match="wrong"):
            second.result(HANG_SECONDS)
    except errors.SchedulerError:
        pass  # the scheduler had ended before the second submit()
    with pytest.raises(errors.TaskLostError):
        gate.handle.result(HANG_SECONDS)
    with pytest.raises(errors.SchedulerError, match="policy 'wrong'"):
        scheduler.submit(double[BLOCK], x)
    assert isinstance(scheduler.failure, errors.SchedulerError)
    assert gate.handle.cancel() is False
    gate.open()
    scheduler.close()


def test_what_a_callback_submits_to_a_scheduler_that_fails_is_refused():
    scheduler = scheduler_of(Wrong())
    gate, outcomes = Gate(scheduler, 4, 0), []

    def again(_):
        try:
            outcomes.append(scheduler.submit(double[BLOCK], np.ones(BLOCK, np.int64)))
        except errors.SchedulerError as error:
            outcomes.append(error)

    gate.handle.add_done_callback(again)
    inside(scheduler, gate, 3)
    with contextlib.suppress(errors.SchedulerError):
        scheduler.submit(double[BLOCK], np.ones(BLOCK, np.int64))
    assert isinstance(gate.handle.exception(HANG_SECONDS), errors.TaskLostError)
    until(lambda: outcomes)
    gate.open()
    assert isinstance(outcomes[0], errors.SchedulerError)  # not a handle, which would never end


# -- cancelling ----------------------------------------------------------------------------------------------------


def test_a_task_that_waits_is_cancelled_at_once(scheduler):
    gates = [Gate(scheduler), Gate(scheduler)]
    x = np.ones(BLOCK, np.int64)
    handle = scheduler.submit(double[BLOCK], x)
    assert handle.cancel() and handle.cancelled() and handle.state is State.CANCELLED and handle.cancel()
    with pytest.raises(CancelledError):
        handle.result(HANG_SECONDS)
    for gate in gates:
        gate.open()
        gate.handle.result(HANG_SECONDS)
    assert (x == 1).all() and not gates[0].handle.cancel()


def test_a_task_that_runs_is_cancelled_at_the_end_of_its_blocks_and_frees_its_workers():
    with scheduler_of(limit=1) as scheduler:
        gate = Gate(scheduler, 8, 2)
        inside(scheduler, gate, 5)
        x = np.ones(BLOCK, np.int64)
        waiting = scheduler.submit(double[BLOCK], x)
        assert gate.handle.cancel() and not gate.handle.done() and gate.handle.state is State.STOPPING
        gate.open()
        with pytest.raises(CancelledError):
            gate.handle.result(HANG_SECONDS)
        waiting.result(HANG_SECONDS)
        assert gate.counts.sum() == 5 * BLOCK and (x == 2).all()


def test_a_task_whose_last_blocks_ran_when_it_was_cancelled_is_done(scheduler):
    gate = Gate(scheduler, 2, 0)
    inside(scheduler, gate, 2)
    assert gate.handle.cancel()
    gate.open()
    gate.handle.result(HANG_SECONDS)
    assert gate.handle.state is State.DONE and (gate.counts == 1).all()


def test_a_preempted_task_is_cancelled_and_gives_its_arrays_back(tmp_path):
    class Once(Together):
        def decide(self, view):
            preemptible = [j for j in view.running if j.state is State.RUNNING and j.preemptions == 0]
            if preemptible:
                return [Preempt(preemptible[0])]
            return [Launch(j) for j in view.waiting if j.preemptions == 0 and not view.running]

    np.save(tmp_path / "a.npy", np.arange(40 * BLOCK))
    policy = Once()
    policy.period = 1e-3
    with ww.open(tmp_path / "a.npy", device="cpu") as array, scheduler_of(policy, limit=2) as scheduler:
        y = np.zeros(40 * BLOCK, np.int64)
        handle = scheduler.submit(beyond[y.size - 1], array, y[:-1])
        extra = scheduler.submit(double[BLOCK], np.zeros(BLOCK))
        until(lambda: handle.state in (State.PREEMPTED, State.DONE))
        if handle.state is State.PREEMPTED:
            assert array.cache._in_flight == 1
            assert handle.cancel() and handle.cancelled()
        assert array.cache._in_flight == 0
        extra.cancel()


def test_cancelling_one_of_a_request_that_waits_for_others(scheduler):
    before: concurrent.futures.Future[None] = concurrent.futures.Future()
    x = np.ones(BLOCK, np.int64)
    first, second, third = scheduler.submit_many([(double[BLOCK], x)] * 3, after=before).handles
    assert second.cancel() and third.cancelled() and not first.done()
    before.set_result(None)
    first.result(HANG_SECONDS)
    scheduler.submit(increment[BLOCK], x).result(HANG_SECONDS)
    assert (x == 3).all()


def test_what_runs_whole_cannot_be_cancelled():
    class Plain(Together):
        def decide(self, view):
            return [Launch(j, Placement(plain=True)) for j in view.waiting][: view.limit - len(view.running)]

    with scheduler_of(Plain()) as scheduler:
        gate = Gate(scheduler)
        until(lambda: gate.handle.state is State.RUNNING)
        assert gate.handle.cancel() is False
        gate.open()
        gate.handle.result(HANG_SECONDS)
    assert (gate.counts == 1).all()


# -- stuck kernels -------------------------------------------------------------------------------------------------


def test_a_stuck_kernel_fails_and_frees_its_workers():
    with scheduler_of(limit=1, stuck_after=1.0) as scheduler:
        gate = Gate(scheduler, 8, 3)
        x = np.ones(BLOCK, np.int64)
        waiting = scheduler.submit(double[BLOCK], x)
        with pytest.raises(errors.StallError, match="stuck_after") as caught:
            gate.handle.result(HANG_SECONDS)
        assert caught.value.kernel == "gated" and caught.value.seconds == 1.0
        waiting.result(HANG_SECONDS)
        assert (x == 2).all() and gate.handle.state is State.FAILED
        assert "fail" in [e.kind for e in scheduler.log]
        gate.open()


class Watched(CpuExecutor):
    """An executor with a clock and counters that a test sets."""

    time, done, begun_blocks = 0.0, 0, 0

    def now(self):
        return self.time

    def progress(self, job):
        return self.done

    def claimed(self, job):
        return self.begun_blocks


def test_a_task_is_stuck_when_a_block_runs_and_none_begins_or_ends():
    task = Task("t", 9)
    job = Job(task, Request("r", [task]), 0.0, placement=Placement())
    watchdog, executor = Watchdog(4.0), Watched(threads=1)

    def stuck_at(seconds, done, begun_blocks):
        executor.time, executor.done, executor.begun_blocks = seconds, done, begun_blocks
        return watchdog.check([job], executor) == [job]

    assert not stuck_at(0.0, 0, 0)
    assert not stuck_at(99.0, 0, 0)  # it is compiled, or waits for a place
    assert not stuck_at(100.0, 0, 2)
    assert not stuck_at(103.9, 0, 2)
    assert not stuck_at(105.0, 1, 3)  # slow, and not stuck
    assert not stuck_at(108.0, 1, 3)
    assert not stuck_at(108.9, 1, 3)  # progress is checked at most once a second
    assert stuck_at(109.0, 1, 3)
    job.placement = Placement(plain=True)
    assert not stuck_at(200.0, 1, 3) and not stuck_at(300.0, 1, 3)
    job.placement, never = Placement(), Watchdog(None)
    assert never.check([job], executor) == [] and never.due is None
    job.done = 1
    assert "1 of 9" in str(watchdog.error(job))


def test_time_in_which_the_process_was_stopped_makes_no_task_stuck():
    task = Task("t", 9)
    job = Job(task, Request("r", [task]), 0.0, placement=Placement())
    watchdog, executor = Watchdog(4.0), Watched(threads=1)
    vars(executor).update(done=0, begun_blocks=2)
    stuck_at = []
    for executor.time in (100.0, 101.0, 131.0, 132.0, 133.5, 135.0):
        if watchdog.check([job], executor):
            stuck_at.append(executor.time)
    assert stuck_at == [135.0]


def test_a_watchdog_keeps_no_task_that_has_ended():
    task = Task("t", 9)
    job = Job(task, Request("r", [task]), 0.0, placement=Placement())
    watchdog, executor = Watchdog(4.0), Watched(threads=1)
    vars(executor).update(time=100.0, done=0, begun_blocks=2)
    assert watchdog.check([job], executor) == []
    ended = weakref.ref(task)
    del task, job
    assert ended() is None


def test_compiling_is_not_being_stuck(monkeypatch):
    from warpwell.targets.blocks.launch import BlockLaunch

    prepare = BlockLaunch.prepare
    monkeypatch.setattr(BlockLaunch, "prepare", lambda launch: (time.sleep(2.0), prepare(launch)))
    x = np.ones(BLOCK, np.int64)
    with scheduler_of(stuck_after=1.0) as scheduler:
        scheduler.submit(double[BLOCK], x).result(HANG_SECONDS)
    assert (x == 2).all()


class NoWayBack(CpuExecutor):
    """An executor that cannot stop a kernel, like a GPU's."""

    def abandon(self, job, error):
        super(CpuExecutor, self).abandon(job, error)


def test_a_stuck_kernel_on_a_device_that_cannot_stop_it_loses_the_device():
    scheduler = scheduler_of(limit=1, stuck_after=0.2, executor=lambda: NoWayBack(threads=2, patience=0.1))
    gate = Gate(scheduler, 8, 3)
    x = np.ones(BLOCK, np.int64)
    waiting = scheduler.submit(double[BLOCK], x)
    with pytest.raises(errors.StallError):
        gate.handle.result(HANG_SECONDS)
    with pytest.raises(errors.TaskLostError, match="submit it to a new scheduler"):
        waiting.result(HANG_SECONDS)
    until(lambda: scheduler.failure is not None)
    assert isinstance(scheduler.failure, errors.TaskLostError)
    scheduler.close()
    gate.open()


def test_a_callback_that_cancels_while_the_scheduler_fails_ends_no_task_twice():
    scheduler = scheduler_of(limit=1, stuck_after=0.2, executor=lambda: NoWayBack(threads=2, patience=0.1))
    gate = Gate(scheduler, 8, 3)
    x, states = np.ones(BLOCK, np.int64), []
    first, second = (scheduler.submit(double[BLOCK], x) for _ in range(2))
    first.add_done_callback(lambda _: second.cancel())
    second.add_done_callback(lambda handle: states.append(handle.state))
    until(lambda: scheduler.failure is not None and first.done() and second.done())
    scheduler.close()
    gate.open()
    assert len(states) == 1 and states == [second.state]


# -- closing -------------------------------------------------------------------------------------------------------


def test_leaving_waits_for_all_tasks():
    arrays = [np.zeros(BLOCK * 20, np.int64) for _ in range(5)]
    with scheduler_of() as scheduler:
        handles = [scheduler.submit(slow[a.size], a, 200) for a in arrays]
    assert all(h.done() for h in handles) and all((a == 1).all() for a in arrays)
    with pytest.raises(errors.ClosedError, match="closed"):
        scheduler.submit(double[4], np.zeros(4))
    scheduler.close()
    assert not handles[0].cancel()


def test_leaving_waits_for_what_others_keep_back():
    before: concurrent.futures.Future[None] = concurrent.futures.Future()
    x = np.ones(BLOCK, np.int64)
    with scheduler_of() as scheduler:
        scheduler.submit(double[BLOCK], x, after=before)
        threading.Timer(0.1, before.set_result, [None]).start()
    assert (x == 2).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_with_an_exception_cancels_them(error):
    handles = []
    with pytest.raises(error), scheduler_of(limit=1) as scheduler:
        gate = Gate(scheduler, 8, 2)
        inside(scheduler, gate, 5)
        handles += [gate.handle, scheduler.submit(double[4], np.zeros(4))]
        handles.append(scheduler.submit(double[4], np.zeros(4), after=handles[1]))
        run = scheduler.inspect(lambda core: core.executor._runs[gate.handle.job])

        def open_after_the_stop() -> None:
            until(lambda: run.fields[STOP] == run.top)  # or the running blocks would be followed by others
            gate.open()

        opener = threading.Thread(target=open_after_the_stop)
        opener.start()
        raise error
    opener.join()
    assert all(h.cancelled() for h in handles) and gate.counts.sum() == 5 * BLOCK


def test_a_close_that_cancels_gives_up_what_does_not_leave():
    scheduler = scheduler_of(limit=1)
    gate = Gate(scheduler, 4, 0)
    inside(scheduler, gate, 3)
    scheduler._dispatcher.close(cancel=True, patience=0.2)
    with pytest.raises(errors.SchedulerError, match="still running"):
        gate.handle.result(HANG_SECONDS)
    gate.open()


def test_a_task_that_a_policy_never_launches_fails_when_the_scheduler_is_closed():
    class Never(Together):
        name = "never"

        def decide(self, view):
            return [Hold(next(iter(view.waiting)))]

    scheduler = scheduler_of(Never())
    handle = scheduler.submit(double[4], np.zeros(4))
    scheduler.close()
    with pytest.raises(errors.SchedulerError, match="'never'"):
        handle.result(0)


def test_a_scheduler_may_be_closed_in_its_own_thread():
    scheduler = scheduler_of()
    handle = scheduler.submit(double[4], np.zeros(4))
    handle.add_done_callback(lambda _: scheduler.close())
    handle.result(HANG_SECONDS)
    scheduler.close()


class Reluctant(Policy):
    """Always says that it decides later."""

    name = "reluctant"

    def __init__(self, period, again):
        self.period, self.again = period, again

    def decide(self, view):
        return [] if self.again is None else [Hold(view.waiting.first(), again=self.again)]


@pytest.mark.parametrize(("period", "again"), [(0.01, None), (None, 0.01), (None, 1e6)])
def test_closing_gives_up_tasks_that_a_policy_never_launches(monkeypatch, period, again):
    monkeypatch.setattr("warpwell.scheduler.dispatcher.PATIENCE", 0.2)
    scheduler = Scheduler("cpu", Reluctant(period, again))
    handles = [scheduler.submit(double[BLOCK], np.ones(BLOCK, np.int64)) for _ in range(3)]
    assert scheduler._dispatcher.close(timeout=HANG_SECONDS)
    for handle in handles:
        with pytest.raises(errors.SchedulerError, match="policy 'reluctant' launched nothing more"):
            handle.result(HANG_SECONDS)


def test_a_scheduler_that_nobody_has_ends_after_its_tasks():
    x = np.ones(BLOCK, np.int64)
    scheduler = scheduler_of()
    thread = scheduler._dispatcher._thread
    handle = scheduler.submit(double[BLOCK], x)
    del scheduler
    gc.collect()
    handle.result(HANG_SECONDS)
    thread.join(HANG_SECONDS)
    assert not thread.is_alive() and (x == 2).all()


def test_an_executor_that_cannot_be_made_is_an_error_of_the_scheduler():
    def fail():
        raise errors.DeviceNotFoundError("no such device")

    with pytest.raises(errors.DeviceNotFoundError):
        Scheduler("cpu", "first-come", executor=fail)


# -- processes, signals, idling ------------------------------------------------------------------------------------


def test_a_forked_child_is_told():
    with scheduler_of(limit=1) as scheduler:
        done = scheduler.submit(double[4], np.zeros(4))
        done.result(HANG_SECONDS)
        gate = Gate(scheduler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
            child = os.fork()
        if child == 0:
            code = 1
            try:
                x = np.zeros(4)
                calls = (
                    lambda: gate.handle.result(HANG_SECONDS),
                    gate.handle.cancel,
                    lambda: scheduler.submit(double[4], x),
                )
                refused = 0
                for call in calls:
                    try:
                        call()
                    except errors.ForkError:
                        refused += 1
                scheduler.close()
                done.result(0)
                code = 0 if refused == 3 else 2
            finally:
                os._exit(code)
        gate.open()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.handle.result(HANG_SECONDS)


def test_a_task_of_another_process_is_nothing_to_come_after(scheduler):
    gate = Gate(scheduler)
    gate.handle._process -= 1  # as in a child that has a scheduler of its own
    with pytest.raises(errors.ForkError, match=r"task .* was started in process .* start it again here"):
        scheduler.submit(double[4], np.zeros(4), after=gate.handle)
    gate.open()


def test_a_forked_child_is_told_though_the_learner_was_busy():
    with scheduler_of(limit=1) as scheduler:
        assert isinstance(scheduler._analyzer, Learner)
        with warnings.catch_warnings(), scheduler._analyzer._lock:  # as if another thread held the lock at the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                code = 1
                try:
                    scheduler.submit(double[4], np.zeros(4, np.int32))
                except errors.ForkError:
                    code = 0
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_may_compile_though_the_scheduler_made_its_first_dispatcher(monkeypatch):
    """Numba makes its target then, under locks of its own, which the child would find taken."""
    making, lock = threading.Event(), threading.Lock()

    def slowly(**options):
        with lock:
            making.set()
            time.sleep(0.5)
        return numba.njit(**options)

    monkeypatch.setattr(compiled, "njit", slowly)
    with scheduler_of() as scheduler, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
        handle = scheduler.submit(kernel(lambda x: None)[4], np.zeros(4))
        assert making.wait(HANG_SECONDS)
        child = os.fork()
        if child == 0:
            os._exit(lock.locked())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        handle.result(HANG_SECONDS)


def test_threads_of_a_scheduler_import_nothing(tmp_path):
    """A child that is forked during the import inherits a locked module and cannot run a kernel."""
    process = run(
        """
        import threading
        from numba.core.compiler_lock import global_compiler_lock

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                # a fork waits for the thread that holds Numba's lock
                if threading.current_thread().name != "MainThread" and not global_compiler_lock.is_locked():
                    print("imported", name)

        @ww.kernel
        def first(x):
            x[ww.gpu.grid(1)] = 2

        with Scheduler("cpu") as scheduler:
            sys.meta_path.insert(0, Finder)
            x = np.zeros(4, np.float32)
            for _ in range(2):
                scheduler.submit(first[4], x).result()
        """,
        tmp_path,
    )
    assert process.communicate(timeout=HANG_SECONDS)[0] == "" and process.returncode == 0


PROGRAM = """
import sys, time
import numpy as np
import warpwell as ww
from warpwell.scheduler.scheduler import Scheduler

@ww.kernel
def slow(counts, steps):
    i = ww.gpu.grid(1)
    if i < counts.size:
        x = i
        for _ in range(steps):
            x = x * 6364136223846793005 + 1442695040888963407
        counts[i] += 1 if x != 1 else 2

counts = np.zeros(256 * 100_000, np.int64)
"""


def run(program: str, tmp_path: Path) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + textwrap.dedent(program))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ctrl_c_wherever_it_comes_in_a_call_keeps_the_scheduler_from_nothing(scheduler):
    def answers():
        answered = []
        thread = threading.Thread(target=lambda: answered.append(scheduler.inspect(lambda core: True)))
        thread.start()
        thread.join(HANG_SECONDS)
        assert answered == [True]

    assert interrupted_everywhere(lambda: scheduler.inspect(lambda core: core), answers)


def test_ctrl_c_ends_a_program_that_waits_for_a_result(tmp_path):
    process = run(
        """
        with Scheduler("cpu", "source") as scheduler:
            handle = scheduler.submit(slow[counts.size], counts, 10_000)
            while not counts.any():
                time.sleep(0.01)
            print("running", flush=True)
            handle.result()
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=HANG_SECONDS)[0]
    assert "KeyboardInterrupt" in output and process.returncode != 0


def test_a_program_may_end_while_tasks_run(tmp_path):
    process = run(
        """
        scheduler = Scheduler("cpu", "source")
        handle = scheduler.submit(slow[counts.size], counts, 10_000)
        while not counts.any():
            time.sleep(0.01)
        """,
        tmp_path,
    )
    output = process.communicate(timeout=HANG_SECONDS)[0]
    assert output.startswith("warpwell: 1 tasks of a scheduler were cancelled") and output.count("\n") == 1
    assert process.returncode == 0


@pytest.mark.timing
def test_an_idle_scheduler_takes_no_time(scheduler):
    scheduler.submit(double[4], np.zeros(4)).result(HANG_SECONDS)
    gate = Gate(scheduler)  # A running task must not cost time, either.
    inside(scheduler, gate, 3)
    before = time.thread_time_ns, time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before[1] < 0.25
    gate.open()
    gate.handle.result(HANG_SECONDS)


# -- other executors -----------------------------------------------------------------------------------------------


def test_an_analyzer_says_what_is_known_of_a_task():
    sizes = []

    def analyzer(task):
        sizes.append(task.size)
        return Profile(seconds=0.25, source="predicted")

    with scheduler_of(analyzer=analyzer) as scheduler:
        handle = scheduler.submit(double[4], np.zeros(4), size={"n": 4})
        profiled = scheduler.submit(double[4], np.zeros(4), profile=Profile(seconds=1.0))
        handle.result(HANG_SECONDS)
        profiled.result(HANG_SECONDS)
    assert handle.task.profile.source == "predicted" and profiled.task.profile.seconds == 1.0 and sizes == [{"n": 4}]


def test_a_simulation_runs_behind_the_same_interface():
    from lab.sched.rates import ClassTable
    from lab.sched.simulator import Simulator

    simulator = Simulator(ClassTable(), capacity=Capacity())
    with Scheduler("cpu", "first-come", executor=simulator) as scheduler:
        handles = [scheduler.submit(double[BLOCK], np.zeros(BLOCK), profile=Profile(seconds=100.0)) for _ in range(2)]
        for handle in handles:
            handle.result(HANG_SECONDS)
    assert handles[1].job.ended >= 200.0


def test_jobs_that_have_ended_are_not_kept(scheduler):
    for _ in range(3):
        scheduler.submit(double[4], np.zeros(4)).result(HANG_SECONDS)
    assert scheduler.inspect(lambda core: [j for j in core.jobs if isinstance(j, Job)]) == []
