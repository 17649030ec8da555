"""`LocalTransport`: processes of a pool that are threads of this one."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque

from ...errors import ClosedError, StallError
from .bulk import CANCELLED, RUNNING, Region, Transfer
from .peers import CLOSED, PeerTransport
from .transport import OVERHEAD, SEND_TIMEOUT, WINDOW, Bytes

_CLOSED = "it closed its transport"


class LocalTransport(PeerTransport):
    """One end of connections within this process; `local_transports` and `local_pair` make them.

    Messages change hands without being copied again. A thread moves bulk data, started with the first transfer.
    """

    name = "local"

    def __init__(self, rank: int, count: int, hub: _Hub) -> None:
        super().__init__(rank, [peer for peer in range(count) if peer != rank])
        self._hub = hub
        self._inbox: deque[tuple[int, bytes]] = deque()
        # locks of their own for `with`: Ctrl-C may come between a Condition's acquire and the block
        self._arrived_lock, self._room_lock = threading.RLock(), threading.RLock()
        self._arrived, self._room = threading.Condition(self._arrived_lock), threading.Condition(self._room_lock)
        self._waiting = dict.fromkeys(self.peers, 0)

    def send(self, peer: int, *parts: Bytes) -> None:
        """Send one message; see `Transport.send`."""
        message = b"".join(parts)
        counts = self._counts(peer)
        other = self._hub.ends[peer]
        with self._room_lock:
            self._check(peer)
            if self._waiting[peer] >= WINDOW:
                counts["waits"] += 1
                self._wait_for_room(peer)
            with other._arrived_lock:  # inside, so that the order is the same for both
                other._inbox.append((self.rank, message))
                other._arrived.notify()
            self._waiting[peer] += len(message) + OVERHEAD  # after it: Ctrl-C between them leaves more room, not less
            counts["messages_sent"] += 1
            counts["bytes_sent"] += len(message)

    def _wait_for_room(self, peer: int) -> None:
        end = time.monotonic() + SEND_TIMEOUT
        while self._waiting[peer] >= WINDOW:
            if not self._room.wait(end - time.monotonic()):
                raise StallError(f"rank {peer} received nothing for {SEND_TIMEOUT:g} s", seconds=SEND_TIMEOUT)
            self._check(peer)

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next message; see `Transport.receive`."""
        with self._arrived_lock:
            if not self._arrived.wait_for(lambda: self._inbox or self._closed, timeout):
                return None
            if self._closed:
                raise ClosedError(CLOSED)
            peer, message = self._inbox.popleft()
        self._count_received(peer, message)
        other = self._hub.ends[peer]
        with other._room_lock:
            other._waiting[self.rank] -= len(message) + OVERHEAD
            other._room.notify_all()
        return peer, message

    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to send bulk data; see `Transport.put`."""
        return self._transfer(peer, tag, memory, self.rank, peer)

    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to receive bulk data; see `Transport.get`."""
        return self._transfer(peer, tag, memory, peer, self.rank)

    def _transfer(self, peer: int, tag: int, memory: Region, source: int, destination: int) -> Transfer:
        counts = self._counts(peer)
        self._check(peer)
        transfer = Transfer(peer, tag, memory, self._hub.wake)
        counts["transfers"] += 1
        self._hub.add(self.rank, (source, destination, tag), transfer)
        if self._closed or peer in self._losses:  # just now
            self._hub.fail(self.rank, peer, _CLOSED)
        return transfer

    def lose(self, peer: int, reason: str) -> None:
        """Treat `peer` as lost, for tests and for agents that end: its transfers fail, nothing more is sent to it."""
        if not self._losses.add(peer, reason):
            return
        self._hub.fail(self.rank, peer, reason)
        with self._room_lock:
            self._room.notify_all()
        self._losses.tell(peer)

    def close(self, timeout: float = 5.0) -> None:
        """Stop; see `Transport.close`."""
        with self._arrived_lock:
            if self._closed:
                return
        self._hub.drain(self.rank, timeout)
        with self._arrived_lock:
            self._closed = True
            self._arrived.notify_all()
        with self._room_lock:
            self._room.notify_all()
        for peer in self.peers:
            self._hub.fail(self.rank, peer, "this transport was closed")
            self._hub.ends[peer].lose(self.rank, _CLOSED)
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
