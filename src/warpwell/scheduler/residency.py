"""Residency: the part of a device that the blocks of a kernel can fill."""

from __future__ import annotations

from collections.abc import Sequence

from .executor import Capacity
from .task import Job, Placement, Profile

REMEMBERED = 1 << 13
"""Maximum number of kernels with cached results, which a simulation reads many times."""

MIN_ROOM = 0.1
"""Minimum fraction of the blocks of a kernel that must fit for the kernel to count as running. Chosen, not fitted."""


class Shape:
    """The demand of the blocks of a kernel on a device.

    Attributes
    ----------
    profile : Profile
    footprint : tuple of float
        Fractions of the registers, shared memory, threads and block slots of the device that one block holds.
    load : float
        Maximum of `footprint`.
    alone : int
        Resident blocks when the kernel runs alone: at least 1.
    """

    __slots__ = ("alone", "blocks", "footprint", "load", "profile")

    def __init__(self, profile: Profile, blocks: int, capacity: Capacity) -> None:
        self.profile = profile
        self.blocks = blocks
        processors = capacity.processors
        self.footprint = (
            profile.registers / (processors * capacity.registers),
            profile.shared / (processors * capacity.shared) if profile.shared else 0.0,
            profile.threads / (processors * capacity.threads),
            1 / (processors * capacity.blocks),
        )
        self.load = max(self.footprint)
        self.alone = max(1, min(profile.resident, blocks, int(1 / self.load + 1e-6)))


_SHAPES: dict[tuple[int, int, int], tuple[Shape, Profile, Capacity]] = {}


def shape_of(profile: Profile, blocks: int, capacity: Capacity) -> Shape:
    """Return the shape of a kernel.

    Results are cached by the identity of profile and capacity. The cache also holds both objects, so that no other
    object can have the same identity.
    """
    key = id(profile), blocks, id(capacity)
    found = _SHAPES.get(key)
    if found is None:
        if len(_SHAPES) >= REMEMBERED:
            _SHAPES.clear()  # all entries can be computed again
        found = _SHAPES[key] = Shape(profile, blocks, capacity), profile, capacity
    return found[0]


def demand(job: Job, capacity: Capacity, placement: Placement | None = None) -> float:
    """Return the part of the device that the blocks of a job can fill, 0 to 1, by their scarcest resource.

    With a `placement`, its quota of workers limits the part.
    """
    shape = shape_of(job.task.profile, job.task.blocks, capacity)
    unfinished = shape.blocks - job.done
    workers = shape.alone if shape.alone < unfinished else max(1, unfinished)
    if placement is not None and placement.workers is not None:
        workers = min(workers, placement.workers)
    return workers * shape.load


def with_room(running: Sequence[Job], capacity: Capacity) -> list[Job]:
    """Return the running jobs that have blocks on the device, in the order of residency."""
    found: list[Job] = []
    left = 1.0
    for job in running:
        needed = demand(job, capacity, job.placement)
        if not found or left > MIN_ROOM * needed:
            found.append(job)
            left -= needed
    return found
