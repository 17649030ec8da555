"""Pairs: measured rates of kernels that ran together, by the code and size of the kernels, not by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..task import Task
from .record import PROCESS_ONLY, is_persistent

Key = tuple[str, str]
Rates = tuple[float, float]

AVERAGE_WEIGHT = 0.5
"""Weight of a new measurement in the average. Chosen, not fitted."""

MAX_PAIRS = 4096
"""Maximum number of pairs; the least recently measured is deleted first. Chosen, not fitted."""


class Pairs:
    """Normalized IPC of pairs, the memory-intensive kernel first, by the share of the device that this kernel had.

    Attributes
    ----------
    learnt : int
        Number of measurements so far.
    """

    def __init__(self) -> None:
        self.learnt = 0
        self._rates: dict[Key, Mapping[float, Rates]] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def get(self, key: Key) -> Mapping[float, Rates]:
        """Return the rates of a pair by share; empty if it was never measured."""
        return self._rates.get(key, {})

    def record(self, key: Key, share: float, rates: Rates) -> None:
        """Add a measurement; it is averaged with earlier ones of the same share."""
        by_share = self._rates.pop(key, {})
        before = by_share.get(share, rates)
        memory, compute = (old + AVERAGE_WEIGHT * (new - old) for old, new in zip(before, rates, strict=True))
        self._rates[key] = {
            **by_share,
            share: (memory, compute),
        }  # a new dict: another thread may be saving the old one
        self.learnt += 1
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def update(self, newer: Pairs) -> None:
        """Add the pairs of another table, which replace those of the same kernels."""
        self._rates = dict(list({**self._rates, **newer._rates}.items())[-MAX_PAIRS:])

    def as_json(self) -> list[Any]:
        """Return the pairs whose keys are valid in other processes, as plain data."""
        return [
            [*key, [[share, *rates] for share, rates in by_share.items()]]
            for key, by_share in self._rates.items()
            if all(map(is_persistent, key))
        ]

    @classmethod
    def from_json(cls, entries: Any) -> Pairs:
        """Return a table with the data of `as_json`; raise an exception if they are damaged."""
        found = cls()
        for memory, compute, measured in entries[-MAX_PAIRS:]:
            rates = {float(share): (float(first), float(second)) for share, first, second in measured}
            if not all(0 < share < 1 and 0 <= min(pair) and max(pair) < math.inf for share, pair in rates.items()):
                raise ValueError("a share must lie between 0 and 1, and a rate must be finite, 0 or more")
            if not (isinstance(memory, str) and isinstance(compute, str)):
                raise TypeError("a pair must have two kernels")
            found._rates[memory, compute] = rates
        return found


def key_of(task: Task) -> str:
    """Return the key of a task in pairs: code and size if it has a record, otherwise its name, for this process."""
    return task.name + PROCESS_ONLY if task.known is None else str(task.known.key)
