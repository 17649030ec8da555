"""`PeerTransport`: what transports know of their peers: who is gone, and how much went to and fro."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...errors import ArgumentError, ClosedError
from .losses import Losses
from .transport import Transport

CLOSED = "the transport was closed"
_COUNTS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received", "waits", "transfers")


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
