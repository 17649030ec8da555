"""A scheduler whose tasks run on the devices of a pool (agents in this process)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.device import Device, Stream
from warpwell.pool.devices import Devices
from warpwell.remote import PoolHandle, PoolScheduler
from warpwell.remote.placement import Chain, Member, Placements
from warpwell.remote.scheduler_agent import AgentScheduler
from warpwell.scheduler import Profile, Scheduler
from warpwell.scheduler.data_order import DataOrder
from warpwell.scheduler.extend import State
from warpwell.targets.primitives import SYSTEM, backoff, load_acquire


@ww.kernel
def double(x):
    i = gpu.grid(1)
    if i < x.size:
        x[i] = 2 * x[i]


@ww.kernel
def add(x, y):
    i = gpu.grid(1)
    if i < x.size:
        y[i] += x[i]


@ww.kernel
def spin(x, rounds):
    i = gpu.grid(1)
    s = x[i]
    for k in range(rounds):
        s = (s * 1103515245 + k) & 0x7FFFFFFF
    x[i] = s


@ww.kernel
def increment_after(gate, x):
    """Wait for a number at an address in this process, where the agents are, too."""
    attempt = 0
    while load_acquire(gate, SYSTEM) == 0:
        backoff(attempt)
        attempt += 1
    x[gpu.grid(1)] += 1


@ww.kernel
def total(edges, out):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(out, 0, edges[i])


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu", "cpu"]) as found:
        yield found


@pytest.fixture
def scheduler(devices: Devices) -> Iterator[Scheduler]:
    with Scheduler(devices=devices) as made:
        yield made


def lose(device: Any) -> None:
    """Make an agent of this process vanish, as a killed one does."""
    device.caller.transport.lose(device.connection.rank, "killed by a test")


def test_tasks_with_arrays_of_this_process_go_anywhere(scheduler: Scheduler) -> None:
    assert isinstance(scheduler, PoolScheduler)
    arrays = [np.arange(1000) + k for k in range(12)]
    handles = [scheduler.submit(double[1000], a) for a in arrays]
    wait(handles, HANG_SECONDS)
    for k, (array, handle) in enumerate(zip(arrays, handles, strict=True)):
        assert handle.result(0) is None and handle.state is State.DONE
        assert np.array_equal(array, 2 * (np.arange(1000) + k))
    assert {h.device.index for h in handles if isinstance(h, PoolHandle)} == {0, 1, 2}


def test_a_task_goes_where_its_buffers_are(scheduler: Scheduler, devices: Devices, tmp_path: Path) -> None:
    x = devices[2].to_device(np.arange(100))
    y = devices[2].zeros(100, np.int64)
    handle = scheduler.submit(add[100], x, y)
    handle.result(HANG_SECONDS)
    assert isinstance(handle, PoolHandle) and handle.device is devices[2]
    assert np.array_equal(y.copy_to_host(), np.arange(100))
    np.save(tmp_path / "a.npy", np.arange(1000))
    with devices[1].open(tmp_path / "a.npy") as array:
        out = devices[1].zeros(1, np.int64)
        scheduler.submit(total[1000], array, out).result(HANG_SECONDS)
        assert out.copy_to_host()[0] == 499_500


def test_buffers_may_be_freed_behind_a_task(scheduler: Scheduler, devices: Devices) -> None:
    y = devices[0].zeros(100, np.int64)
    handles = []
    for _ in range(20):
        x = devices[0].to_device(np.arange(100))
        handles.append(scheduler.submit(add[100], x, y))
        x.free()
        handles[-1].result(HANG_SECONDS)
    assert np.array_equal(y.copy_to_host(), 20 * np.arange(100))
    with pytest.raises(errors.ClosedError):
        scheduler.submit(add[100], x, y)


def test_requests_run_in_order(scheduler: Scheduler, devices: Devices) -> None:
    x, y = np.ones(300), np.zeros(300)
    handles = scheduler.submit_many([(double[300], x), (add[300], x, y), (add[300], x, y)]).handles
    wait(handles, HANG_SECONDS)
    assert (y == 4).all() and (x == 2).all()
    remote = devices[1].to_device(x)
    handles = scheduler.submit_many([(double[300], remote)] * 5, name="five").handles
    wait(handles, HANG_SECONDS)
    assert (remote.copy_to_host() == 64).all()
    last = scheduler.submit(double[300], x, after=handles)
    last.result(HANG_SECONDS)
    assert (x == 4).all()


def test_read_only_arrays_do_not_come_back(scheduler: Scheduler) -> None:
    x = np.ones(50)
    x.flags.writeable = False
    scheduler.submit(double[50], x).result(HANG_SECONDS)
    assert (x == 1).all()


def test_what_cannot_be_is_told_at_once(scheduler: Scheduler, devices: Devices) -> None:
    x = np.ones(5)
    lock = threading.Lock()

    @ww.kernel
    def bad(x):
        x[0] = lock

    with pytest.raises(errors.CodeError, match=r"'bad' cannot be sent.*'lock'"):
        scheduler.submit(bad[1], x)
    with pytest.raises(errors.ArgumentError, match="on devices 0, 1: copy them to one"):
        scheduler.submit(add[1], devices[0].zeros(1), devices[1].zeros(1))
    with pytest.raises(errors.ArgumentError, match="cannot be an argument"):
        scheduler.submit(double[1], "text")
    with pytest.raises(errors.DTypeError):
        scheduler.submit(double[1], np.array([object()]))
    with pytest.raises(errors.ArgumentError, match="not a launch"):
        scheduler.submit(double, x)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="has no blocks"):
        scheduler.submit(double[0], x)
    with pytest.raises(errors.TaskMemoryError):
        scheduler.submit(double[5], x, memory=1 << 60)
    source = ww.CudaSource('extern "C" __global__ void f(double *x) { x[0] = 1; }', "f", {"x": "float64*"})
    with pytest.raises(errors.DeviceNotFoundError, match="needs a GPU"):
        scheduler.submit(source[1, 32], x)
    with (
        pytest.raises(errors.ArgumentError, match="the scheduler does not use"),
        Scheduler(devices=devices[:1]) as started,
    ):
        started.submit(double[1], devices[1].zeros(1))


def test_options_are_checked_where_they_count(devices: Devices) -> None:
    with pytest.raises(errors.ArgumentError, match="policy"):
        Scheduler(devices=devices, policy="no such")
    with pytest.raises(errors.QuotaError, match="100 %"):
        Scheduler(devices=devices, tenants={"a": {"share": 0.7}, "b": {"share": 0.6}})
    with pytest.raises(errors.ArgumentError, match="at least one"):
        Scheduler(devices=[])
    with pytest.raises(errors.ArgumentError, match="twice"):
        Scheduler(devices=[devices[0], devices[0]])
    with pytest.raises(errors.ArgumentError, match="omit it"):
        Scheduler("cpu", devices=devices)
    devices.synchronize()  # these errors are not raised again


def test_a_failing_kernel_says_where(scheduler: Scheduler, tmp_path: Path, devices: Devices) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    with devices[1].open(tmp_path / "a.npy") as array:
        out = devices[1].zeros(1, np.int64)

        @ww.kernel
        def beyond(array, out):
            out[0] = array[10_000 + gpu.grid(1)]

        handle = scheduler.submit(beyond[1], array, out)
        with pytest.raises(errors.IndexRangeError) as caught:
            handle.result(HANG_SECONDS)
        assert any("on device 1" in note for note in caught.value.__notes__)
        assert handle.state is State.FAILED
        later = scheduler.submit(double[1], out, after=handle)
        with pytest.raises(
            CancelledError, match="task 'double' was cancelled, because task 'beyond' failed"
        ) as refused:
            later.result(HANG_SECONDS)
        assert refused.value.__cause__ is caught.value
    devices.synchronize()


def test_a_task_is_cancelled(devices: Devices) -> None:
    with Scheduler(devices=devices[:1], limit=1) as scheduler:
        x = np.ones(4096, np.int64)
        running = scheduler.submit(spin[4096], x, 3_000_000)
        waiting = scheduler.submit(double[4096], x)
        after = scheduler.submit(double[4096], x, after=waiting)
        while running.state is not State.RUNNING:
            time.sleep(0.01)
        assert waiting.cancel() and waiting.cancelled()
        assert running.cancel()
        for handle in (running, waiting, after):
            with pytest.raises(CancelledError):
                handle.result(HANG_SECONDS)
        assert (x == 1).all()
        assert waiting.state is State.CANCELLED and waiting.cancel()


def test_the_last_task_of_a_request_is_cancelled(devices: Devices) -> None:
    with Scheduler(devices=devices[:1], limit=1) as scheduler:
        x, y, gate = np.ones(64, np.int64), np.ones(64, np.int64), np.zeros(1, np.int64)
        launches = [(double[64], x), (increment_after[64], gate.ctypes.data, y), (double[64], x)]
        first, second, third = scheduler.submit_many(launches).handles
        try:
            until(lambda: second.state is not State.WAITING)
            assert not first.done() and third.cancel()
        finally:
            gate[0] = 1
        first.result(HANG_SECONDS)
        second.result(HANG_SECONDS)
        assert third.cancelled() and (x == 2).all() and (y == 2).all()


def test_a_task_whose_arrays_are_on_their_way_is_cancelled(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer_started, go_on = threading.Event(), threading.Event()

    def held(call: Any) -> Any:
        def calls(self: Any, *args: Any, **options: Any) -> Any:
            transfer_started.set()
            assert go_on.wait(HANG_SECONDS)
            return call(self, *args, **options)

        return calls

    with Scheduler(devices=devices[:1]) as scheduler:
        assert isinstance(scheduler, PoolScheduler)
        remote, x = devices[0].to_device(np.ones(4)), np.ones(4)
        with monkeypatch.context() as patch:
            patch.setattr(Device, "to_device", held(Device.to_device))
            handle = scheduler.submit(double[4], x, name="none")
            assert transfer_started.wait(HANG_SECONDS) and handle.state is State.WAITING
            assert handle.cancel() and handle.cancelled()
            go_on.set()
            scheduler.submit(double[4], np.ones(4)).result(HANG_SECONDS)  # queued after it, in the device's thread
            assert isinstance(handle, PoolHandle) and handle.chain.arrays is None
        assert (x == 1).all() and "none" not in {event.name for event in scheduler.logs()[devices[0].index].events}
        transfer_started.clear()
        go_on.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "wait", held(Stream.wait))  # stands for arrays in transit
            first, second, third = scheduler.submit_many([(double[4], remote)] * 3).handles
            assert transfer_started.wait(HANG_SECONDS) and second.cancel()
            go_on.set()
            first.result(HANG_SECONDS)
        assert second.cancelled() and third.cancelled() and (remote.copy_to_host() == 2).all()
        member = scheduler._placements.members[0]
        assert not member.chains and member.seconds == 0


class TracedLock:
    """A lock that calls a function of a thread each time the thread has released it."""

    def __init__(self) -> None:
        self._lock, self.released = threading.RLock(), dict[int, Callable[[], object]]()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self.released.get(threading.get_ident(), lambda: None)()


def test_a_cancelled_task_is_not_sent_at_the_same_time(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, go_on, sent = threading.Event(), threading.Event(), threading.Event()
    with Scheduler(devices=devices[:1]) as scheduler:
        assert isinstance(scheduler, PoolScheduler)
        placements, lock, x = scheduler._placements, TracedLock(), devices[0].to_device(np.ones(4))
        send = placements._send

        def held(chain: Chain, member: Member) -> None:
            ready.set()
            assert go_on.wait(HANG_SECONDS)
            send(chain, member)
            sent.set()

        def let_send() -> None:
            del lock.released[threading.get_ident()]
            go_on.set()
            assert sent.wait(HANG_SECONDS)

        monkeypatch.setattr(placements, "_lock", lock)
        monkeypatch.setattr(placements, "_send", held)
        handle = scheduler.submit(double[4], x)
        assert ready.wait(HANG_SECONDS)
        lock.released[threading.get_ident()] = let_send
        assert handle.cancel() and handle.cancelled()
    assert (x.copy_to_host() == 1).all()


def test_tenants_and_load(devices: Devices) -> None:
    settings = {"a": {"share": 0.5}, "b": {"memory": 1000.0}}
    with Scheduler(devices=devices, tenants=settings) as scheduler:
        x = np.ones(4)
        with pytest.raises(errors.QuotaError, match="'c' has no setting"):
            scheduler.submit(double[4], x, tenant="c")
        with pytest.raises(errors.TaskMemoryError):
            scheduler.submit(double[1000], np.ones(1000), tenant="b")
        scheduler.submit(double[4], x, tenant="b").result(HANG_SECONDS)
        hold = threading.Event()
        gate: Any = PoolHandle(None, scheduler.task(double[4], x), 0)  # type: ignore[arg-type]
        long = scheduler.submit(double[4], x, tenant="a", profile=Profile(seconds=10.0), after=gate)
        hold.set()
        gate.settle(None)
        long.result(HANG_SECONDS)
    with Scheduler(devices=devices[:2]) as scheduler:
        heavy = [np.ones(64, np.int64) for _ in range(7)]
        first = scheduler.submit(spin[4096], np.ones(4096, np.int64), 3_000_000, profile=Profile(seconds=100.0))
        handles = [scheduler.submit(double[64], a, profile=Profile(seconds=1.0)) for a in heavy]
        assert isinstance(first, PoolHandle) and first.device is not None
        assert all(isinstance(h, PoolHandle) and h.device is not first.device for h in handles)
        first.cancel()


def test_logs_and_inspect(scheduler: Scheduler) -> None:
    assert isinstance(scheduler, PoolScheduler)
    x = np.ones(4)
    handle = scheduler.submit(double[4], x, name="mine")
    handle.result(HANG_SECONDS)
    logs = scheduler.logs()
    assert isinstance(handle, PoolHandle) and handle.device is not None
    assert "mine" in {event.name for event in logs[handle.device.index].events}
    assert scheduler.inspect(lambda core: len(core.running)) == [0, 0, 0]
    assert scheduler.failure is None


def test_what_a_lost_device_had_runs_elsewhere() -> None:
    with Devices(targets=["cpu", "cpu"]) as pool, Scheduler(devices=pool, policy="first-come", limit=1) as scheduler:
        x = np.ones(4096, np.int64)
        remote = pool[1].zeros(4096, np.int64)
        slow = scheduler.submit(spin[4096], remote, 1_000_000)
        queued = scheduler.submit(double[4096], remote)
        host = []
        for _ in range(6):
            host.append(scheduler.submit(spin[4096], x.copy(), 10_000, profile=Profile(seconds=1.0)))
        while slow.state is not State.RUNNING:
            time.sleep(0.01)
        lose(pool[1])
        for handle in (slow, queued):
            with pytest.raises(errors.TaskLostError, match=r"device 1 is gone \(killed by a test\), and the task's"):
                handle.result(HANG_SECONDS)
        for handle in host:
            handle.result(HANG_SECONDS)
        assert {h.tries for h in host if isinstance(h, PoolHandle)} == {1, 2}
        again = scheduler.submit(double[4096], x)
        again.result(HANG_SECONDS)
        assert isinstance(again, PoolHandle) and again.device is pool[0]
        with pytest.raises(errors.TaskLostError):
            scheduler.submit(double[4096], remote).result(HANG_SECONDS)
        lose(pool[0])
        with pytest.raises(errors.TaskLostError, match="no remaining device"):
            scheduler.submit(double[4096], x).result(HANG_SECONDS)
        assert isinstance(scheduler.failure, errors.DeviceLostError)


def test_many_tasks_on_one_array_fail_when_the_last_device_is_lost() -> None:
    with Devices(targets=["cpu"]) as pool, Scheduler(devices=pool) as scheduler:
        x, before = np.ones(64, np.int64), Future[None]()
        handles = [scheduler.submit(double[64], x, after=before)]
        handles += [scheduler.submit(double[64], x) for _ in range(400)]
        lose(pool[0])
        before.set_result(None)
        for handle in handles:
            with pytest.raises(errors.TaskLostError, match="no remaining device"):
                handle.result(HANG_SECONDS)


def test_a_long_sequence_of_requests_is_cancelled_with_its_first_one(scheduler: Scheduler) -> None:
    gate = PoolHandle(None, scheduler.task(double[4], np.ones(4)), 0)  # type: ignore[arg-type]
    handles = [scheduler.submit(double[4], np.ones(4), after=gate)]
    for _ in range(500):
        handles.append(scheduler.submit(double[4], np.ones(4), after=handles[-1]))
    gate.settle(None, cancelled=True)
    assert not wait(handles, HANG_SECONDS).not_done
    assert all(handle.cancelled() for handle in handles)


def test_ctrl_c_in_a_submit_keeps_no_later_task_waiting(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    add = DataOrder.add

    def interrupted(self: Any, *args: Any) -> Any:
        found = add(self, *args)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return found

    x = np.ones(100, np.int64)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DataOrder, "add", interrupted)
        scheduler.submit(double[100], x)
    scheduler.submit(double[100], x).result(HANG_SECONDS)
    assert (x == 4).all()


def test_a_signal_handler_submits_a_task_within_a_submit(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    add, x = DataOrder.add, np.ones(100, np.int64)
    signals, handles = [signal.SIGUSR1], []

    def interrupted(self: Any, *args: Any) -> Any:
        found = add(self, *args)
        if threading.current_thread() is threading.main_thread() and signals:
            signal.raise_signal(signals.pop())
        return found

    previous = signal.signal(signal.SIGUSR1, lambda *_: handles.append(scheduler.submit(double[100], x)))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(DataOrder, "add", interrupted)
            scheduler.submit(double[100], x).result(HANG_SECONDS)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    handles[0].result(HANG_SECONDS)
    assert (x == 4).all()


def test_a_source_whose_only_gpu_is_lost_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ww.CudaSource('extern "C" __global__ void f(double *x) { x[0] = 1; }', "f", {"x": "float64*"})
    with Devices(targets=["cpu", "cpu"]) as pool, Scheduler(devices=pool) as scheduler:
        pool[0].target = "cuda"  # makes the scheduler place it like a GPU
        copy_arguments = Member.copy_arguments

        def copies(member: Member, chain: Chain, handles: Any) -> Any:
            if member.device is pool[0]:
                lose(pool[0])
            return copy_arguments(member, chain, handles)

        monkeypatch.setattr(Member, "copy_arguments", copies)
        gate: Any = PoolHandle(None, scheduler.task(double[4], np.ones(4)), 0)  # type: ignore[arg-type]
        pending = scheduler.submit(source[1, 32], np.ones(4), after=gate)
        with pytest.raises(errors.TaskLostError, match=r"device 0 is gone \(killed by a test\)"):
            scheduler.submit(source[1, 32], np.ones(4)).result(HANG_SECONDS)
        gate.settle(None)
        with pytest.raises(errors.TaskLostError, match="no remaining device can run it"):
            pending.result(HANG_SECONDS)
        x = np.ones(4)
        scheduler.submit(double[4], x).result(HANG_SECONDS)
        assert (x == 2).all()


def test_what_fails_in_a_devices_thread_is_told_and_the_thread_goes_on(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scheduler(devices=devices[:1]) as scheduler, monkeypatch.context() as patch:
        patch.setattr(Member, "wait_for_end", lambda member, task, result: 1 / 0)
        x = np.ones(4)
        first, second = scheduler.submit_many([(double[4], x), (double[4], x)], name="mine").handles
        for handle in (first, second):
            with pytest.raises(ZeroDivisionError) as caught:
                handle.result(HANG_SECONDS)
        assert any("'mine'" in note for note in caught.value.__notes__)
        patch.undo()
        errors_raised: list[Any] = []
        patch.setattr(threading, "excepthook", errors_raised.append)
        handle = scheduler.submit(double[4], x)
        handle.add_done_callback(lambda _: sys.exit(3))  # SystemExit is not an Exception, and is logged nevertheless
        handle.result(HANG_SECONDS)
        scheduler.submit(double[4], x).result(HANG_SECONDS)
        assert errors_raised == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_losses_at_random_moments(seed: int) -> None:
    """Every task with arrays of this process runs to its end, and its results are as if it had run once."""
    random = np.random.default_rng(seed)
    with Devices(targets=["cpu", "cpu", "cpu"]) as pool, Scheduler(devices=pool) as scheduler:
        arrays, handles, sums = [], [], []
        moments = sorted(random.choice(60, 2, replace=False))
        for k in range(60):
            if k in moments:
                lose(pool[1 + moments.index(k)])
            x, y = np.full(300, k), np.zeros(300, np.int64)
            arrays.append(x)
            sums.append(y)
            handles += scheduler.submit_many([(double[300], x), (add[300], x, y), (add[300], x, y)]).handles
            if random.random() < 0.2:
                time.sleep(0.01)
        wait(handles, HANG_SECONDS)
        assert all(h.exception(0) is None for h in handles)
        assert all((x == 2 * k).all() and (y == 4 * k).all() for k, (x, y) in enumerate(zip(arrays, sums, strict=True)))


def test_a_closed_pool_or_scheduler() -> None:
    pool = Devices(targets=["cpu"])
    scheduler = Scheduler(devices=pool)
    x = np.ones(4096, np.int64)
    slow = scheduler.submit(spin[4096], x, 1_000_000)
    pool.close()
    with pytest.raises(errors.TaskLostError):
        slow.result(HANG_SECONDS)
    scheduler.close()
    scheduler.close()
    with pytest.raises(errors.ClosedError):
        scheduler.submit(double[4], x)


def test_leaving_with_an_exception_cancels(devices: Devices) -> None:
    with pytest.raises(ZeroDivisionError), Scheduler(devices=devices, limit=1) as scheduler:
        handles = [scheduler.submit(spin[4096], np.ones(4096, np.int64), 3_000_000) for _ in range(9)]
        raise ZeroDivisionError
    assert all(h.done() for h in handles) and any(h.cancelled() for h in handles)


def test_many_threads_and_callbacks_submit(devices: Devices) -> None:
    with Scheduler(devices=devices[:2]) as scheduler:
        done: list[Any] = []

        def work() -> None:
            for _ in range(10):
                x = np.ones(64)
                handle = scheduler.submit(double[64], x)
                handle.add_done_callback(lambda h, x=x: done.append((scheduler.submit(double[64], x), x)))  # type: ignore[misc]

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        while len(done) < 40:
            time.sleep(0.01)
        wait([handle for handle, _ in done], HANG_SECONDS)
        assert len(done) == 40 and all((x == 4).all() for _, x in done)


def test_waiting_arrays_do_not_fill_the_device(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.remote.placement.MAX_STAGED_SHARE", 1e-12)
    with Scheduler(devices=devices[:2]) as scheduler:
        arrays = [np.full(100, k) for k in range(20)]
        handles = [scheduler.submit(double[100], a) for a in arrays]
        wait(handles, HANG_SECONDS)
        assert all((a == 2 * k).all() for k, a in enumerate(arrays))
        x, y = np.ones(100, np.int64), np.zeros(100, np.int64)
        wait(scheduler.submit_many([(double[100], x), (add[100], x, y), (double[100], y)]).handles, 60)
        assert (x == 2).all() and (y == 4).all()


@pytest.mark.parametrize(
    "make", [lambda: Placements([], DataOrder()), lambda: AgentScheduler("cpu")], ids=["places", "agent"]
)
def test_who_drops_it_starts_no_thread(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # a finalizer may run while its thread holds a lock that starting another one takes
    dropped = make()
    started: list[str] = []
    closed = threading.Event()
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(threading.current_thread().name)
        real_start(thread)
        closed.set()

    monkeypatch.setattr(threading.Thread, "start", start)
    if isinstance(dropped, Placements):
        dropped.retire()
    del dropped
    assert closed.wait(HANG_SECONDS)
    assert set(started) == {"warpwell-closing"}
