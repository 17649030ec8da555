"""Rates: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone).

`ClassTable` goes by class alone; `warpwell.study.rates` has others, for simulations. All take the order of residency
into account: the hardware behaves as if the oldest resident warps issue first, so a memory-intensive kernel
that was launched before a compute-intensive one keeps its rate, and one launched after it starves. An executor, a log
and an output name the model that they used.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..executor import Capacity
from ..residency import ResidentKernel, Shape, fit, remember, shape_of, share_of
from ..task import MEMORY, Job, Kind, Placement, Profile, Task

T = TypeVar("T")

Points = tuple[tuple[float, float], ...]


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
