"""Large arrays among arguments and results of calls: they go as copies do, and arrive as they were at the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness.pool_agents import pool_of
from tests.harness.until import HANG_SECONDS, until

from warpwell import errors
from warpwell.pool import copies
from warpwell.pool.agent import code
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.arguments import answer
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.devices import Devices
from warpwell.pool.transport.local_transport import local_transports
from warpwell.pool.transport.transport import Tags

ITEMS = 200_000
NUMBERS = np.arange(ITEMS, dtype=np.int64)
RECORDS = np.zeros(ITEMS, [("x", "f4"), ("n", "i8")])
RECORDS["n"] = NUMBERS


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Devices, list[Agent]]]:
    with pool_of(Runtime() for _ in range(2)) as made:
        yield made


@pytest.fixture
def devices(agents: tuple[Devices, list[Agent]]) -> Iterator[Devices]:
    yield agents[0]
    for device in agents[0]:
        device.synchronize(30)
    until(lambda: not any(agent.bulk or agent.handles for agent in agents[1]))


def same(value: Any) -> Any:
    return value


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def describe(array: Any) -> Any:
    return type(array), array.flags.c_contiguous, array.flags.f_contiguous, array.flags.writeable


class Counter:
    """Has an array that it changes, and returns."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def add(self) -> Any:
        self.values += 1
        return self.values

    def take(self, values: Any) -> None:
        self.values = values


def counter(values: Any) -> Counter:
    return Counter(values)


@pytest.mark.parametrize(
    "array",
    [
        NUMBERS,
        NUMBERS[::2],
        NUMBERS.reshape(100, -1).T,
        np.asfortranarray(np.ones((300, 400, 3))),
        RECORDS,
        RECORDS["n"],
        np.frombuffer(NUMBERS.tobytes(), ">i8"),
        NUMBERS.astype("M8[s]"),
        np.ones((ITEMS, 1, 0, 3)),
    ],
    ids=lambda a: f"{a.dtype.kind}{a.shape}",
)
def test_arrays_arrive_as_they_are(devices: Devices, array: Any) -> None:
    back = devices[0].call(same, array).get(30)
    assert np.array_equal(back, array) and (back.dtype, back.shape) == (array.dtype, array.shape)
    kind, c, f, writeable = devices[1].call(describe, array).get(30)
    assert (kind, writeable) == (np.ndarray, array.flags.writeable)
    assert f if array.flags.f_contiguous else c


def test_arrays_within_other_things_and_twice(devices: Devices) -> None:
    value = {"a": [NUMBERS, NUMBERS], "b": (3, NUMBERS[:5]), "buffer": devices[0].zeros(4)}
    back = devices[0].call(same, value).get(30)
    assert back["a"][0] is back["a"][1] and np.array_equal(back["a"][0], NUMBERS)
    assert back["b"][1].tolist() == [0, 1, 2, 3, 4] and back["buffer"].tolist() == [0] * 4
    del value


def test_a_result_is_the_same_object_each_time(devices: Devices) -> None:
    result = devices[0].call(same, NUMBERS)
    first = result.get(30)
    first[0] = -1
    assert result.done and result.get() is first


def test_arrays_may_change_when_the_call_returns(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = devices[0].call(nap, 0.2)
    array = NUMBERS.copy()
    result = devices[0].call(same, array)
    array[:] = 0
    # Lower the limit: larger arguments are sent in place, without a copy.
    monkeypatch.setattr(copies, "MAX_PRIVATE_ARGUMENT_BYTES", 1000)
    changing = NUMBERS.copy()
    later = devices[0].call(same, changing)
    changing[:] = 0
    assert slow.get(30) == 0.2
    assert np.array_equal(result.get(30), NUMBERS) and np.array_equal(later.get(30), NUMBERS)


def test_objects_of_an_agent_may_change_what_they_have_returned(devices: Devices) -> None:
    made = devices[0].create(f"{__name__}:counter", NUMBERS)
    results = [made.call("add") for _ in range(5)]
    for k, result in enumerate(results):
        assert np.array_equal(result.get(30), NUMBERS + k + 1)
    made.call("take", NUMBERS[::-1]).get(30)
    assert made.attribute("values")[0] == ITEMS - 1
    made.free()
    until(lambda: not devices[0].query_agent()["buffers"])


def test_what_is_too_large_for_a_message_is_refused_before_anything_is_sent(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 1 << 20)
    channel = devices[0].default_stream.channel
    devices[0].synchronize(30)
    before = channel.sequence
    with pytest.raises(errors.ArgumentError, match=r"without large NumPy arrays.*numpy\.asarray"):
        devices[0].call(len, b"x" * (2 << 20))
    assert channel.sequence == before and not channel.is_full
    with pytest.raises(errors.RemoteError, match="without large NumPy arrays"):
        devices[0].call(bytes, 2 << 20).get(30)
    assert devices[0].call(same, np.ones(1 << 20)).get(30).sum() == 1 << 20


def test_a_call_that_cannot_be_sent_leaves_room_for_others(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, transport = devices[0].default_stream.channel, devices[0].caller.transport
    send = transport.send

    def full(peer: int, *message: bytes) -> None:
        raise errors.StallError("it takes nothing", seconds=0)

    monkeypatch.setattr(transport, "send", full)
    for _ in range(3):
        with pytest.raises(errors.StallError):
            devices[0].call(len, b"x" * (40 << 20))
    monkeypatch.setattr(transport, "send", send)
    assert not channel.is_full and devices[0].call(len, b"xy").get(30) == 2


def test_no_room_for_an_argument_or_a_result(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def small(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(np, "empty", small)
    result = devices[0].call(same, NUMBERS)
    with pytest.raises(errors.RemoteError, match="no room"):
        result.get(30)
    monkeypatch.setattr(np, "empty", empty)
    devices[0].synchronize(30)  # no further error is raised
    monkeypatch.setattr(np, "empty", small)
    with pytest.raises(MemoryError):
        devices[0].call(np.ones, ITEMS).get(30)
    monkeypatch.setattr(np, "empty", empty)
    assert devices[0].call(np.ones, ITEMS).get(30).sum() == ITEMS


def test_a_lost_agent_ends_a_result_that_is_on_its_way() -> None:
    with pool_of([Runtime()]) as (devices, (agent,)):
        put = agent.transport.put
        started = threading.Event()

        def never(peer: int, tag: int, memory: Any) -> Any:
            started.set()
            transfer = put(peer, tag + 1, memory)  # to another tag: the receiver never takes this transfer
            transfer.tag = tag
            return transfer

        agent.transport.put = never  # type: ignore[method-assign]
        result = devices[0].call(np.ones, ITEMS)
        assert started.wait(HANG_SECONDS)
        with pytest.raises(errors.StallError):
            result.get(0.1)
        devices[0].caller.transport.lose(1, "as a test says")
        with pytest.raises(errors.DeviceLostError):
            result.get(30)


def test_lanes_that_answer_at_the_same_time_keep_each_others_arrays() -> None:
    """While one looks which answers are over, another one's is noted: neither fails, and both can be given up."""
    program_end, agent_end = local_transports(2)
    running = SimpleNamespace(done=False)
    agent: Any = SimpleNamespace(
        application=0, transport=agent_end, tags=Tags(1), answers={}, tell=lambda *message: None
    )

    class Over:
        @property
        def done(self) -> bool:
            agent.answers[3] = [running]  # as if another lane had answered
            return True

    agent.answers |= {1: [Over()], 2: [running]}
    answer(agent, 4, NUMBERS)
    assert set(agent.answers) == {2, 3, 4}
    agent_end.close(0)
    program_end.close(0)
