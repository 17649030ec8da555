"""`next_of`: who has the lease next; `Limits`: what the operator allows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .board import HOLDER, LIMITS, PRIORITY, SINCE, SLOTS, USE, YIELDED, Board

QUANTUM = 20e-3
"""Seconds for which a holder keeps the lease from others of its priority: to hand over empties the GPU."""

AGE = 1.0
"""Seconds of waiting that are worth a step of priority."""

HOLD = 10.0
"""Seconds without a point at which a holder could hand over, after which its lease counts no more."""

CEILING = 8
"""Priorities count up to this and its negative."""


def next_of(board: Board, holder: int, kept_since: int, now: int) -> int:
    """Return the slot that is to have the lease; 0: the holder keeps it, or nobody waits.

    Parameters
    ----------
    board : Board
    holder : int
        Slot of a holder that would go on; 0 where none would.
    kept_since : int
        When it got the lease.
    now : int
        Nanoseconds.
    """
    words = board.words
    best, key = 0, (0, 0)
    for slot in board.waiters():
        at = board.at(slot)
        level = words[at + PRIORITY] + int(max(0, now - words[at + SINCE]) / (AGE * 1e9))
        if not best or (level, -words[at + USE]) > key:
            best, key = slot, (level, -words[at + USE])
    if not best or not holder:
        return best
    at = board.at(holder)
    if words[at + PRIORITY] != key[0]:
        return best if key[0] > words[at + PRIORITY] else 0
    return best if now - kept_since > QUANTUM * 1e9 and words[at + USE] >= -key[1] else 0


def least_use(board: Board) -> int | None:
    """Return the least use of those that have the lease or wait: what a thread that comes back is put at, at least."""
    words = board.words
    slots = [*board.waiters(), *[slot for slot in (words[HOLDER],) if 0 < slot < SLOTS]]
    return min((words[board.at(slot) + USE] for slot in slots), default=None)


def overstays(board: Board, since: int, now: int, hold: float) -> bool:
    """Return whether the holder has let somebody wait since then, and could not have handed over, for too long."""
    return now - max(board.words[YIELDED], since) > hold * 1e9


FILE = "limits.json"
"""In the folder of the boards: the limits of devices whose board is made later."""


@dataclass(frozen=True)
class Limits:
    """What the operator allows at a device, for all tenants and for some.

    Attributes
    ----------
    hold : float
        Seconds that a holder may let others wait without a point at which it could hand over.
    ceiling : int
        Priorities count up to this and its negative.
    tenants : dict
        Name, and of "hold", "ceiling" and "priority" (added to that of its turns) those that differ.
    """

    hold: float = HOLD
    ceiling: int = CEILING
    tenants: dict[str, dict[str, Any]] = field(default_factory=dict)

    def priority(self, tenant: str, priority: int) -> int:
        """Return a turn's priority, as far as it counts."""
        own = self.tenants.get(tenant, {})
        most = own.get("ceiling", self.ceiling)
        return int(max(-most, min(most, priority + own.get("priority", 0))))

    def holds(self, tenant: str) -> float:
        """Return how long a tenant may hold the lease."""
        return float(self.tenants.get(tenant, {}).get("hold", self.hold))

    def text(self) -> bytes:
        """Return these limits as a board and `FILE` keep them."""
        return json.dumps({"hold": self.hold, "ceiling": self.ceiling, "tenants": self.tenants}).encode()

    @classmethod
    def of(cls, text: bytes) -> Limits | None:
        """Return the limits of a text, None where they are none."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @classmethod
    def read(cls, board: Board) -> tuple[int, Limits | None]:
        """Return the version of a board's limits, and these; None while they are written."""
        version = board.words[LIMITS]
        if not version:
            return version, cls()
        found = cls.of(board.read_text())
        return version, found if version % 2 == 0 and board.words[LIMITS] == version else None
