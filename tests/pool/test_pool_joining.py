"""Devices that join and leave a running program, as under ``warpwell run --allocate use``. No GPU: a UUID is a name."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.harness.pool_agents import Pool, spare_pool
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.pool import spares
from warpwell.pool.agent import lane
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.protocol import Op
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.agent.spare import SpareDevice
from warpwell.pool.agent.state import AgentState
from warpwell.pool.device import Device
from warpwell.pool.devices import Devices
from warpwell.pool.launch.reservation import FOLDER, Claim, Reservation, _queue, users

from .test_pool_ctrl_c import Interrupts


@ww.kernel
def double(x):
    i = ww.gpu.grid(1)
    x[i] = 2 * x[i]


class Counter:
    """An object of a service."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "locks"))
    return tmp_path / "locks"


def cpus(count: int) -> list[SpareDevice]:
    return [SpareDevice("cpu", None, Runtime) for _ in range(count)]


def gpus(*names: str) -> list[SpareDevice]:
    return [SpareDevice("cpu", name, Runtime) for name in names]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with spare_pool(cpus(3)) as made:
        yield made


def join(devices: Devices, count: int = 1) -> list[Device]:
    with devices.lease(count, timeout=HANG_SECONDS) as lease:
        return list(lease)


def works(device: Device) -> bool:
    x = device.to_device(np.arange(8))
    double[8](x)
    return x.copy_to_host().tolist() == [2 * k for k in range(8)]


def test_devices_join_with_a_lease_and_leave_while_arrays_of_others_survive(pool: Pool) -> None:
    devices, agents = pool
    assert len(devices) == 0 and not devices.changed.is_set()
    with pytest.raises(IndexError, match=r"0 devices have joined; ww.devices\(\).lease\(\) lets more join"):
        devices[0]
    with devices.lease(timeout=HANG_SECONDS) as lease:
        first = lease[0]
        assert list(devices) == [first] and devices.changed.is_set() and first.peers == ()
        survivor = first.to_device(np.arange(100))
        with devices.lease(2, timeout=HANG_SECONDS) as leased:
            assert [d.index for d in devices] == [0, 1, 2] and leased[0].peers == (first, leased[1])
            assert all(map(works, devices))
        copied = leased[1].to_device(survivor)
        assert np.array_equal(copied.copy_to_host(), np.arange(100))
    devices.changed.clear()
    event, stream = devices[1].event(), devices[1].stream()
    old = devices[1]
    event.record(stream)
    old.leave(HANG_SECONDS)
    assert [d.index for d in devices] == [0, 2] and devices.changed.is_set() and first.peers == (devices[1],)
    assert not (agents[1].handles or agents[1].codes or agents[1].events or agents[1].lanes)
    for call in (old.synchronize, old.leave, event.synchronize, lambda: old.zeros(3), lambda: old.to_device(survivor)):
        with pytest.raises(errors.DeviceLostError, match=r"device 1 .* is gone: it has left the pool"):
            call()
    with pytest.raises(errors.DeviceLostError):
        first.default_stream.wait(stream)
    stream.close()
    with devices.lease(3, timeout=HANG_SECONDS) as lease:
        again = lease[1]
        assert again is not old and again.index == 1 and old.lost is not None
        assert all(map(works, lease))
    assert np.array_equal(survivor.copy_to_host(), np.arange(100))
    assert np.array_equal(copied.copy_to_host(), np.arange(100))


def test_many_calls_before_and_after_a_device_left(pool: Pool) -> None:
    """Each device gets more calls than a stream's window holds; the streams of the next device count from zero."""
    devices, _ = pool
    for _ in range(3):
        (device,) = join(devices)
        x = device.zeros(4, np.int64)
        for k in range(3000):
            x.fill(k)
        assert x.copy_to_host().tolist() == [2999] * 4
        x.free()
        device.leave(HANG_SECONDS)


def test_a_device_that_holds_something_does_not_leave(pool: Pool) -> None:
    devices, agents = pool
    first, second = join(devices, 2)
    buffers = [first.zeros(3), first.zeros(4)]
    counter = first.create(f"{__name__}:Counter")
    with pytest.raises(
        errors.PoolError, match=r"device 0 cannot leave: it has buffers \(2\), objects \(1\); free them"
    ):
        first.leave(timeout=0.05)
    view = buffers[0][1:]
    del buffers, counter

    def has_one_buffer() -> bool:
        with pytest.raises(errors.PoolError) as caught:
            first.leave()
        return "it has buffers (1);" in str(caught.value)

    until(has_one_buffer)  # a thread of the pool frees dropped objects
    assert works(first) and view.copy_to_host().tolist() == [0, 0]
    with devices.lease(2), pytest.raises(errors.PoolError, match="device 0 is leased: release the lease first"):
        first.leave()
    with pytest.raises(errors.ArgumentError, match="timeout is -1"):
        first.leave(timeout=-1)
    pinned = ww.pinned_empty(10_000)
    pinned[:] = 7
    for device in (first, second):
        x = device.to_device(pinned)  # the agent maps the pinned memory, and keeps it mapped
        assert x.copy_to_host()[-1] == 7
        del x
    view.free()
    first.leave(HANG_SECONDS)
    (again,) = join(devices)
    assert again.index == 1  # index 1 is free again
    assert [d.index for d in join(devices, 3)] == [0, 1, 2]
    assert devices[0].to_device(pinned).copy_to_host()[0] == 7
    until(lambda: len(agents[0].handles) == 1)  # the mapped array


def test_a_failure_before_a_leave_is_raised_and_a_call_is_waited_for(pool: Pool) -> None:
    devices, _ = pool
    (device,) = join(devices)
    started, proceed = threading.Event(), threading.Event()
    THREADS[0] = started, proceed
    result = device.call(wait_for_go)
    assert started.wait(HANG_SECONDS)
    thread = threading.Thread(target=device.leave, args=(HANG_SECONDS,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and list(devices) == [device]
    proceed.set()
    thread.join(HANG_SECONDS)
    assert result.get() == 5 and not list(devices)
    (device,) = join(devices)
    device.call(fail)
    with pytest.raises(errors.RemoteError, match="on purpose"):
        device.leave()
    device.leave(HANG_SECONDS)
    assert not list(devices)


THREADS: dict[int, tuple[threading.Event, threading.Event]] = {}


def wait_for_go() -> int:
    from tests.pool.test_pool_joining import THREADS

    THREADS[0][0].set()
    THREADS[0][1].wait(HANG_SECONDS)
    return 5


def fail() -> None:
    raise ValueError("on purpose")


def test_devices_of_other_pools_are_fixed() -> None:
    with Devices(targets=["cpu"]) as devices:
        with pytest.raises(errors.PoolError, match="device 0 cannot leave: the devices of this program are fixed"):
            devices[0].leave()
        assert works(devices[0])


def test_gpus_are_claimed_all_or_none() -> None:
    job_claim = Claim("GPU-1", exclusive=True)  # held by another job
    with spare_pool(gpus("GPU-0", "GPU-1")) as (devices, _):
        message = "waited 1 s for 2 devices: 2 GPUs of the 2 on host .*, GPU-1 is in use by process"
        with pytest.raises(errors.StallError, match=message):
            devices.lease(2, timeout=1)
        assert len(devices) == 0
        until(lambda: list(users(["GPU-0", "GPU-1"])) == ["GPU-1"])
        assert [d.index for d in join(devices)] == [0]
        with pytest.raises(errors.StallError, match="waited 0 s for 2 devices: 1 GPU of the 1 on host"):
            devices.lease(2, timeout=0)
        with pytest.raises(errors.PoolError, match="3 devices were requested, but the pool has 2"):
            devices.lease(3)
        threading.Timer(0.3, job_claim.free).start()
        with devices.lease(2, timeout=HANG_SECONDS) as lease:
            assert [d.index for d in lease] == [0, 1] and all(map(works, lease))
        with pytest.raises(errors.AgentError, match="is in use by"):
            Reservation(["GPU-0", "GPU-1"], 1).poll()
        for device in list(devices):
            device.leave(HANG_SECONDS)
        until(lambda: not users(["GPU-0", "GPU-1"]))
    Reservation(["GPU-0", "GPU-1"], 2).poll()


class OfHost(SpareDevice):
    """A device whose UUID begins with the name of its host."""

    def info(self) -> dict[str, object]:
        gpu = super().info()["gpu"]
        return {**super().info(), "host": gpu.partition("-")[0]}


def test_hosts_with_enough_devices_are_asked_at_the_same_time_and_others_in_order() -> None:
    names = ["a-0", "a-1", "b-0", "b-1"]
    claims = {name: Claim(name, exclusive=True) for name in ("a-0", "a-1", "b-0")}
    with spare_pool(OfHost("cpu", name, Runtime) for name in names) as (devices, agents):
        assert [d.index for d in join(devices)] == [3]
        with pytest.raises(errors.StallError, match=r"waited 1 s for 1 devices, host 'a': 1 GPU of the 2"):
            devices.lease(host="a", timeout=1)
        devices[0].leave(HANG_SECONDS)
        claims.pop("a-0").free()
        claims.pop("a-1").free()
        with pytest.raises(errors.StallError, match=r"waited 2 s for 4 devices: 2 GPUs of the 2 .* b-0 is in use"):
            devices.lease(4, timeout=2)
        until(lambda: list(users(names)) == ["b-0"])
        with devices.lease(3, timeout=HANG_SECONDS) as lease:
            assert [d.index for d in lease] == [0, 1, 3] and all(map(works, lease))
        for device in list(devices):
            device.leave(HANG_SECONDS)
        until(lambda: not any(agent.reservations for agent in agents))
        with devices.lease(2, timeout=HANG_SECONDS) as lease:
            assert [d.host for d in lease] == ["a", "a"]
        claims.pop("b-0").free()
        with devices.lease(4, timeout=HANG_SECONDS) as lease:
            assert [d.host for d in lease] == ["a", "a", "b", "b"]
        until(lambda: not any(agent.reservations for agent in agents))


def test_jobs_take_turns_in_the_order_of_their_requests(folder: Path) -> None:
    names = ("GPU-0", "GPU-1")
    with (
        spare_pool(gpus(*names)) as (first, _),
        spare_pool(gpus(*names)) as (second, _),
        spare_pool(gpus(*names)) as (third, _),
    ):
        joined = join(first, 2)
        order: list[int] = []

        def work(number: int, devices: Devices, count: int) -> None:
            with devices.lease(count, timeout=HANG_SECONDS) as lease:
                order.append(number)
                assert all(map(works, lease))
            for device in list(devices):
                device.leave(HANG_SECONDS)

        threads = []
        for number, devices, count in ((2, second, 2), (3, third, 1)):
            threads.append(threading.Thread(target=work, args=(number, devices, count)))
            threads[-1].start()
            until(lambda: len(list((folder / "queue").iterdir())) == len(threads))
        joined[0].leave(HANG_SECONDS)
        time.sleep(0.6)
        assert not order  # one GPU is free, but the first request in the queue needs two
        joined[1].leave(HANG_SECONDS)
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert order == [2, 3]
    until(lambda: not users(names))
    assert not list((folder / "queue").iterdir())


def test_a_waiting_lease_takes_a_device_that_a_thread_releases() -> None:
    job_claim = Claim("GPU-1", exclusive=True)
    with spare_pool(gpus("GPU-0", "GPU-1")) as (devices, agents):
        held = devices.lease(timeout=HANG_SECONDS)
        leases: list[object] = []
        thread = threading.Thread(target=lambda: leases.append(devices.lease(timeout=HANG_SECONDS)))
        thread.start()
        until(lambda: agents[1].reservations)
        held.release()
        thread.join(HANG_SECONDS)
        assert leases and len(devices) == 1
        until(lambda: not agents[1].reservations)
    job_claim.free()


class Opening:
    """Opens devices slowly, or not at all."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.proceed = threading.Event()
        self.failure: Exception | None = None

    def __call__(self) -> Runtime:
        self.started.release()
        assert self.proceed.wait(HANG_SECONDS)
        if self.failure is not None:
            raise self.failure
        return Runtime()


def test_a_device_that_cannot_be_opened_lets_no_other_join() -> None:
    opening = Opening()
    opening.proceed.set()
    opening.failure = RuntimeError("the GPU fell off the bus")
    spares = [*gpus("GPU-0"), SpareDevice("cpu", "GPU-1", opening)]
    with spare_pool(spares) as (devices, _):
        for _ in range(2):
            with pytest.raises(errors.RemoteError, match=r"join failed on device 1: .*the GPU fell off the bus"):
                devices.lease(2, timeout=HANG_SECONDS)
            assert len(devices) == 0
        until(lambda: not users(["GPU-0", "GPU-1"]))
        opening.failure = None
        assert all(map(works, join(devices, 2)))


def test_an_agent_that_is_lost_while_it_joins() -> None:
    opening = Opening()
    spares = [SpareDevice("cpu", "GPU-0", opening), *gpus("GPU-1", "GPU-2")]
    with spare_pool(spares) as (devices, agents):
        leases: list[list[Device]] = []
        thread = threading.Thread(target=lambda: leases.append(join(devices, 2)))
        thread.start()
        assert opening.started.acquire(timeout=HANG_SECONDS)
        caller = devices._caller
        assert caller is not None
        caller.transport.lose(1, "killed")  # type: ignore[attr-defined]
        for released in agents[0].reservations.values():
            released.set()  # as the exit of the agent's process would do
        thread.join(HANG_SECONDS)
        assert [d.index for d in leases[0]] == [1, 2] and all(map(works, leases[0]))
        with pytest.raises(errors.PoolError, match=r"3 devices were requested, but the pool has 2 \(1 are lost\)"):
            devices.lease(3)
        opening.proceed.set()


def test_a_job_that_claims_a_gpu_when_the_agent_of_the_reservation_is_lost_has_it_alone() -> None:
    claim, claims = Claim("GPU-0", exclusive=True), []

    class LateSpare(SpareDevice):
        """Joins when the agent that reserved the GPU has ended, and another job has claimed it."""

        def join(self, agent: AgentState) -> None:
            if not claims:
                for released in agents[0].reservations.values():
                    released.set()  # as the exit of the agent's process would do
                until(lambda: not agents[0].reservations)
                claims.append(Claim("GPU-1", exclusive=True))
                devices._caller.transport.lose(1, "killed")  # type: ignore[union-attr]
            super().join(agent)

    with spare_pool([*gpus("GPU-0"), LateSpare("cpu", "GPU-1", Runtime)]) as (devices, agents):
        leases: list[list[Device]] = []
        thread = threading.Thread(target=lambda: leases.append(join(devices)))
        thread.start()
        until(lambda: leases or agents[1].reservations)  # the next agent has been asked
        for _ in range(30):  # and finds the claim when it looks
            assert claims and not leases and len(devices) == 0
            time.sleep(0.01)
        claims[0].free()
        thread.join(HANG_SECONDS)
        assert works(leases[0][0])
    claim.free()


def test_a_lease_beside_devices_that_are_joining() -> None:
    """Devices that are about to join belong to the pool."""
    opening = Opening()
    with spare_pool([SpareDevice("cpu", None, opening) for _ in range(2)]) as (devices, _):
        found: list[int] = []
        threads = [threading.Thread(target=lambda c=count: found.append(len(join(devices, c)))) for count in (2, 1, 2)]
        threads[0].start()
        assert opening.started.acquire(timeout=HANG_SECONDS)
        for thread in threads[1:]:
            thread.start()
        with pytest.raises(errors.StallError):
            devices.lease(2, timeout=0.1)
        opening.proceed.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert sorted(found) == [1, 2, 2]


def test_memory_is_known_when_a_device_has_joined() -> None:
    with spare_pool(gpus("GPU-0", "GPU-1")) as (devices, _):
        with pytest.raises(errors.PoolError, match=r"1 devices were requested, memory .* but the pool has 0"):
            devices.lease(memory=1 << 60)
        assert len(devices) == 0
        until(lambda: not users(["GPU-0", "GPU-1"]))
        assert join(devices)[0].memory > 0


def test_idle_devices_leave() -> None:
    with spare_pool(gpus("GPU-0", "GPU-1", "GPU-2"), idle=0.2) as (devices, _):
        lease = devices.lease(timeout=HANG_SECONDS)
        # Leased, so that the idle device cannot leave before the call.
        with devices.lease(2, timeout=HANG_SECONDS) as joined:
            used, dropped = joined
            survivor = used.to_device(np.arange(5))
        until(lambda: dropped.lost is not None)
        time.sleep(0.6)
        assert list(devices) == [lease[0], used]
        until(lambda: users(["GPU-2"]) == {})
        assert survivor.copy_to_host().tolist() == list(range(5))
        lease.release()
        del survivor
        until(lambda: len(devices) == 0)


def test_a_pending_failure_keeps_an_idle_device() -> None:
    with spare_pool(cpus(1), idle=0.1) as (devices, _):
        # Leased, so that the idle device cannot leave before the call.
        with devices.lease(timeout=HANG_SECONDS) as lease:
            stream = lease[0].stream()
            lease[0].call(fail, stream=stream)
            until(lambda: stream.channel.failures)
        time.sleep(0.5)
        with pytest.raises(errors.RemoteError, match="on purpose"):
            stream.synchronize()
        until(lambda: len(devices) == 0)


@contextlib.contextmanager
def forked_child() -> Iterator[int]:
    """Yield the process of a forked child that does nothing."""
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            signal.pause()
        os._exit(1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_locks() -> None:
    claim, reservation = Claim("GPU-0"), Reservation(["GPU-1"], 1)
    assert reservation.poll() == ["GPU-1"]
    with contextlib.ExitStack() as children:
        with _queue():
            children.enter_context(forked_child())
        claim.free()
        reservation.close()
        assert users(["GPU-0", "GPU-1"]) == {}
        again = Reservation(["GPU-0", "GPU-1"], 2)
        assert again.poll() == ["GPU-0", "GPU-1"]
        again.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_releases_a_lease_whose_lock_another_thread_held() -> None:
    with spare_pool(cpus(1)) as (devices, _):
        lease = devices.lease(timeout=HANG_SECONDS)
        held, proceed = threading.Event(), threading.Event()

        def hold() -> None:
            with devices._leases.lock:
                held.set()
                proceed.wait(HANG_SECONDS)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(HANG_SECONDS)
        process = os.fork()
        if not process:
            signal.alarm(int(HANG_SECONDS))
            with contextlib.suppress(BaseException):
                lease.release()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(process, 0)[1] == 0
        proceed.set()
        thread.join(HANG_SECONDS)
        lease.release()


def test_a_lease_that_must_not_wait_waits_for_the_lock_of_the_queue() -> None:
    with spare_pool(gpus("GPU-0")) as (devices, agents):
        leases: list[list[Device]] = []

        def lease() -> None:
            with devices.lease(timeout=0) as lease:
                leases.append(list(lease))

        with _queue():  # held by another job
            thread = threading.Thread(target=lease)
            thread.start()
            until(lambda: agents[0].reservations)
            time.sleep(0.1)
        thread.join(HANG_SECONDS)
        assert leases


def test_a_second_lease_gets_a_spare_device_while_the_first_one_is_joining() -> None:
    opening = Opening()
    with spare_pool([SpareDevice("cpu", "GPU-0", opening), *gpus("GPU-1")]) as (devices, _):
        thread = threading.Thread(target=join, args=(devices,))
        thread.start()
        assert opening.started.acquire(timeout=HANG_SECONDS)
        try:
            with devices.lease(timeout=HANG_SECONDS) as lease:
                assert [d.index for d in lease] == [1] and thread.is_alive()
        finally:
            opening.proceed.set()
            thread.join(HANG_SECONDS)
        assert len(devices) == 2


def test_an_idle_device_whose_agent_does_not_answer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a function holds the GIL."""
    is_asked, proceed = threading.Event(), threading.Event()
    dispatch = Agent._dispatch

    def slow_dispatch(self: Agent, peer: int, op: int, operands: list[object]) -> None:
        if is_slow:
            is_asked.set()
            proceed.wait(HANG_SECONDS)
        dispatch(self, peer, op, operands)

    is_slow: list[None] = []
    monkeypatch.setattr(Agent, "_dispatch", slow_dispatch)
    with spare_pool(cpus(1), idle=0.3) as (devices, _):
        # Leased, so that the idle device cannot leave before the call.
        with devices.lease(timeout=HANG_SECONDS) as (device,):
            x = device.zeros(4)
        assert x.copy_to_host().tolist() == [0] * 4
        is_slow.append(None)
        with monkeypatch.context() as short:
            short.setattr(spares, "LEAVE_SECONDS", 0.1)
            assert is_asked.wait(HANG_SECONDS)
            time.sleep(0.3)  # until the idle thread has given up
        is_slow.clear()
        proceed.set()
        assert device.lost is None and x.copy_to_host().tolist() == [0] * 4
        x.free()
        until(lambda: len(devices) == 0)


def test_a_device_whose_agent_does_not_answer_when_it_is_to_leave_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    proceed = threading.Event()
    dispatch = Agent._dispatch

    def slow_dispatch(self: Agent, peer: int, op: int, operands: list[object]) -> None:
        if op in (Op.INFO, Op.LEAVE):
            proceed.wait(HANG_SECONDS)
        dispatch(self, peer, op, operands)

    with spare_pool(cpus(1)) as (devices, _):
        (device,) = join(devices)
        monkeypatch.setattr(Agent, "_dispatch", slow_dispatch)
        with monkeypatch.context() as short, pytest.raises(errors.StallError):
            short.setattr(spares, "LEAVE_SECONDS", 0.1)
            device.leave()
        proceed.set()
        assert device.lost is None and works(device)
        device.leave(HANG_SECONDS)
        assert len(devices) == 0


def test_a_call_that_its_lane_has_only_just_taken_keeps_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    is_taken, proceed = threading.Event(), threading.Event()

    class Queue:
        """A queue whose thread is interrupted when it has taken a call of a function."""

        def __init__(self) -> None:
            self._queue: queue.SimpleQueue[tuple[object, ...] | None] = queue.SimpleQueue()
            self.put, self.qsize = self._queue.put, self._queue.qsize

        def get(self) -> tuple[object, ...] | None:
            item = self._queue.get()
            if item is not None and str(item[1]).startswith("call of"):
                is_taken.set()
                proceed.wait(HANG_SECONDS)
            return item

    monkeypatch.setattr(lane, "queue", SimpleNamespace(SimpleQueue=Queue, Empty=queue.Empty))
    with spare_pool(cpus(1)) as (devices, _):
        (device,) = join(devices)
        result = device.call(int)
        assert is_taken.wait(HANG_SECONDS)
        held = devices._leases.spares.leave(device)  # `Device.leave` synchronizes first
        proceed.set()
        assert held == "busy streams (1)" and result.get() == 0


class Untrimmed(Runtime):
    """A runtime whose unused memory cannot be returned."""

    def trim(self) -> None:
        raise RuntimeError("another library fails")


def test_a_device_leaves_although_its_memory_cannot_be_returned() -> None:
    with spare_pool([SpareDevice("cpu", "GPU-0", Untrimmed)]) as (devices, _):
        (device,) = join(devices)
        device.leave(HANG_SECONDS)
        assert len(devices) == 0
        until(lambda: not users(["GPU-0"]))
        (device,) = join(devices)
        assert works(device)


def test_an_agent_that_has_ended_has_no_claim() -> None:
    with spare_pool(gpus("GPU-0")) as (devices, _):
        join(devices)
        assert list(users(["GPU-0"])) == ["GPU-0"]
    until(lambda: not users(["GPU-0"]))


@pytest.mark.parametrize("kind", [cpus, lambda count: gpus(*(f"GPU-{k}" for k in range(count)))], ids=["cpus", "gpus"])
def test_devices_come_and_go_beside_running_calls(kind: Callable[[int], list[SpareDevice]]) -> None:
    with spare_pool(kind(4)) as (devices, agents):
        keeper = devices.lease(timeout=HANG_SECONDS)
        survivor = keeper[0].to_device(np.arange(1000))
        stop, failures = threading.Event(), []
        turns = [0] * 4

        def steady() -> None:
            total = keeper[0].zeros(1000, np.int64)
            while not stop.is_set():
                double[1000](total)
                assert np.array_equal(survivor.copy_to_host(), np.arange(1000))
                turns[3] += 1

        def lease(number: int) -> None:
            rng = random.Random(number)
            while not stop.is_set():
                with devices.lease(rng.randint(1, 3), timeout=HANG_SECONDS) as leased:
                    for device in leased:
                        x = device.to_device(survivor)
                        double[1000](x)
                        assert x[:10].copy_to_host().tolist() == [2 * k for k in range(10)]
                        x.free()
                for device in leased:
                    with contextlib.suppress(errors.PoolError):  # leased by another thread, or left
                        device.leave(timeout=0)
                turns[number] += 1

        def run(work: Callable[..., None], *args: int) -> None:
            try:
                work(*args)
            except BaseException as error:
                failures.append(error)
                stop.set()

        threads = [threading.Thread(target=run, args=args) for args in ((steady,), *((lease, k) for k in range(3)))]
        for thread in threads:
            thread.start()
        until(lambda: stop.is_set() or min(turns) > 2)
        stop.wait(1)
        stop.set()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert not failures and min(turns) > 2
        for device in list(devices):
            with contextlib.suppress(errors.PoolError):
                device.leave(HANG_SECONDS)
        assert list(devices) == list(keeper)
        until(lambda: len(agents[0].handles) == 1)


def test_ctrl_c_at_every_place_of_a_lease() -> None:
    names = ["GPU-0", "GPU-1"]
    with spare_pool(gpus(*names)) as (devices, agents):

        def call() -> None:
            with devices.lease(2, timeout=HANG_SECONDS) as lease:
                joined = list(lease)
            for device in joined:
                device.leave(HANG_SECONDS)

        call()
        with Interrupts(0) as counted:
            call()
        for at in np.unique(np.linspace(1, counted.points, 150).astype(int)).tolist():
            with Interrupts(at), contextlib.suppress(KeyboardInterrupt):
                call()
            for device in list(devices):
                device.leave(HANG_SECONDS)
            until(lambda: not users(names))
            until(lambda: not any(agent.reservations for agent in agents))
        call()
        assert devices._caller is not None
        until(lambda: not devices._caller.replies)  # type: ignore[union-attr]
