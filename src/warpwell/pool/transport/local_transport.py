"""`LocalTransport`: processes of a pool that are threads of this one."""

from __future__ import annotations

import ctypes
import threading
from collections import deque

from .bulk import CANCELLED, RUNNING, Transfer
from .peers import PeerTransport
from .signal import Signal
from .transport import WINDOW


class LocalTransport(PeerTransport):
    """One end of connections within this process; `local_transports` and `local_pair` make them.

    Messages change hands without being copied again. A thread moves bulk data, started with the first transfer.
    """

    name = "local"

    def __init__(self, rank: int, count: int, hub: _Hub) -> None:
        super().__init__(rank, [peer for peer in range(count) if peer != rank])
        self._hub = hub
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._arrived, self._acknowledged = Signal(), Signal()
        self._received = dict.fromkeys(self.peers, 0)  # bytes of messages, with their overhead

    def _post(self, peer: int, message: bytes) -> None:
        other = self._hub.ends[peer]
        other._inbox.append((self.rank, message))
        listening, other._listening = other._listening, False  # the first of many messages wakes it, not each
        other._arrived.raise_(wake=listening)

    def _take(self) -> tuple[int, bytes] | None:
        return self._inbox.popleft() if self._inbox else None

    def _received_by(self, peer: int) -> int:
        return self._hub.ends[peer]._received[self.rank]

    def _consumed(self, peer: int, nbytes: int) -> None:
        self._received[peer] += nbytes
        other = self._hub.ends[peer]
        if other._posted[self.rank] - self._received[peer] + nbytes >= WINDOW:  # it may wait for this
            other._acknowledged.raise_()

    def _wake(self) -> None:
        self._hub.wake()

    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        peer = transfer.peer
        source, destination = (self.rank, peer) if outgoing else (peer, self.rank)
        self._hub.add(self.rank, (source, destination, transfer.tag), transfer)
        if self._closed or peer in self._reasons:  # just now
            self._hub.fail(self.rank, peer, self.close_reason)

    def lose(self, peer: int, reason: str) -> None:
        """Treat `peer` as lost, for tests and for agents that end: its transfers fail, nothing more is sent to it."""
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
            self._hub.fail(self.rank, peer, "this transport was closed")
            self._hub.ends[peer].lose(self.rank, self.close_reason)
        self._hub.leave()


class _Hub:
    """What the ends share: the halves of transfers, and the thread that moves matching ones."""

    def __init__(self) -> None:
        self.ends: list[LocalTransport] = []
        # Under (source, destination, tag): the halves in the order in which they came.
        self._halves: dict[tuple[int, int, int], tuple[deque[Transfer], deque[Transfer]]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._again = False
        self._open = 0
        self._thread: threading.Thread | None = None

    def add(self, rank: int, key: tuple[int, int, int], transfer: Transfer) -> None:
        if transfer.status != RUNNING:
            return
        with self._lock:
            halves = self._halves.setdefault(key, (deque(), deque()))
            halves[rank != key[0]].append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._move_all, name="warpwell local transport", daemon=True)
                self._thread.start()
        self.wake()

    def wake(self) -> None:
        with self._lock:
            self._again = True
            self._changed.notify_all()

    def fail(self, rank: int, peer: int, reason: str) -> None:
        """Fail the transfers of `rank` with `peer`."""
        with self._lock:  # the mover copies under it: nothing is touched afterwards
            for key, halves in self._halves.items():
                if key[:2] in ((rank, peer), (peer, rank)):
                    for transfer in halves[rank != key[0]]:
                        transfer.fail(reason)
            self._again = True
            self._changed.notify_all()

    def drain(self, rank: int, timeout: float) -> None:
        """Wait until the transfers of `rank` are over that can go on."""

        def idle() -> bool:
            return not any(rank in key[:2] and source and sink for key, (source, sink) in self._halves.items())

        with self._lock:
            self._changed.wait_for(idle, timeout)

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            self._changed.notify_all()

    def _move_all(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._again or not self._open)
                if not self._open and not self._again:
                    return
                self._again = False
                keys = list(self._halves)
            moved = True
            while moved:
                moved = False
                for key in keys:
                    with self._lock:
                        moved = self._move(key) or moved

    def _move(self, key: tuple[int, int, int]) -> bool:
        """Move one chunk between the oldest halves under `key`; return whether there was one."""
        if key not in self._halves:
            return False
        sources, sinks = self._halves[key]
        for halves in (sources, sinks):
            while halves and halves[0].status != RUNNING:
                gone = halves.popleft()
                if gone.status == CANCELLED:
                    gone.finish(CANCELLED)
                self._changed.notify_all()
        if not sources and not sinks:
            del self._halves[key]
        if not sources or not sinks:
            return False
        source, sink = sources[0], sinks[0]
        chunk = source.completed
        if chunk >= min(source.allowed, sink.allowed):
            return False
        assert source.region is not None and sink.region is not None
        (origin, nbytes), (target, room) = source.region.place(chunk), sink.region.place(chunk)
        if nbytes != room or source.chunks != sink.chunks:
            for half, other in ((source, sink), (sink, source)):
                half.fail(f"the sides of the copy disagree: {half.chunks} chunks here, {other.chunks} there")
            return True
        ctypes.memmove(target, origin, nbytes)
        source.advance(chunk + 1)
        sink.advance(chunk + 1)
        return True


def local_transports(count: int) -> list[LocalTransport]:
    """Return `count` connected transports, of ranks 0 to count - 1. Close each."""
    hub = _Hub()
    hub.ends = [LocalTransport(rank, count, hub) for rank in range(count)]
    hub._open = count
    return hub.ends


def local_pair() -> tuple[LocalTransport, LocalTransport]:
    """Return the transports of rank 0 and of rank 1."""
    first, second = local_transports(2)
    return first, second
