"""Pairs: measured rates of kernels that ran together, by the code and size of the kernels, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ... import errors
from ..task import Task
from .record import PROCESS_ONLY, lasts

Key = tuple[str, str]
Rates = tuple[float, float]

LEARN = 0.5
"""Weight of a new measurement."""

MAX_PAIRS = 4096
"""Maximum number of pairs; those that were measured longest ago are dropped first."""


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
        """Return the rates of a pair by share; empty if it was never measured."""
        return self._rates.get(key, {})

    def note(self, key: Key, share: float, rates: Rates) -> None:
        """Add a measurement; it is averaged with earlier ones of the same share."""
        by_share = self._rates.pop(key, {})
        before = by_share.get(share, rates)
        average = before[0] + LEARN * (rates[0] - before[0]), before[1] + LEARN * (rates[1] - before[1])
        self._rates[key] = {**by_share, share: average}  # a new dict: another thread may be saving the old one
        self.learnt += 1
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def update(self, newer: Pairs) -> None:
        """Add the pairs of another table, which replace those of the same kernels."""
        self._rates = dict(list({**self._rates, **newer._rates}.items())[-MAX_PAIRS:])

    def as_json(self) -> list[Any]:
        """Return the pairs whose keys last, as plain data."""
        return [
            [*key, [[share, *rates] for share, rates in by_share.items()]]
            for key, by_share in self._rates.items()
            if all(map(lasts, key))
        ]

    @classmethod
    def from_json(cls, entries: Any, source: str) -> Pairs:
        """Make a table from the data of `as_json`; `source` names it in the FormatError."""
        found = cls()
        try:
            for memory, compute, measured in entries[-MAX_PAIRS:]:
                if not (isinstance(memory, str) and isinstance(compute, str)):
                    raise TypeError("a pair must have two kernels")
                rates = {
                    float(share): (float(memory_rate), float(compute_rate))
                    for share, memory_rate, compute_rate in measured
                }
                if not all(0 < share < 1 and 0 <= min(pair) and max(pair) < math.inf for share, pair in rates.items()):
                    raise ValueError("a share must lie between 0 and 1, and a rate must be finite, 0 or more")
                found._rates[memory, compute] = rates
        except (TypeError, ValueError, KeyError) as error:
            raise errors.FormatError(f"{source} is damaged: {error}") from error
        return found


def key_of(task: Task) -> str:
    """Return the key of a task in pairs: code and size if a learner knows them, else the name, for this process."""
    return task.name + PROCESS_ONLY if task.known is None else str(task.known.key)
