"""The GPU's executor over streams and workers of the host: what it does in which order, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import random
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.testing.fake_gpu import FakeGpu, fake_executor
from warpwell import errors
from warpwell.scheduler import Profile, Scheduler
from warpwell.scheduler.batch import batched
from warpwell.scheduler.dispatcher import Watchdog
from warpwell.scheduler.executors import cuda_launch, launch_queues
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.executors.gpu import Gpu
from warpwell.scheduler.executors.launch_queues import AHEAD, AHEAD_NS, LAUNCH, NOTHING, LaunchQueues, address_of
from warpwell.scheduler.extend import Ended, Executor, Job, Kind, Placement, Request, Stopped, Task
from warpwell.scheduler.task import Prepared, State
from warpwell.targets.primitives import backoff
from warpwell.testing.executors import ExecutorConformance


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stalled machine, the executor postpones growth if the launching thread does not run for a second."""
    monkeypatch.setattr(launch_queues, "LAUNCH_TIMEOUT_SECONDS", HANG_SECONDS)


class TestCudaExecutorWithoutRows(ExecutorConformance):
    """Kernels without launch rows, which Python launches."""

    def make(self) -> Executor:
        return fake_executor(uses_rows=False)


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
        assert 1 <= gpu.made[0].max_workers <= 6
        executor.close()

    def test_a_short_kernel_that_does_not_end_is_stuck(self) -> None:
        """It runs whole, because it was to be over before it could be preempted: so it shows no progress."""
        executor = fake_executor()
        x = np.zeros(2, np.int64)
        task = Task("endless", 1, Profile(seconds=1e-6, source="predicted"), endless[1], (x,))
        job = Job(task, Request("endless", [task]), 0.0)
        executor.launch(job, Placement())
        watchdog = Watchdog(0.3)
        while not watchdog.check([job], executor):
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
    return CudaExecutor(gpu=gpu)


def test_the_second_of_two_launches_waits_until_the_workers_of_the_first_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_launch, "START_TIMEOUT_SECONDS", HANG_SECONDS)
    gpu = FakeGpu()
    waited: list[tuple[int, int]] = []
    wait_word = gpu.wait_word

    def record_wait(stream: Any, address: int, minimum: int) -> None:
        waited.append((address, minimum))
        wait_word(stream, address, minimum)

    gpu.wait_word = record_wait  # type: ignore[method-assign]
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    first, second, last = (conformance.job(executor) for _ in range(3))
    executor.launch(first, Placement(workers=2))
    ended: list[Any] = []
    # A separate thread compiles the task, which may end between two polls.
    while executor.progress(first) == 0 and not ended:
        executor.wait(executor.now() + 1e-3)
        ended += executor.poll()
    urgent = conformance.job(executor)
    executor.launch(last, Placement(workers=1))
    before = len(waited)
    executor.launch(urgent, Placement(workers=1, priority=8))
    assert len(waited) == before  # a more urgent launch does not wait
    executor.launch(second, Placement(workers=1))
    while len(ended) < 4:
        executor.wait(executor.now() + 1e-2)
        ended += executor.poll()
    assert all(event.error is None for event in ended)
    assert len(waited) >= 1 and all(minimum > 0 for _, minimum in waited)
    executor.close()


def endless_job() -> tuple[Job, Any]:
    """Return a task whose blocks end when a number is set, and the array of this number."""
    x = np.zeros(2, np.int64)
    launch = endless[4096]
    task = Task("endless", launch.cut((x,), "cpu").blocks, launch=launch, arguments=(x,))
    return Job(task, Request("endless", [task]), 0.0), x


def held(executor: Any) -> tuple[Job, Any]:
    """Launch a task whose blocks end when a number is set; return it when one has begun."""
    job, x = endless_job()
    executor.launch(job, Placement(workers=1))
    while not executor.claimed(job):
        executor.wait(executor.now() + 1e-3)
        assert executor.poll() == []
    return job, x


def until_reported(executor: Any, count: int) -> None:
    """Wait until `poll` has `count` events to return."""
    while len(executor._events) < count:
        executor.wait(executor.now() + 1e-3)


@pytest.mark.parametrize("is_waiting", [False, True], ids=["poll", "wait"])
def test_what_runs_is_lost_with_its_gpu_and_what_stopped_before_is_in_the_queue(is_waiting: bool) -> None:
    executor = fake_executor_over(gpu := FakeGpu())
    stopped, x = held(executor)
    executor.preempt(stopped)
    x[0] = 1
    until_reported(executor, 1)
    assert [type(event) for event in executor.poll()] == [Stopped]
    running, y = held(executor)
    gpu.lose()
    if is_waiting:
        executor.wait(executor.now() + 60)
    until(lambda: executor._queues.news != executor._seen_news or executor._events)
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
    while scheduler.failure is None:  # the scheduler fails without another call
        time.sleep(1e-3)
    assert "running" in {event.name for event in scheduler.log.events if event.kind == "lost"}
    scheduler.close()
    gpu.launch_queues._thread.join(HANG_SECONDS)
    assert not gpu.launch_queues._thread.is_alive()  # a lost device is not closed
    x[0] = 1
    gpu.close()


def test_tasks_that_were_cancelled_before_their_launch_are_not_kept() -> None:
    started: list[Any] = []
    gpu = FakeGpu()
    gpu.at_hand = lambda launch, args: True  # type: ignore[method-assign]
    ahead = cuda_launch.Ahead(gpu, started.append)  # type: ignore[arg-type]

    def job() -> Any:
        task = Task("endless", 1)
        return Job(task, Request("endless", [task]), 0.0)

    first, second, third = job(), job(), job()
    for each in (first, second, third):
        ahead.note(each)
    second.state = State.CANCELLED
    for _ in range(3):
        ahead.step(())
    assert [run.job for run in started] == [first, third]
    first.state = State.CANCELLED
    reference = weakref.ref(first)
    started.clear()
    ahead.drop(first)
    del first, each
    assert reference() is None and ahead.take(third, Placement()).job is third


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
        for memory in (None, 0, 5):  # a memory claim smaller than the arrays is ignored
            scheduler.submit(add[1000], x, tenant="a", memory=memory).result(HANG_SECONDS)
            with pytest.raises(errors.TaskMemoryError, match="its tenant may hold 8000"):
                scheduler.submit(add[1000], np.zeros(1001), tenant="a", memory=memory)
        with pytest.raises(errors.TaskMemoryError, match="8001 bytes"):
            scheduler.submit(add[1000], x, tenant="a", memory=8001)
    y = np.ones(4000, np.int64)
    y[-1] = 0  # the last block waits for this value
    with Scheduler("cpu", "left-over", executor=CudaExecutor(gpu=Full())) as scheduler:
        first = scheduler.submit(gated[4096], y)
        for handle in [scheduler.submit(add[1000], x) for _ in range(5)]:
            handle.result(HANG_SECONDS)
        y[-1] = 1
        first.result(HANG_SECONDS)
        kinds = [(e.kind, e.task) for e in scheduler.log.events if e.kind in ("launch", "end")]
        # Both run, although the device has memory for neither.
        assert kinds.index(("launch", 1)) < kinds.index(("end", 0))
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
    conformance.finish_one(executor)  # so the kernel is compiled
    job, x = held(executor)
    second = conformance.job(executor)
    executor.resize(job, 4)
    until(lambda: gpu.made[1].max_workers == 4)
    assert executor.launch_behind(second, Placement(workers=3), job)
    executor.resize(job, 2)
    executor.resize(job, 4)  # two more workers, which start when two have left
    executor.resize(job, 1, younger=True)
    executor.resize(job, 3)
    time.sleep(0.05)
    assert executor.progress(second) == 0
    x[0] = 1
    until(lambda: (conformance.counts(second.task) == 1).all())
    assert gpu.made[1].max_workers == 4
    events = conformance.ends(executor, 2)
    assert [event.job for event in events] == [job, second]
    executor.close()


@pytest.mark.parametrize("placement", [Placement(plain=True), Placement(workers=2)], ids=["whole", "workers"])
@pytest.mark.parametrize("uses_rows", [True, False], ids=["rows", "no rows"])
def test_a_kernel_that_is_wanted_to_be_measured_is(uses_rows: bool, placement: Placement) -> None:
    executor = fake_executor(uses_rows=uses_rows)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job = conformance.job(executor)
    job.task.known = SimpleNamespace(should_measure=True)  # type: ignore[assignment]
    executor.launch(job, placement)
    (event,) = conformance.ends(executor, 1)
    assert isinstance(event, Ended) and event.error is None and event.seconds is not None
    executor.close()


def test_a_closed_executor_leaves_no_worker_behind() -> None:
    gpu = FakeGpu()
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    job, x = held(executor)
    queued = [conformance.job(executor) for _ in range(3)]
    for before, behind in itertools.pairwise([job, *queued]):
        assert executor.launch_behind(behind, Placement(workers=2), before)
    executor.resize(job, 3)
    executor.resize(job, 2)
    executor.resize(job, 3)  # the new worker waits until one has left
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

    watch = executor._queues.watch

    def counted(*arguments: Any) -> None:
        looks[0] += 1
        watch(*arguments)

    executor._queues.watch = counted
    while not executor._runs[job].runs:
        executor.wait(executor.now() + 1e-3)
        executor.poll()
    looks[0] = 0
    executor.wait(executor.now() + 1.0)
    assert looks[0] <= 1  # a stalled machine does not poll at all
    x[0] = 1
    while not executor.poll():
        executor.wait(executor.now() + 1e-2)
    executor.close()


def test_workers_that_are_relieved_come_back_behind_those_that_began_meanwhile() -> None:
    gpu = FakeGpu(resident=4)
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    remaining, _ = conformance.stop(executor)  # so the task is compiled, and starts at its next launch
    turns, x = endless_job()
    ended: list[Any] = []
    executor.launch(turns, Placement(workers=2))
    run = executor._runs[turns]
    until(lambda: executor.poll() or executor.claimed(turns) == 2)
    executor.launch(remaining, Placement(workers=1))
    executor.resize(turns, 1, younger=True)  # all workers leave, and one is started again
    assert (run.floor, run.top) == (2, 3)
    executor.resize(turns, 1, younger=True)
    assert (run.floor, run.top) == (3, 4)
    executor.resize(turns, None)
    x[0] = 1
    while len(ended) < 2:
        executor.wait(executor.now() + 1e-2)
        ended += executor.poll()
    assert all(isinstance(event, Ended) and event.error is None for event in ended)
    conformance.check(remaining.task)
    executor.close()


def test_the_end_of_a_kernel_that_is_relieved_when_it_has_ended_is_noticed() -> None:
    executor = fake_executor()
    conformance = TestCudaExecutorWithoutGpu()
    conformance.stop(executor)  # so the task is compiled, and starts at its next launch
    job = conformance.job(executor)
    executor.launch(job, Placement(workers=2))
    while executor._queues.news == executor._seen_news:
        time.sleep(1e-3)
    executor.resize(job, 1, younger=True)
    executor.wait(executor.now() + 1e6)  # waits until there is news
    assert [type(event) for event in executor.poll()] == [Ended]
    executor.close()


class _Array:
    def __init__(self, address: int, shape: tuple[int, ...] = (4,), stream: int | None = None) -> None:
        self.address, self.shape, self.stream = address, shape, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.address:
            raise RuntimeError("as of a tensor with gradients")
        interface = {"data": (self.address, False), "shape": self.shape, "typestr": "<f4", "version": 3}
        return interface if self.stream is None else {**interface, "stream": self.stream}


def test_signatures_of_arguments_are_equal_only_if_a_kernel_gets_the_same() -> None:
    def key(*arguments: Any) -> Any:
        return Gpu.launch_signature(Any, arguments)  # type: ignore[arg-type]

    assert key(1, 2.0, _Array(64)) == key(1, 2.0, _Array(64)) and key() == ()
    different = [key(1), key(True), key(1.0), key(0.0), key(-0.0), key(_Array(64)), key(_Array(128)),
                 key(_Array(64, (2, 2))), key(1, 1), key(np.float32(1)), key(np.float64(1)), key(np.int64(1)),
                 key(np.float32(0)), key(np.float32(-0.0)), key(np.bool_(True)),
                 key(np.datetime64(1, "s")), key(np.datetime64(1, "m"))]  # fmt: skip
    assert len(set(different)) == len(different)
    assert key(np.float32("nan"), np.int8(3)) == key(np.float32("nan"), np.int8(3))
    assert [key(value) for value in (np.zeros(3), "text", _Array(0), None, [1])] == [None] * 5
    assert key(_Array(64, stream=1)) == key(_Array(64))
    assert key(_Array(64, stream=2)) is key(_Array(64, stream=4096)) is None  # a launch must wait for these streams


def free_records(records: Any) -> int:
    return len(records._ready) + len(records._used) + len(records._spare)


def prepared_jobs(x: Any, seconds: float, count: int) -> list[Job]:
    """Return jobs of one prepared launch."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured", resident=4)
    task = Task("add", -(-x.size // 256), profile, add[x.size], (x,))
    prepared = Prepared(task)
    tasks = [prepared.new_task() for _ in range(count)]
    return [Job(task, Request("add", [task]), 0.0, number=k) for k, task in enumerate(tasks)]


def test_workers_of_a_prepared_launch_need_nothing_of_their_own() -> None:
    x, gpu = np.zeros(1000), FakeGpu()
    executor, jobs = fake_executor_over(gpu), prepared_jobs(x, 5e-3, 3)
    for k, job in enumerate(jobs):
        gpu.default.append(lambda k=k: x.fill(10 * k))
        executor.launch(job, Placement(workers=2))
        until(lambda job=job: any(event.job is job and isinstance(event, Ended) for event in executor.poll()))
        assert not gpu.default and (x == 10 * k + 1).all() and len(gpu.made) == 1
    executor.close()


def test_a_task_finds_its_record_told_where_progress_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gpu = np.zeros(1000), FakeGpu()
    executor = fake_executor_over(gpu)
    first, second = prepared_jobs(x, 5e-3, 2)
    executor.launch(first, Placement(workers=2))
    ended: list[Any] = []
    until(lambda: ended.extend(executor.poll()) or ended)
    until(lambda: executor.wait(executor.now() + 0.01) or executor._records._spare)  # it has nothing else to do
    writes: list[int] = []
    monkeypatch.setattr(gpu, "set_word", lambda address, value: writes.append(address))
    executor.launch(second, Placement(workers=2))
    assert not writes
    until(lambda: ended.extend(executor.poll()) or len(ended) == 2)
    assert (x == 2).all()
    executor.close()


def batch_job(x: Any, count: int, seconds: float = 20e-6) -> Job:
    """Return the job of a batch of launches that each add 1 to `x`."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured", resident=4)
    single = Task("add", -(-x.size // 256), profile, add[x.size], (x,))
    task = batched([single], [0] * count, "adds", 0)
    return Job(task, Request("adds", [task]), 0.0)


@pytest.mark.parametrize("uses_rows", [True, False])
def test_the_launches_of_a_batch_run_in_order_and_leave_between_two(uses_rows: bool) -> None:
    executor, x = fake_executor(uses_rows=uses_rows), np.zeros(1000)
    job = batch_job(x, 3000)  # more launches than a queue accepts
    executor.launch(job, Placement())
    preemptions, ended = 0, None
    while ended is None:
        executor.wait(executor.now() + 2e-3)
        found = executor.poll()
        assert len(found) <= 1
        if found and isinstance(found[0], Ended):
            ended = found[0]
        elif found:
            assert isinstance(found[0], Stopped) and (x == found[0].done).all() and executor.progress(job) == x[0]
            preemptions += 1
            executor.launch(job, Placement(workers=2))
        elif preemptions < 4:
            executor.preempt(job)
            executor.resize(job, 2)
    assert ended.error is None and (x == 3000).all()
    assert preemptions >= 2 or not uses_rows
    executor.close()


def test_a_batch_that_the_driver_refuses_fails_and_launches_no_more() -> None:
    gpu = _Refuses()
    executor, x = fake_executor_over(gpu), np.zeros(1000)
    job = batch_job(x, 500)
    gpu.refuses = True
    executor.launch(job, Placement())
    found: list[Any] = []
    until(lambda: executor.wait(executor.now() + 0.01) or found.extend(executor.poll()) or found)
    assert isinstance(found[0].error, errors.ArgumentError) and x[0] < 500
    executor.close()


def test_a_batch_on_a_lost_gpu_is_lost() -> None:
    gpu = FakeGpu()
    executor, x = fake_executor_over(gpu), np.zeros(1000)
    job, going = batch_job(x, 500), threading.Event()
    queue = executor._queues.take(0)  # the queue that the executor uses next
    queue.stream.operations.put(going.wait)
    executor._queues.put(queue)
    executor.launch(job, Placement())
    until(lambda: executor._runs[job].queue is queue)
    gpu.lose()
    found: list[Any] = []
    until(lambda: executor.wait(executor.now() + 0.01) or found.extend(executor.poll()) or found)
    assert [event.job for event in found] == [job] and isinstance(found[0].error, errors.TaskLostError)
    executor.close()
    going.set()
    for stream in gpu._streams:
        gpu.synchronize(stream)  # a kernel in this stream still writes to the array


def test_ends_are_waited_for_the_longer_the_more_the_scheduler_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = fake_executor()
    executor.poll()
    executor._busy = [SimpleNamespace(seconds=0.5)]
    until: list[float] = []
    monkeypatch.setattr(executor._queues, "watch", lambda last_value, timeout, spin, soonest=0.0: until.append(soonest))
    # Small values of the clock: after a year of uptime, its values in seconds are multiples of 4 ns.
    began, now = 8.0, 16.0
    executor._began = began
    monkeypatch.setattr(executor, "_time", lambda: now)
    for worked in (0.0, 5e-3, 1.0):
        executor._returned = now - worked
        executor._queues.wake()
        executor.wait(None)
        until[-1] -= began + now
    assert until == pytest.approx([2e-4, 1e-2, 5e-2], rel=1e-6)
    executor._queues.wake()
    executor.wait(0.0)
    assert until[-1] == began  # returns at once: that time has passed
    executor._busy = []
    executor.close()


CALL = ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 7)


class _Refuses(FakeGpu):
    """Refuses the next launch."""

    refuses = False

    @functools.cached_property
    def launch_queues(self) -> LaunchQueues:
        queues = super().launch_queues
        start = CALL(int(queues._state[LAUNCH // 8]))

        def launch(*arguments: int) -> int:
            refused, self.refuses = self.refuses, False
            return 1 if refused else int(start(*arguments))

        self.launch = CALL(launch)
        queues._state[LAUNCH // 8] = address_of(self.launch)
        return queues

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
    executor.resize(job, 4)  # two more workers, which wait for two that never started to leave
    (event,) = conformance.ends(executor, 1)
    assert event.job is job and isinstance(event.error, errors.ArgumentError)
    executor.close()


def test_workers_are_relieved_in_another_queue_where_theirs_has_no_room_for_all_behind_them() -> None:
    with contextlib.closing(fake_executor_over(FakeGpu())) as executor:
        conformance = TestCudaExecutorWithoutGpu()
        conformance.finish_one(executor)
        job, x = held(executor)
        # Few rounds: 512 tasks run one after the other.
        jobs = [job, *(conformance.job(executor, rounds=20) for _ in range(512))]
        assert all(
            executor.launch_behind(behind, Placement(workers=1), before) for before, behind in itertools.pairwise(jobs)
        )
        executor.resize(job, 1, younger=True)
        assert all(queue.room >= 0 for queue in executor._busy)
        x[0] = 1
        assert [event.job for event in conformance.ends(executor, len(jobs))] == jobs


def test_what_cannot_be_put_behind_others_keeps_no_record() -> None:
    executor = fake_executor(uses_rows=False)
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
    for before, behind in ((job, second), (second, third)):
        assert executor.launch_behind(behind, Placement(workers=1), before) and executor._runs[behind].is_launched()
    queue = executor._queues.take(0)  # the queue that is used next; it is busy, so the last of three tasks is held back
    queue._fields[AHEAD // 8] = AHEAD_NS
    queue.stream.operations.put(going.wait)
    executor._queues.put(queue)
    # The second worker goes to that queue, after the tasks queued after the first have been stopped.
    executor.resize(job, 2)
    records = executor._records
    count = free_records(records)
    x[0] = 1
    until(lambda: executor.poll() or executor._runs[third].rows == 1)  # until `third` has one row left
    executor.preempt(third)
    (event,) = executor.poll()
    assert event.job is third and isinstance(event, Stopped)
    executor.discard(third)
    assert free_records(records) == count  # the record is free: another task may reset it, and then it is never set
    going.set()
    assert [event.job for event in conformance.ends(executor, 2)] == [job, second]
    assert free_records(records) == count + 3
    executor.close()


def test_blocks_of_an_earlier_launch_count_when_the_last_one_is_withdrawn() -> None:
    executor, going = fake_executor_over(FakeGpu()), threading.Event()
    first, x = held(executor)
    job, y = endless_job()
    assert executor.launch_behind(job, Placement(workers=1), first)
    run = executor._runs[job]
    until(run.is_launched)
    x[0] = 1
    assert [event.job for event in TestCudaExecutorWithoutGpu().ends(executor, 1)] == [first]
    until(lambda: executor.claimed(job) == 1)
    queue = run.queue
    queue.stream.operations.put(going.wait)  # the stream executes nothing after the running launch
    for _ in range(2):
        queue.push(NOTHING, 0.0, [])
    until(lambda: queue.launched(queue._pushed - 1))
    queue._fields[AHEAD // 8] = 2 * AHEAD_NS  # later launches are held back
    executor.resize(job, 1, younger=True)
    assert run.rows == 2 and not run.is_launched()
    y[0] = 1  # lets the running worker end its block and leave
    until(lambda: executor.wait(executor.now() + 1e-3) or executor.poll() or run.rows == 1)
    executor.preempt(job)
    going.set()
    (stopped,) = executor.poll()
    assert stopped.job is job and isinstance(stopped, Stopped) and stopped.done == 1
    executor.launch(job, Placement(workers=1))
    assert [event.job for event in TestCudaExecutorWithoutGpu().ends(executor, 1)] == [job]
    executor.close()


@ww.kernel
def gated(x):
    while x[ww.gpu.grid(1) * x.size // 4096] == 0:
        backoff(100)


@pytest.mark.parametrize("younger", [True, False], ids=["reissue", "growth"])
def test_launches_of_a_run_without_progress_are_bounded_and_its_growth_comes_later(younger: bool) -> None:
    """With a launch at each change, the oldest workers would leave before they have claimed a block, and so on."""
    gpu, x = FakeGpu(resident=6), np.zeros(16, np.int64)
    executor = fake_executor_over(gpu)
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    task = Task("gated", gated[4096].cut((x,), "cpu").blocks, launch=gated[4096], arguments=(x,))
    job = Job(task, Request("gated", [task]), 0.0)
    executor.launch(job, Placement(workers=1))
    until(lambda: executor.poll() or executor.claimed(job))
    run = executor._runs[job]
    for _ in range(50):
        executor.resize(job, 2, younger=younger)
        executor.wait(executor.now())
        executor.resize(job, 1)
    assert run.rows <= 3 + 2 * executor.claimed(job)  # workers may claim one after another

    def is_postponed() -> bool:
        executor.resize(job, 3)
        assert executor.poll() == []
        if run.top - run.floor < 3:
            return True
        executor.resize(job, 1)  # a worker had claimed a block late
        return False

    until(is_postponed)
    claimed = executor.claimed(job)
    x[:claimed] = 1  # lets the oldest workers leave
    until(lambda: executor.wait(executor.now() + 0.01) or executor.claimed(job) == claimed + 3)
    assert executor.poll() == [] and gpu.made[1].max_workers == 3
    x[:] = 1
    (event,) = conformance.ends(executor, 1)
    assert isinstance(event, Ended) and event.error is None
    executor.close()


def test_growth_comes_later_where_the_last_launch_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    executor = fake_executor_over(gpu)
    job, x = held(executor)
    monkeypatch.setattr(type(executor._runs[job].queue), "launched", lambda queue, number: False)
    executor.resize(job, 3)
    executor.wait(executor.now() + 0.01)
    assert executor._runs[job].rows == 1
    monkeypatch.undo()
    until(lambda: executor.wait(executor.now() + 0.01) or gpu.made[0].max_workers == 3)
    x[0] = 1
    assert len(TestCudaExecutorWithoutGpu().ends(executor, 1)) == 1
    executor.close()


def test_ends_behind_workers_in_two_queues_are_told_in_order() -> None:
    executor = fake_executor_over(FakeGpu())
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    x = np.zeros(16, np.int64)
    launch = gated[4096]
    task = Task("gated", launch.cut((x,), "cpu").blocks, launch=launch, arguments=(x,))
    first = Job(task, Request("gated", [task]), 0.0)
    second, third = conformance.job(executor), conformance.job(executor)

    def polled() -> list[Ended | Stopped]:
        executor.wait(executor.now() + 1e-3)
        return executor.poll()

    executor.launch(first, Placement(workers=1))
    until(lambda: polled() or executor.claimed(first) == 1)
    assert executor.launch_behind(second, Placement(plain=True), first)
    until(executor._runs[second].is_launched)
    executor.resize(first, 2)  # the other worker is in a queue of its own
    assert executor.launch_behind(third, Placement(workers=2), second)
    until(lambda: executor.claimed(first) == 2)
    x[0] = 1
    x[2:] = 1  # so one worker leaves, and the tasks queued after it start
    until(lambda: (conformance.counts(third.task) == 1).all())
    assert not any(polled() for _ in range(20))
    x[1] = 1
    assert [event.job for event in conformance.ends(executor, 3)] == [first, second, third]
    executor.close()


def test_a_run_that_ended_before_one_that_is_withdrawn_is_reported() -> None:
    executor = fake_executor_over(FakeGpu())
    conformance = TestCudaExecutorWithoutGpu()
    conformance.finish_one(executor)
    first, x = held(executor)
    second, withdrawn, ended = (conformance.job(executor) for _ in range(3))
    queue = executor._runs[first].queue
    assert queue is not None and executor.launch_behind(second, Placement(workers=1), first)
    until(executor._runs[second].is_launched)
    queue._fields[AHEAD // 8] = AHEAD_NS  # rows queued after both tasks are held back
    assert executor.launch_behind(withdrawn, Placement(workers=1), second)
    assert not executor._runs[withdrawn].is_launched()
    executor.launch(ended, Placement(workers=1))
    run = executor._runs[ended]
    run.after = executor._runs[withdrawn]
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
