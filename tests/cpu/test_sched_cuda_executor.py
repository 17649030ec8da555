"""The GPU's executor over streams and workers of the host: what it does in which order, without a GPU."""

from __future__ import annotations

import collections
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.harness.fake_gpu import FakeGpu, fake_executor
from tests.harness.until import until

import warpwell as ww
from warpwell import errors
from warpwell.scheduler import Ended, Executor, Job, Kind, Placement, Profile, Request, Scheduler, Stopped, Task
from warpwell.scheduler.dispatcher import Watchdog
from warpwell.scheduler.executors import cuda_launch
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.policies.order import FirstCome
from warpwell.scheduler.task import Pattern, State
from warpwell.targets.gpu.gpu import Gpu
from warpwell.testing.executors import ExecutorConformance


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
        task = Task("endless", 1, Profile(seconds=1e-6, source="predicted"), endless[1], (x,))
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
    from warpwell.scheduler.executors.cuda_executor import CudaExecutor

    return CudaExecutor(gpu=gpu)


def test_the_second_of_two_launches_waits_until_the_workers_of_the_first_have_begun(
    monkeypatch: pytest.MonkeyPatch
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
    until = time.monotonic() + 60
    ended: list[Any] = []
    while executor.progress(first) == 0 and not ended:  # compiled, in a thread of its own; it may end between two looks
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


class Losing(FakeGpu):
    """Faults when it is told to."""

    fault = False

    def done(self, event: threading.Event) -> bool:
        if self.fault:
            raise errors.DeviceNotFoundError("the GPU refused a call (700): a kernel may have failed")
        return super().done(event)


def held(executor: Any) -> tuple[Job, Any]:
    """Launch a task whose blocks end when a number is set; return it when one has begun."""
    x = np.zeros(2, np.int64)
    launch = endless[4096]
    task = Task("endless", launch.cut((x,), "cpu").blocks, launch=launch, arguments=(x,))
    job = Job(task, Request("endless", [task]), 0.0)
    executor.launch(job, Placement(workers=1))
    until = time.monotonic() + 60
    while not executor.claimed(job):
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-3)
        assert executor.poll() == []
    return job, x


def until_there_is_word(executor: Any, count: int) -> None:
    """Wait until `poll` would tell of so many events."""
    until = time.monotonic() + 60
    while len(executor._events) < count:
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-3)


@pytest.mark.parametrize("waits", [False, True], ids=["poll", "wait"])
def test_what_runs_is_lost_with_its_gpu_and_what_stopped_before_is_in_the_queue(waits: bool) -> None:
    executor = fake_executor_over(gpu := Losing())
    stopped, x = held(executor)
    executor.preempt(stopped)
    x[0] = 1
    until_there_is_word(executor, 1)
    assert [type(event) for event in executor.poll()] == [Stopped]
    running, y = held(executor)
    gpu.fault = True
    if waits:
        executor.wait(executor.now() + 60)
    events = executor.poll()
    assert [(event.job, type(event.error)) for event in events] == [(running, errors.TaskLostError)]
    for call in (executor.poll, lambda: executor.wait(0.0), lambda: executor.launch(stopped, Placement())):
        with pytest.raises(errors.TaskLostError, match="the GPU is lost"):
            call()
    y[0] = 1
    gpu.close()


def test_the_log_says_what_was_lost() -> None:
    gpu, x = Losing(), np.zeros(2, np.int64)
    scheduler = Scheduler("cpu", executor=lambda: fake_executor_over(gpu), limit=1)
    running = scheduler.submit(endless[4096], x, name="running")
    until = time.monotonic() + 60
    while not scheduler.inspect(lambda core: running.job is not None and core.executor.claimed(running.job)):
        assert time.monotonic() < until
    gpu.fault = True
    with pytest.raises(errors.TaskLostError, match="was lost"):
        running.result(60)
    while scheduler.failure is None:  # it ends without being asked anything
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert "running" in {event.name for event in scheduler.log.events if event.kind == "lost"}
    scheduler.close()
    gpu.lines._thread.join(20)
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
    i = ww.grid(1)
    if i < x.size:
        x[i] += 1


@ww.kernel
def spin(x, rounds):
    i = ww.grid(1)
    v = x[i]
    for _ in range(rounds):
        v = (v ^ v >> 13) * 6364136223846793005 + 1  # LLVM does many rounds at once where it is linear
    x[i] = v


class Full(FakeGpu):
    """A GPU whose memory holds the arguments of its tasks already (here: they are NumPy's), and little is free."""

    def free_memory(self) -> int:
        return 100


def test_memory_of_arrays_counts_for_their_tenant_and_where_it_is_once() -> None:
    x = np.zeros(1000)
    with Scheduler("cpu", executor=CudaExecutor(gpu=FakeGpu()), tenants={"a": {"memory": 8000}, "b": 1}) as scheduler:
        for memory in (None, 0, 5):  # what is said to be less is not believed
            scheduler.submit(add[1000], x, tenant="a", memory=memory).result(20)
            with pytest.raises(errors.TaskMemoryError, match="its tenant may hold 8000"):
                scheduler.submit(add[1000], np.zeros(1001), tenant="a", memory=memory)
        with pytest.raises(errors.TaskMemoryError, match="8001 bytes"):
            scheduler.submit(add[1000], x, tenant="a", memory=8001)
    y = np.zeros((4, 1000), np.int64)
    with Scheduler("cpu", "left-over", executor=CudaExecutor(gpu=Full())) as scheduler:
        first = scheduler.submit(spin[4000], y[0:].reshape(-1), 2000)
        handles = [scheduler.submit(add[1000], x) for _ in range(5)]
        for handle in (first, *handles):
            handle.result(20)
        kinds = [(e.kind, e.task) for e in scheduler.log.events if e.kind in ("launch", "end")]
        assert kinds.index(("launch", 1)) < kinds.index(("end", 0))  # together, on a device that has room for neither
    assert (x == 8).all()


@pytest.mark.alone
def test_a_task_that_is_said_to_be_short_leaves_for_a_higher_priority() -> None:
    options: Any = {"kind": Kind.COMPUTE, "resident": 4}
    with Scheduler("cpu", executor=fake_executor(), tenants={"a": 1, "b": 1}) as scheduler:
        for n in (256, 2):
            scheduler.submit(spin[n], np.zeros(256, np.int64), 1, tenant="a").result(20)  # compiled
        n = 256 * 4000
        long = [
            scheduler.submit(spin[n], np.zeros(n, np.int64), 4000, tenant="b", profile=Profile(seconds=1e-6, **options))
            for _ in range(2)
        ]
        until = time.monotonic() + 20
        while not all(h.running() for h in long) and time.monotonic() < until:
            time.sleep(1e-3)
        short = scheduler.submit(spin[256], np.zeros(256, np.int64), 10, tenant="a", priority=100,
                                 profile=Profile(seconds=1e-3, **options))  # fmt: skip
        short.result(20)
        assert not any(h.done() for h in long)
        for handle in long:
            handle.cancel()


@pytest.mark.alone
def test_what_takes_long_is_looked_at_less_often() -> None:
    """A look takes Python's lock, which the program's own threads want."""
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
    until = time.monotonic() + 30
    while not executor._runs[job].runs:
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-3)
        executor.poll()
    looks[0] = 0
    executor.wait(executor.now() + 1.0)
    x[0] = 1
    assert 100 < looks[0] < 3000
    while not executor.poll():
        assert time.monotonic() < until
        executor.wait(executor.now() + 1e-2)
    executor.close()


def test_workers_that_are_relieved_come_back_behind_those_that_began_meanwhile() -> None:
    gpu = FakeGpu(resident=4)
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    stays, _ = conformance.stop(executor)  # so it is compiled, and begins when it is launched again
    turns = conformance.job(executor, rounds=10 * conformance.ROUNDS)
    ended: list[Any] = []
    until = time.monotonic() + 60
    executor.launch(turns, Placement(workers=2))
    run = executor._runs[turns]
    assert conformance.until_some_are_done(executor, turns)
    executor.launch(stays, Placement(workers=1))
    executor.resize(turns, 1, younger=True)  # all leave, and come back as one
    assert (run.floor, run.top, run.quota) == (2, 3, 1)
    executor.resize(turns, 1, younger=True)
    assert (run.floor, run.top, run.quota) == (3, 4, 1)
    executor.resize(turns, None)
    while len(ended) < 2:
        assert time.monotonic() < until
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
    until = time.monotonic() + 60
    while not executor._runs[job].arrived(executor._gpu):
        assert time.monotonic() < until
        time.sleep(1e-3)
    executor.resize(job, 1, younger=True)
    began = time.monotonic()
    executor.wait(executor.now() + 5.0)
    assert [type(event) for event in executor.poll()] == [Ended]
    assert time.monotonic() < began + 4, "nobody looked until something else happened"
    executor.close()


def test_many_launches_that_are_alike_run_each_once_unless_they_are_cancelled() -> None:
    x, y = np.zeros(1000), np.zeros(1000)
    gpu = FakeGpu()
    short: Any = {"profile": Profile(kind=Kind.COMPUTE, seconds=20e-6, source="measured")}
    with Scheduler("cpu", limit=1, executor=CudaExecutor(gpu=gpu)) as scheduler:
        for array in (x, y):
            for _ in range(8):
                scheduler.submit(add[1000], array, **short).result(20)
        handles = [scheduler.submit(add[1000], (x, y)[k // 50 % 2], **short) for k in range(400)]
        asked = [handle for k, handle in enumerate(handles) if k % 7 == 3 and handle.cancel()]
        for handle in handles:
            if handle not in asked:
                handle.result(20)
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
            handle.result(20)
            return handle.task.pattern

        first = pattern()
        assert first is not None and pattern() is first and pattern(tenant="default", priority=0) is first
        others = [
            pattern(add[999]), pattern(spin[4], np.zeros(4, np.int64), 1), pattern(add[1000], np.zeros(1000)),
            pattern(add[1000], x[:]), pattern(tenant="b"), pattern(priority=1), pattern(name="other"),
            pattern(profile=Profile(seconds=1.0)), pattern(deadline=1.0), pattern(memory=9000), pattern(size={"n": 1}),
            pattern(after=scheduler.submit(add[1000], x)),
        ]  # fmt: skip
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
            scheduler.submit(add[1000], x).result(20)

        def more(_: Any) -> None:
            made.append(scheduler.submit(add[1000], x))
            made.append(scheduler.submit(add[1000], x, deadline=9.0))

        before = scheduler.submit(add[1000], x, deadline=9.0)
        before.add_done_callback(more)
        until(lambda: len(made) == 2)
        for handle in made:
            handle.result(20)
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
        scheduler.submit(add[1000], x, **its).result(20)
        pair.append(its)
    held, free = threading.Event(), threading.Event()
    scheduler.submit(add[1000], x, memory=9000).add_done_callback(lambda _: held.set() or free.wait(20))
    assert held.wait(20)
    handles = [scheduler.submit(add[1000], x, **pair[k // 3]) for k in range(6)]
    asked = ThreadPoolExecutor(1).submit(scheduler.inspect, lambda core: core.limit)
    until(lambda: scheduler._dispatcher._calls.qsize() == 7)
    policy.broken = True
    free.set()
    for handle in handles:
        with pytest.raises((errors.TaskLostError, errors.SchedulerError), match="a policy broke"):
            handle.result(5)
    assert asked.result(5) == 2  # it was taken out with them
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
                 words(_Array(64, (2, 2))), words(1, 1)]  # fmt: skip
    assert len(set(different)) == len(different)
    assert [words(its) for its in (np.zeros(3), "text", _Array(0), None, np.float32(1))] == [None] * 5
    assert words(_Array(64, stream=1)) == words(_Array(64))
    assert words(_Array(64, stream=2)) is words(_Array(64, stream=4096)) is None  # each launch must wait for it


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


def test_what_left_a_train_of_its_like_may_come_again_as_workers() -> None:
    executor = fake_executor()
    x = np.zeros(4000)
    jobs = alike(x, 5e-3, 9)  # of their length, two are on the device
    found: dict[Job, Ended | Stopped] = {}

    def wait_for(*jobs: Job) -> None:
        until = time.monotonic() + 20
        while not all(job in found for job in jobs):
            assert time.monotonic() < until
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
