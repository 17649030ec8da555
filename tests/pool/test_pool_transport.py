"""Transports within a process, regions, and code that all transports share."""

import contextlib
import ctypes
import threading
from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.transports.conformance import TransportConformance
from tests.harness.until import HANG_SECONDS

from warpwell._os import FUTEX
from warpwell.errors import ArgumentError, ClosedError, DeviceLostError, PoolError
from warpwell.pool.transport import mpi_loop
from warpwell.pool.transport.bulk import CANCELLED, Region, Transfer
from warpwell.pool.transport.local_transport import LocalTransport, local_transports
from warpwell.pool.transport.mpi_transport import MpiTransport, compiled_loop
from warpwell.pool.transport.signal import Signal
from warpwell.pool.transport.transport import Tags
from warpwell.targets import native


class TestLocalTransport(TransportConformance):
    def make(self, count: int) -> list[LocalTransport]:
        return local_transports(count)


def test_a_lost_peer_fails_what_waits_for_it() -> None:
    first, second = local_transports(2)
    get = first.get(1, 4, Region.over(np.zeros(8, np.uint8)))
    losses: list[tuple[int, str]] = []
    first.on_lost(lambda peer, reason: losses.append((peer, reason)))
    timer = threading.Timer(0.05, first.lose, (1, "it fell over"))
    timer.start()
    with pytest.raises(DeviceLostError, match="it fell over"):
        get.wait(1, HANG_SECONDS)
    timer.join()
    with pytest.raises(DeviceLostError, match="rank 1 is gone: it fell over"):
        first.send(1, b"")
    assert get.done and losses == [(1, "it fell over")] and first.lost() == {1: "it fell over"}
    first.close()
    second.close()


def test_a_sender_that_waits_hears_of_the_loss() -> None:
    first, second = local_transports(2)
    threading.Timer(0.1, first.lose, (1, "it fell over")).start()
    with pytest.raises(DeviceLostError):
        for _ in range(100):
            first.send(1, bytes(100_000))
    first.close()
    second.close()
    with pytest.raises(ClosedError):
        first.send(1, b"")


def test_sides_that_disagree_fail() -> None:
    first, second = local_transports(2)
    put = first.put(1, 4, Region.over(np.zeros(8, np.uint8)))
    get = second.get(0, 4, Region.over(np.zeros(9, np.uint8)))
    for half in (put, get):
        with pytest.raises(DeviceLostError, match="disagree"):
            half.wait(1, HANG_SECONDS)
    first.close()
    second.close()


def test_there_is_nobody_else() -> None:
    first, second = local_transports(2)
    with pytest.raises(ArgumentError, match="no peer 2"):
        first.send(2, b"")
    with pytest.raises(ArgumentError):
        first.put(1, 1, Region(0, 100, 10, 2)).allow(3)
    first.close(0.1)
    second.close(0.1)


@given(st.integers(0, 10_000), st.integers(1, 999), st.none() | st.integers(1, 9))
def test_chunks_of_a_region_cover_it(nbytes: int, chunk: int, slots: int | None) -> None:
    region = Region(1000, nbytes, chunk, slots)
    parts = [region.locate(k) for k in range(region.chunks)]
    assert sum(part for _, part in parts) == nbytes and all(0 < part <= chunk for _, part in parts)
    for k, (address, part) in enumerate(parts):
        assert address == 1000 + (k if slots is None else k % slots) * chunk
        assert part == chunk or k == region.chunks - 1


@pytest.mark.parametrize(("nbytes", "chunk", "slots"), [(-1, 1, None), (1, 0, None), (1, 1 << 31, None), (1, 1, 0)])
def test_regions_that_cannot_be(nbytes: int, chunk: int, slots: int | None) -> None:
    with pytest.raises(ArgumentError):
        Region(0, nbytes, chunk, slots)


lengths = st.one_of(
    st.integers(0, 300), st.integers(mpi_loop.FRAGMENT - 80, mpi_loop.FRAGMENT + 80), st.integers(0, 100_000)
)


@settings(deadline=None)  # the first example compiles
@given(st.lists(lengths, max_size=30), st.integers(0, 1 << 32))
def test_messages_survive_fragments(sizes: list[int], seed: int) -> None:
    """`unpack` restores the messages that `pack` writes into fragments."""
    pack, unpack = native(mpi_loop.pack), native(mpi_loop.unpack)
    random = Random(seed)
    messages = [random.randbytes(size) for size in sizes]
    global_words, peer = np.zeros(mpi_loop.GLOBAL_WORDS, np.int64), np.zeros(mpi_loop.PEER_BYTES // 8, np.int64)
    outbox, inbox = np.zeros((40, 2), np.int64), np.zeros((40, 3), np.int64)
    fragment = np.zeros(mpi_loop.FRAGMENT // 8, np.int64)
    g, p, at = (int(area.ctypes.data) for area in (global_words, peer, fragment))
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    for offset, function in ((mpi_loop.G_MALLOC, libc.malloc), (mpi_loop.G_SYSCALL, libc.syscall)):
        global_words[offset // 8] = ctypes.cast(function, ctypes.c_void_p).value or 0
    global_words[mpi_loop.G_FUTEX // 8] = FUTEX
    global_words[[mpi_loop.G_INBOX // 8, mpi_loop.G_INBOX_SLOTS // 8]] = inbox.ctypes.data, len(inbox)
    peer[[mpi_loop.P_OUT // 8, mpi_loop.P_OUT_SLOTS // 8]] = outbox.ctypes.data, len(outbox)
    peer[[mpi_loop.P_OFFSET // 8, mpi_loop.P_FILLED // 8]] = -1
    for k, message in enumerate(messages):
        outbox[k] = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0, len(message)
    posted, got = 0, []
    while posted < len(messages) or peer[mpi_loop.P_OUT_HEAD // 8] < posted:
        while posted < len(messages) and random.random() < 0.5:
            posted += 1
        peer[mpi_loop.P_OUT_TAIL // 8] = posted
        used = pack(p, at)
        assert mpi_loop.HEADER <= used <= mpi_loop.FRAGMENT
        fragment[1] = used - mpi_loop.HEADER
        unpack(g, p, at)
        while len(got) < global_words[mpi_loop.G_INBOX_TAIL // 8]:
            _, address, nbytes = inbox[len(got)].tolist()
            got.append(ctypes.string_at(address, nbytes))
            libc.free(address)
    assert got == messages


def test_a_peer_is_lost_if_there_is_no_memory_for_its_message() -> None:
    state, peer = np.zeros(mpi_loop.GLOBAL_WORDS, np.int64), np.zeros(mpi_loop.PEER_BYTES // 8, np.int64)
    fragment, inbox = np.zeros(mpi_loop.FRAGMENT // 8, np.int64), np.zeros((4, 3), np.int64)
    prototype = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    full = prototype(lambda nbytes: None)
    state[mpi_loop.G_MALLOC // 8] = ctypes.cast(full, ctypes.c_void_p).value or 0
    state[[mpi_loop.G_INBOX // 8, mpi_loop.G_INBOX_SLOTS // 8]] = inbox.ctypes.data, len(inbox)
    peer[[mpi_loop.P_RANK // 8, mpi_loop.P_FILLED // 8]] = 3, -1
    fragment[[1, mpi_loop.HEADER // 8]] = 16, 1 << 40  # the length of a message, and its first bytes
    native(mpi_loop.unpack)(int(state.ctypes.data), int(peer.ctypes.data), int(fragment.ctypes.data))
    assert (peer[mpi_loop.P_LOST // 8], peer[mpi_loop.P_CODE // 8]) == (mpi_loop.NO_MEMORY, 1 << 40)
    assert state[mpi_loop.G_LOSSES // 8] == 1 and state[mpi_loop.G_INBOX_TAIL // 8] == 0
    transport = object.__new__(MpiTransport)
    assert transport._describe_loss(3, mpi_loop.NO_MEMORY, 1 << 40).startswith(
        "this process has no memory for a message"
    )


def test_a_tag_is_given_out_again_once_its_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.pool.transport.transport.TAGS", 8)  # agents use the second half of the tags
    assert [Tags(1).new(1, 0)] == [4]
    tags = Tags()
    assert [tags.new(0, 1) for _ in range(6)] == [0, 1, 2, 3, 0, 1] and tags.new(1, 0) == 0
    memory = Region.over(np.zeros(4, np.uint8))
    transport: Any = SimpleNamespace(rank=0, put=Transfer)
    held = tags.start(transport, 1, memory, outgoing=True)
    assert held.tag == 2
    held.cancel()
    assert [tags.new(0, 1) for _ in range(4)] == [3, 0, 1, 3] and [tags.new(1, 0) for _ in range(2)] == [1, 2]
    held.finish(CANCELLED)
    assert [tags.new(0, 1) for _ in range(3)] == [0, 1, 2]


def test_ctrl_c_frees_no_message_that_waits() -> None:
    """`MpiTransport._post` releases only messages that are in fragments."""

    class Interrupted(deque[bytes]):
        def popleft(self) -> bytes:
            super().popleft()
            raise KeyboardInterrupt

    transport = object.__new__(MpiTransport)
    peer_words = np.zeros(mpi_loop.PEER_BYTES // 8, np.int64)
    peer_words[[mpi_loop.P_OUT_HEAD // 8, mpi_loop.P_OUT_TAIL // 8]] = 1, 2
    transport._block, transport._unsent, transport._freed = (
        {1: peer_words},
        {1: Interrupted([b"sent", b"waits"])},
        {1: 0},
    )
    transport._outbox = {}
    for _ in range(2):  # a second call would free the waiting message, and find no place for its own
        with contextlib.suppress(KeyboardInterrupt, KeyError):
            transport._post(1, b"next")
    assert b"waits" in transport._unsent[1]


def test_a_signal_wakes_and_a_change_is_never_missed() -> None:
    signal = Signal()
    last_value = signal.value
    signal.raise_()
    signal.sleep(last_value, 1e6)  # returns at once: the value has changed
    last_value = signal.value
    threading.Timer(0.02, signal.raise_).start()
    while signal.value == last_value:
        signal.sleep(last_value, 1e6)


def test_a_processor_without_futex_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.pool.transport.mpi_transport.FUTEX", 0)
    with pytest.raises(PoolError, match=r"futex.*not known: use this machine's devices"):
        compiled_loop()
