"""`LocalTransport`: between threads of one process that act as processes of a pool."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque

from .bulk import CANCELLED, RUNNING, Transfer
from .signal import Signal
from .transport import CLOSED, WINDOW, Transport


class LocalTransport(Transport):
    """One end of the connections within this process; `local_transports` creates them.

    Messages are passed by reference.
    """

    name = "local"

    def __init__(self, rank: int, count: int, hub: _Hub) -> None:
        super().__init__(rank, [peer for peer in range(count) if peer != rank])
        self._hub = hub
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._arrived, self._acknowledged = Signal(), Signal()
        self._received = dict.fromkeys(self.peers, 0)  # bytes of messages, overhead included

    def _post(self, peer: int, message: bytes) -> None:
        end = self._hub.ends[peer]
        end._inbox.append((self.rank, message))
        listening, end._listening = end._listening, False  # only the first of several messages wakes the receiver
        end._arrived.raise_(wake=listening)

    def _next_message(self) -> tuple[int, bytes] | None:
        return self._inbox.popleft() if self._inbox else None

    def _received_by(self, peer: int) -> int:
        return self._hub.ends[peer]._received[self.rank]

    def _acknowledge(self, peer: int, nbytes: int) -> None:
        self._received[peer] += nbytes
        end = self._hub.ends[peer]
        if end._posted[self.rank] - self._received[peer] + nbytes >= WINDOW:  # the peer may wait for this credit
            end._acknowledged.raise_()

    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        peer = transfer.peer
        source, destination = (self.rank, peer) if outgoing else (peer, self.rank)
        self._hub.add(self.rank, (source, destination, transfer.tag), transfer)
        if self._closed or peer in self._reasons:  # closed concurrently
            self._hub.fail(self.rank, peer, self.close_reason)

    def lose(self, peer: int, reason: str) -> None:
        """Treat `peer` as lost: fail its transfers and send it nothing more. For tests, and agents that exit."""
        if not self._record_loss(peer, reason):
            return
        self._hub.fail(self.rank, peer, reason)
        self._acknowledged.raise_()
        self._report_loss(peer)

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        self._hub.drain(self.rank, timeout)
        self._closed = True
        self._arrived.raise_()
        self._acknowledged.raise_()
        for peer in self.peers:
            self._hub.fail(self.rank, peer, CLOSED)
            self._hub.ends[peer].lose(self.rank, self.close_reason)


class _Hub:
    """The shared state of the ends: the sides of all transfers. The thread that lets a chunk move copies it."""

    def __init__(self) -> None:
        self.ends: list[LocalTransport] = []
        # by (source, destination, tag): the sending and the receiving sides, in the order in which they were started
        self._sides: dict[tuple[int, int, int], tuple[deque[Transfer], deque[Transfer]]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def add(self, rank: int, key: tuple[int, int, int], transfer: Transfer) -> None:
        transfer.wake = functools.partial(self.move_all, key)
        with self._lock:
            sides = self._sides.setdefault(key, (deque(), deque()))
            sides[rank != key[0]].append(transfer)
        self.move_all(key)

    def fail(self, rank: int, peer: int, reason: str) -> None:
        """Fail the transfers of `rank` with `peer`."""
        with self._lock:  # copies hold it, too: after `fail` returns, none of them accesses memory
            for key, sides in list(self._sides.items()):
                if key[:2] in ((rank, peer), (peer, rank)):
                    for transfer in sides[rank != key[0]]:
                        transfer.fail(reason)
                    self.move_all(key)

    def drain(self, rank: int, timeout: float) -> None:
        """Wait for the transfers of `rank` that have both sides."""

        def idle() -> bool:
            return not any(rank in key[:2] and source and sink for key, (source, sink) in self._sides.items())

        with self._lock:
            self._changed.wait_for(idle, timeout)

    def move_all(self, key: tuple[int, int, int]) -> None:
        """Copy the chunks under `key` that may move."""
        moved = True
        while moved:
            with self._lock:
                moved = self._move(key)

    def _move(self, key: tuple[int, int, int]) -> bool:
        """Copy one chunk between the oldest sides under `key`. Return False if no chunk may move."""
        if key not in self._sides:
            return False
        sources, sinks = self._sides[key]
        for sides in (sources, sinks):
            while sides and sides[0].status != RUNNING:
                finished = sides.popleft()
                if finished.status == CANCELLED:
                    finished.finish(CANCELLED)
                self._changed.notify_all()
        if not sources and not sinks:
            del self._sides[key]
        if not sources or not sinks:
            return False
        source, sink = sources[0], sinks[0]
        chunk = min(source.completed, sink.completed)  # they differ if Ctrl-C came between the last two lines
        if chunk >= min(source.allowed, sink.allowed):
            return False
        assert source.region is not None and sink.region is not None
        (origin, nbytes), (target, capacity) = source.region.locate(chunk), sink.region.locate(chunk)
        if nbytes != capacity or source.chunks != sink.chunks:
            for side, peer in ((source, sink), (sink, source)):
                side.fail(f"the sides of the copy disagree: {side.chunks} chunks here, {peer.chunks} there")
            return True
        ctypes.memmove(target, origin, nbytes)
        source.advance(chunk + 1)
        sink.advance(chunk + 1)
        return True


def local_transports(count: int) -> list[LocalTransport]:
    """Return `count` connected transports, of ranks 0 to count - 1. Close each."""
    hub = _Hub()
    hub.ends = [LocalTransport(rank, count, hub) for rank in range(count)]
    return hub.ends
