"""Tasks that use the same memory run in the order of their submission, unless all of them only read it."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tests.harness.scripted_executor import ScriptedExecutor
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.campaigns.sched_order import run_on_cpu, run_simulated
from lab.testing.fake_gpu import fake_executor
from warpwell import errors, gpu
from warpwell.scheduler import Handle, Profile, Scheduler
from warpwell.scheduler.accesses import accesses_of
from warpwell.scheduler.batch import batched
from warpwell.scheduler.callables import as_launch
from warpwell.scheduler.core import Core
from warpwell.scheduler.data_order import Access, DataOrder
from warpwell.scheduler.extend import Capacity, Job, Kind, Placement, Request, Task
from warpwell.scheduler.handle import RequestHandle
from warpwell.scheduler.report.explain import sentences
from warpwell.scheduler.task import State
from warpwell.targets.compiler import written_arguments
from warpwell.targets.primitives import backoff


class User:
    """Uses memory."""

    def __init__(self, number: int, accesses: list[Access]) -> None:
        self.number, self.request, self.accesses, self.state = number, number, accesses, "new"

    def conflicts(self, earlier: User) -> bool:
        return any(
            a.start < b.end and b.start < a.end and (a.writes or b.writes)
            for a in self.accesses
            for b in earlier.accesses
        )


@pytest.mark.parametrize("seed", range(200))
def test_a_task_waits_exactly_for_earlier_ones_that_conflict(seed: int) -> None:
    """Against a plain list: a task is released when all earlier tasks with conflicts have ended, directly or not."""
    chance = random.Random(seed)
    order: DataOrder[User] = DataOrder()
    users: list[User] = []

    def open_before(user: User) -> list[User]:
        return [before for before in users[: user.number] if before.state != "over" and user.conflicts(before)]

    def check() -> None:
        changed = True
        while changed:  # a cancelled task ends after the tasks that it follows
            changed = False
            for user in users:
                if user.state == "ended" and not open_before(user):
                    user.state, changed = "over", True
        for user in users:
            if user.state == "new":
                assert order.is_waiting(user) == bool(open_before(user))

    for number in range(40):
        accesses = []
        for _ in range(chance.randrange(4)):
            start = chance.randrange(20)
            accesses.append(Access(start, start + chance.randrange(8), chance.random() < 0.4))
        user = User(number, [a for a in accesses if a.start < a.end])
        users.append(user)
        order.add(user, accesses)
        check()
        for _ in range(chance.randrange(3)):
            new = [
                user for user in users if user.state == "new" and (not order.is_waiting(user) or chance.random() < 0.2)
            ]
            if new:
                ends = chance.choice(new)
                ends.state = "ended"
                before = {user for user in users if user.state == "new" and order.is_waiting(user)}
                released = order.release(ends)
                assert set(released) == {user for user in before if not order.is_waiting(user)}
                check()
    for user in users:
        if user.state == "new" and not order.is_waiting(user):
            user.state = "ended"
            order.release(user)
        check()
    while any(user.state == "new" for user in users):
        user = next(user for user in users if user.state == "new" and not order.is_waiting(user))
        user.state = "ended"
        order.release(user)
        check()
    assert not order._segments and not order._awaited and not order._followers and not order._ended


@pytest.mark.parametrize("seed", [*range(150), 662])
def test_random_programs_in_the_simulator_end_in_order(seed: int) -> None:
    run_simulated(seed)


def test_random_programs_on_the_cpu_equal_their_serial_results() -> None:
    with Scheduler("cpu") as scheduler:
        for seed in range(8):
            run_on_cpu(seed, scheduler)


def test_random_programs_on_a_gpu_s_executor_equal_their_serial_results() -> None:
    with Scheduler("cpu", executor=fake_executor()) as scheduler:
        for seed in range(3):
            run_on_cpu(seed, scheduler)


def test_random_programs_queue_tasks_behind_their_data() -> None:
    assert sum(run_simulated(seed)[1] for seed in range(1000, 1030)) > 20


@ww.kernel
def step(x, rounds):
    i = gpu.grid(1)
    if i < x.size:
        for _ in range(rounds):
            x[i] = x[i] * 3 + 1


@ww.kernel
def copy(x, y):
    i = gpu.grid(1)
    if i < x.size:
        y[i] = x[i]


def test_submissions_on_one_array_lose_no_update() -> None:
    x, expected = np.zeros(2000, np.uint64), np.zeros(1, np.uint64)
    with Scheduler("cpu") as scheduler:
        handles = [scheduler.submit(step[x.size], x, 5) for _ in range(12)]
        for handle in handles:
            handle.result(HANG_SECONDS)
        for _ in range(60):
            expected = expected * 3 + 1
        assert (x == expected).all()
        after = [event.why.get("after") for event in scheduler.log if event.kind == "arrive"]
        assert after == [None, *([[k] for k in range(11)])] or after[0] is None


def test_submissions_on_an_array_on_storage_lose_no_update(tmp_path: Path) -> None:
    path, expected = tmp_path / "x.npy", np.zeros(1, np.uint64)
    np.save(path, np.zeros(2000, np.uint64))
    with ww.open(path, mode="r+", device="cpu") as x, Scheduler("cpu") as scheduler:
        handles = [scheduler.submit(step[x.size], x, 5) for _ in range(12)]
        for handle in handles:
            handle.result(HANG_SECONDS)
        for _ in range(60):
            expected = expected * 3 + 1
        assert (np.asarray(x[:]) == expected).all()


def test_a_function_follows_the_kernel_on_its_array() -> None:
    x, before, found = np.zeros(100, np.int64), Future[None](), []
    with Scheduler("cpu") as scheduler:
        scheduler.submit(step[100], x, 1, after=before)
        reader = scheduler.submit(lambda stream, arrays: found.append(arrays[0].sum()), [x])
        scheduler.submit(step[100], np.zeros(100), 1).result(HANG_SECONDS)
        assert not reader.done()
        before.set_result(None)
        reader.result(HANG_SECONDS)
    assert found == [100]


def task(name: str, *accesses: Access, **options: Any) -> Task:
    return Task(name, 10, Profile(seconds=1.0), accesses=accesses, **options)


def started(core: Core) -> dict[str, Any]:
    for _ in range(100):
        until = core.step()
        if not (core.busy or core.blocked):
            break
        core.executor.wait(until)
    return {job.task.name: job.started for job in core.jobs}


X, Y = Access(0, 10, True), Access(5, 8, True)
READ = Access(2, 6, False)


def test_readers_run_together_and_the_log_says_who_waited() -> None:
    core = Core(ScriptedExecutor(), "left-over", limit=8)
    for name, access in (("write", X), ("read", READ), ("again", READ), ("other", Access(6, 8, False)), ("end", Y)):
        core.submit(Request(name, [task(name, access)]))
    assert started(core) == {"write": 0, "read": 1, "again": 1, "other": 1, "end": 2}
    after = {event.name: event.why.get("after") for event in core.log if event.kind == "arrive"}
    assert after == {"write": None, "read": [0], "again": [0], "other": [0], "end": [0, 1, 2, 3]}
    texts = {event.name: text for event, text in sentences(core.log) if event.kind == "arrive"}
    assert texts["write"] == "write (task 0) of tenant default arrived."
    assert texts["read"].endswith("arrived after the end of write (task 0), because it uses the same data.")


def test_a_failed_or_cancelled_task_lets_the_next_one_run_and_keeps_the_order_of_the_others() -> None:
    core = Core(ScriptedExecutor(fails={"bad": errors.KernelError("bad")}), "left-over", limit=8)
    jobs = [core.submit(Request(name, [task(name, X)]))[0] for name in ("bad", "cancelled", "next")]
    core.step()
    assert core.cancel(jobs[1])
    core.step()
    assert jobs[2].started is None  # the first one still runs
    assert started(core)["next"] == 1.0
    assert [job.state for job in jobs] == [State.FAILED, State.CANCELLED, State.DONE]


def test_a_task_that_waits_for_an_event_keeps_its_place_unless_it_is_cancelled() -> None:
    for cancels in (False, True):
        core = Core(ScriptedExecutor(), "left-over", limit=8)
        held = core.submit(Request("held", [task("held", X)]), ["event"])[0]
        core.submit(Request("next", [task("next", X)]))
        core.step()
        assert core.blocked and not core.busy
        if cancels:
            core.cancel(held)
        else:
            core.release("event")
        assert started(core) == {"held": None if cancels else 0.0, "next": 0.0 if cancels else 1.0}


SHORT = 2.0**-10


def queueing_core(executor: Any = None, limit: int = 2) -> Core:
    core = Core(executor or ScriptedExecutor(queues=True), "lanes", limit=limit)
    core._view.overhead = 1.0  # so that tasks of about this length count as short
    return core


def submit_short(core: Core, name: str, *accesses: Access, kind: Kind = Kind.COMPUTE, **options: Any) -> Job:
    profile = Profile(kind=kind, seconds=SHORT, source="measured")
    return core.submit(Request(name, [Task(name, 10, profile, accesses=accesses, **options)]))[0]


def test_short_tasks_are_queued_behind_the_tasks_whose_data_they_use() -> None:
    core = queueing_core()
    jobs = [submit_short(core, f"t{k}", X) for k in range(7)]
    core.step()
    placed = [call[:3] for call in core.executor.calls]
    assert placed == [("launch", 0, Placement(plain=True)), *[("behind", k, k - 1) for k in range(1, 5)]]
    assert started(core) == {f"t{k}": SHORT * k for k in range(7)}
    assert all(job.state is State.DONE for job in jobs)
    texts = [text for event, text in sentences(core.log) if event.task == 1]
    assert texts[0] == (
        "t1 (task 1) of tenant default arrived to be queued behind t0 (task 0), because it uses the same data."
    )
    assert texts[1].startswith("t1 (task 1) was launched behind t0 (task 0): it uses the same data, so the device")


def test_a_follower_waits_for_its_memory_and_no_job_is_kept() -> None:
    core = queueing_core(ScriptedExecutor(Capacity(memory=100), queues=True))
    jobs = [submit_short(core, name, X, memory=60) for name in "abc"]
    core.step()
    assert [job.state for job in jobs] == [State.RUNNING, State.WAITING, State.WAITING] and core.blocked
    assert started(core) == {"a": 0.0, "b": SHORT, "c": 2 * SHORT}
    assert not core._view.followers


def test_a_task_is_not_queued_behind_data_of_two_queues_or_past_waiting_tasks() -> None:
    core = queueing_core()
    for name, access in (("a", X), ("b", Access(20, 30, True))):
        submit_short(core, name, access)
    core.step()
    assert len(core.running) == 2
    both = submit_short(core, "both", X, Access(20, 30, False))
    core.step()
    assert both.state is State.WAITING and core.blocked
    assert started(core)["both"] == SHORT
    core = queueing_core(limit=1)
    submit_short(core, "a", X)
    core.step()
    submit_short(core, "follower", X)
    long = core.submit(Request("long", [Task("long", 10, Profile(kind=Kind.COMPUTE, seconds=5.0, source="measured"))]))
    core.step()
    assert long[0] in core.waiting and core.blocked  # the follower does not overtake it


def test_a_task_is_not_queued_behind_one_whose_results_are_copied_by_the_host() -> None:
    executor = ScriptedExecutor(queues=True)
    executor.completes_on_device = lambda job: job.number != 1  # type: ignore[method-assign]
    core = queueing_core(executor)
    for k in range(4):
        submit_short(core, f"t{k}", X)
    core.step()
    assert [call[:2] for call in executor.calls] == [("launch", 0), ("behind", 1)]
    assert started(core) == {f"t{k}": SHORT * k for k in range(4)}


def test_a_task_that_leaves_its_train_takes_along_those_that_use_its_data() -> None:
    core = queueing_core(ScriptedExecutor(queues=True))
    jobs = [submit_short(core, name, *accesses) for name, accesses in (("t0", (X,)), ("t1", (X,)), ("t2", (X,)))]
    core.step()
    assert [job.state for job in jobs] == [State.RUNNING] * 3
    assert core.cancel(jobs[1])
    assert jobs[2].state is State.STOPPING
    assert started(core) == {"t0": 0.0, "t1": None, "t2": SHORT}
    assert [job.state for job in jobs] == [State.DONE, State.CANCELLED, State.DONE]
    assert not core._order._awaited and not core._order._segments


def test_a_task_that_gets_no_memory_behind_its_data_still_waits_for_them() -> None:
    core = queueing_core(ScriptedExecutor(Capacity(memory=100), queues=True))
    core.admission._patience = 0
    submit_short(core, "writer", X, memory=30)
    profile, read = Profile(kind=Kind.COMPUTE, seconds=SHORT, source="measured"), X._replace(writes=False)
    small = core.submit(Request("small", [Task("small", 10, profile, memory=10, accesses=(read,))]), ["event"])[0]
    core.step()
    core.executor._now = SHORT / 4
    request = Request("large", [Task("large", 10, profile, memory=80, accesses=(read,))], SHORT / 4)
    large = core.submit(request)[0]
    core.step()
    assert large.state is State.WAITING
    core.executor._now = SHORT / 2
    core.release("event")
    core.step()
    assert small not in core.waiting
    core.cancel(large)
    core.step()
    assert [call[:3] for call in core.executor.calls if call[1] == small.number] == [("behind", small.number, 0)]
    assert started(core)["small"] == SHORT


def test_no_memory_is_kept_free_for_a_task_that_waits_for_data_too() -> None:
    core = queueing_core(ScriptedExecutor(Capacity(memory=100)))
    core.admission._patience = 0
    submit_short(core, "writer", X, memory=30)
    submit_short(core, "large", X, memory=80)
    core.step()
    submit_short(core, "other", memory=50, kind=Kind.MEMORY)
    core.step()
    assert [job.task.name for job in core.running] == ["writer", "other"]


@ww.kernel
def wait_and_add(gate, x):
    i = gpu.grid(1)
    while gate[0] == 0:
        backoff(100)
    if i < x.size:
        x[i] += 1


def test_tasks_on_one_array_are_on_the_device_together() -> None:
    gate, x = np.zeros(1, np.int64), np.zeros(64, np.int64)
    profile = Profile(kind=Kind.COMPUTE, seconds=2e-5, resident=4, source="measured")
    with Scheduler("cpu", executor=fake_executor()) as scheduler:
        opened = np.ones(1, np.int64)
        scheduler.submit(wait_and_add[x.size], opened, x).result(HANG_SECONDS)  # compiled
        handles = [scheduler.submit(wait_and_add[x.size], gate, x, profile=profile) for _ in range(20)]
        until(lambda: scheduler.inspect(lambda core: [len(train) for train in core._trains.values()] == [4]))
        handles[2].cancel()  # if the task is on the device already, it runs
        gate[0] = 1
        assert not wait(handles, HANG_SECONDS).not_done
    assert (x == 21 - handles[2].cancelled()).all()


def test_order_none_and_what_waits_for_a_future() -> None:
    x, before = np.zeros(100, np.int64), Future[None]()
    with Scheduler("cpu") as scheduler:
        held = scheduler.submit(step[100], x, 1, after=before)
        second = scheduler.submit(step[100], x, 1)
        scheduler.submit(step[100], x, 1, order="none").result(HANG_SECONDS)
        assert not second.done() and (x == 1).all()
        before.set_result(None)
        second.result(HANG_SECONDS)
        assert held.done() and (x == 13).all()
        with pytest.raises(errors.ArgumentError, match="order must be 'data' or 'none', got 'x'"):
            scheduler.submit(step[100], x, 1, order="x")


def test_arguments_are_known_by_their_memory_and_what_the_kernel_does() -> None:
    x = np.zeros((10, 10))
    start = x.__array_interface__["data"][0]
    assert accesses_of(copy[10], (x[0], x[1])) == [
        Access(start, start + 80, False),
        Access(start + 80, start + 160, True),
    ]
    assert accesses_of(step[10], (x[:, 2], 1)) == [Access(start + 16, start + 16 + 9 * 80 + 8, True)]
    assert accesses_of(copy[10], (x[::-1][0], np.zeros(0))) == [Access(start + 720, start + 800, False)]
    x.flags.writeable = False
    assert accesses_of(step[10], (x[0], 1)) == [Access(start, start + 80, False)]

    def enqueue(*_: Any) -> None:
        pass

    launch, _ = as_launch(enqueue, ([x[1]], x[2], 5))
    assert [access.start for access in accesses_of(launch, ())] == [start + 80, start + 160]

    class Device:
        def __init__(self) -> None:
            interface = {"data": (4096, False), "shape": (4, 2), "strides": (-16, 8), "typestr": "<f8"}
            self.__cuda_array_interface__, self.ndim, self.dtype = interface, 2, np.dtype(float)

    assert accesses_of(copy[4], (x[0], Device()))[1] == Access(4096 - 48, 4096 + 16, True)


def test_ranges_of_rows_on_storage_are_compared_by_their_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 4)))
    with ww.open(tmp_path / "x.npy", mode="r+", device="cpu") as x:
        read, write = accesses_of(copy[10], (x[2:4], x[4:]))
        access = accesses_of(step[10], (x, 1))[0]
    assert (read.end, read.writes, write.writes, access.writes) == (write.start, False, True, True)
    assert (access.start, access.end, access.space) == (read.start - 64, write.end, write.space)
    assert read.end - read.start == 64 and access.end - access.start == 320


def test_a_batch_writes_what_one_of_its_launches_writes() -> None:
    launch = types.SimpleNamespace(kernel=None)
    tasks = [task(name, access, launch=launch) for name, access in (("write", X), ("read", X._replace(writes=False)))]
    assert batched(tasks, [0, 1, 0], "batch", 0).accesses == [X]


def test_prepared_launches_that_were_measured_later_are_a_batch() -> None:
    x = np.zeros(64, np.int64)
    with Scheduler("cpu") as scheduler:
        prepared = scheduler.prepare(step[64], x, 1)
        prepared.task.known = types.SimpleNamespace(profile=Profile(seconds=1e-4))
        handle = scheduler.submit_many([prepared] * 3)
        handle.result(HANG_SECONDS)
    assert isinstance(handle, Handle) and handle.task.blocks == 3 and (x == 13).all()


def test_a_batch_has_launches_of_one_tenant_priority_and_deadline() -> None:
    x, profile = np.zeros(64, np.int64), Profile(seconds=1e-4)
    options: list[dict[str, Any]] = [{}, {"tenant": "other"}, {"priority": 3}, {"deadline": 9.0}]
    with Scheduler("cpu") as scheduler:
        prepared = [scheduler.prepare(step[64], x, 1, profile=profile, **each) for each in options]
        request = scheduler.submit_many([launch for launch in prepared for _ in range(2)])
        request.result(HANG_SECONDS)
    assert isinstance(request, RequestHandle)
    tasks = [handle.task for handle in request.handles if isinstance(handle, Handle)]
    fields = [(task.blocks, task.tenant, task.priority, task.deadline) for task in tasks]
    assert fields == [(2, "default", 0, None), (2, "other", 0, None), (2, "default", 3, None), (2, "default", 0, 9.0)]


def test_options_of_prepared_launches_are_refused() -> None:
    x = np.zeros(64, np.int64)
    with Scheduler("cpu") as scheduler:
        prepared = scheduler.prepare(step[64], x, 1, order="none")
        submits: list[Callable[[], Any]] = [
            lambda: scheduler.submit(prepared, x),
            lambda: scheduler.submit(prepared, priority=1),
            lambda: scheduler.submit_many([prepared], tenant="other"),
        ]
        for submit in submits:
            with pytest.raises(errors.ArgumentError, match="its own arguments and options: pass them to prepare"):
                submit()
    assert not x.any()


def reads_element(a, i):
    return a[i] * 2


def writes_second(a, b, i):
    b[i] = reads_element(a, i)


def recurses(a, i):
    if i > 0:
        recurses(a, i - 1)


def f_reads(x, y, m):
    i = gpu.grid(1)
    total = 0.0
    for k in range(len(x)):
        total += x[k] + m[i, k] + math.sqrt(m[i, 0])
    row = m[i]
    for value in row:
        total += value
    y[i] = total


def f_calls(x, y, m):
    writes_second(x, y, gpu.grid(1))


def f_views(x, y, m):
    row = m[0]
    row[gpu.grid(1)] = y[0]
    tail = x[1:]
    alias = tail
    alias[0] += 1


def f_chosen(x, y, m):
    chosen = x if gpu.grid(1) else y
    chosen[0] = 1
    recurses(m, 2)


def f_atomic(x, y, m):
    gpu.atomic_add(x, 0, 1)
    y.fill(0)


def both(a, b):
    return a, b


def writes_part(a, part):
    found = a[part]
    found[0] = 1


def f_unpacked(x, y, m):
    first, second = both(x, y)
    second[0] = first[0]


def f_tuple(x, y, m):
    arrays = (x,) + (y,)  # noqa: RUF005
    found = arrays[1]
    found[0] = arrays[0][0]


def f_new_axis(x, y, m):
    row = x[None][0]
    row[0] = m[0, 0]


def f_selected(x, y, m):
    selected = (slice(0, 2), slice(1, 3))
    row = m[selected][0]
    row[0] = x[0]


def f_passed_slice(x, y, m):
    writes_part(y, slice(1, 3))


def f_address(x, y, m):
    numba.carray(y.ctypes.data + 8, 1)[0] = x[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (f_unpacked, [True, True, False]),  # items of a tuple are not distinguished
        (f_tuple, [True, True, False]),
        (f_new_axis, [True, False, False]),
        (f_selected, [False, False, True]),
        (f_passed_slice, [False, True, False]),
        (f_address, [False, True, False]),
        (f_reads, [False, True, False]),
        (f_calls, [False, True, False]),
        (f_views, [True, False, True]),
        (f_chosen, [True, True, True]),
        (f_atomic, [True, True, False]),
    ],
)
def test_read_only_arguments_are_recognized_from_the_code(function: Any, expected: list[bool]) -> None:
    x, m = np.zeros(4), np.zeros((4, 4))
    assert written_arguments(ww.kernel(function), (x, x, m)) == expected
    records = np.zeros(4, [("a", "i4")])
    assert written_arguments(ww.kernel(f_reads), (records, x, m))[1]
    shaped = types.SimpleNamespace(shape=(4, 4))  # a device array that has no `ndim`
    assert written_arguments(ww.kernel(f_views), (x, x, shaped)) == [True, False, True]
    assert written_arguments(ww.kernel(f_tuple), ((x, x), x, m)) == [True, True, False]
    assert written_arguments(types.SimpleNamespace(function=None), (x, m)) == [True, True]
