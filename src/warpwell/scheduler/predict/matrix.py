"""Matrix: rates of pairs that were measured, kept in a JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ... import errors
from ..residency import REMEMBERED, Resident, part_of
from .class_table import ClassTable
from .rate_model import RateModel

FORMAT = "warpwell-pairs/1"


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
    partition : float or None
        The part of the multiprocessors that the first had to itself, the second having the rest; None: they shared all.
    """

    first: str
    second: str
    rates: tuple[float, float]
    shares: tuple[float, float] = (0.5, 0.5)
    partition: float | None = None


class Matrix(RateModel):
    """Measured pairs, by the kernels' names and their order of residency.

    Of several measurements of a pair, that with the nearest quotas (or partition) counts. More than two kernels are
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
    missing : set of tuple
        Pairs (first, second) that were asked for and are not there; the first ones, where they are many.
    """

    by_name = True

    def __init__(self, pairs: Iterable[Pair], otherwise: RateModel | None = None, *, device: str = "unknown") -> None:
        self.otherwise = otherwise or ClassTable()
        super().__init__(self.otherwise.capacity)
        self.device = device
        self.missing: set[tuple[str, str]] = set()
        self._pairs: dict[tuple[str, str], list[Pair]] = {}
        self._shared: dict[tuple[str, str], list[Pair]] = {}
        self._apart: dict[tuple[str, str], list[Pair]] = {}
        count = 0
        for count, pair in enumerate(pairs, 1):  # noqa: B007 - the last count is the sum
            key = pair.first, pair.second
            self._pairs.setdefault(key, []).append(pair)
            (self._shared if pair.partition is None else self._apart).setdefault(key, []).append(pair)
        self.name = f"measured matrix ({count} pairs, {device}), otherwise {self.otherwise.name}"

    @property
    def pairs(self) -> list[Pair]:
        """All measurements."""
        return [pair for those in self._pairs.values() for pair in those]

    def of(self, residents: Sequence[Resident]) -> list[float]:
        """Return measured rates; where a pair is missing, those of the other model."""
        if len(residents) == 1:
            return self.otherwise.of(residents)
        rates = [1.0] * len(residents)
        for j in range(1, len(residents)):
            for i in range(j):
                older, newer = self._pair(residents[i], residents[j])
                rates[i] *= older
                rates[j] *= newer
        return rates

    def _pair(self, older: Resident, newer: Resident) -> Sequence[float]:
        apart = older.partition is not None and newer.partition is not None and older.partition != newer.partition
        known = (self._apart if apart else self._shared).get((older.name, newer.name))
        if not known:
            if len(self.missing) < REMEMBERED:
                self.missing.add((older.name, newer.name))
            return self.otherwise.of([older, newer])
        if apart:
            part = part_of(older.partition, self.capacity)
            return min(known, key=lambda pair: abs((pair.partition or 0.0) - part)).rates
        one, other = older.share, newer.share
        found, least = known[0], math.inf
        for pair in known:
            first, second = pair.shares
            away = abs(first - one) + abs(second - other)
            if away < least:
                found, least = pair, away
        return found.rates

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the measurements."""
        content = {"format": FORMAT, "device": self.device, "pairs": [asdict(pair) for pair in self.pairs]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str], otherwise: RateModel | None = None) -> Matrix:
        """Read what `write` wrote.

        Raises
        ------
        MissingFileError, FormatError
            No such file, or not a pair matrix: the message names the entry.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            message = f"{path} does not exist: give the file of a pair matrix"
            raise errors.MissingFileError(message, path=path) from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            message = f"{path} is not JSON ({error}): give the file of a pair matrix"
            raise errors.FormatError(message, path=path) from error
        known = isinstance(content, dict) and content.get("format") == FORMAT
        if not known or not isinstance(content.get("pairs"), list):
            message = f'{path} is no pair matrix: its "format" must be "{FORMAT}", with a list "pairs"'
            raise errors.FormatError(message, path=path)
        pairs = [_pair(entry, number, path) for number, entry in enumerate(content["pairs"])]
        return cls(pairs, otherwise, device=str(content.get("device", "unknown")))


def _pair(entry: Any, number: int, path: str | os.PathLike[str]) -> Pair:
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
            if not (isinstance(two, list) and len(two) == 2 and all(_number(x) and 0 <= x <= most for x in two)):
                raise wrong(f"must have two numbers from 0 {'up' if most > 1 else 'to 1'} as {name}")
    part = entry.get("partition")
    if part is not None and not (_number(part) and 0 < part < 1):
        raise wrong("must have a number between 0 and 1, or null, as partition")
    pair = Pair(entry["first"], entry["second"], tuple(entry["rates"]), partition=part)
    return pair if "shares" not in entry else Pair(pair.first, pair.second, pair.rates, tuple(entry["shares"]), part)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
