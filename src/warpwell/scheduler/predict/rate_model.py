"""RateModel: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone)."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..executor import Capacity
from ..residency import REMEMBERED, Resident, Shape, fit, shape_of, share_of
from ..task import Job, Kind, Placement, Profile, Task

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
        self._residents: dict[tuple[int, str, float, str | None], Resident] = {}

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
            allowed, workers, partition = shape.alone, placement.workers, placement.partition
            if partition is not None:
                allowed = shape.allowed(placement, self.capacity)
            elif workers is not None and workers < allowed:
                allowed = workers
            # As `Shape.wanted`, written out.
            last = (blocks - 1) // allowed * allowed
            parts += number, allowed, blocks - last if job.done >= last else allowed, partition
            shapes.append(shape)
        key = tuple(parts)
        found = self._together.get(key)
        if found is None:
            if len(self._together) >= REMEMBERED:
                self._together.clear()
            found = self._together[key] = self._evaluate(jobs, shapes, parts)
        return found.copy()

    def _evaluate(self, jobs: Sequence[Job], shapes: Sequence[Shape], parts: list[Any]) -> list[float]:
        quotas, wanted, partitions = parts[1::4], parts[2::4], parts[3::4]
        residents = []
        counts = fit(wanted, shapes, partitions, self.capacity)
        for i, count in enumerate(counts):
            if count:
                share = share_of(count, wanted[i], quotas[i], shapes[i].alone)
                residents.append(self.resident(jobs[i].task.name, shapes[i].profile, share, partitions[i]))
        rates = iter(self.of(residents))
        return [next(rates) if count else 0.0 for count in counts]

    def _learn(self, task: Task) -> tuple[int, Shape, Profile]:
        """Number a kernel: those that are alike in all that rates depend on have the same number."""
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        profile, shape = task.profile, shape_of(task.profile, task.blocks, self.capacity)
        figures = (
            profile.kind, profile.bandwidth, profile.compute, profile.need, profile.miss_rate, shape.footprint,
            shape.alone, task.blocks, task.name if self.by_name else "",
        )  # fmt: skip
        number = self._alike.get(figures)
        if number is None:
            if len(self._alike) >= REMEMBERED:
                self._alike.clear()
            number = self._alike[figures] = next(self._next)  # none is given twice: what is kept goes by them
        found = self._known[id(profile), task.blocks, task.name] = number, shape, profile
        return found

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
