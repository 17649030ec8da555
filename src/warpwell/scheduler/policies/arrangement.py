"""Arrangement: places for kernels that run together, and the sum of rates that the rates table gives them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..policy import View
from ..residency import remember, shape_of
from ..task import Job, Kind, Placement, Profile
from .sharing import Sight, alone, at_most, pairs, quota, within

WHOLE = Placement()
PLAIN = Placement(plain=True)
ALIKE = 0.3
"""Part by which sharing must be better than turns for kernels of one class. Two that want the same can hardly gain:
where a table says so, it mostly has one of them without its launch and its last blocks (H200: pairs of a measured sum
of 1.16 to 1.23 came to 0.85)."""

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
        self._cards: dict[Job, tuple[Profile, int, int, float, int]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._quotas: dict[tuple[int, float], Placement] = {}
        self._next = itertools.count()
        self._load = 0.0

    def now(self, view: View) -> Arrangement:
        """Return the arrangement of the running kernels."""
        running = view.running
        placements = [job.placement or WHOLE for job in running]
        return Arrangement(running, placements, view.rates.together(self._sight.jobs(view, running), placements))

    def estimate(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> float:
        """Return an estimate of the sum of `best`, from like kernels where they are known."""
        exact = self._exact(view, jobs, fixed)
        same = self._same.get(exact)
        return same[2] if same is not None else self._guess(view, jobs, fixed, exact)

    def estimates(self, view: View, running: Sequence[Job], heads: Sequence[Job]) -> list[float]:
        """Return the `estimate` of the running kernels with each waiting one."""
        count = len(running)
        *begin, _ = self._exact(view, running, count)
        load, same, found = self._load, self._same, []
        for job in heads:
            exact = self._extend(view, begin.copy(), load, (job,), 0)
            known = same.get(exact)
            found.append(known[2] if known is not None else self._guess(view, [*running, job], count, exact))
        return found

    def _guess(self, view: View, jobs: Sequence[Job], fixed: int, exact: tuple[Any, ...]) -> float:
        known = self._known.get(self._key(view, jobs, fixed, exact[-1]))
        if known is not None:
            return known[1]
        found = self._find(view, jobs, fixed, exact)
        self._same[exact] = found.placements, found.rates, found.sum
        return found.sum

    def _grow_old(self) -> None:
        """Forget everything every so often."""
        self._left -= 1
        if self._left <= 0:
            self._known.clear()
            self._same.clear()
            self._left = self._remembers

    def best(self, view: View, jobs: Sequence[Job], fixed: int = 0) -> Arrangement:
        """Return the best arrangement of kernels in this order of residency, without new partitions.

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
            arrangement = self._find(view, jobs, fixed, same)
            self._same[same] = arrangement.placements, arrangement.rates, arrangement.sum
            return arrangement
        self._grow_old()
        return Arrangement(jobs, there[0], there[1])

    def _find(self, view: View, jobs: Sequence[Job], fixed: int, exact: tuple[Any, ...]) -> Arrangement:
        seen = self._sight.jobs(view, jobs)
        parts = _parts(jobs, fixed, exact[-1], view)
        key = self._key(view, jobs, fixed, exact[-1])
        known = self._known.get(key)
        if known is not None and known[2] == len(parts):
            placements = self._places(view, jobs, parts[known[0]])
            return Arrangement(jobs, placements, view.rates.together(seen, placements))
        found = []
        for its in parts:
            placements = self._places(view, jobs, its)
            found.append(Arrangement(jobs, placements, view.rates.together(seen, placements)))
        index = self._choose(found, self._factor(view, jobs)) if len(found) > 1 else 0
        self._known[key] = index, found[index].sum, len(parts)
        return found[index]

    def _places(self, view: View, jobs: Sequence[Job], parts: Sequence[float | str | None]) -> list[Placement]:
        """Return placements by parts of the device, names of partitions, or None (all)."""
        found = []
        for job, part in zip(jobs, parts, strict=True):
            if isinstance(part, str):
                found.append(within(part))
            elif job.task.whole or (job.placement is not None and job.placement.plain):
                # One that cannot be cut takes what it finds.
                found.append(PLAIN)
            elif part is None:
                found.append(WHOLE)
            else:
                key = self._cards[job][1], part
                place = self._quotas.get(key)
                if place is None:
                    place = remember(self._quotas, key, at_most(quota(job, part, view.capacity)))
                found.append(place)
        if found[-1].workers is not None and jobs[-1].waits and "switch" not in view.capacity.modes:
            # What comes last takes what the others leave, now and, without a word from the host, when they end.
            found[-1] = WHOLE
        return found

    def _factor(self, view: View, jobs: Sequence[Job]) -> float:
        """Return the factor by which an arrangement must be better than turns, which cannot go wrong."""
        alike = len({self._sight.profile(view, job).kind for job in jobs}) == 1
        return 1 + (max(self._better, ALIKE) if alike else self._better)

    def _choose(self, found: Sequence[Arrangement], factor: float) -> int:
        """Return which is best: the first, turns, unless another one is clearly better. Turns cannot go wrong."""
        sums = [round(arrangement.sum, 9) for arrangement in found]
        index = max(range(len(found)), key=sums.__getitem__)
        return index if sums[index] > sums[0] * factor else 0

    def apart(self, view: View, found: Arrangement) -> Arrangement:
        """Return two kernels in partitions if that is clearly better: they stay there, whoever comes next."""
        jobs = found.jobs
        if len(jobs) != 2 or not view.capacity.partitions or self._exact(view, jobs, 0)[-1]:
            return found
        seen = self._sight.jobs(view, jobs)
        best, most = found, found.sum * self._factor(view, jobs)
        for one, other in pairs(view.capacity):
            for names in ((one, other), (other, one)):
                places = self._places(view, jobs, names)
                its = Arrangement(jobs, places, view.rates.together(seen, places))
                if its.sum > most:
                    best, most = its, its.sum
        return best

    def _card(self, view: View, job: Job) -> tuple[Profile, int, int, float, int]:
        """Return a job's profile, the number that like jobs share, and the figures that say how much it fills."""
        task, profile = job.task, self._sight.profile(view, job)
        shape = shape_of(profile, task.blocks, view.capacity)
        figures = (
            profile.kind, profile.need, profile.compute, profile.bandwidth, profile.miss_rate, shape.footprint,
            shape.alone, task.blocks, task.name if getattr(view.rates, "by_name", True) else "", bool(task.whole),
        )  # fmt: skip
        if (number := self._numbers.get(figures)) is None:
            # a number that was never used: entries under old numbers must not match
            number = remember(self._numbers, figures, next(self._next))
        found = self._cards[job] = profile, number, shape.alone, shape.load, task.blocks
        return found

    def _exact(self, view: View, jobs: Sequence[Job], fixed: int) -> tuple[Any, ...]:
        """Return all that the best arrangement depends on; how far the last wave of blocks is, does not count."""
        key: list[Any] = [fixed]
        return self._extend(view, key, 0.0, jobs, fixed)

    def _extend(self, view: View, key: list[Any], load: float, jobs: Sequence[Job], fixed: int) -> tuple[Any, ...]:
        """Add kernels to a key, of which the first `fixed` run; its last item is whether all have room."""
        cards = self._cards
        for i, job in enumerate(jobs):
            card = cards.get(job)
            if card is None or (card[0] is not job.task.profile and card[0] is not self._sight.profile(view, job)):
                card = self._card(view, job)
            _, number, alone_, each, blocks = card
            left = blocks - job.done
            load += (alone_ if alone_ < left else max(1, left)) * each
            key.append(number)
            if i < fixed and (placement := job.placement) is not None:
                key += placement.workers, placement.plain, placement.partition
        self._load = load
        key.append(load <= 1.0 + 1e-9)
        return tuple(key)

    def ended(self, job: Job) -> None:
        """Forget a job."""
        self._likes.pop(job, None)
        self._cards.pop(job, None)

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
        most = alone(job, capacity) * shape_of(profile, 1, capacity).load
        eighths = [math.ceil(8 * x) for x in (profile.need, profile.compute, profile.bandwidth, most)]
        kind = name, profile.kind, bool(job.task.whole), *eighths
        if (found := self._kinds.get(kind)) is None:
            found = remember(self._kinds, kind, next(self._next))
        self._likes[job] = found
        return found


def _parts(jobs: Sequence[Job], fixed: int, fits: bool, view: View) -> Sequence[Sequence[float | str | None]]:
    """Return arrangements to choose from: for each job a part of the device, the name of a partition, or None (all).

    The first is that they take turns, where they do not all fit.
    """
    for job in jobs[:fixed]:
        if job.placement is not None and job.placement.partition is not None:
            return _beside_partitions(view, [job.placement if i < fixed else None for i, job in enumerate(jobs)])
    if fits:
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
    return found


def _beside_partitions(view: View, there: Sequence[Placement | None]) -> list[list[float | str | None]]:
    """Return the only arrangement beside kernels in partitions: newcomers in the free partitions."""
    taken = {p.partition for p in there if p is not None}
    free = [name for pair in pairs(view.capacity) for name in pair if name not in taken and taken & set(pair)]
    found: list[float | str | None] = []
    for place in there:
        if place is not None:
            found.append(place.partition)
        else:
            found.append(free.pop(0) if free else None)
    return [found]
