"""Rates: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone).

`ClassTable` goes by class alone; simulations may bring others. All take the order of residency
into account: the hardware behaves as if the oldest resident warps issue first, so a memory-intensive kernel
that was launched before a compute-intensive one keeps its rate, and one launched after it starves. An executor, a log
and an output name the model that they used.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..executor import Capacity
from ..residency import REMEMBERED, ResidentKernel, fit, shape_of, share_of
from ..task import MEMORY, Job, Kind, Placement, Profile

T = TypeVar("T")

Points = tuple[tuple[float, float], ...]


class RateModel(ABC):
    """How fast kernels run together; satisfies `warpwell.scheduler.policy.Rates`.

    Parameters
    ----------
    capacity : Capacity
        The device, whose size limits the number of resident blocks.

    Attributes
    ----------
    name : str
        As logs and outputs have it.
    """

    name: str

    def __init__(self, capacity: Capacity | None = None) -> None:
        self.capacity = capacity or Capacity()

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC when exactly these run together; 0 for one whose blocks find no room.

        The order of `jobs` is the order of residency: the first was launched first.
        """
        shapes = [shape_of(job.task.profile, job.task.blocks, self.capacity) for job in jobs]
        allowed = [shape.allowed(placement.workers) for shape, placement in zip(shapes, placements, strict=True)]
        demands = [shape.demand(limit, 0, job.done) for shape, limit, job in zip(shapes, allowed, jobs, strict=True)]
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
        """Return the normalized IPC of kernels that have found room, in the order of residency."""


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
"""Rate of a compute-intensive kernel that runs together with an older memory-intensive one."""
# Not measured for the table's kernels: the order of the source is kept (compute with compute is better than memory with
# memory), with a small gain and a small loss. A measured `Matrix` replaces both.
BESIDE_COMPUTE = (0.95, 0.10)
MEMORY_LOSS = 0.04


class ClassTable(RateModel):
    """Rates by class alone: memory- or compute-intensive, in both orders of residency, as measured on an H100.

    A kernel that does not need all multiprocessors (`Profile.need`) disturbs others, and is disturbed, in proportion
    to the overlap. Rates of more than two are composed of the rates of pairs. Unmeasured: two compute-intensive kernels
    (0.95 and 0.10 at full size), two memory-intensive ones (0.48 each).
    """

    name = "class table (H100)"

    def of(self, residents: Sequence[ResidentKernel]) -> list[float]:
        """Return the rates of all kernels, composed of the rates of pairs."""
        facts = [_facts(class_of(r.profile) is MEMORY, r.profile.need, r.share) for r in residents]
        if len(facts) == 1:
            return [facts[0].alone]
        if len(facts) == 2:
            older, newer = _factors(*facts)
            return [facts[0].alone * older, facts[1].alone * newer]
        return [fact.alone * factor for fact, factor in zip(facts, composed(facts, _factors), strict=True)]


class _Facts(NamedTuple):
    """The figures of a kernel in a pair; `leaves` is the rate that it leaves to a younger, memory-intensive kernel."""

    memory: bool
    alone: float
    need: float
    bandwidth: float
    leaves: float


@functools.lru_cache(maxsize=REMEMBERED)
def _facts(memory: bool, need: float, share: float) -> _Facts:
    # Kernels of one class that need as much are alike here: few are, of thousands in a trace, any different.
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


def composed(kernels: Sequence[T], pair: Callable[[T, T], Sequence[float]]) -> list[float]:
    """Return the rates of kernels, the oldest first, of which each is slowed by all others.

    ``pair(older, newer)`` returns the rates of two. Slowdowns add up: of three kernels that each run at half of
    their rate in a pair, each has a third.
    """
    slow = [1.0] * len(kernels)
    for j in range(1, len(kernels)):
        for i in range(j):
            for k, rate in zip((i, j), pair(kernels[i], kernels[j]), strict=True):
                slow[k] += 1.0 / rate - 1.0 if rate > 0 else math.inf
    return [1.0 / slowdown for slowdown in slow]
