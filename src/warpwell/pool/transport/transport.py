"""`Transport`: messages and bulk data between the processes of one job; `Tags`."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ...errors import ArgumentError, ClosedError, DeviceLostError, StallError
from .bulk import Region, Transfer
from .signal import Signal

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Part of a message; any contiguous buffer works."""

WINDOW = 1 << 20
"""Bytes of unreceived messages to one peer at which `Transport.send` blocks."""

OVERHEAD = 256
"""Size in bytes that each message has in the window in addition to its length."""

SEND_TIMEOUT = 60.0
"""Time in seconds after which `Transport.send` fails if a live peer receives nothing."""

TAGS = 1 << 20
"""Number of transfer tags; they wrap around."""

CLOSED = "the transport was closed"
_COUNTS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received", "waits", "transfers")


class Tags:
    """Allocates transfer tags, each unique among the copies in flight from one rank to another.

    Tags wrap around. The tag of an unfinished transfer is skipped: data sent with it and not yet received would be
    matched to the new copy. Any thread, also a signal handler, may call the methods.

    Parameters
    ----------
    half : {0, 1}
        The program allocates from the first half of all tags; agents allocate the tags of replies from the second.
    """

    def __init__(self, half: int = 0) -> None:
        self._first = half * (TAGS // 2)
        self._next: dict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        # weak references: the transport keeps unfinished transfers alive, and finished transfers vanish from here
        self._transfers: weakref.WeakValueDictionary[tuple[int, int, int], Transfer] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def new(self, source: int, destination: int) -> int:
        """Return a tag for a copy from rank `source` to rank `destination`."""
        with self._lock:
            while True:
                tag = self._first + next(self._next[source, destination]) % (TAGS // 2)
                transfer = self._transfers.get((source, destination, tag))
                if transfer is None or transfer.done:
                    return tag

    def start(self, transport: Transport, peer: int, memory: Region, *, outgoing: bool) -> Transfer:
        """Start a transfer to or from a peer with a new tag, which is skipped until the transfer is done."""
        ends = (transport.rank, peer) if outgoing else (peer, transport.rank)
        transfer = (transport.put if outgoing else transport.get)(peer, self.new(*ends), memory)
        with self._lock:
            self._transfers[(*ends, transfer.tag)] = transfer
        return transfer


class Transport:
    """Carries ordered messages, and bulk data independently of them, between this process and its peers.

    A back end raises `_arrived` when a message has arrived, and `_acknowledged` when a peer has received messages. A
    wrapper overrides all public methods.

    Attributes
    ----------
    rank : int
        This process.
    peers : sequence of int
        The ranks of all other processes, including lost ones.
    name : str
        For display: ``"local"``, ``"mpi"``, or the name that a wrapper sets.
    """

    rank: int
    peers: Sequence[int]
    name: str
    close_reason = "it closed its transport"
    """Reason that peers in this process report for the loss of this transport after its close."""
    can_share_memory = True
    """Whether peers on this host may share memory instead of copying. That would bypass an emulated link."""
    _arrived: Signal
    _acknowledged: Signal

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self._closed = False
        self._reasons: dict[int, str] = {}
        self._loss_calls: list[Callable[[int, str], None]] = []
        self._loss_lock = threading.Lock()
        self._statistics = {peer: dict.fromkeys(_COUNTS, 0) for peer in peers}
        self._locks = {peer: threading.RLock() for peer in peers}
        self._posted, self._acknowledged_bytes = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self._listening = False  # whether `receive` sleeps, or is about to sleep

    def send(self, peer: int, *parts: Bytes) -> None:
        """Send the concatenation of `parts` as one message. The data is copied before the call returns.

        Messages to one peer arrive whole and in order. Any thread may send. The call blocks while the peer has at
        least `WINDOW` bytes to receive. So the receiving thread must not send messages on which the peer's receiving
        thread depends.

        Raises
        ------
        DeviceLostError
            The peer was lost, before or during the call.
        StallError
            The peer is alive, but received nothing for `SEND_TIMEOUT` seconds.
        ClosedError
            This transport was closed.
        """
        message = b"".join(parts)
        counts = self._counts(peer)
        with self._locks[peer]:
            self._check(peer)
            # query the transport only if the cached count does not leave enough credit
            if self._posted[peer] - self._acknowledged_bytes[peer] >= WINDOW and self._unreceived(peer) >= WINDOW:
                counts["waits"] += 1
                self._wait_for_credit(peer)
            self._post(peer, message)
            # counted after posting: Ctrl-C between the two lines leaves too much credit rather than too little
            self._posted[peer] += len(message) + OVERHEAD
            counts["messages_sent"] += 1
            counts["bytes_sent"] += len(message)

    def _unreceived(self, peer: int) -> int:
        received = self._acknowledged_bytes[peer] = self._received_by(peer)
        return self._posted[peer] - received

    def _wait_for_credit(self, peer: int) -> None:
        end = time.monotonic() + SEND_TIMEOUT
        while True:
            version = self._acknowledged.value
            self._check(peer)
            if self._unreceived(peer) < WINDOW:
                return
            left = end - time.monotonic()
            if left <= 0:
                raise StallError(f"rank {peer} received nothing for {SEND_TIMEOUT:g} s", seconds=SEND_TIMEOUT)
            self._acknowledged.sleep(version, left)

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the rank of a peer and its next message, or None after `timeout` seconds.

        Only one thread receives. Messages that a lost peer had sent are still received.

        Raises
        ------
        ClosedError
            This transport was closed.
        """
        end = time.monotonic() + timeout
        while True:
            version = self._arrived.value
            if self._closed:
                raise ClosedError(CLOSED)
            if (received := self._next_message()) is not None:
                break
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._listening = True
            self._arrived.sleep(version, left)
            self._listening = False
        peer, message = received
        counts = self._statistics[peer]
        counts["messages_received"] += 1
        counts["bytes_received"] += len(message)
        self._acknowledge(peer, len(message) + OVERHEAD)
        return peer, message

    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to send bulk data to the peer's `get` with the same tag, size and chunk size.

        The process that starts a copy chooses a tag below `TAGS` that is unique among the copies in flight from one
        process to another. The two sides may start in any order. A copy, also a cancelled one, is in flight until both
        sides are `done`; data that was sent and not received has then been discarded.

        Raises
        ------
        DeviceLostError
            The peer was lost.
        """
        return self._transfer(peer, tag, memory, True)

    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to receive bulk data: the other side of `put`."""
        return self._transfer(peer, tag, memory, False)

    def _transfer(self, peer: int, tag: int, memory: Region, outgoing: bool) -> Transfer:
        if not 0 <= tag < TAGS:
            raise ArgumentError(f"tag must be from 0 to {TAGS - 1}, got {tag}", name="tag")
        self._counts(peer)["transfers"] += 1
        self._check(peer)
        transfer = Transfer(peer, tag, memory)
        if transfer.chunks:
            self._start(transfer, outgoing)
        return transfer

    def _post(self, peer: int, message: bytes) -> None:
        """Queue a message for `peer`. The caller holds the peer's lock."""
        raise NotImplementedError

    def _next_message(self) -> tuple[int, bytes] | None:
        """Return the sender and the text of the next message that has arrived, or None."""
        raise NotImplementedError

    def _received_by(self, peer: int) -> int:
        """Return the bytes of messages, with their overhead, that `peer` has received from this process."""
        raise NotImplementedError

    def _acknowledge(self, peer: int, nbytes: int) -> None:
        """Record that this process has received another `nbytes` bytes from `peer`, overhead included."""
        raise NotImplementedError

    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        """Start to move the data of a transfer."""
        raise NotImplementedError

    def lose(self, peer: int, reason: str) -> None:
        """Treat `peer` as lost, because its process has exited.

        Messages that it had sent are still received. Does nothing if the peer is already lost or the transport is
        closed.
        """
        raise NotImplementedError

    def close(self, timeout: float = 5.0) -> None:
        """Wait at most `timeout` seconds for messages and transfers in flight, notify the peers, and stop."""
        raise NotImplementedError

    def lost(self) -> Mapping[int, str]:
        """Return the lost peers, each with the reason. A peer that closed its transport counts as lost."""
        with self._loss_lock:
            return dict(self._reasons)

    def on_lost(self, call: Callable[[int, str], None]) -> None:
        """Call ``call(peer, reason)`` once for each peer that was or will be lost.

        The transport's own thread calls it; `call` must not block.
        """
        with self._loss_lock:
            self._loss_calls.append(call)
            before = dict(self._reasons)
        for peer, reason in before.items():
            call(peer, reason)

    def _record_loss(self, peer: int, reason: str) -> bool:
        """Record why a peer is lost. Return False, and keep the first reason, if it was lost before."""
        with self._loss_lock:
            if peer in self._reasons:
                return False
            self._reasons[peer] = reason
            return True

    def _report_loss(self, peer: int) -> None:
        """Call the functions of `on_lost`, after everything else in this transport treats the peer as lost."""
        with self._loss_lock:
            calls = list(self._loss_calls)
        for call in calls:
            call(peer, self._reasons[peer])

    def statistics(self) -> dict[int, dict[str, int]]:
        """Return counts for each peer.

        They are ``messages_sent``, ``messages_received``, ``bytes_sent``, ``bytes_received`` (both of messages),
        ``waits`` (sends that blocked) and ``transfers``.
        """
        return {peer: dict(counts) for peer, counts in self._statistics.items()}

    def _counts(self, peer: int) -> dict[str, int]:
        counts = self._statistics.get(peer)
        if counts is None:
            raise ArgumentError(f"rank {self.rank} has no peer {peer}", name="peer")
        return counts

    def _check(self, peer: int) -> None:
        """Raise if `peer` cannot be reached."""
        if self._closed:
            raise ClosedError(CLOSED)
        if (reason := self._reasons.get(peer)) is not None:
            raise DeviceLostError(f"rank {peer} is gone: {reason}")
