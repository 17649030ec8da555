"""`Report` and `Row`: results of a micro-benchmark; `require_same` ends it if a result is wrong; times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warpwell.errors import WarpwellError


@dataclass(frozen=True)
class Row:
    """A rate, and rates to compare with that the same run measured.

    Attributes
    ----------
    name : str
    rate : float
        In the unit of the report.
    ceiling : float or None
        Rate that cannot be exceeded, or the rate of a good program without Warpwell.
    by : str
        Name of the program or device that reached the ceiling.
    bam : float or None
        Rate of BaM's protocol on the same queues and medium.
    notes : dict
        Other results, by name.
    """

    name: str
    rate: float
    ceiling: float | None = None
    by: str = ""
    bam: float | None = None
    notes: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, and the ratios of the rate to the others."""
        return {
            "what": self.name,
            "rate": self.rate,
            "ceiling": self.ceiling,
            "ceiling_by": self.by,
            "of_ceiling": self.rate / self.ceiling if self.ceiling else None,
            "bam": self.bam,
            "over_bam": self.rate / self.bam if self.bam else None,
            **self.notes,
        }


@dataclass(frozen=True)
class Report:
    """The rows of a micro-benchmark.

    Attributes
    ----------
    name, unit : str
    where : str
        Location of the data, with a note if a drive is emulated.
    rows : list of Row
    emulated : bool
    """

    name: str
    unit: str
    where: str
    rows: list[Row]
    emulated: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "where": self.where,
            "emulated": self.emulated,
            "rows": [row.as_dict() for row in self.rows],
        }


def require_same(name: str, found: Any, expected: Any) -> None:
    """Raise WarpwellError unless a result is as expected, because figures of a broken program mean nothing."""
    equal = np.array_equal(found, expected)
    if not equal:
        raise WarpwellError(
            f"the result of {name} is wrong ({_short(found)}, not {_short(expected)}): please report this with "
            "`warpwell info`"
        )


def _short(value: Any) -> str:
    items = np.asarray(value)
    return str(value) if items.ndim == 0 else f"{items.shape} {items.dtype}, sum {items.sum()}"


def seconds(call: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the median seconds of a call, after one that compiles and warms up; `before` is called before each."""
    times = []
    for _ in range(runs + 1):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
