"""RateModel: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone)."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from .executor import Capacity
from .residency import REMEMBERED, Resident, Shapes, fit, share_of
from .task import Job, Kind, Placement, Profile

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
        self._shapes = Shapes(self.capacity)
        self._residents: dict[tuple[int, str, float, str | None], Resident] = {}

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC when exactly these run together; 0 for one whose blocks find no room.

        The order of `jobs` is the order of residency: the first was launched first.
        """
        capacity = self.capacity
        shapes, quotas, wanted = [], [], []
        load, apart = 0.0, False
        for job, placement in zip(jobs, placements, strict=True):
            task = job.task
            shape = self._shapes(task.profile, task.blocks)
            allowed = shape.allowed(placement, capacity)
            blocks = shape.wanted(allowed, 0, job.done)
            load += shape.load * blocks
            apart |= placement.partition is not None
            shapes.append(shape)
            quotas.append(allowed)
            wanted.append(blocks)
        found = wanted
        if load > 1.0 or apart:
            found = fit(wanted, shapes, [placement.partition for placement in placements], capacity)
        residents = []
        for i, count in enumerate(found):
            if count:
                share = share_of(count, wanted[i], quotas[i], shapes[i].alone)
                residents.append(self.resident(jobs[i].task.name, shapes[i].profile, share, placements[i].partition))
        rates = self.of(residents)
        if len(residents) == len(jobs):
            return rates
        there = iter(rates)
        return [next(there) if count else 0.0 for count in found]

    @abstractmethod
    def of(self, residents: Sequence[Resident]) -> list[float]:
        """Return the normalized IPC of kernels that have found room, in the order of residency."""

    def resident(self, name: str, profile: Profile, share: float, partition: str | None) -> Resident:
        """Return what `of` takes; it is made once, with what the model derives from it."""
        key = id(profile), name, share, partition
        found = self._residents.get(key)
        if found is None:
            if len(self._residents) >= REMEMBERED:
                self._residents.clear()
            found = self._residents[key] = Resident(name, profile, share, partition)
        return found


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
