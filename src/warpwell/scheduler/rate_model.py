"""RateModel: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone)."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .executor import Capacity
from .residency import Resident, fit, footprint, part_of, quota, resident_alone
from .task import Job, Kind, Placement, Profile

REMEMBERED = 1 << 16
"""Combinations whose rates are kept, at most: each is asked for many times in a simulation."""

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

    def __init__(self, capacity: Capacity | None = None) -> None:
        self.capacity = capacity or Capacity()
        self._together: dict[tuple[Any, ...], tuple[list[float], list[Profile]]] = {}
        self._of: dict[tuple[Any, ...], tuple[list[float], list[Profile]]] = {}

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC when exactly these run together; 0 for one whose blocks find no room.

        The order of `jobs` is the order of residency: the first was launched first.
        """
        # Profiles are told apart by identity, which is fast; they are kept with what is remembered, so that none is
        # given the address of another.
        parts: list[Any] = []
        for job, placement in zip(jobs, placements, strict=True):
            task = job.task
            left = task.blocks - job.done
            resident = task.profile.resident
            parts += (id(task.profile), task.name, left if left < resident else resident, task.blocks,
                      placement.workers, placement.partition)  # fmt: skip
        key = tuple(parts)
        known = self._together.get(key)
        if known is None:
            if len(self._together) >= REMEMBERED:
                self._together.clear()
            known = self._together[key] = (self._resolve(jobs, placements), [j.task.profile for j in jobs])
        return known[0].copy()

    def of(self, residents: Sequence[Resident]) -> list[float]:
        """Return the normalized IPC of kernels that have found room, in the order of residency."""
        parts: list[Any] = []
        for resident in residents:
            parts += (id(resident.profile), resident.name, resident.share, resident.partition)
        key = tuple(parts)
        known = self._of.get(key)
        if known is None:
            if len(self._of) >= REMEMBERED:
                self._of.clear()
            known = self._of[key] = (self.evaluate(residents), [r.profile for r in residents])
        return known[0]

    @abstractmethod
    def evaluate(self, residents: Sequence[Resident]) -> list[float]:
        """Return what `of` does, not remembered."""

    def _resolve(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        capacity = self.capacity
        alone, wanted, quotas = [], [], []
        for job, placement in zip(jobs, placements, strict=True):
            task = job.task
            alone.append(resident_alone(task.profile, task.blocks, capacity))
            quotas.append(quota(alone[-1], placement, capacity))
            wanted.append(min(quotas[-1], task.blocks - job.done))
        found = fit(wanted, [footprint(j.task.profile, capacity) for j in jobs], [p.partition for p in placements],
                    capacity)  # fmt: skip
        rates = [0.0] * len(jobs)
        there = [i for i, count in enumerate(found) if count]
        residents = [
            Resident(jobs[i].task.name, jobs[i].task.profile, share_of(found[i], wanted[i], quotas[i], alone[i]),
                     placements[i].partition)
            for i in there
        ]  # fmt: skip
        for i, rate in zip(there, self.of(residents), strict=True):
            rates[i] = rate
        return rates


def share_of(found: int, wanted: int, allowed: int, alone: int) -> float:
    """Return `Resident.share`: a kernel whose last blocks run is not slower for having no more of them."""
    return allowed / alone if found >= wanted else allowed / alone * found / wanted


def kind_of(profile: Profile) -> Kind:
    """Return a kernel's class; where it is not known, by what it takes most of, and else memory."""
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


def on_each(resident: Resident, capacity: Capacity) -> float:
    """Return the share of blocks on each multiprocessor that a kernel is on: a partition is no smaller share there."""
    return min(1.0, resident.share / part_of(resident.partition, capacity))
