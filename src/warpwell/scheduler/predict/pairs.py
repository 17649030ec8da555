"""Pairs: how fast kernels ran together, as it was measured; by their code and size, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ... import errors
from ..task import Task
from .record import HERE, lasts

Key = tuple[str, str]
Rates = tuple[float, float]

LEARN = 0.5
"""Weight of a new measurement."""

KEPT = 4096
"""Pairs that are kept at most; those that were measured longest ago go first."""


class Pairs:
    """Normalized IPC of pairs, a memory-intensive kernel first, by the part of the device that it had.

    Attributes
    ----------
    learnt : int
        Measurements so far.
    """

    def __init__(self) -> None:
        self.learnt = 0
        self._rates: dict[Key, Mapping[float, Rates]] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def of(self, key: Key) -> Mapping[float, Rates]:
        """Return the rates of a pair by share; empty where it was never measured."""
        return self._rates.get(key, {})

    def note(self, key: Key, share: float, rates: Rates) -> None:
        """Take in a measurement; it is averaged with earlier ones of the same share."""
        of = self._rates.pop(key, {})
        was = of.get(share, rates)
        now = was[0] + LEARN * (rates[0] - was[0]), was[1] + LEARN * (rates[1] - was[1])
        self._rates[key] = {**of, share: now}  # made anew: somebody may save what was there
        self.learnt += 1
        if len(self._rates) > KEPT:
            del self._rates[next(iter(self._rates))]

    def update(self, other: Pairs) -> None:
        """Take over the pairs of another table, in place of the same ones here."""
        self._rates = dict(list({**self._rates, **other._rates}.items())[-KEPT:])

    def as_json(self) -> list[Any]:
        """Return the pairs whose keys last, as plain data."""
        return [
            [*key, [[share, *rates] for share, rates in of.items()]]
            for key, of in self._rates.items()
            if all(map(lasts, key))
        ]

    @classmethod
    def from_json(cls, entries: Any, place: str) -> Pairs:
        """Make a table from the data of `as_json`; `place` is for the message of the FormatError."""
        found = cls()
        try:
            for memory, compute, measured in entries[-KEPT:]:
                if not (isinstance(memory, str) and isinstance(compute, str)):
                    raise TypeError("a pair must have two kernels")
                rates = {float(share): (float(one), float(two)) for share, one, two in measured}
                if not all(0 < share < 1 and 0 <= min(its) and max(its) < math.inf for share, its in rates.items()):
                    raise ValueError("a share must lie between 0 and 1, and a rate must be finite, 0 or more")
                found._rates[memory, compute] = rates
        except (TypeError, ValueError, KeyError) as error:
            raise errors.FormatError(f"{place} is damaged: {error}") from error
        return found


def key_of(task: Task) -> str:
    """Return what a task is known by in pairs: code and size where a learner knows them, else its name, for now."""
    return task.name + HERE if task.known is None else str(task.known.key)
