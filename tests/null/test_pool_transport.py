"""Transports within a process, regions, and what is common to all transports."""

import contextlib
import threading
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwell.errors import ArgumentError, ClosedError, DeviceLostError, PoolVersionError
from warpwell.pool.options import silence_from_environment
from warpwell.pool.transport import mpi_words
from warpwell.pool.transport.bulk import CANCELLED, Transfer
from warpwell.pool.transport.handshake import Hello
from warpwell.pool.transport.local_transport import LocalTransport, local_pair, local_transports
from warpwell.pool.transport.mpi_native import NativeProgress
from warpwell.pool.transport.signal import Signal
from warpwell.pool.transport.stream_framing import HEADER, Incoming, Outgoing
from warpwell.pool.transport.tags import Tags
from warpwell.pool.transport.transport import Region
from warpwell.testing.transports import TransportConformance


class TestLocalTransport(TransportConformance):
    def make(self, count: int) -> list[LocalTransport]:
        return local_transports(count)


def test_a_lost_peer_fails_what_waits_for_it() -> None:
    first, second = local_pair()
    get = first.get(1, 4, Region.over(np.zeros(8, np.uint8)))
    told: list[tuple[int, str]] = []
    first.on_lost(lambda peer, reason: told.append((peer, reason)))
    threading.Timer(0.05, first.lose, (1, "it fell over")).start()
    with pytest.raises(DeviceLostError, match="it fell over"):
        get.wait(1, 5.0)
    with pytest.raises(DeviceLostError, match="rank 1 is gone: it fell over"):
        first.send(1, b"")
    assert get.done and told == [(1, "it fell over")] and first.lost() == {1: "it fell over"}
    first.close()
    second.close()


def test_a_sender_that_waits_hears_of_the_loss() -> None:
    first, second = local_pair()
    threading.Timer(0.1, first.lose, (1, "it fell over")).start()
    with pytest.raises(DeviceLostError):
        for _ in range(100):
            first.send(1, bytes(100_000))
    first.close()
    second.close()
    with pytest.raises(ClosedError):
        first.send(1, b"")


def test_sides_that_disagree_fail() -> None:
    first, second = local_pair()
    put = first.put(1, 4, Region.over(np.zeros(8, np.uint8)))
    get = second.get(0, 4, Region.over(np.zeros(9, np.uint8)))
    for half in (put, get):
        with pytest.raises(DeviceLostError, match="disagree"):
            half.wait(1, 5.0)
    first.close()
    second.close()


def test_there_is_nobody_else() -> None:
    first, second = local_pair()
    with pytest.raises(ArgumentError, match="no peer 2"):
        first.send(2, b"")
    with pytest.raises(ArgumentError):
        first.put(1, 1, Region(0, 100, 10, 2)).allow(3)
    first.close(0.1)
    second.close(0.1)


@given(st.integers(0, 10_000), st.integers(1, 999), st.none() | st.integers(1, 9))
def test_chunks_of_a_region_cover_it(nbytes: int, chunk: int, slots: int | None) -> None:
    region = Region(1000, nbytes, chunk, slots)
    places = [region.place(k) for k in range(region.chunks)]
    assert sum(part for _, part in places) == nbytes and all(0 < part <= chunk for _, part in places)
    for k, (address, part) in enumerate(places):
        assert address == 1000 + (k if slots is None else k % slots) * chunk
        assert part == chunk or k == region.chunks - 1


@pytest.mark.parametrize(("nbytes", "chunk", "slots"), [(-1, 1, None), (1, 0, None), (1, 1 << 31, None), (1, 1, 0)])
def test_regions_that_cannot_be(nbytes: int, chunk: int, slots: int | None) -> None:
    with pytest.raises(ArgumentError):
        Region(0, nbytes, chunk, slots)


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(HEADER.size + 9, 200), st.randoms())
def test_messages_survive_fragments_of_any_size(messages: list[bytes], size: int, random: object) -> None:
    outgoing, incoming = Outgoing(), Incoming()
    waiting, got = list(messages), []
    fragment = bytearray(size)
    while waiting or outgoing:
        while waiting and random.random() < 0.5:  # type: ignore[attr-defined]
            outgoing.append(waiting.pop(0))
        used = outgoing.fill(memoryview(fragment), 0, 5)
        kind, acknowledged, whole = incoming.take(memoryview(bytes(fragment[:used])))
        assert (kind, acknowledged) == (0, 5)
        got += whole
    assert got == messages


def test_a_tag_is_given_out_again_once_its_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.pool.transport.tags.TAGS", 8)  # of which agents have the second half
    assert [Tags(1).new(1, 0)] == [4]
    tags = Tags()
    assert [tags.new(0, 1) for _ in range(5)] == [0, 1, 2, 3, 0] and tags.new(1, 0) == 0
    held = Transfer(1, 2, Region.over(np.zeros(4, np.uint8)))
    tags.begun(0, 1, held)
    held.cancel()
    assert [tags.new(0, 1) for _ in range(4)] == [1, 3, 0, 1] and [tags.new(1, 0) for _ in range(2)] == [1, 2]
    held.finish(CANCELLED)
    assert [tags.new(0, 1) for _ in range(3)] == [2, 3, 0]


def test_ctrl_c_frees_no_message_that_waits() -> None:
    """`NativeProgress.post` lets go of the messages that are in fragments, and not of one more."""

    class Interrupted(deque[bytes]):
        def popleft(self) -> bytes:
            super().popleft()
            raise KeyboardInterrupt

    progress = object.__new__(NativeProgress)
    words = np.zeros(mpi_words.PEER_BYTES // 8, np.int64)
    words[[mpi_words.P_OUT_HEAD // 8, mpi_words.P_OUT_TAIL // 8]] = 1, 2
    progress._peer, progress._kept, progress._freed = {1: words}, {1: Interrupted([b"sent", b"waits"])}, {1: 0}
    progress._outbox = {}
    for _ in range(2):  # the second call would free what waits, and find no place for its own message
        with contextlib.suppress(KeyboardInterrupt, KeyError):
            progress.post(1, b"next")
    assert b"waits" in progress._kept[1]


def test_versions_are_compared() -> None:
    mine = Hello.mine()
    assert Hello.decode(mine.encode()) == mine
    mine.check(mine, 1)
    other = Hello(mine.protocol + 1, "7.1", "2.7.18", "elsewhere", 1)
    for here, there in ((mine, other), (other, mine)):
        with pytest.raises(PoolVersionError) as caught:
            here.check(there, 3)
        assert all(word in str(caught.value) for word in (mine.package, "7.1", "2.7.18", mine.python, "rank 3"))
    for junk in (b"", bytes(1024), mine.encode()[:30], b"WARPWELL" + b"\xff" * 99):
        with pytest.raises(PoolVersionError):
            Hello.decode(junk)


def test_a_signal_wakes_and_a_change_is_never_missed() -> None:
    signal = Signal()
    seen = signal.value
    signal.raise_()
    before = time.monotonic()
    signal.sleep(seen, 10.0)  # changed already
    assert time.monotonic() - before < 0.09
    seen = signal.value
    threading.Timer(0.02, signal.raise_).start()
    while signal.value == seen and time.monotonic() < before + 5:
        signal.sleep(seen, 10.0)
    assert signal.value != seen


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_patience_that_cannot_be(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WARPWELL_POOL_TIMEOUT", text)
    with pytest.raises(ArgumentError, match="WARPWELL_POOL_TIMEOUT"):
        silence_from_environment()
