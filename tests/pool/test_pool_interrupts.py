"""Ctrl-C and signal handlers in the middle of calls to a pool, and other things that come at odd moments."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.pool_agents import pool_of
from tests.harness.threads import run_threads, when_blocked
from tests.harness.until import HANG_SECONDS

from warpwell import errors
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.protocol import Op
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.devices import Devices
from warpwell.pool.host_memory import pinned_empty
from warpwell.pool.reply import Reply


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.fixture
def agents() -> Iterator[tuple[Devices, list[Agent]]]:
    with pool_of(Runtime() for _ in range(2)) as made:
        yield made


@pytest.fixture
def devices(agents: tuple[Devices, list[Agent]]) -> Devices:
    return agents[0]


@pytest.mark.parametrize("op", [Op.SOURCE, Op.PULL])
def test_ctrl_c_between_the_calls_of_a_copy(devices: Devices, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after the last of them: no device waits for a call that is never sent."""
    a, b = (device.to_device(np.arange(1000) + device.index) for device in devices)
    for connection in devices[0].caller.connections.values():
        post = connection.post_locked

        def interrupted(channel: Any, posted: Op, *operands: Any, post: Any = post, **options: Any) -> int:
            if posted == op:
                signal.raise_signal(signal.SIGINT)
            number: int = post(channel, posted, *operands, **options)
            return number

        monkeypatch.setattr(connection, "post_locked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        devices[1].copy(b, a)
    monkeypatch.undo()
    for device in devices:
        device.synchronize(30)
    assert np.array_equal(b.copy_to_host(), np.arange(1000))


def test_a_signal_handler_in_the_middle_of_a_call_is_refused(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    device, transport = devices[0], devices[0].caller.transport
    send = transport.send

    def interrupted(peer: int, *parts: bytes) -> None:
        monkeypatch.setattr(transport, "send", send)
        signal.raise_signal(signal.SIGUSR1)
        send(peer, *parts)

    def handler(*_: object) -> None:
        device.synchronize(30)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(transport, "send", interrupted)
        with pytest.raises(errors.PoolError, match="signal handler"):
            device.call(nap, 0.0)
        signal.raise_signal(signal.SIGUSR1)  # the handler may use the device between calls
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert device.call(nap, 0.0).get(30) == 0


@pytest.mark.parametrize("op", [Op.SOURCE, Op.PULL])
def test_a_signal_handler_copies_in_the_middle_of_a_copy(
    devices: Devices, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs after the calls of the copy: neither device waits for the other."""
    a, b = (device.to_device(np.arange(1000) + device.index) for device in devices)
    c, d = (device.empty(1000, a.dtype) for device in devices)
    for connection in devices[0].caller.connections.values():
        post = connection.post_locked

        def interrupted(channel: Any, posted: Op, *operands: Any, post: Any = post, **options: Any) -> int:
            if posted == op:
                monkeypatch.undo()
                signal.raise_signal(signal.SIGUSR1)
            number: int = post(channel, posted, *operands, **options)
            return number

        monkeypatch.setattr(connection, "post_locked", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: devices[0].copy(c, b))
    try:
        devices[1].copy(d, a)
    finally:
        signal.signal(signal.SIGUSR1, before)
    for device in devices:
        device.synchronize(30)
    assert np.array_equal(d.copy_to_host(), np.arange(1000))
    assert np.array_equal(c.copy_to_host(), np.arange(1000) + 1)


def test_threads_that_copy_between_the_same_devices(devices: Devices) -> None:
    """Both streams have the copies in one order, or each would wait for the other."""
    a, b = (device.to_device(np.arange(100) + device.index) for device in devices)
    c, d = (device.empty(100, a.dtype) for device in devices)

    def copy_often(to: Any, source: Any) -> None:
        for _ in range(200):
            to.copy_from(source)

    run_threads(copy_often, [(c, b), (d, a)] * 2)
    for device in devices:
        device.synchronize(30)
    assert np.array_equal(c.copy_to_host(), np.arange(100) + 1) and np.array_equal(d.copy_to_host(), np.arange(100))


@pytest.mark.parametrize("make", [np.zeros, pinned_empty])
def test_an_array_is_left_alone_after_ctrl_c(devices: Devices, make: Any, tmp_path: Path) -> None:
    device = devices[0]
    x, out = device.to_device(np.arange(100_000.0)), make(100_000)
    out[:] = 0
    x.copy_to_host(out)
    out[:] = -1
    with gate_file(tmp_path) as gate:
        slow = device.call(wait_for_file, str(gate))
        with pytest.raises(KeyboardInterrupt):
            when_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
            x.copy_to_host(out)
    slow.get(HANG_SECONDS)
    device.synchronize(HANG_SECONDS)
    assert (out == -1).all()


def test_ctrl_c_ends_a_wait_for_an_event_on_a_full_stream(devices: Devices, tmp_path: Path) -> None:
    """No call of the stream completes before the interrupt, so the wait for a place in its window must end by it."""
    device, peer = devices
    event, x, stream = peer.default_stream.record(), device.zeros(1), device.stream()
    with gate_file(tmp_path) as gate:
        slow = device.call(wait_for_file, str(gate), stream=stream)
        while not stream.channel.is_full:
            x.fill(1, stream)
        with pytest.raises(KeyboardInterrupt):
            when_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
            stream.wait(event)
    slow.get(HANG_SECONDS)
    stream.wait(event)
    stream.synchronize(HANG_SECONDS)
    assert x.copy_to_host().tolist() == [1]


def test_a_reply_that_several_wait_for() -> None:
    reply, found = Reply(), []
    threads = [threading.Thread(target=lambda: found.append(reply.get("it", 30))) for _ in range(4)]
    for thread in threads:
        thread.start()
    reply.when_set(lambda _: 1 / 0)  # the answering thread continues
    reply.set(7)
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert found == [7] * 4 and reply.done and reply.get("it") == 7
    for seconds in (0.0, -0.5, -1.0):
        with pytest.raises(errors.StallError):
            Reply().get("it", seconds)


def test_a_reply_is_there_when_ctrl_c_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Reply()

    class InterruptingLock:
        """A lock that is interrupted just after it was taken, when the reply arrived."""

        def __init__(self, lock: Any) -> None:
            self.lock, self.release = lock, lock.release

        def acquire(self, timeout: float) -> None:
            threading.Thread(target=reply.set, args=(7,)).start()
            assert self.lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    lock = reply._arrived
    reply._arrived = InterruptingLock(lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        reply.get("it", 30)
    reply._arrived = lock
    assert reply.get("it", HANG_SECONDS) == 7


def test_streams_that_begin_and_end_while_their_device_is_synchronized(agents: tuple[Devices, list[Agent]]) -> None:
    (device, _), (agent, _) = agents
    interval = sys.getswitchinterval()

    def begin_and_end() -> None:
        for _ in range(200):
            with device.stream() as stream:
                results.append(device.call(nap, 0.0, stream=stream))

    results: list[Any] = []
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=begin_and_end)
    try:
        thread.start()
        while thread.is_alive():
            copied = list(results)
            device.synchronize(30)
            assert all(result.done for result in copied)
            del results[: len(copied)]
    finally:
        sys.setswitchinterval(interval)
        thread.join(HANG_SECONDS)
    device.synchronize(30)
    assert list(agent.lanes) == [0]


def test_a_method_of_an_object_that_was_freed_is_answered(devices: Devices) -> None:
    connection = devices[0].connection
    reply = connection.request(connection.channels[0], Op.METHOD, 10**9, "anything", Reply, (), b"")
    with pytest.raises(errors.RemoteError, match="was it freed"):
        reply.get("it", 30)


def test_a_copy_with_a_lost_agent_fails_at_once(agents: tuple[Devices, list[Agent]]) -> None:
    devices, both = agents
    a, b = (device.to_device(np.arange(1000)) for device in devices)
    stream = devices[0].stream()
    both[0].transport.lose(2, "as a test says")
    for to, source in ((b, a), (a, b)):
        to.copy_from(source, stream)
        with pytest.raises(errors.RemoteError, match="as a test says"):
            stream.synchronize(30)
    assert not both[0].outgoing and not both[0].incoming


def test_what_stays_on_its_device_is_not_copied(devices: Devices) -> None:
    x = devices[0].zeros(3)
    for item in (x, devices[0].default_stream, devices[0].default_stream.record()):
        with pytest.raises(TypeError, match="stays"):
            copy.copy(item)
    assert not x.copy_to_host().any()
