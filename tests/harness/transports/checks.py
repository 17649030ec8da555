"""`CHECKS`: requirements of every transport, as programs that all ranks run at the same time.

A rank has a `Party`: its transport, and helpers that keep what came from other peers than the one asked for.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tests.harness.until import HANG_SECONDS, until

from warpwell.errors import ClosedError, DeviceLostError, PoolError, StallError
from warpwell.pool.transport.bulk import Region, Transfer
from warpwell.pool.transport.transport import OVERHEAD, WINDOW, Transport

PATIENCE = HANG_SECONDS
"""Timeout in seconds of each wait of a check."""

SIZES = (0, 1, 2, 31, 777, 4096, 32735, 32736, 32737, 65535, 65536, 65537, 200_001)
"""Bytes of messages: about each boundary there may be."""

CHUNK = 48 << 10
BULK_SIZES = (0, 1, 777, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3)


class Party:
    """One rank of a check."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.peers = tuple(transport.peers)
        self._unclaimed: dict[int, deque[bytes]] = defaultdict(deque)

    def send(self, peer: int, *parts: bytes) -> None:
        """Send a message."""
        self.transport.send(peer, *parts)

    def keep(self, peer: int, message: bytes) -> None:
        """Let `take` return a message later."""
        self._unclaimed[peer].append(message)

    def take(self, peer: int) -> bytes:
        """Return the next message of `peer`."""
        end = time.monotonic() + PATIENCE
        while not self._unclaimed[peer]:
            got = self.transport.receive(max(end - time.monotonic(), 0.0))
            assert got is not None, f"rank {self.rank} got nothing from rank {peer} for {PATIENCE} s"
            self.keep(*got)
        return self._unclaimed[peer].popleft()

    def barrier(self) -> None:
        """Wait for all ranks."""
        for peer in self.peers:
            self.send(peer, b"here")
        for peer in self.peers:
            assert self.take(peer) == b"here", "a check left a message behind"


Check = Callable[[Party], None]
CHECKS: dict[str, Check] = {}
"""All checks by name. Those that close transports or lose peers are `LAST`."""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def pattern(nbytes: int, *seed: int) -> bytes:
    """Return bytes that differ for different seeds."""
    start = hashlib.sha256(repr(seed).encode()).digest()
    step = int.from_bytes(start[:4], "little") | 1
    numbers = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(step) + np.uint64(start[5])
    return bytes(numbers.tobytes()[:nbytes])


def _array(nbytes: int, *seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(pattern(nbytes, *seed), np.uint8).copy()


def _until_done(halves: Sequence[Transfer], otherwise: str, seconds: float) -> None:
    """Wait until halves of copies are done; raise AssertionError with the text `otherwise` where they take longer."""
    end = time.monotonic() + seconds
    while not all(half.done for half in halves):
        assert time.monotonic() < end, otherwise
        time.sleep(1e-3)


@check
def messages_arrive_whole_and_in_order(party: Party) -> None:
    def sizes(peer: int, to: int) -> list[int]:
        return [SIZES[(k * 7 + peer + 3 * to) % len(SIZES)] if k % 3 == 0 else k % 50 for k in range(150)]

    for start in range(0, 150, 30):  # one thread sends and receives, so it must not send enough to block
        for peer in party.peers:
            for k, nbytes in enumerate(sizes(party.rank, peer)[start : start + 30], start):
                party.send(peer, pattern(nbytes, party.rank, peer, k))
        for peer in party.peers:
            for k, nbytes in enumerate(sizes(peer, party.rank)[start : start + 30], start):
                assert party.take(peer) == pattern(nbytes, peer, party.rank, k)


@check
def a_message_of_any_size_and_parts_is_copied(party: Party) -> None:
    for peer in party.peers:
        for nbytes in SIZES:
            part = bytearray(pattern(nbytes, 1))
            party.transport.send(peer, b"head", part, memoryview(part)[: nbytes // 2])
            part[:] = bytes(nbytes)  # too late
        party.send(peer)
    for peer in party.peers:
        for nbytes in SIZES:
            want = pattern(nbytes, 1)
            assert party.take(peer) == b"head" + want + want[: nbytes // 2]
        assert party.take(peer) == b""


@check
def large_messages_in_both_directions_do_not_wait_for_each_other(party: Party) -> None:
    nbytes = 5 * WINDOW + 13
    for peer in party.peers:
        party.send(peer, pattern(nbytes, party.rank, peer))
    for peer in party.peers:
        assert party.take(peer) == pattern(nbytes, peer, party.rank)


@check
def many_threads_send(party: Party) -> None:
    def send_all(thread: int) -> None:
        for k in range(100):
            for peer in party.peers:
                party.send(peer, struct.pack("<qq", thread, k), pattern(k * 11, thread))

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for peer in party.peers:
        following = [0] * 4
        for _ in range(400):
            message = party.take(peer)
            number, k = struct.unpack("<qq", message[:16])
            assert k == following[number] and message[16:] == pattern(k * 11, number)
            following[number] += 1
    for thread in threads:
        thread.join(PATIENCE)


@check
def a_peer_that_does_not_receive_holds_its_senders(party: Party) -> None:
    nbytes, count = 10_000, 500
    held = np.zeros(1, np.uint8)
    party.barrier()
    if party.rank == 0:
        for peer in party.peers:
            party.send(peer, b"go")  # not before the barrier: a rank that waits there receives messages
        for peer in party.peers:
            party.transport.get(peer, 9, Region.over(held)).wait(1, PATIENCE)
        for peer in party.peers:
            for k in range(count):
                assert party.take(peer)[:8] == struct.pack("<q", k)
    else:
        sent = 0

        def send_all() -> None:
            nonlocal sent
            for k in range(count):
                party.send(0, struct.pack("<q", k), bytes(nbytes - 8))
                sent = k + 1

        assert party.take(0) == b"go"
        waits_before = party.transport.statistics()[0]["waits"]
        thread = threading.Thread(target=send_all)
        thread.start()
        end = time.monotonic() + PATIENCE
        while party.transport.statistics()[0]["waits"] == waits_before:
            assert time.monotonic() < end, f"{sent} messages were sent, and none had to wait"
            time.sleep(1e-3)
        assert 0 < sent <= WINDOW // (nbytes + OVERHEAD) + 2
        party.transport.put(0, 9, Region.over(held)).wait(1, PATIENCE)
        thread.join(PATIENCE)
        assert sent == count
    party.barrier()


@check
def bulk_data_of_every_size(party: Party) -> None:
    for late_side in ("put", "get"):
        for nbytes in BULK_SIZES:
            tag = 100 + nbytes % 97
            for peer in party.peers:
                sink = np.zeros(nbytes, np.uint8)
                source = _array(nbytes, party.rank, peer, nbytes)
                first, second = (party.transport.get, sink), (party.transport.put, source)
                if late_side == "get":
                    first, second = second, first
                send = first[0](peer, tag, Region.over(first[1], chunk=CHUNK))
                party.send(peer, b"now")
                assert party.take(peer) == b"now"
                two = second[0](peer, tag, Region.over(second[1], chunk=CHUNK))
                for half in (send, two):
                    half.wait(half.chunks, PATIENCE)
                    assert half.completed == half.chunks == -(-nbytes // CHUNK) and half.done
                assert np.array_equal(sink, _array(nbytes, peer, party.rank, nbytes))


@check
def bulk_data_through_a_few_slots(party: Party) -> None:
    nbytes, chunk, slots = 23 * 5000 + 17, 5000, 3

    def fill(peer: int) -> None:
        data, room = _array(nbytes, party.rank, peer), np.zeros(slots * chunk + 8, np.uint8)
        region = Region(int(room.ctypes.data) + 1, nbytes, chunk, slots, room)
        put = party.transport.put(peer, 7, region)
        for k in range(put.chunks):
            if k >= slots:
                put.wait(k - slots + 1, PATIENCE)
            address, part = region.locate(k)
            at = address - int(room.ctypes.data)
            room[at : at + part] = data[k * chunk : k * chunk + part]
            put.allow(k + 1)
        put.wait(put.chunks, PATIENCE)

    threads = [threading.Thread(target=fill, args=(peer,)) for peer in party.peers]
    for thread in threads:
        thread.start()
    for peer in party.peers:
        data, room = np.zeros(nbytes, np.uint8), np.zeros(2 * chunk, np.uint8)
        region = Region(int(room.ctypes.data), nbytes, chunk, 2, room)
        get = party.transport.get(peer, 7, region)
        get.allow(2)
        for k in range(get.chunks):
            get.wait(k + 1, PATIENCE)
            address, part = region.locate(k)
            at = address - int(room.ctypes.data)
            data[k * chunk : k * chunk + part] = room[at : at + part]
            get.allow(min(k + 3, get.chunks))
        assert np.array_equal(data, _array(nbytes, peer, party.rank))
    for thread in threads:
        thread.join(PATIENCE)


@check
def opposite_copies_and_many_at_once(party: Party) -> None:
    count, nbytes = 12, 300_001
    for round_ in range(3):
        sinks, halves = {}, []
        for k in range(count):
            tag = (k * (5 if party.rank % 2 else 7)) % count  # the sides start them in different orders
            for peer in party.peers:
                sinks[peer, tag] = np.zeros(nbytes, np.uint8)
                source = _array(nbytes, party.rank, peer, tag, round_)
                halves.append(party.transport.put(peer, tag, Region.over(source, chunk=CHUNK)))
                halves.append(party.transport.get(peer, tag, Region.over(sinks[peer, tag], chunk=CHUNK)))
                party.send(peer, struct.pack("<q", tag))
        for half in halves:
            half.wait(half.chunks, PATIENCE)
        for (peer, tag), sink in sinks.items():
            assert np.array_equal(sink, _array(nbytes, peer, party.rank, tag, round_))
        for peer in party.peers:
            assert {struct.unpack("<q", party.take(peer))[0] for _ in range(count)} == set(range(count))


@check
def chunks_move_only_when_both_sides_allow_them(party: Party) -> None:
    nbytes, chunk = 4 * 70_000, 70_000
    for peer in party.peers:
        source, sink = _array(nbytes, party.rank), np.zeros(nbytes, np.uint8)
        put = party.transport.put(peer, 9, Region(int(source.ctypes.data), nbytes, chunk, 4, source))
        get = party.transport.get(peer, 9, Region(int(sink.ctypes.data), nbytes, chunk, 4, sink))
        put.allow(2)
        get.allow(1)
        get.wait(1, PATIENCE)
        try:
            get.wait(2, 0.05)
        except StallError:
            pass
        else:
            raise AssertionError("a chunk came that was not allowed")
        assert get.completed == 1 and put.completed <= 2 and not sink[chunk:].any()
        put.allow(4)
        get.allow(4)
        get.wait(4, PATIENCE)
        put.wait(4, PATIENCE)
        assert np.array_equal(sink, _array(nbytes, peer))


@check
def a_cancelled_copy_lets_go_and_harms_no_other(party: Party) -> None:
    for peer in party.peers:
        nbytes, chunk = 10 * CHUNK, CHUNK
        source, sink = _array(nbytes, 1), np.zeros(nbytes, np.uint8)
        put = party.transport.put(peer, 11, Region(int(source.ctypes.data), nbytes, chunk, 4, source))
        get = party.transport.get(peer, 11, Region(int(sink.ctypes.data), nbytes, chunk, 4, sink))
        put.allow(2)
        get.allow(2)
        get.wait(2, PATIENCE)
        put.wait(2, PATIENCE)
        put.cancel()
        get.cancel()
        _until_done((put, get), "a cancelled copy holds its memory", PATIENCE)
        for half in (put, get):
            try:
                half.wait(3, 1.0)
            except PoolError:
                continue
            raise AssertionError("it was cancelled, and went on")
    party.barrier()
    bulk_data_of_every_size(party)


@check
def what_nobody_takes_is_let_go_and_its_tag_is_free_again(party: Party) -> None:
    nbytes, tag = 10 * CHUNK, 13
    for accepted in (0, 2):  # chunks that the receiver took before both sides gave up; 0: it never started
        party.barrier()
        halves = []
        for peer in party.peers:
            halves.append(
                party.transport.put(peer, tag, Region.over(_array(nbytes, party.rank, accepted), chunk=CHUNK))
            )
        for peer in party.peers if accepted else ():
            sink = np.zeros(accepted * CHUNK, np.uint8)
            get = party.transport.get(peer, tag, Region(int(sink.ctypes.data), nbytes, CHUNK, accepted, sink))
            get.allow(accepted)
            get.wait(accepted, PATIENCE)
            halves.append(get)
        time.sleep(0.02)
        party.barrier()  # no rank cancels a transfer that a peer waits for
        for half in halves:
            half.cancel()
        _until_done(halves, "a transfer that no peer takes is held", PATIENCE)
        party.barrier()  # both sides of all transfers have ended
        opposite = []
        for peer in party.peers:
            sink = np.zeros(nbytes, np.uint8)
            opposite.append((peer, sink, party.transport.get(peer, tag, Region.over(sink, chunk=CHUNK))))
            source = _array(nbytes, party.rank, peer, accepted)
            halves.append(party.transport.put(peer, tag, Region.over(source, chunk=CHUNK)))
        for peer, sink, get in opposite:
            get.wait(get.chunks, PATIENCE)
            assert np.array_equal(sink, _array(nbytes, peer, party.rank, accepted)), "data of a copy that was cancelled"
        for put in halves[-len(party.peers) :]:
            put.wait(put.chunks, PATIENCE)


@check
def many_copies_that_nobody_takes_harm_no_other(party: Party) -> None:
    party.barrier()
    stale = np.zeros(3 * CHUNK, np.uint8)
    for _ in range(3):
        tags = range(100, 140)
        puts = [party.transport.put(peer, k, Region.over(stale, chunk=CHUNK)) for k in tags for peer in party.peers]
        opposite_copies_and_many_at_once(party)
        for put in puts:
            put.cancel()
        _until_done(puts, "a transfer that no peer takes is held", PATIENCE)
        party.barrier()


@check
def the_memory_of_a_finished_copy_is_let_go(party: Party) -> None:
    party.barrier()
    held = []
    for peer in party.peers:
        source, sink = np.zeros(CHUNK, np.uint8), np.zeros(CHUNK, np.uint8)
        halves = [party.transport.get(peer, 14, Region.over(sink)), party.transport.put(peer, 14, Region.over(source))]
        for half in halves:
            half.wait(1, PATIENCE)
        held += [weakref.ref(source), weakref.ref(sink)]
    del source, sink, halves, half
    while any(memory() is not None for memory in held):  # the next copy would release them, but none follows
        got = party.transport.receive(0.01)
        if got is not None:
            party.keep(*got)
    party.barrier()


@check
def receiving_ends_in_time_and_counts_are_kept(party: Party) -> None:
    party.barrier()
    got = party.transport.receive(0.05)
    if got is not None:  # this rank was descheduled until another rank had finished
        assert got[1] == b"here"
        party.keep(*got)
    time.sleep(0.2)
    assert not party.transport.lost()
    for counts in party.transport.statistics().values():
        assert counts["messages_sent"] and counts["messages_received"] and min(counts.values()) >= 0
    party.barrier()


def a_peer_that_closes_is_lost_and_the_others_go_on(party: Party) -> None:
    """Run last: the highest rank closes its transport, then the others close theirs."""
    last = max((party.rank, *party.peers))
    losses: list[tuple[int, str]] = []
    party.transport.on_lost(lambda peer, reason: losses.append((peer, reason)))
    party.barrier()
    if party.rank == last:
        for peer in party.peers:
            party.send(peer, b"a last word")
        party.transport.close()
        try:
            party.transport.receive(0.1)
        except ClosedError:
            return
        raise AssertionError("a closed transport received")
    stuck = None
    if not party.transport.lost():
        try:
            stuck = party.transport.get(last, 3, Region.over(np.zeros(10, np.uint8)))
        except DeviceLostError:
            pass  # it was faster
    assert party.take(last) == b"a last word"
    end = time.monotonic() + PATIENCE
    while last not in party.transport.lost():
        assert time.monotonic() < end, "no rank noticed"
        time.sleep(1e-3)
    for action in (
        lambda: party.send(last, b"?"),
        lambda: party.transport.put(last, 1, Region.over(np.zeros(4, np.uint8))),
        lambda: stuck.wait(1, PATIENCE) if stuck else party.send(last),
    ):
        try:
            action()
        except DeviceLostError:
            continue
        raise AssertionError("a lost peer was spoken to")
    remaining = [peer for peer in party.peers if peer != last]
    for peer in remaining:
        party.send(peer, b"still here")
    for peer in remaining:
        assert party.take(peer) == b"still here"
    until(lambda: losses)  # another thread may report the loss
    time.sleep(0.05)
    assert [peer for peer, _ in losses].count(last) == 1 and dict(losses)[last]
    party.transport.close()


LAST = a_peer_that_closes_is_lost_and_the_others_go_on
