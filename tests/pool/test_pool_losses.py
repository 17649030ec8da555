"""Agents that exit during an operation: all other processes notice within seconds, and continue."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.threads import when_blocked
from tests.harness.until import HANG_SECONDS

from lab.emulated_device import EmulatedDevice
from warpwell import errors
from warpwell.pool.agent.agent import Agent, start
from warpwell.pool.agent.protocol import Op, pack
from warpwell.pool.caller import Caller
from warpwell.pool.device import Device
from warpwell.pool.devices import Devices
from warpwell.pool.reply import Reply
from warpwell.pool.transport.local_transport import LocalTransport, local_transports

SECONDS = HANG_SECONDS
"""So long everybody has to notice."""


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends waits half a second for calls that will never return."""
    monkeypatch.setattr("warpwell.pool.agent.agent.DRAIN_SECONDS", 0.5)


def nap(seconds: float) -> None:
    time.sleep(seconds)


def end(devices: Devices, index: int) -> None:
    """Let an agent be gone for all others, as a process that died."""
    transport: LocalTransport = devices._closing[index][1]
    transport.close(0.05)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(errors.PoolError) as caught:
        call()
    return caught.value


def test_answers_that_came_before_a_loss_are_taken() -> None:
    """Another thread reports the loss before the receiving thread has processed the answers."""
    own, peer = local_transports(2)
    caller = Caller(own)
    replies = [caller.connections[1].request(None, Op.INFO, Reply) for _ in range(3)]
    replies[0].when_set(lambda _: time.sleep(1.2))  # a busy machine may stop the receiving thread for as long
    for k in (0, 1):
        peer.send(0, pack(Op.REPLY.value, replies[k].number, k))
    own.lose(1, "it fell over")
    assert [replies[k].get("an answer", SECONDS) for k in (0, 1)] == [0, 1]
    with pytest.raises(errors.DeviceLostError, match="it fell over"):
        replies[2].get("an answer", SECONDS)
    with pytest.raises(errors.DeviceLostError, match="it fell over"):
        caller.connections[1].request(None, Op.INFO, Reply)
    caller.close()
    peer.close()


def test_an_answer_that_comes_with_a_loss_after_an_empty_receive_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    own, peer = local_transports(2)
    receive, reply_numbers = own.receive, [0]

    def receive_late(timeout: float) -> tuple[int, bytes] | None:
        received = receive(timeout)
        if received is None and reply_numbers[-1]:
            peer.send(0, pack(Op.REPLY.value, reply_numbers.pop(), 7))
            own.lose(1, "it fell over")
        return received

    monkeypatch.setattr(own, "receive", receive_late)
    caller = Caller(own)
    reply = caller.connections[1].request(None, Op.INFO, Reply)
    reply_numbers.append(reply.number)
    assert reply.get("an answer", SECONDS) == 7
    caller.close()
    peer.close()


def test_a_loss_is_told_beside_others_who_never_pause() -> None:
    own, talks, falls = local_transports(3)
    caller = Caller(own)
    reply = caller.connections[2].request(None, Op.INFO, Reply)
    over = threading.Event()

    def talk() -> None:
        while not over.is_set():
            talks.send(0, pack(Op.DONE.value, 7, 0))

    thread = threading.Thread(target=talk)
    thread.start()
    own.lose(2, "it fell over")
    try:
        with pytest.raises(errors.DeviceLostError, match="it fell over"):
            reply.get("an answer", SECONDS)
    finally:
        over.set()
        thread.join(HANG_SECONDS)
    caller.close()
    for transport in (talks, falls):
        transport.close()


class Fallen(EmulatedDevice):
    """A device whose driver answers no more, from some question on."""

    requests = answers = 0

    def memory_info(self) -> tuple[int, int]:
        self.requests += 1
        if self.requests > self.answers:
            raise OSError("it fell off the bus")
        return super().memory_info()


@pytest.mark.parametrize("answers", [0, 2])
def test_a_device_that_cannot_be_asked(answers: int) -> None:
    """The loss is reported at once, at the start or later, and calls that do not need the device continue."""
    own, peer = local_transports(2)
    device = Fallen()
    device.answers = answers
    thread = start(Agent(peer, device), "fallen")
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join, 10)
        if not answers:
            error = raised(lambda: Devices(own))
            assert isinstance(error, errors.AgentError) and "it fell off the bus" in str(error)
            return
        devices = stack.enter_context(Devices(own))
        while device.requests < answers:
            devices[0].memory_info()
        assert "it fell off the bus" in str(raised(devices[0].memory_info))
        assert devices[0].call(len, "abc").get(SECONDS) == 3


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03])
def test_an_agent_goes_in_the_middle_of_copies(delay: float) -> None:
    with Devices(targets=["cpu", "cpu", "cpu"]) as devices:
        buffers = [[device.full(200_000, 10.0 * device.index + k) for k in range(3)] for device in devices]
        devices.synchronize(30)
        timer = threading.Timer(delay, end, (devices, 1))
        timer.start()
        try:
            for k in range(200):
                target, source = k % 3, (k + 1 + k // 3 % 2) % 3
                buffers[target][k % 3].copy_from(buffers[source][(k + 1) % 3])
        except errors.DeviceLostError:
            pass
        timer.join()
        error = raised(lambda: [devices[1].synchronize(30), devices[1].synchronize(30)])
        assert isinstance(error, errors.DeviceLostError | errors.RemoteError)
        for device in (devices[0], devices[2]):
            _settle(device)
        x = devices[0].to_device(np.arange(100_000.0))
        assert np.array_equal(devices[2].to_device(x).copy_to_host(), np.arange(100_000.0))


def _settle(device: Device) -> None:
    """Take what is kept: copies with the lost agent failed."""
    try:
        device.synchronize(SECONDS)
    except errors.RemoteError as error:
        assert "copy between devices" in str(error)
    device.synchronize(SECONDS)


def test_everybody_who_waits_is_told() -> None:
    with Devices(targets=["cpu", "cpu"]) as devices:
        lost = devices[0]
        x = lost.zeros(300_000)
        stream = lost.stream()
        lost.synchronize(30)
        lost.call(nap, 20.0)
        event = lost.default_stream.record()
        result = lost.call(nap, 0.0)
        calls: list[Callable[[], object]] = [
            result.get,
            event.synchronize,
            lambda: event.done and event.synchronize(),
            lost.synchronize,
            lambda: x.copy_to_host(),
            lambda: x.copy_from(np.ones(300_000)),
            lambda: fill(lost),
            lost.query_agent,
            lambda: large.copy_from(np.ones(2_000_000)),
        ]
        large = lost.empty(2_000_000, stream=stream)
        found: list[BaseException | None] = [None] * len(calls)
        start = time.monotonic()

        def wait(k: int) -> None:
            try:
                while time.monotonic() < start + 20:
                    calls[k]()
            except BaseException as error:
                found[k] = error

        def fill(device: Device) -> None:
            for _ in range(10_000):  # more calls than may be in flight
                x.fill(1.0)

        threads = [threading.Thread(target=wait, args=(k,)) for k in range(len(calls))]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        end(devices, 0)
        for thread in threads:
            thread.join(SECONDS)
        assert [type(error) for error in found] == [errors.DeviceLostError] * len(calls)
        assert {error.device for error in found if isinstance(error, errors.DeviceLostError)} == {0}


def test_a_copy_that_one_side_cannot_do_is_told_by_the_leading_one() -> None:
    with Devices(targets=["cpu", "cpu"]) as devices:
        unbacked, backed = devices[0].empty(1 << 50, np.uint8), devices[1].zeros(1 << 20, np.uint8)
        part = unbacked[: 1 << 20]
        with pytest.raises(errors.RemoteError, match="allocation"):
            devices[0].synchronize(30)
        # If the stream of the failed side leads, the copy is skipped, like any call that uses the missing allocation.
        for stream, expected in ((None, 1), (devices[1].stream(), 2), (devices[0].stream(), 0)):
            backed.copy_from(part, stream)
            part.copy_from(backed, stream)
            failures = 0
            for device in devices:
                try:
                    device.synchronize(SECONDS)
                except errors.RemoteError as error:
                    failures += 1 + len([n for n in error.__notes__ if n.startswith("then: ")])
                    assert "has no memory for" in str(error)
            assert failures == expected
        backed.fill(3)
        assert (devices[0].to_device(backed).copy_to_host() == 3).all()


def test_ctrl_c_gives_a_copy_up(tmp_path: Path) -> None:
    with Devices(targets=["cpu"]) as devices:
        x = devices[0].zeros(500_000)
        devices[0].synchronize(30)
        with gate_file(tmp_path) as gate:
            devices[0].call(wait_for_file, str(gate))
            with pytest.raises(KeyboardInterrupt):
                when_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
                x.copy_to_host()
        devices[0].synchronize(SECONDS)
        assert not x.copy_to_host().any()
