"""Preemption on the CPU: conformance, a thousand preemptions, and the corners of a task's life."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import preemption
from tests.harness.preemption import gated, live_threads
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.scheduler import Scheduler
from warpwell.scheduler.batch import batched
from warpwell.scheduler.executors.cpu_executor import CpuExecutor
from warpwell.scheduler.extend import Ended, Job, Placement, Request, Stopped, Task
from warpwell.targets import kernel
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.primitives import DEVICE, backoff, element_address, fetch_add, grid, load_acquire
from warpwell.testing.executors import ExecutorConformance, count_and_mix, mixed

BLOCK = 256


class TestCpuExecutor(ExecutorConformance):
    def make(self) -> CpuExecutor:
        return CpuExecutor(threads=3)


@kernel
def crowd(inside, peak, counts):
    """Leave in most[0] how many threads were ever inside at the same time."""
    i = grid(1)
    if i < counts.size:
        now = fetch_add(element_address(inside, 0), 1, DEVICE) + 1
        if now > peak[0]:
            peak[0] = now
        backoff(0)
        fetch_add(element_address(counts, i), 1, DEVICE)
        fetch_add(element_address(inside, 0), -1, DEVICE)


@kernel
def copy(a, y):
    i = grid(1)
    if i < y.size:
        y[i] = a[i]


@kernel
def wrong(gate, a, y):
    """The first index is outside; the third block waits at the gate."""
    i = grid(1)
    if i < y.size:
        if i == 512:
            attempt = 0
            while load_acquire(element_address(gate, 0), DEVICE) == 0:
                backoff(attempt)
                attempt += 1
        y[i] = a[a.size] if i == 0 else a[i]


def job_of(launch, *arguments, **options):
    task = Task(
        launch.kernel.__name__,
        BlockLaunch(launch, arguments, "cpu").blocks,
        launch=launch,
        arguments=arguments,
        **options,
    )
    return Job(task, Request(task.name, [task]), 0.0)


def event_of(executor: CpuExecutor, seconds: float = HANG_SECONDS) -> Ended | Stopped:
    until = executor.now() + seconds
    while executor.now() < until:
        executor.wait(until)
        events = executor.poll()
        if events:
            assert len(events) == 1
            if isinstance(events[0], Stopped):
                events[0].job.done = events[0].done
            return events[0]
    raise AssertionError("no event")


@pytest.fixture
def executor():
    made = CpuExecutor(threads=3, patience=0.5)
    yield made
    made.close()


class Gate:
    """Arguments of `gated`, and the job."""

    def __init__(self, blocks: int, first: int, **options) -> None:
        self.words = np.array([first], np.int64)
        self.counts = np.zeros(BLOCK * blocks, np.int64)
        self.job = job_of(gated[self.counts.size], self.words, self.counts, **options)

    def open(self, blocks: int = 1 << 40) -> None:
        self.words[0] = blocks


# -- a thousand preemptions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_block_runs_once_through_random_preemptions(count, capsys):
    assert preemption.main(["--preemptions", str(count), "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{count} preemptions with blocks done and left") == 2
    assert "bit-equal" in printed


@pytest.mark.parametrize("fault", ["twice", "never", "bit"])
def test_the_program_finds_faults(fault, capsys, monkeypatch):
    check = preemption.Run.check

    def spoiled(run):
        if fault == "twice":
            run.counts[300] += 1
        elif fault == "never":
            run.counts[BLOCK : 2 * BLOCK] = 0
        else:
            run.out.reshape(-1).view(np.int64)[7] ^= 1
        check(run)

    monkeypatch.setattr(preemption.Run, "check", spoiled)
    assert preemption.main(["--preemptions", "2", "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and ("differ" if fault == "bit" else "1 of") in printed


# -- quotas --------------------------------------------------------------------------------------------------------


def test_a_quota_is_never_exceeded(executor):
    inside, peak = np.zeros(1, np.int64), np.zeros(1, np.int64)
    counts = np.zeros(BLOCK * 60, np.int64)
    job = job_of(crowd[counts.size], inside, peak, counts)
    executor.launch(job, Placement(workers=2))
    rng = np.random.default_rng(3)
    until(lambda: executor.progress(job) > 0)
    for quota in rng.integers(1, 3, 60):
        executor.resize(job, int(quota))
        time.sleep(1e-4)
    assert peak[0] <= 2
    executor.resize(job, 1)
    until(lambda: live_threads(executor, job) <= 1)
    claimed = executor.claimed(job)  # until its block ends, a thread that has counted two may write 2 to `peak`
    until(lambda: executor.claimed(job) > claimed or live_threads(executor, job) == 0)
    peak[0] = 0
    until(lambda: peak[0] > 0 or live_threads(executor, job) == 0)
    assert peak[0] <= 1
    executor.resize(job, 3)
    event = event_of(executor)
    assert isinstance(event, Ended) and event.error is None
    assert peak[0] <= 3 and (counts == 1).all()


def test_growing_waits_for_those_that_are_to_leave(executor):
    gate = Gate(9, 0)
    executor.launch(gate.job, Placement(workers=3))
    until(lambda: executor.claimed(gate.job) == 3)
    executor.resize(gate.job, 1)
    executor.resize(gate.job, 3)  # the two workers have not left yet: they stay, and none is added
    assert live_threads(executor, gate.job) == 3
    time.sleep(0.02)
    assert executor.claimed(gate.job) == 3
    gate.open()
    assert isinstance(event_of(executor), Ended)
    assert (gate.counts == 1).all()


def test_a_shrink_is_obeyed_at_the_end_of_a_block(executor):
    gate = Gate(40, 3)
    executor.launch(gate.job, Placement(workers=3))
    until(lambda: executor.claimed(gate.job) == 6)
    executor.resize(gate.job, 1)
    assert live_threads(executor, gate.job) == 3
    gate.open(6)
    until(lambda: live_threads(executor, gate.job) == 1)
    until(lambda: executor.claimed(gate.job) == 7)
    time.sleep(0.02)
    assert executor.claimed(gate.job) == 7 and live_threads(executor, gate.job) == 1
    gate.open()
    assert isinstance(event_of(executor), Ended)
    assert (gate.counts == 1).all()


# -- a task's life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["drain", "switch"])
def test_a_drain_waits_for_blocks_that_run(executor, mode):
    gate = Gate(8, 2)
    executor.launch(gate.job, Placement(workers=2))
    until(lambda: executor.claimed(gate.job) == 4)
    executor.preempt(gate.job, mode)
    executor.wait(executor.now() + 0.05)
    assert executor.poll() == []
    gate.open()
    event = event_of(executor)
    assert isinstance(event, Stopped) and event.done == 4 and gate.counts.sum() == 4 * BLOCK
    executor.launch(gate.job, Placement())
    assert isinstance(event_of(executor), Ended)
    assert (gate.counts == 1).all()


def test_a_task_that_ends_while_it_stops_has_ended(executor):
    gate = Gate(2, 0)
    executor.launch(gate.job, Placement(workers=2))
    until(lambda: executor.claimed(gate.job) == 2)
    executor.preempt(gate.job)
    gate.open()
    event = event_of(executor)
    assert isinstance(event, Ended) and event.error is None and (gate.counts == 1).all()


def test_a_stuck_task_is_abandoned_and_others_go_on(executor):
    gate, healthy = Gate(4, 1), Gate(4, 99)
    executor.launch(gate.job, Placement())
    until(lambda: executor.claimed(gate.job) == 4)
    executor.abandon(gate.job, errors.StallError("stuck"))
    event = event_of(executor)
    assert isinstance(event, Ended) and isinstance(event.error, errors.StallError)
    with pytest.raises(errors.SchedulerError, match="does not run"):
        executor.preempt(gate.job)
    executor.launch(healthy.job, Placement())
    assert isinstance(event_of(executor), Ended)
    gate.open()  # the threads return, and no event is reported
    until(lambda: (gate.counts == 1).sum() >= 2 * BLOCK)
    executor.wait(executor.now() + 0.05)
    assert executor.poll() == []


def test_abandoning_aborts_waits_for_storage_that_no_other_task_shares(executor):
    class Argument:
        def __init__(self):
            self.aborted = 0

        def abort(self, flag):
            self.aborted += 1

    own, shared = Argument(), Argument()
    gates = [Gate(2, 0), Gate(2, 0)]
    for gate, arguments in zip(gates, ([own, shared], [shared]), strict=True):
        executor.launch(gate.job, Placement(workers=1))
        until(lambda gate=gate: executor.claimed(gate.job) == 1)
        executor._runs[gate.job].blocks.participants = arguments
    executor.abandon(gates[0].job, errors.StallError("stuck"))
    assert (own.aborted, shared.aborted) == (1, 0)
    executor.abandon(gates[1].job, errors.StallError("stuck"))
    assert (own.aborted, shared.aborted) == (1, 1)
    for gate in gates:
        gate.open()


def test_closing_does_not_wait_for_a_stuck_block():
    executor = CpuExecutor(threads=2, patience=0.2)
    gate = Gate(4, 0)
    executor.launch(gate.job, Placement())
    until(lambda: executor.claimed(gate.job) == 2)
    executor.close()
    gate.open()
    until(lambda: gate.counts.sum() == 2 * BLOCK)
    with pytest.raises(errors.ClosedError):
        executor.launch(gate.job, Placement())


def test_a_preemption_while_it_is_compiled_stops_it_before_its_first_block(executor, monkeypatch):
    compiled = threading.Event()
    prepare = BlockLaunch.prepare

    def slowly(launch):
        compiled.wait(HANG_SECONDS)
        prepare(launch)

    monkeypatch.setattr(BlockLaunch, "prepare", slowly)
    gate = Gate(4, 99)
    executor.launch(gate.job, Placement())
    executor.preempt(gate.job)
    compiled.set()
    event = event_of(executor)
    assert isinstance(event, Stopped) and event.done == 0 and not gate.counts.any()
    executor.launch(gate.job, Placement())
    assert isinstance(event_of(executor), Ended)


def test_a_closed_executor_ends_what_it_was_compiling(monkeypatch):
    compiled = threading.Event()
    calls: list[str] = []
    task = (job := Gate(4, 99).job).task
    task.cut = task.launch.cut(task.arguments, "cpu")  # not all launches: another test's may end meanwhile
    monkeypatch.setattr(task.cut, "prepare", lambda: compiled.wait(HANG_SECONDS))
    monkeypatch.setattr(task.cut, "end", lambda: calls.append("end"))
    executor = CpuExecutor(threads=2, patience=0.1)
    executor.launch(job, Placement())
    executor.close()
    assert calls == []
    compiled.set()
    until(lambda: calls == ["end"])


def test_a_task_with_a_wrong_block_count_fails(executor):
    gate = Gate(4, 99)
    gate.job.task.blocks = 5
    executor.launch(gate.job, Placement())
    event = event_of(executor)
    assert isinstance(event, Ended) and "was submitted with 5" in str(event.error)


@pytest.mark.parametrize("options", [{"threads": 0}, {"patience": -1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(errors.ArgumentError):
        CpuExecutor(**options)


def test_a_batch_that_was_preempted_continues(executor):
    n, rounds, stops = BLOCK * 20, 50, 0
    while stops == 0:  # a busy machine may let a batch end before it is preempted: then a longer one is tried
        rounds *= 4
        assert rounds < 50 * 4**6
        counts, out = np.zeros(n, np.int64), np.zeros(n, np.int64)
        single = job_of(count_and_mix[n], counts, out, rounds).task
        task = batched([single], [0] * 400, "counts", 0)
        job = Job(task, Request(task.name, [task]), 0.0)
        executor.launch(job, Placement())
        while stops < 3:
            until(lambda job=job: executor.progress(job) > job.done)
            executor.preempt(job)
            event = event_of(executor)
            if isinstance(event, Ended):
                break
            assert (counts == event.done).all()
            stops += 1
            executor.launch(job, Placement())
        else:
            event = event_of(executor)
        assert isinstance(event, Ended) and event.error is None and (counts == 400).all()


# -- storage-backed arrays -----------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path):
    """An array of 8 blocks of int64, in a file."""
    np.save(tmp_path / "a.npy", np.arange(8 * BLOCK))
    array = ww.open(tmp_path / "a.npy", device="cpu")
    yield array
    array.close()


def test_arguments_begin_and_end_once_a_task(executor, stored, monkeypatch):
    calls: list[str] = []
    kind = type(stored)
    for name in ("launch_begins", "launch_ended"):
        real = getattr(kind, name)
        noted = lambda self, flag, name=name, real=real: (calls.append(name), real(self, flag))[1]  # noqa: E731
        monkeypatch.setattr(kind, name, noted)
    y = np.zeros(8 * BLOCK, np.int64)
    job = job_of(copy[y.size], stored, y)
    executor.launch(job, Placement(workers=1))
    for _ in range(3):
        executor.preempt(job)
        if isinstance(event_of(executor), Ended):
            break
        assert calls == ["launch_begins"]
        executor.launch(job, Placement(workers=1))
    else:
        assert isinstance(event_of(executor), Ended)
    assert calls == ["launch_begins", "launch_ended"]
    assert np.array_equal(y, np.arange(8 * BLOCK))


def test_what_is_latched_comes_out_at_the_end_of_its_own_task(executor, stored, tmp_path):
    np.save(tmp_path / "b.npy", np.arange(8 * BLOCK))
    y, z, gate = np.zeros(8 * BLOCK, np.int64), np.zeros(8 * BLOCK, np.int64), np.zeros(1, np.int64)
    with ww.open(tmp_path / "b.npy", device="cpu") as second:
        bad, good = job_of(wrong[y.size], gate, stored, y), job_of(copy[z.size], second, z)
        executor.launch(bad, Placement(workers=1))
        until(lambda: executor.claimed(bad) == 3)
        executor.preempt(bad)
        gate[0] = 1
        event = event_of(executor)
        assert isinstance(event, Stopped) and event.done == 3  # the first block's latched values stay in place
        executor.launch(good, Placement())
        event = event_of(executor)
        assert isinstance(event, Ended) and event.job is good and event.error is None
        assert np.array_equal(z, np.arange(8 * BLOCK))
        executor.launch(bad, Placement())
        event = event_of(executor)
        assert isinstance(event, Ended) and isinstance(event.error, errors.IndexRangeError)
    again = job_of(copy[y.size], stored, y)  # and the array can be used again
    executor.launch(again, Placement())
    event = event_of(executor)
    assert isinstance(event, Ended) and event.error is None and y[-1] == 8 * BLOCK - 1


def test_a_forgotten_task_gives_its_arrays_back(executor, stored):
    y = np.zeros(8 * BLOCK, np.int64)
    job = job_of(copy[y.size], stored, y)
    executor.launch(job, Placement(workers=1))
    executor.preempt(job)
    assert isinstance(event_of(executor), Stopped)
    executor.discard(job)
    assert stored.cache._in_flight == 0


def test_an_array_that_refuses_fails_the_task(executor, tmp_path):
    np.save(tmp_path / "c.npy", np.arange(BLOCK))
    array = ww.open(tmp_path / "c.npy", device="cpu")
    job = job_of(copy[BLOCK], array, np.zeros(BLOCK, np.int64))
    array.close()
    executor.launch(job, Placement())
    event = event_of(executor)
    assert isinstance(event, Ended) and isinstance(event.error, errors.ClosedError)


def test_results_are_those_of_a_plain_launch():
    n = BLOCK * 20 + 3
    out = np.zeros(n, np.int64)
    count_and_mix[n](np.zeros(n, np.int64), out, 5, device="cpu")
    assert np.array_equal(out, mixed(n, 5))


@pytest.mark.parametrize("option", ["known", "resident_bytes", "prioritty"])
def test_an_option_that_a_launch_does_not_have_is_refused_by_name(option: str) -> None:
    launch, items, out = copy[4], np.ones(4), np.zeros(4)
    refused: dict[str, Any] = {option: 5}
    with Scheduler("cpu") as scheduler:
        for submit in (scheduler.submit, scheduler.prepare):
            with pytest.raises(TypeError, match=option):
                submit(launch, items, out, **refused)
        with pytest.raises(TypeError, match=option):
            scheduler.submit_many([(launch, items, out)], **refused)
        scheduler.submit(launch, items, out).result()
        assert out.tolist() == items.tolist()
