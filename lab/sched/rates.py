"""Rates of a simulation: `ClassTable` depends on classes and sizes only, `Matrix` on pairs that were measured.

All models consider the order of residency, as `warpwell.scheduler.predict.rates` does.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from warpwell import errors
from warpwell.json_file import read_json
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Job, Kind, Placement
from warpwell.scheduler.predict.rates import composed
from warpwell.scheduler.residency import REMEMBERED, shape_of

from .residency import ResidentKernel, allowed_blocks, demand_of, fit, share_of

FORMAT = "warpwell-pairs/1"

Points = tuple[tuple[float, float], ...]


class RateModel(ABC):
    """Base class of models; satisfies `warpwell.scheduler.policy.Rates`.

    Parameters
    ----------
    capacity : Capacity
        Size of the device, which limits the number of resident blocks.

    Attributes
    ----------
    name : str
        Name of the model in logs and outputs.
    """

    name: str

    def __init__(self, capacity: Capacity | None = None) -> None:
        self.capacity = capacity or Capacity()

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC when exactly these run together; 0 for a job without resident blocks.

        The order of `jobs` is the order of residency: the first was launched first.
        """
        shapes = [shape_of(job.task.profile, job.task.blocks, self.capacity) for job in jobs]
        allowed = [
            allowed_blocks(shape, placement.workers) for shape, placement in zip(shapes, placements, strict=True)
        ]
        demands = [
            demand_of(shape, limit, 0, job.done) for shape, limit, job in zip(shapes, allowed, jobs, strict=True)
        ]
        counts = fit(demands, shapes)
        rates = iter(
            self.of(
                [
                    ResidentKernel(job.task.name, shape.profile, share_of(count, demand, limit, shape.alone))
                    for job, shape, count, demand, limit in zip(jobs, shapes, counts, demands, allowed, strict=True)
                    if count
                ]
            )
        )
        return [next(rates) if count else 0.0 for count in counts]

    @abstractmethod
    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return the normalized IPC of kernels with resident blocks, in the order of residency."""


def class_of(profile: Profile) -> Kind:
    """Return a kernel's class; if it is unknown, the class of the resource that it uses most."""
    if profile.kind is not None:
        return profile.kind
    return Kind.COMPUTE if profile.compute > profile.bandwidth else Kind.MEMORY


def between(points: Points, x: float) -> float:
    """Return the piecewise linear function through `points`, constant beyond both ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


# Measured on an H100 (132 multiprocessors): a streaming kernel, 3,140 GB/s solo, and an FMA-bound one, in one window.
MEMORY_BY_PROCESSORS: Points = ((0.0, 0.0), (16 / 132, 0.70), (32 / 132, 1.0), (1.0, 1.0))
"""Rate of a memory-intensive kernel by its fraction of the multiprocessors: a quarter of them saturates the memory."""
MEMORY_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 8, 1.0), (1.0, 1.0))
COMPUTE_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 4, 0.98), (1.0, 1.0))
"""Rate of a kernel by the fraction of its resident blocks on every multiprocessor: few blocks hide all latency."""
STARVED: Points = ((0.0, 1.0), (0.25, 0.22), (0.5, 0.02), (0.75, 0.01), (1.0, 0.01))
"""Rate of a memory-intensive kernel launched after a compute-intensive one, by the share of blocks of the latter."""
BESIDE_MEMORY = 0.94
"""Rate of a compute-intensive kernel that runs together with an older memory-intensive one."""
# Chosen, not measured: they keep the order of the source (compute with compute is better than memory with memory), with
# a small gain and a small loss.
BESIDE_COMPUTE = (0.95, 0.10)
MEMORY_LOSS = 0.04


class ClassTable(RateModel):
    """Rates by class only: memory- or compute-intensive, in both orders of residency, measured on an H100.

    A kernel that does not need all multiprocessors (`Profile.need`) slows its co-runners, and is slowed, in proportion
    to the overlap. Rates of more than two kernels are composed of the rates of pairs. Chosen, not measured: two
    compute-intensive kernels (0.95 and 0.10 at full size), two memory-intensive ones (0.48 each).
    """

    name = "class table (H100)"

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return the rates of all kernels, composed of the rates of pairs."""
        facts = [_facts(class_of(r.profile) is Kind.MEMORY, r.profile.need, r.share) for r in residents]
        if len(facts) == 1:
            return [facts[0].alone]
        if len(facts) == 2:
            older, newer = _factors(*facts)
            return [facts[0].alone * older, facts[1].alone * newer]
        return [fact.alone * factor for fact, factor in zip(facts, composed(facts, _factors), strict=True)]


class _Facts(NamedTuple):
    """Rates of a kernel in a pair; `leaves` is the rate that it leaves to a younger, memory-intensive kernel."""

    memory: bool
    alone: float
    need: float
    bandwidth: float
    leaves: float


@functools.lru_cache(maxsize=REMEMBERED)
def _facts(memory: bool, need: float, share: float) -> _Facts:
    # Cached, because thousands of kernels in a trace have few different values.
    share, need = min(1.0, share), min(1.0, need)
    rate = between(MEMORY_BY_BLOCKS if memory else COMPUTE_BY_BLOCKS, share)
    return _Facts(memory, rate, need, between(MEMORY_BY_PROCESSORS, need), between(STARVED, share))


def _factors(older: _Facts, newer: _Facts) -> tuple[float, float]:
    """Return the factors by which two kernels slow each other."""
    if older.memory and newer.memory:
        demand = older.bandwidth + newer.bandwidth
        if demand <= 1:
            return 1.0, 1.0
        each = (1 - MEMORY_LOSS * (demand - 1)) / demand
        return each, each
    if older.memory:
        return 1.0, 1 - (1 - BESIDE_MEMORY) * older.need
    free = max(0.0, 1 - older.need)
    free = 1.0 if free >= newer.need else free / newer.need
    if not newer.memory:
        return 1 - (1 - BESIDE_COMPUTE[0]) * newer.need, max(BESIDE_COMPUTE[1], free)
    return 1.0, 1.0 if free == 1.0 else max(older.leaves, between(MEMORY_BY_PROCESSORS, free))


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
        Maximum resident blocks of each kernel, as fractions of its resident blocks when it runs alone.
    """

    first: str
    second: str
    rates: tuple[float, float]
    shares: tuple[float, float] = (0.5, 0.5)


class Matrix(RateModel):
    """Measured pairs, by the kernels' names and their order of residency.

    Of several measurements of a pair, the measurement with the nearest quotas counts. Rates of more than two kernels
    are composed of their pairs. Pairs without measurements have the rates of another model.

    Parameters
    ----------
    pairs : iterable of Pair
    otherwise : RateModel, optional
        For pairs that were not measured; a `ClassTable` by default.
    device : str
        Device of the measurements.

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
        """Return measured rates; for a pair without measurements, the rates of the other model."""
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
            The file does not exist, or is not a pair matrix; the message names the entry.
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
