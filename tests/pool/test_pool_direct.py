"""Copies between devices of one host go from memory to memory; memory stays until no process can write to it."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness.pool_agents import Pool, pool_of
from tests.harness.pool_programs import run
from tests.harness.until import HANG_SECONDS, until

from lab.emulated_device import EmulatedDevice
from warpwell import errors
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.peer_access import HostAccess
from warpwell.pool.agent.peer_memory import PeerMemory
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.copies import _may_write


def late_device(k: int) -> EmulatedDevice:
    """Return a device that has not done anything when a call returns."""
    return EmulatedDevice(5e9, jitter=1e-3, seed=k)


@pytest.fixture
def agents() -> Iterator[Pool]:
    with pool_of(Runtime() for _ in range(2)) as made:
        yield made


def settled(agents: list[Agent], seconds: float = HANG_SECONDS) -> dict[str, int]:
    """Wait until agents hold nothing for others; return what they do."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        counts: dict[str, int] = {"copies": sum(len(a.incoming) + len(a.outgoing) for a in agents)}
        for agent in agents:
            for name, count in agent.sharing.count().items():
                counts[name] = counts.get(name, 0) + count
        if not any(counts.values()) or time.monotonic() > end:
            return counts
        time.sleep(0.01)


def transfers(agents: list[Agent]) -> int:
    return sum(
        agent.transport.statistics()[peer]["transfers"] for agent in agents for peer in agent.transport.peers if peer
    )


NOTHING = {"copies": 0, "held": 0, "ending": 0, "open": 0}


@pytest.mark.parametrize("stream_name", ["default", "of the source", "of the destination"])
@pytest.mark.parametrize("items", [1, 3, 100_003])
def test_nothing_is_sent(agents: Pool, stream_name: str, items: int) -> None:
    (first, two), both = agents
    data = np.arange(items + 5)
    a, b = first.to_device(data), two.zeros(items + 9, data.dtype)
    streams = {"default": None, "of the source": first.stream(), "of the destination": two.stream()}
    for device in (first, two):
        device.synchronize(30)
    two.copy(b[7 : 7 + items], a[2 : 2 + items], stream=streams[stream_name])
    for device in (first, two):
        device.synchronize(30)
    found = b.copy_to_host()
    assert np.array_equal(found[7 : 7 + items], data[2 : 2 + items]) and not found[:7].any()
    assert transfers(both) == 0
    del a, b
    assert settled(both) == NOTHING, "memory that peers had opened is freed"


def test_it_can_be_switched_off(agents: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, two), both = agents
    a = first.to_device(np.arange(100_000))
    two.transfers.direct = False
    assert np.array_equal(two.to_device(a).copy_to_host(), np.arange(100_000))
    assert transfers(both) == 2


@pytest.mark.parametrize("refused", ["address", "access", "open"])
@pytest.mark.parametrize("leader", [0, 1])
def test_data_are_sent_where_memory_cannot_be_reached(
    agents: Pool, refused: str, leader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, both = agents

    def no(*_: object) -> None:
        raise OSError("no way")

    if refused == "address":
        monkeypatch.setattr(Runtime, "peer_address", lambda self: None)
    elif refused == "access":
        monkeypatch.setattr(Runtime, "peer_access", no)
    else:
        monkeypatch.setattr(HostAccess, "open", no)
    offer, offered = PeerMemory.offer, []
    monkeypatch.setattr(PeerMemory, "offer", lambda *arguments: offered.append(offer(*arguments)) or offered[-1])
    stream = devices[leader].stream()
    a, b = devices[0].to_device(np.arange(100_000)), devices[1].zeros(100_000, np.int64)
    for device in devices:
        device.synchronize(30)
    for _ in range(3):
        devices[1].copy(b, a, stream=stream)
        stream.synchronize(30)
    assert np.array_equal(b.copy_to_host(), np.arange(100_000))
    assert transfers(both) == 6
    times = {"address": 0, "access": 1, "open": 3}[refused]
    assert sum(made is not None for made in offered) == times, "without a direct path, nothing is offered again"
    assert list(both[0].info()["unreachable"].values()) == ["no way"] * (refused == "access")
    del a, b
    assert settled(both) == NOTHING


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("leader", [None, 0, 1])
def test_a_side_without_memory_is_told_and_the_streams_go_on(
    agents: Pool, side: int, leader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, both = agents
    good = devices[1 - side].to_device(np.arange(9000))
    devices[1 - side].synchronize(30)

    def full(nbytes: int) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(both[side].runtime, "allocate", full)
    bad = devices[side].empty(9000, np.int64)
    stream = None if leader is None else devices[leader].stream()
    to, source = (bad, good) if side else (good, bad)
    devices[1].copy(to, source, stream=stream)
    found = []
    for device in devices:
        try:
            device.synchronize(30)
        except errors.RemoteError as error:
            found.append(str(error))
    assert found and all("full" in message for message in found)
    monkeypatch.undo()
    assert settled(both)["copies"] == settled(both)["held"] == 0
    x = devices[0].to_device(np.arange(9000))
    y = devices[1].to_device(x)
    assert np.array_equal(y.copy_to_host(), np.arange(9000))


class Shuffled:
    """A transport that reorders messages of different senders, but not of one sender."""

    def __init__(self, transport: Any, seed: int) -> None:
        self._transport = transport
        self._random = random.Random(seed)
        self._waiting: dict[int, deque[bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, timeout: float) -> Any:
        got = self._transport.receive(timeout if not any(self._waiting.values()) else 0.0)
        while got is not None:
            self._waiting.setdefault(got[0], deque()).append(got[1])
            got = self._transport.receive(self._random.choice([0.0, 1e-3]))
        senders = [peer for peer, waiting in self._waiting.items() if waiting]
        if not senders:
            return None
        peer = self._random.choice(senders)
        return peer, self._waiting[peer].popleft()


@pytest.fixture
def shuffled(request: pytest.FixtureRequest) -> Iterator[Pool]:
    count, seed, make = request.param
    with pool_of(map(make, range(count)), lambda transport, k: Shuffled(transport, seed + k)) as made:
        yield made


@pytest.mark.parametrize(
    "shuffled", [(3, 1, late_device), (2, 2, lambda k: Runtime())], indirect=True, ids=["late", "cpu"]
)
def test_random_programs_in_any_order_of_messages(shuffled: Pool) -> None:
    devices, both = shuffled
    run(list(devices), 6, 7)
    assert settled(both) == NOTHING


def give_up(agent: Agent) -> None:
    """Fail all copies that an agent pulls."""
    for copy in list(agent.incoming.values()):
        copy.fail(errors.PoolError("given up"))


@pytest.mark.parametrize("shuffled", [(2, 3, late_device)], indirect=True)
def test_copies_that_fail_at_any_moment(shuffled: Pool) -> None:
    """Both streams continue and no memory is kept, in every state of the two sides."""
    devices, both = shuffled
    chance = random.Random(5)
    streams: list[Any] = [None, devices[0].stream(), devices[1].stream()]
    data = np.arange(20_000)
    for _ in range(60):
        a, b = devices[0].to_device(data), devices[1].empty(20_000, np.int64)
        devices[1].copy(b, a, stream=chance.choice(streams))
        time.sleep(chance.choice([0.0, 1e-4, 1e-3, 5e-3]))
        give_up(both[1])
        for device in devices:
            with contextlib.suppress(errors.RemoteError):
                device.synchronize(30)
        del a, b
    for stream in streams[1:]:
        with contextlib.suppress(errors.RemoteError):
            stream.synchronize(30)
    assert settled(both) == NOTHING
    assert np.array_equal(devices[1].to_device(devices[0].to_device(data)).copy_to_host(), data)


@pytest.mark.parametrize("leader", [None, 1])
def test_a_copy_that_fails_writes_over_nothing_later(
    agents: Pool, leader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, both = agents
    real = HostAccess.put
    started, proceed, written = threading.Event(), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        started.set()
        proceed.wait(HANG_SECONDS)
        real(*arguments)
        written.set()

    monkeypatch.setattr(HostAccess, "put", slow)
    a, b = devices[0].to_device(np.arange(9000)), devices[1].zeros(9000, np.int64)
    stream = None if leader is None else devices[leader].stream()
    for device in devices:
        device.synchronize(30)
    devices[1].copy(b, a, stream=stream)
    assert started.wait(HANG_SECONDS)
    give_up(both[1])
    b.fill(7, stream=stream)
    threading.Timer(0.3, proceed.set).start()
    with pytest.raises(errors.RemoteError, match="given up"):
        (stream or devices[1].default_stream).synchronize(HANG_SECONDS)
    assert written.wait(HANG_SECONDS)
    assert (b.copy_to_host(stream=stream) == 7).all()


@pytest.mark.parametrize("leader", [None, 0])
def test_a_receiver_is_notified_of_a_sender_that_failed_early(
    agents: Pool, leader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, both = agents
    a, b = devices[0].to_device(np.arange(9000)), devices[1].zeros(9000, np.int64)
    streams = [device.default_stream if leader is None else device.stream() for device in devices]
    for device in devices:
        device.synchronize(30)
    release = threading.Event()
    for k in (0, 1) if leader is None else (leader,):  # hold the lanes, so that they do not start the copy
        both[k].lane(streams[k].channel.number).put(0, "wait", 0, 0, lambda lane: release.wait(HANG_SECONDS))
    devices[1].copy(b, a, stream=None if leader is None else streams[leader])
    assert until(lambda: len(both[0].outgoing) == 1)

    def fail(stream: Any) -> None:
        monkeypatch.undo()
        raise errors.KernelError("given up")

    monkeypatch.setattr(both[0].runtime, "synchronize", fail)
    release.set()
    found = []
    for device, stream in zip(devices, streams, strict=True):
        for each in (stream, device.default_stream):
            try:
                each.synchronize(HANG_SECONDS)
            except errors.RemoteError as error:
                found.append(str(error))
    assert ["given up" in text for text in found] == [True]
    del a, b
    assert settled(both) == NOTHING


@pytest.mark.parametrize("leader", [None, 0])
def test_nothing_is_written_after_the_receiver_failed(
    agents: Pool, leader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, both = agents
    real, started, proceed = HostAccess.open, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        started.set()
        proceed.wait(HANG_SECONDS)
        return real(*arguments)

    monkeypatch.setattr(HostAccess, "open", slow)
    a, b = devices[0].to_device(np.arange(9000)), devices[1].zeros(9000, np.int64)
    stream = None if leader is None else devices[leader].stream()
    for device in devices:
        device.synchronize(30)
    devices[1].copy(b, a, stream=stream)
    assert started.wait(HANG_SECONDS)
    (copy,) = both[0].outgoing.values()
    give_up(both[1])
    assert until(lambda: copy.failure is not None)
    proceed.set()
    for each in (devices[0], devices[1], stream):
        with contextlib.suppress(errors.RemoteError):
            if each is not None:
                each.synchronize(30)
    assert not b.copy_to_host().any()


def test_a_copy_that_the_destination_cannot_be_sent_is_forgotten(agents: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, both = agents
    a, b = devices[0].to_device(np.arange(9000)), devices[1].zeros(9000, np.int64)
    connection = devices[1].connection
    send = connection.transport.send

    def full(peer: int, *parts: bytes) -> None:
        if peer == connection.rank:
            raise errors.StallError("no room", seconds=60)
        send(peer, *parts)

    monkeypatch.setattr(connection.transport, "send", full)
    with pytest.raises(errors.StallError):
        devices[1].copy(b, a)
    monkeypatch.undo()
    a.fill(3)
    devices[1].copy(b, a)
    assert (b.copy_to_host() == 3).all()
    del a, b
    assert settled(both) == NOTHING


def test_a_sender_that_fails_writes_no_more_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(EmulatedDevice(jitter=0.5, seed=k) for k in range(2)) as (devices, both):
        a, b = devices[0].to_device(np.arange(1, 9000)), devices[1].zeros(8999, np.int64)
        for device in devices:
            device.synchronize(30)
        monkeypatch.setattr(both[0].runtime, "reach", lambda mark, timeout: False)
        monkeypatch.setattr(both[0].runtime.chance, "uniform", lambda low, high: high)
        devices[1].copy(b, a)
        with pytest.raises(errors.RemoteError, match="exceeded"):
            devices[1].synchronize(30)
        b.fill(7)
        devices[1].synchronize(30)
        time.sleep(0.8)
        assert (b.copy_to_host() == 7).all()
        with contextlib.suppress(errors.RemoteError):
            devices[0].synchronize(30)


def test_who_may_write() -> None:
    def device(**properties: Any) -> Any:
        transport = SimpleNamespace(can_share_memory=properties.pop("shares", True))
        transfers = SimpleNamespace(direct=properties.pop("direct", True))
        return SimpleNamespace(
            **{"host": "a", "target": "cuda", **properties}, transport=transport, transfers=transfers
        )

    assert _may_write(device(), device())
    variants: list[dict[str, Any]] = [{"host": "b"}, {"target": "cpu"}, {"direct": False}, {"shares": False}]
    assert not any(_may_write(device(), device(**variant)) for variant in variants)


def test_agents_hear_who_is_lost(agents: Pool) -> None:
    (first, two), both = agents
    b = two.to_device(first.to_device(np.arange(1000)))
    two.synchronize(30)
    first.synchronize(30)
    assert both[0].sharing.count()["open"] == 1
    both[0].transport.lose(2, "gone")
    assert until(lambda: both[0].sharing.count()["open"] == 0)
    assert np.array_equal(b.copy_to_host(), np.arange(1000))


def test_a_destination_that_is_freed_at_once_stays_until_the_copy_is_over() -> None:
    with pool_of(map(late_device, range(2))) as (devices, both):
        a = devices[0].to_device(np.arange(50_000))
        for _ in range(30):
            b = devices[1].empty(50_000, np.int64)
            devices[1].copy(b, a)
            b.free()
            c = devices[1].zeros(50_000, np.int64)  # c may get the memory of b
            assert not c.copy_to_host().any()
        del a, b, c
        assert settled(both) == NOTHING


def test_agents_that_end_leave_no_threads() -> None:
    before = threading.active_count()
    with pool_of(Runtime() for _ in range(3)) as (devices, _):
        a = devices[0].to_device(np.arange(1000))
        copies = [device.to_device(a) for device in devices[1:]]
        for device in devices:
            device.synchronize(30)
    del a, copies
    assert until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("method", ["peer_address", "export"])
def test_data_are_sent_where_memory_cannot_be_offered(
    agents: Pool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, two), both = agents

    def no(*_: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(Runtime, method, no)
    data = np.arange(100_000)
    assert np.array_equal(two.to_device(first.to_device(data)).copy_to_host(), data)
    assert transfers(both) == 2


def test_a_sender_without_a_way_keeps_nothing_of_its_copies(agents: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, two), both = agents

    def no(*_: object) -> None:
        raise OSError("no way")

    monkeypatch.setattr(Runtime, "peer_access", no)
    sources = []
    for _ in range(5):
        a, b = first.to_device(np.arange(9000)), two.empty(9000, np.int64)
        first.synchronize(30)
        sources.append(weakref.ref(list(both[0].handles.values())[-1].memory))
        two.copy(b, a)
        two.synchronize(30)
        del a, b
    first.synchronize(30)
    assert until(lambda: (gc.collect(), not any(source() for source in sources))[1])


def test_many_blocks_are_closed_by_few_threads(agents: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, two), both = agents
    a = first.to_device(np.arange(1000))
    buffers = [two.to_device(a) for _ in range(500)]
    for device in (first, two):
        device.synchronize(60)
    before, proceed = threading.active_count(), threading.Event()
    monkeypatch.setattr(HostAccess, "close", lambda self, opened: proceed.wait(HANG_SECONDS))
    del buffers
    assert until(lambda: both[0].counts.get("RELEASE", 0) == 500)
    assert threading.active_count() <= before + 3
    proceed.set()
    assert settled(both) == NOTHING
