"""Arrangement: where kernels that run together are put, and what that is worth by the rates table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..policy import View
from ..residency import Shape, footprint, shape_of
from ..task import Job, Kind, Placement, Profile
from .partition import pairs
from .sharing import Sight, alone, demand, quota

WHOLE = Placement()
PLAIN = Placement(plain=True)
PARTS = (0.25, 0.5, 0.75)
"""Parts of the device that a memory-intensive kernel beside a compute-intensive one may get, to choose from."""


class Arrangement(NamedTuple):
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
    """Finds the best arrangement of kernels: turns, quotas of workers, or partitions.

    *Turns*: each is launched with its whole quota behind those before it. The hardware gives it room when their last
    blocks have none to follow, so no host is in the way of a hand-over, and the sum is that of the first one alone.

    What was found for some kernels is remembered for others like them (class, need, demands in eighths, and the name
    where the rates table knows names), so that a decision between many combinations asks the table about few. It is
    forgotten every so often: tables are learnt while they are used.

    Parameters
    ----------
    sight : Sight
    better : float
        Part by which sharing must be better than taking turns.
    remembers : int
        Estimates until everything is looked at anew.
    """

    def __init__(self, sight: Sight, better: float = 0.05, remembers: int = 1 << 16) -> None:
        self._sight = sight
        self._better = better
        self._remembers = remembers
        self._left = remembers
        self._known: dict[tuple[Any, ...], tuple[int, float, int]] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._likes: dict[Job, int] = {}
        self._same: dict[tuple[Any, ...], tuple[Sequence[Placement], Sequence[float], float]] = {}
        self._figures: dict[tuple[Any, ...], tuple[int, Shape, Profile]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}

    def now(self, view: View) -> Arrangement:
        """Return what runs now."""
        running = view.running
        placements = [job.placement or WHOLE for job in running]
        return Arrangement(running, placements, view.rates.together(self._sight.jobs(view, running), placements))

    def estimate(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> float:
        """Return about what `best` would have as its sum, without asking where that is known of like kernels."""
        exact = self._exact(view, jobs, fixed)
        same = self._same.get(exact)
        if same is not None:
            return same[2]
        known = self._known.get(self._key(view, jobs, fixed, exact[1]))
        return known[1] if known is not None else self.best(view, jobs, fixed).sum

    def _grow_old(self) -> None:
        """Forget everything every so often."""
        self._left -= 1
        if self._left <= 0:
            self._known.clear()
            self._same.clear()
            self._figures.clear()
            self._left = self._remembers

    def best(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> Arrangement:
        """Return the best arrangement of kernels in this order of residency.

        Parameters
        ----------
        view : View
        jobs : sequence of Job
        fixed : int
            How many of the first run already: their quota can change, their partition cannot.
        """
        same = self._exact(view, jobs, fixed)
        there = self._same.get(same)
        if there is None:
            self._grow_old()
            arrangement = self._find(view, jobs, fixed, same[1])
            self._same[same] = arrangement.placements, arrangement.rates, arrangement.sum
            return arrangement
        self._grow_old()
        return Arrangement(jobs, there[0], there[1])

    def _find(self, view: View, jobs: Sequence[Job], fixed: int, fits: bool) -> Arrangement:
        seen = self._sight.jobs(view, jobs)
        parts = _parts(view, jobs, fixed)
        key = self._key(view, jobs, fixed, fits)
        known = self._known.get(key)
        if known is not None and known[2] == len(parts):
            placements = _placements(view, jobs, parts[known[0]])
            return Arrangement(jobs, placements, view.rates.together(seen, placements))
        choices = [_placements(view, jobs, its) for its in parts]
        found = [Arrangement(jobs, places, view.rates.together(seen, places)) for places in choices]
        index = self._choose(found)
        self._known[key] = index, found[index].sum, len(parts)
        return found[index]

    def _choose(self, found: Sequence[Arrangement]) -> int:
        """Return which is best: the first unless another one is clearly better, and partitions the same.

        Turns cost nothing and cannot go wrong. What runs in a partition stays there, whoever comes next.
        """
        sums = [round(arrangement.sum, 9) for arrangement in found]
        shared = [k for k, its in enumerate(found) if its.placements[0].partition is None]
        index = max(shared or [0], key=lambda k: (sums[k], -k))
        if sums[index] <= sums[0] * (1 + self._better):
            index = 0
        if len(shared) < len(found):
            apart = max(range(len(found)), key=lambda k: (sums[k], -k))
            if sums[apart] > sums[index] * (1 + self._better):
                index = apart
        return index

    def _exact(self, view: View, jobs: Sequence[Job], fixed: int) -> tuple[Any, ...]:
        """Return all that the best arrangement depends on; how far the last wave of blocks is, does not count."""
        key: list[Any] = [fixed, False]
        load = 0.0
        for i, job in enumerate(jobs):
            task = job.task
            profile = self._sight.profile(view, job) if self._sight.perfect else task.profile
            # By identity, which is fast; the profile is kept, so that no other has its.
            known = self._figures.get((id(profile), task.blocks, task.name))
            if known is None:
                shape = shape_of(profile, task.blocks, view.capacity)
                figures = (
                    profile.kind, profile.need, profile.compute, profile.bandwidth, profile.miss_rate, shape.footprint,
                    shape.alone, task.blocks, task.name if getattr(view.rates, "by_name", True) else "",
                )  # fmt: skip
                number = self._numbers.setdefault(figures, len(self._numbers))
                known = self._figures[id(profile), task.blocks, task.name] = number, shape, profile
            number, shape, _ = known
            left = task.blocks - job.done
            load += (shape.alone if shape.alone < left else max(1, left)) * shape.load
            key.append(-1 - number if task.whole else number)
            if i < fixed and job.placement is not None:
                key += job.placement.workers, job.placement.plain, job.placement.partition
        key[1] = load <= 1.0 + 1e-9
        return tuple(key)

    def ended(self, job: Job) -> None:
        """Forget a job."""
        self._likes.pop(job, None)

    def _key(self, view: View, jobs: Sequence[Job], fixed: int, fits: bool) -> tuple[Any, ...]:
        likes = self._likes
        key: list[Any] = [fixed, fits]
        for job in jobs:
            like = likes.get(job)
            key.append(self._like(view, job) if like is None else like)
        for job in jobs[:fixed]:
            if job.placement is not None and (job.placement.partition is not None or job.placement.plain):
                key += (job.number, job.placement.partition, job.placement.plain)
        return tuple(key)

    def _like(self, view: View, job: Job) -> int:
        """Return a number that like kernels have in common."""
        profile, capacity = self._sight.profile(view, job), view.capacity
        name = job.task.name if getattr(view.rates, "by_name", True) else ""
        most = alone(job, capacity) * max(footprint(profile, capacity))
        eighths = [math.ceil(8 * x) for x in (profile.need, profile.compute, profile.bandwidth, most)]
        kind = name, profile.kind, bool(job.task.whole), *eighths
        found = self._likes[job] = self._kinds.setdefault(kind, len(self._kinds))
        return found


def _parts(view: View, jobs: Sequence[Job], fixed: int) -> Sequence[Sequence[float | str | None]]:
    """Return arrangements to choose from: for each job a part of the device, the name of a partition, or None (all).

    The first is that they take turns, where they do not all fit.
    """
    there = [job.placement if i < fixed else None for i, job in enumerate(jobs)]
    if any(p is not None and p.partition is not None for p in there):
        return _beside_partitions(view, there)
    if sum(demand(job, view.capacity) for job in jobs) <= 1.0 + 1e-9:
        return [[None] * len(jobs)]
    memory = [job.task.profile.kind is Kind.MEMORY for job in jobs]
    count, few = len(jobs), sum(memory)
    found: list[Sequence[float | str | None]] = [[None] * count]
    if few in (0, count):
        found.append([1.0 / count] * count)
        if count == 2:
            found += [(part, 1 - part) for part in PARTS if part != 0.5]
    else:
        # Both classes: the memory-intensive ones divide one part among them, the others the rest.
        found += [[part / few if m else (1 - part) / (count - few) for m in memory] for part in PARTS]
    if count == 2 and not fixed and view.capacity.partitions:
        for one, other in pairs(view.capacity):
            found += [(one, other), (other, one)]
    return found


def _beside_partitions(view: View, there: Sequence[Placement | None]) -> list[list[float | str | None]]:
    """Return the one arrangement that is left where kernels run in partitions: newcomers in those that are free."""
    taken = {p.partition for p in there if p is not None}
    free = [name for pair in pairs(view.capacity) for name in pair if name not in taken and taken & set(pair)]
    found: list[float | str | None] = []
    for place in there:
        if place is not None:
            found.append(place.partition)
        else:
            found.append(free.pop(0) if free else None)
    return [found]


def _placements(view: View, jobs: Sequence[Job], parts: Sequence[float | str | None]) -> list[Placement]:
    found = []
    for job, part in zip(jobs, parts, strict=True):
        if isinstance(part, str):
            found.append(Placement(partition=part))
        elif job.task.whole or (job.placement is not None and job.placement.plain):
            # One that cannot be cut takes what it finds.
            found.append(PLAIN)
        else:
            found.append(WHOLE if part is None else Placement(workers=quota(job, part, view.capacity)))
    if found[-1].workers is not None and jobs[-1].waits and "switch" not in view.capacity.modes:
        # What comes last takes what the others leave, now and, without a word from the host, when they end.
        found[-1] = WHOLE
    return found
