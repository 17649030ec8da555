"""Arrangement: where kernels that run together are put, and what that is worth by the rates table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..policy import View
from ..task import Job, Kind, Placement
from .partition import pairs
from .sharing import Sight, demand, quota

WHOLE = Placement()
PARTS = (0.25, 0.5, 0.75)
"""Parts of the device that a memory-intensive kernel beside a compute-intensive one may get, to choose from."""


@dataclass(frozen=True)
class Arrangement:
    """Kernels in their order of residency, their placements, and their normalized IPC there.

    Attributes
    ----------
    jobs : sequence of Job
    placements : sequence of Placement
    rates : sequence of float
    """

    jobs: Sequence[Job]
    placements: Sequence[Placement]
    rates: Sequence[float]

    @property
    def sum(self) -> float:
        """The device's performance: the sum of normalized IPC."""
        return sum(self.rates)


class Arranger:
    """Finds the best arrangement of kernels: quotas of workers are weighed against each other and against partitions.

    What was found for kernels of some names is remembered for others of these names, so that a decision between many
    combinations asks the rates table about few. It is forgotten every so often: tables are learnt while they are used.

    Parameters
    ----------
    sight : Sight
    remembers : int
        Estimates until everything is looked at anew.
    """

    def __init__(self, sight: Sight, remembers: int = 1 << 14) -> None:
        self._sight = sight
        self._remembers = remembers
        self._left = remembers
        self._known: dict[tuple[Any, ...], tuple[int, float]] = {}

    def now(self, view: View) -> Arrangement:
        """Return what runs now."""
        running = view.running
        placements = [job.placement or WHOLE for job in running]
        return Arrangement(running, placements, view.rates.together(self._sight.jobs(view, running), placements))

    def estimate(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> float:
        """Return about what `best` would have as its sum, without asking where that is known of like kernels."""
        self._left -= 1
        if self._left <= 0:
            self._known.clear()
            self._left = self._remembers
        known = self._known.get(self._key(view, jobs, fixed))
        return known[1] if known is not None else self.best(view, jobs, fixed).sum

    def best(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> Arrangement:
        """Return the best arrangement of kernels in this order of residency.

        Parameters
        ----------
        view : View
        jobs : sequence of Job
        fixed : int
            How many of the first run already: their quota can change, their partition cannot.
        """
        seen = self._sight.jobs(view, jobs)
        choices = _choices(view, jobs, fixed)
        key = self._key(view, jobs, fixed)
        known = self._known.get(key)
        if known is not None and known[0] < len(choices):
            placements = choices[known[0]]
            return Arrangement(jobs, placements, view.rates.together(seen, placements))
        found = [Arrangement(jobs, places, view.rates.together(seen, places)) for places in choices]
        index = max(range(len(found)), key=lambda k: (round(found[k].sum, 9), -k))
        self._known[key] = index, found[index].sum
        return found[index]

    def _key(self, view: View, jobs: Sequence[Job], fixed: int) -> tuple[Any, ...]:
        key: list[Any] = [fixed]
        for i, job in enumerate(jobs):
            task = job.task
            profile = self._sight.profile(view, job)
            key += (task.name, profile.kind, profile.need, task.blocks - job.done >= profile.resident)
            if i < fixed and job.placement is not None:
                key += (job.placement.partition, job.placement.plain)
        return tuple(key)


def _choices(view: View, jobs: Sequence[Job], fixed: int) -> list[list[Placement]]:
    capacity = view.capacity
    there = [job.placement if i < fixed else None for i, job in enumerate(jobs)]
    partitioned = [p for p in there if p is not None and p.partition is not None]
    if partitioned:
        return _beside_partitions(view, jobs, there)
    if sum(demand(job, capacity) for job in jobs) <= 1.0 + 1e-9:
        return [[WHOLE] * len(jobs)]
    memory = [job.task.profile.kind is Kind.MEMORY for job in jobs]
    count = len(jobs)
    if sum(memory) in (0, count):
        shares = [[1.0 / count] * count]
    else:
        # Both classes: the memory-intensive ones divide one part among them, the others the rest.
        few, many = sum(memory), count - sum(memory)
        shares = [[part / few if m else (1 - part) / many for m in memory] for part in PARTS]
    found = [[_quota(view, job, part) for job, part in zip(jobs, its, strict=True)] for its in shares]
    if count == 2 and not fixed:
        for pair in pairs(capacity):
            found.append([Placement(partition=name) for name in pair])
            found.append([Placement(partition=name) for name in reversed(pair)])
    return found


def _beside_partitions(view: View, jobs: Sequence[Job], there: Sequence[Placement | None]) -> list[list[Placement]]:
    """Return the one arrangement that is left where kernels run in partitions: newcomers in those that are free."""
    taken = {p.partition for p in there if p is not None}
    free = [name for pair in pairs(view.capacity) for name in pair if name not in taken and taken & set(pair)]
    found = []
    for place in there:
        if place is not None:
            found.append(place)
        else:
            found.append(Placement(partition=free.pop(0)) if free else WHOLE)
    return [found]


def _quota(view: View, job: Job, part: float) -> Placement:
    """A part of the device; a kernel that cannot be cut takes what it finds."""
    if job.task.whole or (job.placement is not None and job.placement.plain):
        return Placement(plain=True)
    return Placement(workers=quota(job, part, view.capacity))
