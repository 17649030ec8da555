"""`Losses`: the peers that are gone, why, and who wants to know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ...errors import DeviceLostError


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
