"""Rates: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone).

`ClassTable` goes by class alone, `MaxMin` by two resources, `Matrix` by pairs that were measured. All take the order of
residency into account: the hardware behaves as if the oldest resident warps issue first, so a memory-intensive kernel
that was launched before a compute-intensive one keeps its rate, and one launched after it starves. An executor, a log
and an output name the model that they used.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ... import errors
from ...json_file import read_json
from ..executor import Capacity
from ..residency import REMEMBERED, ResidentKernel, Shape, fit, remember, shape_of, share_of
from ..task import MEMORY, Job, Kind, Placement, Profile, Task

T = TypeVar("T")

Points = tuple[tuple[float, float], ...]

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


class RateModel(ABC):
    """How fast kernels run together; satisfies `warpwell.scheduler.policy.Rates`.

    Parameters
    ----------
    capacity : Capacity
        The device, which says how many blocks have room.

    Attributes
    ----------
    name : str
        As logs and outputs have it.
    """

    name: str
    by_name = False
    """Whether kernels of the same figures and another name have other rates."""

    def __init__(self, capacity: Capacity | None = None) -> None:
        self.capacity = capacity or Capacity()
        self._alike: dict[tuple[Any, ...], int] = {}
        self._next = itertools.count()
        self._known: dict[tuple[int, int, str], tuple[int, Shape, Profile]] = {}
        self._together: dict[tuple[Any, ...], list[float]] = {}
        self._residents: dict[tuple[int, str, float], ResidentKernel] = {}

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC when exactly these run together; 0 for one whose blocks find no room.

        The order of `jobs` is the order of residency: the first was launched first.
        """
        # Policies ask for the same combinations of alike kernels again and again.
        parts: list[Any] = []
        shapes: list[Shape] = []
        known = self._known
        for job, placement in zip(jobs, placements, strict=True):
            task = job.task
            blocks = task.blocks
            number, shape, _ = known.get((id(task.profile), blocks, task.name)) or self._learn(task)
            allowed = shape.allowed(placement.workers)
            # As `Shape.wanted`, written out.
            last = (blocks - 1) // allowed * allowed
            parts += number, allowed, blocks - last if job.done >= last else allowed
            shapes.append(shape)
        key = tuple(parts)
        found = self._together.get(key)
        if found is None:
            found = remember(self._together, key, self._evaluate(jobs, shapes, parts))
        return found.copy()

    def _evaluate(self, jobs: Sequence[Job], shapes: Sequence[Shape], parts: list[Any]) -> list[float]:
        quotas, wanted = parts[1::3], parts[2::3]
        residents = []
        counts = fit(wanted, shapes)
        for i, count in enumerate(counts):
            if count:
                share = share_of(count, wanted[i], quotas[i], shapes[i].alone)
                residents.append(self.resident(jobs[i].task.name, shapes[i].profile, share))
        rates = iter(self.of(residents))
        return [next(rates) if count else 0.0 for count in counts]

    def _learn(self, task: Task) -> tuple[int, Shape, Profile]:
        """Number a kernel: kernels with the same figures for rates have the same number."""
        profile, shape = task.profile, shape_of(task.profile, task.blocks, self.capacity)
        figures = (
            profile.kind, profile.bandwidth, profile.compute, profile.need, profile.miss_rate, shape.footprint,
            shape.alone, task.blocks, task.name if self.by_name else "",
        )  # fmt: skip
        number = self._alike.get(figures)
        if number is None:
            # none is given twice: what is kept goes by them
            number = remember(self._alike, figures, next(self._next))
        return remember(self._known, (id(profile), task.blocks, task.name), (number, shape, profile))

    @abstractmethod
    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return the normalized IPC of kernels that have found room, in the order of residency."""

    def resident(self, name: str, profile: Profile, share: float) -> ResidentKernel:
        """Return the argument for `of`; it is made once, and the model keeps derived figures in it."""
        key = id(profile), name, share
        found = self._residents.get(key)
        if found is None:
            found = remember(self._residents, key, ResidentKernel(name, profile, share))
        return found


def class_of(profile: Profile) -> Kind:
    """Return a kernel's class; if it is unknown, by the resource that it uses most, else memory."""
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


# Measured on an H100 (132 multiprocessors): a streaming kernel, 3,140 GB/s alone, and an FMA-bound one, in one window.
MEMORY_BY_PROCESSORS: Points = ((0.0, 0.0), (16 / 132, 0.70), (32 / 132, 1.0), (1.0, 1.0))
"""Rate of a memory-intensive kernel by its part of the multiprocessors: a quarter of them saturates the memory."""
MEMORY_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 8, 1.0), (1.0, 1.0))
COMPUTE_BY_BLOCKS: Points = ((0.0, 0.0), (1 / 4, 0.98), (1.0, 1.0))
"""Rate by the part of its resident blocks that a kernel has on every multiprocessor: few hide all latency."""
STARVED: Points = ((0.0, 1.0), (0.25, 0.22), (0.5, 0.02), (0.75, 0.01), (1.0, 0.01))
"""Rate of a memory-intensive kernel launched after a compute-intensive one, by the share of blocks of the latter."""
BESIDE_MEMORY = 0.94
"""Rate of a compute-intensive kernel beside a memory-intensive one that is older."""
# Not measured for the table's kernels: the order of the source is kept (compute with compute is better than memory with
# memory), with a small gain and a small loss. A measured `Matrix` replaces both.
BESIDE_COMPUTE = (0.95, 0.10)
MEMORY_LOSS = 0.04


class ClassTable(RateModel):
    """Rates by class alone: memory- or compute-intensive, in both orders of residency, as measured on an H100.

    A kernel that does not need all multiprocessors (`Profile.need`) disturbs others, and is disturbed, in proportion
    to what overlaps. More than two are composed of their pairs. Unmeasured: two compute-intensive kernels (0.95 and
    0.10 at full size), two memory-intensive ones (0.48 each).
    """

    name = "class table (H100)"

    def __init__(self, capacity: Capacity | None = None) -> None:
        super().__init__(capacity)
        self._facts: dict[tuple[bool, float, float], _Facts] = {}
        self._pairs: dict[tuple[_Facts, _Facts], tuple[float, float]] = {}

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return rates composed of those of pairs."""
        if len(residents) == 1:
            return [(residents[0].facts or self._find(residents[0])).alone]
        facts: list[_Facts] = [resident.facts or self._find(resident) for resident in residents]
        if len(facts) == 2:
            one, other = facts
            pair = self._pairs.get((one, other))
            if pair is None:
                older, newer = _factors(one, other)
                pair = remember(self._pairs, (one, other), (one.alone * older, other.alone * newer))
            return [*pair]
        return [fact.alone * its for fact, its in zip(facts, composed(facts, _factors), strict=True)]

    def alone(self, resident: ResidentKernel) -> float:
        """Return the rate that its blocks allow, with nothing beside it."""
        rate: float = (resident.facts or self._find(resident)).alone
        return rate

    def _find(self, resident: ResidentKernel) -> _Facts:
        # Kernels of one class that need as much are alike here: few are, of thousands in a trace, any different.
        figures = class_of(resident.profile) is MEMORY, resident.profile.need, resident.share
        found = self._facts.get(figures)
        if found is None:
            found = remember(self._facts, figures, self._derive(*figures))
        resident.facts = found
        return found

    def _derive(self, memory: bool, need: float, share: float) -> _Facts:
        share, need = min(1.0, share), min(1.0, need)
        rate = between(MEMORY_BY_BLOCKS if memory else COMPUTE_BY_BLOCKS, share)
        return _Facts(memory, rate, need, between(MEMORY_BY_PROCESSORS, need), between(STARVED, share))


@dataclass(eq=False, slots=True)
class _Facts:
    """The figures of a kernel in a pair; `leaves` is the rate that it leaves to a younger, memory-intensive kernel."""

    memory: bool
    alone: float
    need: float
    bandwidth: float
    leaves: float


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


def composed(kernels: Sequence[T], pair: Callable[[T, T], Sequence[float]]) -> list[float]:
    """Return the rates of kernels, the oldest first, of which each is slowed by all others.

    Slowdowns add up: of three that each run at half of their rate beside another one, each has a third.

    Parameters
    ----------
    kernels : sequence
    pair : callable
        ``pair(older, newer)`` returns the rates of two.
    """
    slow = [1.0] * len(kernels)
    for j in range(1, len(kernels)):
        for i in range(j):
            for k, rate in zip((i, j), pair(kernels[i], kernels[j]), strict=True):
                slow[k] += 1.0 / rate - 1.0 if rate > 0 else math.inf
    return [1.0 / its for its in slow]


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
        caps = [self._table.alone(r) for r in residents]
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

    by_name = True

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
