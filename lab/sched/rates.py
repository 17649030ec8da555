"""Rates of a simulation: `MaxMin` goes by two resources, `Matrix` by pairs that were measured; `rates` names them.

Schedulers that run go by `warpwell.scheduler.predict.rates.ClassTable` and by what they measure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell.json_file import read_json
from warpwell.scheduler import Capacity, Kind, Profile
from warpwell.scheduler.predict.rates import (
    BESIDE_MEMORY,
    MEMORY_BY_PROCESSORS,
    ClassTable,
    RateModel,
    between,
    class_of,
    composed,
)
from warpwell.scheduler.residency import REMEMBERED, ResidentKernel

NAMES = ("class", "maxmin", "matrix")

FORMAT = "warpwell-pairs/1"


def rates(name: str, capacity: Capacity | None = None, *, matrix: str | os.PathLike[str] | None = None) -> RateModel:
    """Return a model by its name.

    Parameters
    ----------
    name : {"class", "maxmin", "matrix"}
    capacity : Capacity, optional
    matrix : path, optional
        File of measured pairs, for "matrix"; what it lacks has the rates of the class table.

    Raises
    ------
    ArgumentError
        Another name, or no file where one is needed.
    """
    if name not in NAMES:
        raise errors.ArgumentError(f"there are no rates {name!r}: choose one of {', '.join(NAMES)}", name="rates")
    if (name == "matrix") != (matrix is not None):
        what = "needs a file of measured pairs" if matrix is None else f"takes no matrix ({matrix})"
        raise errors.ArgumentError(f"rates {name!r} {what}: give both, or neither", name="matrix")
    if matrix is not None:
        return Matrix.read(matrix, ClassTable(capacity))
    return MaxMin(capacity) if name == "maxmin" else ClassTable(capacity)


class MaxMin(RateModel):
    """Two resources: issue slots, which the older kernels take first, and memory bandwidth, which is shared max-min.

    A kernel at rate r takes r times what it takes alone (`Profile.compute`, `Profile.bandwidth`; where both are 0,
    those of its class, times `Profile.need`). Bandwidth is filled progressively: all rates rise together, until it is
    used up.

    Parameters
    ----------
    capacity : Capacity
    ordered : bool
        Whether issue slots go by age. If not, they are shared max-min too.
    """

    def __init__(self, capacity: Capacity | None = None, *, ordered: bool = True) -> None:
        super().__init__(capacity)
        self.ordered = ordered
        self.name = "two-resource max-min" + ("" if ordered else ", no order of residency")
        self._table = ClassTable(self.capacity)

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return rates so that neither resource is exceeded."""
        caps = [self._table.of([r])[0] for r in residents]
        demands = [self.demand(r.profile) for r in residents]
        bandwidth = [d[1] for d in demands]
        rates = caps
        # Twice: kernels that lack issue slots leave bandwidth to others.
        for _ in range(2):
            filled = fill(bandwidth, caps, 1.0)
            rates = self._issue([d[0] for d in demands], filled)
            caps = [r if r < f else c for r, f, c in zip(rates, filled, caps, strict=True)]
        return rates

    def demand(self, profile: Profile) -> tuple[float, float]:
        """Return the parts of the issue slots and of the bandwidth that a kernel uses alone."""
        if profile.compute or profile.bandwidth:
            return profile.compute, profile.bandwidth
        if class_of(profile) is Kind.MEMORY:
            return (1 - BESIDE_MEMORY) * profile.need, between(MEMORY_BY_PROCESSORS, profile.need)
        return profile.need, 0.05 * profile.need

    def _issue(self, demands: Sequence[float], rates: Sequence[float]) -> list[float]:
        if not self.ordered:
            return fill(demands, rates, 1.0)
        found, left = list(rates), 1.0
        for i, demand in enumerate(demands):
            if demand * rates[i] > left:
                found[i] = left / demand
            left = max(0.0, left - demand * found[i])
        return found


def fill(demands: Sequence[float], caps: Sequence[float], capacity: float) -> list[float]:
    """Return max-min fair rates: each at most its cap, and the sum of rate times demand at most `capacity`."""
    rates = list(caps)
    open_ = [i for i, d in enumerate(demands) if d > 0 and caps[i] > 0]
    left = capacity
    while open_:
        level = left / sum(demands[i] for i in open_)
        small = [i for i in open_ if caps[i] <= level]
        if not small:
            for i in open_:
                rates[i] = level
            break
        for i in small:
            left -= caps[i] * demands[i]
        open_ = [i for i in open_ if caps[i] > level]
    return rates


@dataclass(frozen=True)
class Pair:
    """One measurement: two kernels that ran together for a window of at least ten waves.

    Attributes
    ----------
    first, second : str
        Names of the kernels; `first` was launched first.
    rates : tuple of float
        Normalized IPC of the first and of the second.
    shares : tuple of float
        Blocks that each might have resident, as parts of those that it has alone.
    """

    first: str
    second: str
    rates: tuple[float, float]
    shares: tuple[float, float] = (0.5, 0.5)


class Matrix(RateModel):
    """Measured pairs, by the kernels' names and their order of residency.

    Of several measurements of a pair, that with the nearest quotas counts. More than two kernels are
    composed of their pairs. What was not measured has the rates of another model, and its pairs are counted.

    Parameters
    ----------
    pairs : iterable of Pair
    otherwise : RateModel, optional
        For pairs that were not measured; a `ClassTable` by default.
    device : str
        Where they were measured.

    Attributes
    ----------
    pairs : list of Pair
        All measurements.
    missing : set of tuple
        Pairs (first, second) that were asked for and are not there; the first ones, where they are many.
    """

    def __init__(self, pairs: Iterable[Pair], otherwise: RateModel | None = None, *, device: str = "unknown") -> None:
        self.otherwise = otherwise or ClassTable()
        super().__init__(self.otherwise.capacity)
        self.device = device
        self.missing: set[tuple[str, str]] = set()
        self.pairs = list(pairs)
        self._measured: dict[tuple[str, str], list[Pair]] = {}
        for pair in self.pairs:
            self._measured.setdefault((pair.first, pair.second), []).append(pair)
        self.name = f"measured matrix ({len(self.pairs)} pairs, {device}), otherwise {self.otherwise.name}"

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return measured rates; for a pair that is missing, the rates of the other model."""
        if len(residents) == 1:
            return self.otherwise.of(residents)
        if len(residents) == 2:
            return [*self._pair(*residents)]
        return composed(residents, self._pair)

    def _pair(self, older: ResidentKernel, newer: ResidentKernel) -> Sequence[float]:
        known = self._measured.get((older.name, newer.name))
        if not known:
            if len(self.missing) < REMEMBERED:
                self.missing.add((older.name, newer.name))
            return self.otherwise.of([older, newer])
        one, other = older.share, newer.share
        return min(known, key=lambda pair: abs(pair.shares[0] - one) + abs(pair.shares[1] - other)).rates

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the measurements."""
        content = {"format": FORMAT, "device": self.device, "pairs": [asdict(pair) for pair in self.pairs]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str], otherwise: RateModel | None = None) -> Matrix:
        """Read a file that `write` wrote.

        Raises
        ------
        MissingFileError, FormatError
            No such file, or not a pair matrix: the message names the entry.
        """
        content = read_json(path, f'a pair matrix, whose "format" is "{FORMAT}"')
        if content.get("format") != FORMAT or not isinstance(content.get("pairs"), list):
            message = f'{path} is not a pair matrix: its "format" must be "{FORMAT}", with a list "pairs"'
            raise errors.FormatError(message, path=path)
        pairs = [_checked_pair(entry, number, path) for number, entry in enumerate(content["pairs"])]
        return cls(pairs, otherwise, device=str(content.get("device", "unknown")))


def _checked_pair(entry: Any, number: int, path: str | os.PathLike[str]) -> Pair:
    """Check one entry of a file."""
    names = [f.name for f in fields(Pair)]

    def wrong(what: str) -> errors.FormatError:
        return errors.FormatError(f"{path}: entry {number} of the pairs {what}", path=path)

    if not isinstance(entry, dict) or not set(entry) <= set(names) or not {"first", "second", "rates"} <= set(entry):
        raise wrong(f"must have first, second and rates, and nothing but {', '.join(names)}")
    if not (isinstance(entry["first"], str) and isinstance(entry["second"], str)):
        raise wrong("must have names of kernels as first and second")
    for name, most in (("rates", math.inf), ("shares", 1.0)):
        if name in entry:
            two = entry[name]
            if not (isinstance(two, list) and len(two) == 2 and all(_is_number(x) and 0 <= x <= most for x in two)):
                raise wrong(f"must have two numbers from 0 {'up' if most > 1 else 'to 1'} as {name}")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Pair(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
