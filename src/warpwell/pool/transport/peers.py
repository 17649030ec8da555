"""`PeerTransport`: sends, bounds and receives the messages of a transport; counts; peers that are lost."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from ...errors import ArgumentError, ClosedError, DeviceLostError, StallError
from .bulk import Region, Transfer
from .signal import Signal
from .transport import OVERHEAD, SEND_TIMEOUT, TAGS, WINDOW, Bytes, Transport

CLOSED = "the transport was closed"
_COUNTS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received", "waits", "transfers")


class PeerTransport(Transport):
    """The base of transports that are no wrappers of another: messages with back-pressure, counts and losses.

    A subclass says how one message is handed over (`_post`, `_take`), how much of the messages was received
    (`_received_by`, `_consumed`), and how a transfer begins (`_start`). It raises `_arrived` when a message has come,
    and `_acknowledged` when a peer has received some.
    """

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
        self._listening = False  # whether `receive` sleeps, or is about to

    def send(self, peer: int, *parts: Bytes) -> None:
        message = b"".join(parts)
        counts = self._counts(peer)
        with self._locks[peer]:
            self._check(peer)
            # asked anew only when what is known does not suffice
            if self._posted[peer] - self._acknowledged_bytes[peer] >= WINDOW and self._waiting(peer) >= WINDOW:
                counts["waits"] += 1
                self._wait_for_room(peer)
            self._post(peer, message)
            self._posted[peer] += len(message) + OVERHEAD  # after it: Ctrl-C between them leaves more room, not less
            counts["messages_sent"] += 1
            counts["bytes_sent"] += len(message)

    def _waiting(self, peer: int) -> int:
        received = self._acknowledged_bytes[peer] = self._received_by(peer)
        return self._posted[peer] - received

    def _wait_for_room(self, peer: int) -> None:
        end = time.monotonic() + SEND_TIMEOUT
        while True:
            seen = self._acknowledged.value
            self._check(peer)
            if self._waiting(peer) < WINDOW:
                return
            left = end - time.monotonic()
            if left <= 0:
                raise StallError(f"rank {peer} received nothing for {SEND_TIMEOUT:g} s", seconds=SEND_TIMEOUT)
            self._acknowledged.sleep(seen, left)

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        end = time.monotonic() + timeout
        while True:
            seen = self._arrived.value
            if self._closed:
                raise ClosedError(CLOSED)
            if (got := self._take()) is not None:
                break
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._listening = True
            self._arrived.sleep(seen, left)
            self._listening = False
        peer, message = got
        counts = self._statistics[peer]
        counts["messages_received"] += 1
        counts["bytes_received"] += len(message)
        self._consumed(peer, len(message) + OVERHEAD)
        return peer, message

    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        return self._transfer(peer, tag, memory, True)

    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        return self._transfer(peer, tag, memory, False)

    def _transfer(self, peer: int, tag: int, memory: Region, outgoing: bool) -> Transfer:
        if not 0 <= tag < TAGS:
            raise ArgumentError(f"tags run from 0 to {TAGS - 1}, not to {tag}", name="tag")
        self._counts(peer)["transfers"] += 1
        self._check(peer)
        transfer = Transfer(peer, tag, memory, self._wake)
        if transfer.chunks:
            self._start(transfer, outgoing)
        return transfer

    @abstractmethod
    def _post(self, peer: int, message: bytes) -> None:
        """Hand a message over; one thread at a time for each peer."""

    @abstractmethod
    def _take(self) -> tuple[int, bytes] | None:
        """Return the next message that has come, with its peer; None if there is none."""

    @abstractmethod
    def _received_by(self, peer: int) -> int:
        """Return how many bytes of messages, with their overhead, `peer` has received of this process."""

    @abstractmethod
    def _consumed(self, peer: int, nbytes: int) -> None:
        """Note that this process has received so many more bytes of `peer`."""

    @abstractmethod
    def _wake(self) -> None:
        """Let whoever moves bulk data look now."""

    @abstractmethod
    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        """Have a transfer moved."""

    def lost(self) -> Mapping[int, str]:
        with self._loss_lock:
            return dict(self._reasons)

    def on_lost(self, call: Callable[[int, str], None]) -> None:
        with self._loss_lock:
            self._loss_calls.append(call)
            before = dict(self._reasons)
        for peer, reason in before.items():
            call(peer, reason)

    def _record_loss(self, peer: int, reason: str) -> bool:
        """Record why a peer is lost, and return True unless it was lost before; the first reason stays."""
        with self._loss_lock:
            if peer in self._reasons:
                return False
            self._reasons[peer] = reason
            return True

    def _report_loss(self, peer: int) -> None:
        """Call the functions of `on_lost`, when everything else of this transport treats the peer as lost."""
        with self._loss_lock:
            calls = list(self._loss_calls)
        for call in calls:
            call(peer, self._reasons[peer])

    def statistics(self) -> dict[int, dict[str, int]]:
        return {peer: dict(counts) for peer, counts in self._statistics.items()}

    def _counts(self, peer: int) -> dict[str, int]:
        """Return the counts of a peer, to be changed."""
        counts = self._statistics.get(peer)
        if counts is None:
            raise ArgumentError(f"rank {self.rank} has no peer {peer}", name="peer")
        return counts

    def _check(self, peer: int) -> None:
        """Raise if nothing can be sent to a peer."""
        if self._closed:
            raise ClosedError(CLOSED)
        if (reason := self._reasons.get(peer)) is not None:
            raise DeviceLostError(f"rank {peer} is gone: {reason}")
