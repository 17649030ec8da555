"""Rates of a simulation: `Matrix` goes by pairs that were measured.

Schedulers that run go by `warpwell.scheduler.predict.rates.ClassTable` and by measured pairs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell.json_file import read_json
from warpwell.scheduler.predict.rates import ClassTable, RateModel, composed
from warpwell.scheduler.residency import ResidentKernel

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
    """

    first: str
    second: str
    rates: tuple[float, float]
    shares: tuple[float, float] = (0.5, 0.5)


class Matrix(RateModel):
    """Measured pairs, by the kernels' names and their order of residency.

    Of several measurements of a pair, that with the nearest quotas counts. More than two kernels are
    composed of their pairs. Pairs without measurements have the rates of another model.

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
    """

    def __init__(self, pairs: Iterable[Pair], otherwise: RateModel | None = None, *, device: str = "unknown") -> None:
        self.otherwise = otherwise or ClassTable()
        super().__init__(self.otherwise.capacity)
        self.device = device
        self.pairs = list(pairs)
        self._measured: dict[tuple[str, str], list[Pair]] = {}
        for pair in self.pairs:
            self._measured.setdefault((pair.first, pair.second), []).append(pair)
        self.name = f"measured matrix ({len(self.pairs)} pairs, {device}), otherwise {self.otherwise.name}"

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return measured rates; for a pair that is missing, the rates of the other model."""
        if len(residents) == 1:
            return self.otherwise.of(residents)
        return [*self._pair(*residents)] if len(residents) == 2 else composed(residents, self._pair)

    def _pair(self, older: ResidentKernel, newer: ResidentKernel) -> Sequence[float]:
        measured = self._measured.get((older.name, newer.name))
        if not measured:
            return self.otherwise.of([older, newer])
        shares = older.share, newer.share
        return min(measured, key=lambda pair: abs(pair.shares[0] - shares[0]) + abs(pair.shares[1] - shares[1])).rates

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
    """Return an entry of a file as a pair."""
    try:
        pair = Pair(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})  # type: ignore[arg-type]
        for values, maximum in ((pair.rates, math.inf), (pair.shares, 1.0)):
            if len(values) != 2 or not all(0 <= x <= maximum for x in values):
                raise ValueError("rates must be two numbers from 0, and shares two from 0 to 1")
        if not (isinstance(pair.first, str) and isinstance(pair.second, str)):
            raise ValueError("first and second must be names")
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.FormatError(f"{path}: entry {number} of the pairs is damaged: {error}", path=path) from error
    return pair
