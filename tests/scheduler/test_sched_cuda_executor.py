"""The GPU's executor over streams and workers of the host: what it does in which order, without a GPU."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.testing.fake_gpu import FakeGpu, fake_executor
from warpwell import errors
from warpwell.scheduler import Ended, Executor, Job, Kind, Placement, Profile, Request, Scheduler, Stopped, Task
from warpwell.scheduler.dispatcher import Watchdog
from warpwell.scheduler.executor import EndedAlike
from warpwell.scheduler.executors import cuda_launch
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.executors.gpu import Gpu
from warpwell.scheduler.executors.lines import AHEAD, AHEAD_NS, LAUNCH, Line, Lines, address_of
from warpwell.scheduler.policies.order import FirstCome
from warpwell.scheduler.task import Pattern, State
from warpwell.targets.blocks.control import BEGUN, STOP
from warpwell.targets.primitives import backoff
from warpwell.testing.executors import ExecutorConformance


class TestCudaExecutorWithoutRows(ExecutorConformance):
    """Kernels whose arguments are no words, so that Python launches them."""

    def make(self) -> Executor:
        return fake_executor(words=False)


class TestCudaExecutorWithoutGpu(ExecutorConformance):
    def make(self) -> Executor:
        return fake_executor()

    def test_workers_begin_when_each_control_record_was_used_once(self, executor: Any) -> None:
        records = executor._records
        records._used += [records._ready.popleft() for _ in range(len(records._ready) - 8)]
        for _ in range(40):
            job = self.job(executor)
            executor.launch(job, Placement(workers=1))
            self.finish(executor, job)

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
        task = Task("endless", 1, Profile(seconds=1e-6, source="predicted"), endless[1], (x,))
        job = Job(task, Request("endless", [task]), 0.0)
        executor.launch(job, Placement())
        watchdog = Watchdog(0.3)
        while not watchdog.look([job], executor):
            executor.wait(executor.now() + 0.05)
            assert executor.poll() == []
        x[0] = 1
        while not executor.poll():
            executor.wait(executor.now() + 0.05)
        executor.close()


@ww.kernel
def endless(x):
    while x[0] == 0:
        backoff(100)


def fake_executor_over(gpu: FakeGpu) -> Any:
    from warpwell.scheduler.executors.cuda_executor import CudaExecutor

    return CudaExecutor(gpu=gpu)


def test_the_second_of_two_launches_waits_until_the_workers_of_the_first_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_launch, "SOON", 60.0)
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
    ended: list[Any] = []
    while executor.progress(first) == 0 and not ended:  # compiled, in a thread of its own; it may end between two looks
        executor.wait(executor.now() + 1e-3)
        ended += executor.poll()
    urgent = conformance.job(executor)
    executor.launch(late, Placement(workers=1))
    before = len(waited)
    executor.launch(urgent, Placement(workers=1, priority=8))
    assert len(waited) == before  # who is more urgent does not wait
    executor.launch(second, Placement(workers=1))
    while len(ended) < 4:
        executor.wait(executor.now() + 1e-2)
        ended += executor.poll()
    assert all(event.error is None for event in ended)
    assert len(waited) >= 1 and all(least > 0 for _, least in waited)
    executor.close()


def held(executor: Any) -> tuple[Job, Any]:
    """Launch a task whose blocks end when a number is set; return it when one has begun."""
    x = np.zeros(2, np.int64)
    launch = endless[4096]
    task = Task("endless", launch.cut((x,), "cpu").blocks, launch=launch, arguments=(x,))
    job = Job(task, Request("endless", [task]), 0.0)
    executor.launch(job, Placement(workers=1))
    while not executor.claimed(job):
        executor.wait(executor.now() + 1e-3)
        assert executor.poll() == []
    return job, x


def until_there_is_word(executor: Any, count: int) -> None:
    """Wait until `poll` would tell of so many events."""
    while len(executor._events) < count:
        executor.wait(executor.now() + 1e-3)


@pytest.mark.parametrize("waits", [False, True], ids=["poll", "wait"])
def test_what_runs_is_lost_with_its_gpu_and_what_stopped_before_is_in_the_queue(waits: bool) -> None:
    executor = fake_executor_over(gpu := FakeGpu())
    stopped, x = held(executor)
    executor.preempt(stopped)
    x[0] = 1
    until_there_is_word(executor, 1)
    assert [type(event) for event in executor.poll()] == [Stopped]
    running, y = held(executor)
    gpu.lose()
    if waits:
        executor.wait(executor.now() + 60)
    until(lambda: executor._lines.news != executor._seen or executor._events)
    events = executor.poll()
    assert [(event.job, type(event.error)) for event in events] == [(running, errors.TaskLostError)]
    for call in (executor.poll, lambda: executor.wait(0.0), lambda: executor.launch(stopped, Placement())):
        with pytest.raises(errors.TaskLostError, match="the GPU is lost"):
            call()
    y[0] = 1
    gpu.close()


def test_the_log_says_what_was_lost() -> None:
    gpu, x = FakeGpu(), np.zeros(2, np.int64)
    scheduler = Scheduler("cpu", executor=lambda: fake_executor_over(gpu), limit=1)
    running = scheduler.submit(endless[4096], x, name="running")
    until(lambda: scheduler.inspect(lambda core: running.job is not None and core.executor.claimed(running.job)))
    gpu.lose()
    with pytest.raises(errors.TaskLostError, match="was lost"):
        running.result(HANG_SECONDS)
    while scheduler.failure is None:  # it ends without being asked anything
        time.sleep(1e-3)
    assert "running" in {event.name for event in scheduler.log.events if event.kind == "lost"}
    scheduler.close()
    gpu.lines._thread.join(HANG_SECONDS)
    assert not gpu.lines._thread.is_alive()  # nobody closes a lost device
    x[0] = 1
    gpu.close()


def test_tasks_that_were_cancelled_before_their_launch_are_not_kept() -> None:
    begun: list[Any] = []
    gpu = FakeGpu()
    gpu.at_hand = lambda launch, args: True  # type: ignore[method-assign]
    ahead = cuda_launch.Ahead(gpu, begun.append)  # type: ignore[arg-type]

    def job() -> Any:
        task = Task("endless", 1)
        return Job(task, Request("endless", [task]), 0.0)

    first, second, third = job(), job(), job()
    for each in (first, second, third):
        ahead.note(each)
    second.state = State.CANCELLED
    for _ in range(3):
        ahead.step(())
    assert [run.job for run in begun] == [first, third]
    first.state = State.CANCELLED
    gone = weakref.ref(first)
    begun.clear()
    ahead.drop(first)
    del first, each
    assert gone() is None and ahead.take(third, Placement()).job is third


@ww.kernel
def add(x):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] += 1


@ww.kernel
def spin(x, rounds):
    i = ww.gpu.grid(1)
    v = x[i]
    for _ in range(rounds):
        v = (v ^ v >> 13) * 6364136223846793005 + 1  # LLVM does many rounds at once where it is linear
    x[i] = v


class Full(FakeGpu):
    """A GPU whose memory holds the arguments of its tasks already (here: they are NumPy's), and little is free."""

    def memory_info(self) -> tuple[int, int]:
        return 100, 1 << 30


def test_memory_of_arrays_counts_for_their_tenant_and_where_it_is_once() -> None:
    x = np.zeros(1000)
    with Scheduler("cpu", executor=CudaExecutor(gpu=FakeGpu()), tenants={"a": {"memory": 8000}, "b": 1}) as scheduler:
        for memory in (None, 0, 5):  # what is said to be less is not believed
            scheduler.submit(add[1000], x, tenant="a", memory=memory).result(HANG_SECONDS)
            with pytest.raises(errors.TaskMemoryError, match="its tenant may hold 8000"):
                scheduler.submit(add[1000], np.zeros(1001), tenant="a", memory=memory)
        with pytest.raises(errors.TaskMemoryError, match="8001 bytes"):
            scheduler.submit(add[1000], x, tenant="a", memory=8001)
    y = np.zeros((4, 1000), np.int64)
    with Scheduler("cpu", "left-over", executor=CudaExecutor(gpu=Full())) as scheduler:
        first = scheduler.submit(spin[4000], y[0:].reshape(-1), 2000)
        handles = [scheduler.submit(add[1000], x) for _ in range(5)]
        for handle in (first, *handles):
            handle.result(HANG_SECONDS)
        kinds = [(e.kind, e.task) for e in scheduler.log.events if e.kind in ("launch", "end")]
        assert kinds.index(("launch", 1)) < kinds.index(("end", 0))  # together, on a device that has room for neither
    assert (x == 8).all()


@pytest.mark.timing
def test_a_task_that_is_said_to_be_short_leaves_for_a_higher_priority() -> None:
    options: Any = {"kind": Kind.COMPUTE, "resident": 4}
    with Scheduler("cpu", executor=fake_executor(), tenants={"a": 1, "b": 1}) as scheduler:
        for n in (256, 2):
            scheduler.submit(spin[n], np.zeros(256, np.int64), 1, tenant="a").result(HANG_SECONDS)  # compiled
        n = 256 * 4000
        long = [
            scheduler.submit(spin[n], np.zeros(n, np.int64), 4000, tenant="b", profile=Profile(seconds=1e-6, **options))
            for _ in range(2)
        ]
        until(lambda: all(h.running() for h in long))
        short = scheduler.submit(
            spin[256], np.zeros(256, np.int64), 10, tenant="a", priority=100, profile=Profile(seconds=1e-3, **options)
        )
        short.result(HANG_SECONDS)
        assert not any(h.done() for h in long)
        for handle in long:
            handle.cancel()


def test_workers_behind_others_begin_without_the_host_and_a_quota_holds_while_it_grows() -> None:
    gpu = FakeGpu(resident=6)
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)  # compiled by now
    job, x = held(executor)
    second = conformance.job(executor)
    executor.resize(job, 4)
    until(lambda: gpu.made[1].most == 4)
    assert executor.launch_behind(second, Placement(workers=3), job)
    executor.resize(job, 2)
    executor.resize(job, 4)  # two more, which come when two have left
    executor.resize(job, 1, younger=True)
    executor.resize(job, 3)
    time.sleep(0.05)
    assert executor.progress(second) == 0
    x[0] = 1
    until(lambda: (conformance.counts(second.task) == 1).all())
    assert gpu.made[1].most == 4
    events = conformance.ends(executor, 2)
    assert [event.job for event in events] == [job, second]
    executor.close()


@pytest.mark.parametrize("placement", [Placement(plain=True), Placement(workers=2)], ids=["whole", "workers"])
@pytest.mark.parametrize("words", [True, False], ids=["words", "no words"])
def test_a_kernel_that_is_wanted_to_be_measured_is(words: bool, placement: Placement) -> None:
    executor = fake_executor(words=words)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job = conformance.job(executor)
    job.task.known = SimpleNamespace(wants=True)  # type: ignore[assignment]
    executor.launch(job, placement)
    (event,) = conformance.ends(executor, 1)
    assert isinstance(event, Ended) and event.error is None and event.seconds is not None
    executor.close()


def test_a_mate_is_relieved_without_the_host() -> None:
    gpu = FakeGpu()
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    (mate, x), (first, y) = held(executor), held(executor)
    second = conformance.job(executor)
    assert executor.launch_behind(second, Placement(workers=1), first)
    assert executor.relieve_when(mate, second)
    control = executor._runs[mate].control
    time.sleep(0.05)
    assert gpu.read_words(control + 8 * STOP, 1)[0] == 0 and gpu.read_words(control + 8 * BEGUN, 1)[0] == 1
    y[0] = 1
    until(lambda: gpu.read_words(control + 8 * STOP, 1)[0] == 1)
    x[0] = 1  # so the old worker ends its block
    until(lambda: gpu.read_words(control + 8 * BEGUN, 1)[0] == 2)
    events = conformance.ends(executor, 3)
    assert all(isinstance(event, Ended) and event.error is None for event in events)
    assert not executor._runs and not executor._busy
    executor.close()


def test_a_closed_executor_leaves_no_worker_behind() -> None:
    gpu = FakeGpu()
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job, x = held(executor)
    others = [conformance.job(executor) for _ in range(3)]
    for before, other in itertools.pairwise([job, *others]):
        assert executor.launch_behind(other, Placement(workers=2), before)
    executor.resize(job, 3)
    executor.resize(job, 2)
    executor.resize(job, 3)  # waits for one to leave
    threading.Timer(0.2, lambda: x.fill(1)).start()
    executor.close()
    assert all(forms._now == 0 for forms in gpu.made)


def test_nobody_looks_at_what_takes_long() -> None:
    """A look takes Python's lock, which the program's own threads want: the end wakes who waits."""
    executor: Any = fake_executor()
    x = np.zeros(2, np.int64)
    task = Task("endless", 1, Profile(), endless[1], (x,))
    job = Job(task, Request("endless", [task]), 0.0)
    executor.launch(job, Placement())
    looks = [0]

    watch = executor._lines.watch

    def counted(*given: Any) -> None:
        looks[0] += 1
        watch(*given)

    executor._lines.watch = counted
    while not executor._runs[job].runs:
        executor.wait(executor.now() + 1e-3)
        executor.poll()
    looks[0] = 0
    executor.wait(executor.now() + 1.0)
    assert looks[0] == 1
    x[0] = 1
    while not executor.poll():
        executor.wait(executor.now() + 1e-2)
    executor.close()


def test_workers_that_are_relieved_come_back_behind_those_that_began_meanwhile() -> None:
    gpu = FakeGpu(resident=4)
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    stays, _ = conformance.stop(executor)  # so it is compiled, and begins when it is launched again
    turns = conformance.job(executor, rounds=10 * conformance.ROUNDS)
    ended: list[Any] = []
    executor.launch(turns, Placement(workers=2))
    run = executor._runs[turns]
    assert conformance.until_some_are_done(executor, turns)
    executor.launch(stays, Placement(workers=1))
    executor.resize(turns, 1, younger=True)  # all leave, and come back as one
    assert (run.floor, run.top) == (2, 3)
    executor.resize(turns, 1, younger=True)
    assert (run.floor, run.top) == (3, 4)
    executor.resize(turns, None)
    while len(ended) < 2:
        executor.wait(executor.now() + 1e-2)
        ended += executor.poll()
    assert all(isinstance(event, Ended) and event.error is None for event in ended)
    for job in (turns, stays):
        conformance.check(job.task)
    executor.close()


def test_the_end_of_a_kernel_that_is_relieved_when_it_has_ended_is_noticed() -> None:
    executor = fake_executor()
    conformance = TestCudaExecutorWithoutGpu()
    conformance.stop(executor)  # so it is compiled, and begins when it is launched again
    job = conformance.job(executor)
    executor.launch(job, Placement(workers=2))
    while executor._lines.news == executor._seen:
        time.sleep(1e-3)
    executor.resize(job, 1, younger=True)
    executor.wait(executor.now() + 1e6)  # until there is news
    assert [type(event) for event in executor.poll()] == [Ended]
    executor.close()


def test_many_launches_that_are_alike_run_each_once_unless_they_are_cancelled() -> None:
    x, y = np.zeros(1000), np.zeros(1000)
    gpu = FakeGpu()
    short: Any = {"profile": Profile(kind=Kind.COMPUTE, seconds=20e-6, source="measured")}
    with Scheduler("cpu", limit=1, executor=CudaExecutor(gpu=gpu)) as scheduler:
        for array in (x, y):
            for _ in range(8):
                scheduler.submit(add[1000], array, **short).result(HANG_SECONDS)
        handles = [scheduler.submit(add[1000], (x, y)[k // 50 % 2], **short) for k in range(400)]
        asked = [handle for k, handle in enumerate(handles) if k % 7 == 3 and handle.cancel()]
        for handle in handles:
            if handle not in asked:
                handle.result(HANG_SECONDS)
        done = [handle for handle in handles if not handle.cancelled()]
        assert x.max() == x.min() == 8 + sum(handle.task.arguments[0] is x for handle in done)
        assert y.max() == y.min() == 8 + sum(handle.task.arguments[0] is y for handle in done)
        assert sorted(handle.task.number for handle in handles) == list(range(16, 416))
        assert len({id(handle.task) for handle in handles}) == 400 and all(h.job.task is h.task for h in handles)
        told: Any = collections.defaultdict(list)
        for event in scheduler.log:
            told[event.kind].append(event.task)
        assert sorted(told["arrive"]) == list(range(416))
        assert sorted(told["end"]) == [*range(16), *sorted(handle.task.number for handle in done)]
        assert set(told["end"]) <= set(told["launch"]) and sorted(told["end"] + told["cancel"]) == list(range(416))
        assert len(gpu.made) < 60  # the others took the form of one before them
    with pytest.raises(errors.ClosedError):
        scheduler.submit(add[1000], x)


def test_launches_are_alike_only_where_nothing_but_their_number_differs() -> None:
    x = np.zeros(1000)
    with Scheduler("cpu", "first-come", executor=fake_executor()) as scheduler:

        def pattern(launch: Any = add[1000], *args: Any, **options: Any) -> Any:
            handle = scheduler.submit(launch, *(args or (x,)), **{"profile": Profile(seconds=1e-3), **options})
            handle.result(HANG_SECONDS)
            return handle.task.pattern

        first = pattern()
        assert first is not None and pattern() is first and pattern(tenant="default", priority=0) is first
        others = [
            pattern(add[999]),
            pattern(spin[4], np.zeros(4, np.int64), 1),
            pattern(add[1000], np.zeros(1000)),
            pattern(add[1000], x[:]),
            pattern(tenant="b"),
            pattern(priority=1),
            pattern(name="other"),
            pattern(profile=Profile(seconds=1.0)),
            pattern(deadline=1.0),
            pattern(memory=9000),
            pattern(size={"n": 1}),
            pattern(after=scheduler.submit(add[1000], x)),
        ]
        assert others.pop(3) is first  # a view of the same memory
        kept = [its for its in others if its is not None]
        assert first not in kept and len(set(kept)) == len(kept) == 7
        assert others[7:] == [None] * 4
        with pytest.raises(errors.ArgumentError):
            scheduler.submit(add[1000], x, priority=0.0, profile=Profile(seconds=1e-3))  # type: ignore[arg-type]
        more = first.task(())
    assert more.arguments == () and more.cut is None  # what is remembered holds no array


def test_callbacks_submit_in_order_whether_they_are_alike_or_not() -> None:
    x, made = np.zeros(1000), []
    with Scheduler("cpu", executor=fake_executor()) as scheduler:
        for _ in range(2):
            scheduler.submit(add[1000], x).result(HANG_SECONDS)

        def more(_: Any) -> None:
            made.append(scheduler.submit(add[1000], x))
            made.append(scheduler.submit(add[1000], x, deadline=9.0))

        before = scheduler.submit(add[1000], x, deadline=9.0)
        before.add_done_callback(more)
        until(lambda: len(made) == 2)
        for handle in made:
            handle.result(HANG_SECONDS)
    assert made[0].task.pattern is not None is made[1].task.pattern
    assert made[0].task.number < made[1].task.number


class Breaks(FirstCome):
    """A policy with an error that some task brings out."""

    broken = False

    def bucket(self, job: Job) -> Any:
        if self.broken:
            raise ValueError("a policy broke")
        return None


def test_a_policy_that_fails_at_many_that_are_alike_leaves_nobody_waiting() -> None:
    x, policy = np.zeros(1000), Breaks()
    scheduler = Scheduler("cpu", policy, executor=fake_executor())
    pair: list[Any] = []
    for its in (short := {"profile": Profile(seconds=1e-3)}), {**short, "name": "other"}:
        scheduler.submit(add[1000], x, **its).result(HANG_SECONDS)
        pair.append(its)
    held, free = threading.Event(), threading.Event()
    scheduler.submit(add[1000], x, memory=9000).add_done_callback(lambda _: held.set() or free.wait(HANG_SECONDS))
    assert held.wait(HANG_SECONDS)
    handles = [scheduler.submit(add[1000], x, **pair[k // 3]) for k in range(6)]
    asked = ThreadPoolExecutor(1).submit(scheduler.inspect, lambda core: core.limit)
    until(lambda: scheduler._dispatcher._calls.qsize() == 3)  # two series, and who asks
    policy.broken = True
    free.set()
    for handle in handles:
        with pytest.raises((errors.TaskLostError, errors.SchedulerError), match="a policy broke"):
            handle.result(HANG_SECONDS)
    assert asked.result(HANG_SECONDS) == 2  # it was taken out with them
    scheduler.close()


class _Array:
    def __init__(self, address: int, shape: tuple[int, ...] = (4,), stream: int | None = None) -> None:
        self.address, self.shape, self.stream = address, shape, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.address:
            raise RuntimeError("as of a tensor with gradients")
        about = {"data": (self.address, False), "shape": self.shape, "typestr": "<f4", "version": 3}
        return about if self.stream is None else {**about, "stream": self.stream}


def test_words_of_arguments_are_equal_only_where_a_kernel_gets_the_same() -> None:
    def words(*given: Any) -> Any:
        return Gpu.words(Any, given)  # type: ignore[arg-type]

    assert words(1, 2.0, _Array(64)) == words(1, 2.0, _Array(64)) and words() == ()
    different = [words(1), words(True), words(1.0), words(0.0), words(-0.0), words(_Array(64)), words(_Array(128)),
                 words(_Array(64, (2, 2))), words(1, 1), words(np.float32(1)), words(np.float64(1)), words(np.int64(1)),
                 words(np.float32(0)), words(np.float32(-0.0)), words(np.bool_(True)),
                 words(np.datetime64(1, "s")), words(np.datetime64(1, "m"))]  # fmt: skip
    assert len(set(different)) == len(different)
    assert words(np.float32("nan"), np.int8(3)) == words(np.float32("nan"), np.int8(3))
    assert [words(its) for its in (np.zeros(3), "text", _Array(0), None, [1])] == [None] * 5
    assert words(_Array(64, stream=1)) == words(_Array(64))
    assert words(_Array(64, stream=2)) is words(_Array(64, stream=4096)) is None  # each launch must wait for it


def free_records(records: Any) -> int:
    return len(records._ready) + len(records._used) + len(records._spare)


def alike(x: Any, seconds: float, count: int) -> list[Job]:
    """Return jobs of one pattern."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured", resident=4)
    task = Task("add", -(-x.size // 256), profile, add[x.size], (x,))
    task.pattern = Pattern(task)
    tasks = [task, *[task.pattern.task(task.arguments) for _ in range(count - 1)]]
    return [Job(task, Request("add", [task]), 0.0, number=k) for k, task in enumerate(tasks)]


def test_a_train_comes_behind_what_the_default_stream_was_given_before() -> None:
    x, gpu = np.zeros(1000), FakeGpu()
    executor, jobs, plain = fake_executor_over(gpu), alike(x, 5e-3, 6), Placement(plain=True)
    executor.launch(jobs[0], plain)
    until(executor.poll)
    executor.launch(jobs[1], plain)
    until(lambda: (x == 2).all())
    gpu.default.append(lambda: x.fill(100))
    assert executor.launch_train(jobs[2:], plain, jobs[1]) == 4 and not gpu.default
    until(lambda: executor.poll() is not None and not executor._runs)
    assert (x == 104).all()
    executor.close()


def test_workers_of_a_known_pattern_need_nothing_of_their_own() -> None:
    x, gpu = np.zeros(1000), FakeGpu()
    executor, jobs = fake_executor_over(gpu), alike(x, 5e-3, 3)
    for k, job in enumerate(jobs):
        gpu.default.append(lambda k=k: x.fill(10 * k))
        executor.launch(job, Placement(workers=2))
        until(lambda job=job: any(event.job is job and isinstance(event, Ended) for event in executor.poll()))
        assert not gpu.default and (x == 10 * k + 1).all() and len(gpu.made) == 1
    executor.close()


def test_a_task_finds_its_record_told_where_progress_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gpu = np.zeros(1000), FakeGpu()
    executor = fake_executor_over(gpu)
    one, other = alike(x, 5e-3, 2)
    executor.launch(one, Placement(workers=2))
    ended: list[Any] = []
    until(lambda: ended.extend(executor.poll()) or ended)
    executor.wait(executor.now() + 0.01)  # it has nothing else to do
    told: list[int] = []
    monkeypatch.setattr(gpu, "set_word", lambda address, value: told.append(address))
    executor.launch(other, Placement(workers=2))
    assert not told
    until(lambda: ended.extend(executor.poll()) or len(ended) == 2)
    assert (x == 2).all()
    executor.close()


def test_what_left_a_train_of_its_like_may_come_again_as_workers() -> None:
    executor = fake_executor()
    x = np.zeros(4000)
    jobs = alike(x, 5e-3, 9)  # of their length, two are on the device
    found: dict[Job, Ended | Stopped] = {}

    def wait_for(*jobs: Job) -> None:
        while not all(job in found for job in jobs):
            executor.wait(executor.now() + 0.01)
            found.update((event.job, event) for event in executor.poll())

    plain = Placement(plain=True)
    executor.launch(jobs[0], plain)
    wait_for(jobs[0])
    pattern = jobs[0].task.pattern
    assert pattern is not None and pattern.forms is not None
    executor.launch(jobs[1], plain)
    assert executor.launch_train(jobs[2:], plain, jobs[1]) == 7
    for job in reversed(jobs[5:]):
        executor.preempt(job)
    wait_for(*jobs[1:])
    left = [job for job in jobs if isinstance(found[job], Stopped)]
    assert len(left) >= 2
    for job, placement in zip(left, (Placement(workers=2), plain, plain, plain), strict=False):
        del found[job]
        executor.launch(job, placement)
        wait_for(job)
    assert all(isinstance(event, Ended) and event.error is None for event in found.values())
    assert (x == len(jobs)).all()
    executor.close()


def ends_of(executor: CudaExecutor) -> list[Ended | Stopped]:
    """Return what was polled, with the end of each task of a train by itself."""
    return [one for its in executor.poll() for one in (its.each() if isinstance(its, EndedAlike) else [its])]


def train(count: int) -> tuple[CudaExecutor, list[Job], Any]:
    """Return an executor with a train of one running job and so many behind it, which take no time."""
    x = np.zeros(1000)
    executor, jobs, plain = fake_executor(), alike(x, 1e-6, count + 2), Placement(plain=True)
    executor.launch(jobs[0], plain)
    until(executor.poll)
    executor.launch(jobs[1], plain)
    assert executor.launch_train(jobs[2:], plain, jobs[1]) == count
    return executor, jobs, x


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_line_takes_nothing_of_a_train(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    executor, jobs, x = train(2)
    more = alike(x, 1e-6, count)
    for job in more:
        job.task.pattern = jobs[0].task.pattern
    monkeypatch.setattr(Line, "room", 0)
    assert executor.launch_train(more, Placement(plain=True), jobs[-1]) == 0
    monkeypatch.undo()
    executor.close()


def test_the_jobs_of_a_train_end_together_each_once_and_in_order() -> None:
    executor, jobs, x = train(40)
    assert len({id(executor._runs[job]) for job in jobs[2:]}) == 1
    until(lambda: (x == 42).all())
    time.sleep(0.01)
    executor._advance()
    executor.preempt(jobs[7])  # it has ended, which nobody was told yet
    executor.resize(jobs[8], 2)
    events = executor.poll()
    assert len(events) < 42
    found = [one for its in events for one in (its.each() if isinstance(its, EndedAlike) else [its])]
    assert [event.job for event in found] == jobs[1:] and not executor._runs
    times = [event.time for event in found]
    assert times == sorted(times) and all(isinstance(event, Ended) and event.error is None for event in found)
    executor.close()


def test_a_job_of_a_train_that_is_refused_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, jobs, x = train(9)
    until(lambda: (x == 11).all())
    reap, seen = Line.reap, [0]

    def reaps(line: Line) -> list[Any]:
        found = reap(line)
        for k, (run, _, begun, ended) in enumerate(found):
            if seen[0] + k == 4:
                found[k] = run, 1, begun, ended
        seen[0] += len(found)
        return found

    monkeypatch.setattr(Line, "reap", reaps)
    monkeypatch.setattr(executor._gpu, "failure", lambda status, name: errors.ArgumentError("refused"))
    found: list[Ended | Stopped] = []
    until(lambda: found.extend(ends_of(executor)) or len(found) == 10)
    assert [event.job for event in found if isinstance(event, Ended) and event.error is not None] == [jobs[5]]
    assert {event.job for event in found} == set(jobs[1:]) and not executor._runs
    executor.close()


def test_of_a_train_on_a_lost_gpu_each_job_is_told_of_once() -> None:
    executor, jobs, x = train(60)
    until(lambda: x[0] > 5)
    executor._advance()
    executor._lose(errors.DeviceNotFoundError("gone"))
    found = ends_of(executor)
    assert sorted(event.job.number for event in found) == [job.number for job in jobs[1:]]
    assert all(isinstance(event, Ended) for event in found)
    executor.close()
    for stream in executor._gpu._streams:
        executor._gpu.synchronize(stream)  # what runs there has the arrays


def test_ends_are_waited_for_the_longer_the_more_the_scheduler_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = fake_executor()
    executor.poll()
    executor._busy = [SimpleNamespace(seconds=0.5)]
    until: list[float] = []
    monkeypatch.setattr(executor._lines, "watch", lambda seen, late, spin, soonest=0.0: until.append(soonest))
    now = executor._time()
    monkeypatch.setattr(executor, "_time", lambda: now)
    for worked in (0.0, 5e-3, 1.0):
        executor._returned = now - worked
        executor._lines.wake()
        executor.wait(None)
        until[-1] -= executor._began + now
    assert until == pytest.approx([2e-4, 1e-2, 5e-2], rel=1e-6)
    executor._busy = []
    executor.close()


CALL = ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 7)


class _Refuses(FakeGpu):
    """Refuses the next launch."""

    refuses = False

    @functools.cached_property
    def lines(self) -> Lines:
        lines = super().lines
        start = CALL(int(lines._state[LAUNCH // 8]))

        def launch(*arguments: int) -> int:
            refused, self.refuses = self.refuses, False
            return 1 if refused else int(start(*arguments))

        self.launch = CALL(launch)
        lines._state[LAUNCH // 8] = address_of(self.launch)
        return lines

    def failure(self, status: int, name: str) -> BaseException:
        return errors.ArgumentError(f"kernel {name!r} was refused ({status})")


def test_nobody_waits_for_refused_workers_to_leave() -> None:
    gpu = _Refuses()
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job = conformance.job(executor)
    gpu.refuses = True
    executor.launch(job, Placement(workers=4))
    until(executor._runs[job].is_launched)
    executor.resize(job, 2)
    executor.resize(job, 4)  # two more, which wait until two have left that never were
    (event,) = conformance.ends(executor, 1)
    assert event.job is job and isinstance(event.error, errors.ArgumentError)
    executor.close()


def test_workers_are_relieved_in_another_line_where_theirs_has_no_room_for_all_behind_them() -> None:
    with contextlib.closing(fake_executor_over(FakeGpu())) as executor:
        conformance = TestCudaExecutorWithoutGpu()
        conformance.finish_one(executor)
        job, x = held(executor)
        # Few rounds: 512 tasks run one after the other.
        jobs = [job, *(conformance.job(executor, rounds=20) for _ in range(512))]
        assert all(executor.launch_behind(its, Placement(workers=1), other) for other, its in itertools.pairwise(jobs))
        executor.resize(job, 1, younger=True)
        assert all(line.room >= 0 for line in executor._busy)
        x[0] = 1
        assert [event.job for event in conformance.ends(executor, len(jobs))] == jobs


def test_what_cannot_be_put_behind_others_keeps_no_record() -> None:
    executor = fake_executor(words=False)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job, x = held(executor)
    records = executor._records
    count = free_records(records)
    refused = conformance.job(executor)
    assert not executor.launch_behind(refused, Placement(workers=1), job)
    executor.discard(refused)
    assert free_records(records) == count
    x[0] = 1
    conformance.ends(executor, 1)
    executor.close()


def test_a_record_is_not_free_while_a_stream_is_still_to_look_at_it() -> None:
    executor = fake_executor_over(FakeGpu())
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job, x = held(executor)
    second, third, going = conformance.job(executor), conformance.job(executor), threading.Event()
    for before, its in ((job, second), (second, third)):
        assert executor.launch_behind(its, Placement(workers=1), before) and executor._runs[its].is_launched()
    line = executor._lines.take(0)  # the next one, which has so much to do that the last of three is held back
    line._words[AHEAD // 8] = AHEAD_NS
    line.stream.operations.put(going.wait)
    executor._lines.give(line)
    executor.resize(job, 2)  # the other worker comes there, when those behind the first have been told to leave
    records = executor._records
    count = free_records(records)
    x[0] = 1
    until(lambda: executor.poll() or executor._runs[third].rows == 1)  # that there is left
    executor.preempt(third)
    (event,) = executor.poll()
    assert event.job is third and isinstance(event, Stopped)
    executor.discard(third)
    assert free_records(records) == count  # another task may reset it, and then nobody sets it
    going.set()
    assert [event.job for event in conformance.ends(executor, 2)] == [job, second]
    assert free_records(records) == count + 3
    executor.close()


@ww.kernel
def gated(x):
    while x[ww.gpu.grid(1) * x.size // 4096] == 0:
        backoff(100)


def test_ends_behind_workers_in_two_lines_are_told_in_order() -> None:
    executor = fake_executor_over(FakeGpu())
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    x = np.zeros(16, np.int64)
    launch = gated[4096]
    task = Task("gated", launch.cut((x,), "cpu").blocks, launch=launch, arguments=(x,))
    first = Job(task, Request("gated", [task]), 0.0)
    second, third = conformance.job(executor), conformance.job(executor)

    def told() -> list[Ended | Stopped]:
        executor.wait(executor.now() + 1e-3)
        return executor.poll()

    executor.launch(first, Placement(workers=1))
    until(lambda: told() or executor.claimed(first) == 1)
    assert executor.launch_behind(second, Placement(plain=True), first)
    until(executor._runs[second].is_launched)
    executor.resize(first, 2)  # the other worker is in a line of its own
    assert executor.launch_behind(third, Placement(workers=2), second)
    until(lambda: executor.claimed(first) == 2)
    x[0] = 1
    x[2:] = 1  # so one worker leaves, and those behind it come
    until(lambda: (conformance.counts(third.task) == 1).all())
    assert not any(told() for _ in range(20))
    x[1] = 1
    assert [event.job for event in conformance.ends(executor, 3)] == [first, second, third]
    executor.close()


def test_a_run_that_ended_before_one_that_is_withdrawn_is_reported() -> None:
    executor = fake_executor_over(FakeGpu())
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    first, x = held(executor)
    second, withdrawn, ended = (conformance.job(executor) for _ in range(3))
    line = executor._runs[first].line
    assert line is not None and executor.launch_behind(second, Placement(workers=1), first)
    until(executor._runs[second].is_launched)
    line._words[AHEAD // 8] = AHEAD_NS  # rows behind both are held back
    assert executor.launch_behind(withdrawn, Placement(workers=1), second)
    assert not executor._runs[withdrawn].is_launched()
    executor.launch(ended, Placement(workers=1))
    run = executor._runs[ended]
    run.comes_after(executor._runs[withdrawn])
    until(lambda: executor.wait(executor.now() + 1e-3) or executor.poll() or run.rows == 0)
    assert not executor.poll()
    executor._runs[withdrawn].after = None  # as if `second` had ended
    executor.preempt(withdrawn)
    assert [event.job for event in executor.poll()] == [withdrawn, ended]
    x[0] = 1
    assert [event.job for event in conformance.ends(executor, 2)] == [first, second]
    executor.close()


def test_memory_stays_while_a_stream_of_the_stub_gpu_runs() -> None:
    """Kernels of a GPU that is lost, or that a failed test did not close, still use their control records."""
    gpu, going = FakeGpu(), threading.Event()
    stream = gpu.new_stream()
    stream.operations.put(going.wait)
    memory = weakref.ref(gpu.allocate(64))
    del gpu
    gc.collect()
    assert memory() is not None
    going.set()
    stream.operations.put(None)
    until(lambda: gc.collect() >= 0 and memory() is None)
