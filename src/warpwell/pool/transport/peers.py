"""`PeerTransport`: what a transport knows of its peers: counts, and `Losses`, those that are gone and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ...errors import ArgumentError, ClosedError, DeviceLostError
from .transport import Transport

CLOSED = "the transport was closed"
_COUNTS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received", "waits", "transfers")


class Losses:
    """Keeps the reason for which each lost peer was lost; the first one stays."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._calls: list[Callable[[int, str], None]] = []
        self._lock = threading.Lock()

    def __contains__(self, peer: int) -> bool:
        return peer in self._reasons

    def reasons(self) -> Mapping[int, str]:
        """Return a copy of the reasons."""
        with self._lock:
            return dict(self._reasons)

    def on_lost(self, call: Callable[[int, str], None]) -> None:
        """Register `call`, and call it for those who are lost already."""
        with self._lock:
            self._calls.append(call)
            before = dict(self._reasons)
        for peer, reason in before.items():
            call(peer, reason)

    def add(self, peer: int, reason: str) -> bool:
        """Note a loss; return whether it is news. `tell` it once everything else knows."""
        with self._lock:
            if peer in self._reasons:
                return False
            self._reasons[peer] = reason
            return True

    def tell(self, peer: int) -> None:
        """Call who wants to know of the loss of `peer`."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call(peer, self._reasons[peer])

    def check(self, peer: int) -> None:
        """Raise `DeviceLostError` if `peer` is lost."""
        reason = self._reasons.get(peer)
        if reason is not None:
            raise DeviceLostError(f"rank {peer} is gone: {reason}")


class PeerTransport(Transport):
    """The base of transports that are no wrappers of another."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self._closed = False
        self._losses = Losses()
        self._statistics = {peer: dict.fromkeys(_COUNTS, 0) for peer in peers}

    def lost(self) -> Mapping[int, str]:
        """Return who is gone; see `Transport.lost`."""
        return self._losses.reasons()

    def on_lost(self, call: Callable[[int, str], None]) -> None:
        """Register `call`; see `Transport.on_lost`."""
        self._losses.on_lost(call)

    def statistics(self) -> dict[int, dict[str, int]]:
        """Return counts; see `Transport.statistics`."""
        return {peer: dict(counts) for peer, counts in self._statistics.items()}

    def _counts(self, peer: int) -> dict[str, int]:
        """Return the counts of a peer, to be changed."""
        counts = self._statistics.get(peer)
        if counts is None:
            raise ArgumentError(f"rank {self.rank} has no peer {peer}", name="peer")
        return counts

    def _count_received(self, peer: int, message: bytes) -> None:
        counts = self._statistics[peer]
        counts["messages_received"] += 1
        counts["bytes_received"] += len(message)

    def _check(self, peer: int) -> None:
        """Raise where nothing can be sent to a peer."""
        if self._closed:
            raise ClosedError(CLOSED)
        self._losses.check(peer)
