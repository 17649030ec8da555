"""Residency: the fraction of its blocks that each kernel has on the device, in launch order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .executor import Capacity
from .task import Job, Profile

REMEMBERED = 1 << 13
"""Maximum number of kernels with cached results, which a simulation reads many times."""

MIN_ROOM = 0.1
"""Minimum fraction of the blocks of a kernel that must fit for the kernel to count as running. Chosen, not fitted."""

_SLACK = 1e-9


class ResidentKernel(NamedTuple):
    """A kernel that has blocks on the device.

    Attributes
    ----------
    name : str
    profile : Profile
    share : float
        Blocks that may be resident, as a fraction of the resident blocks when the kernel runs alone: 0 to 1.
    """

    name: str
    profile: Profile
    share: float


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

    def allowed(self, workers: int | None) -> int:
        """Return the number of blocks that may be resident with a quota."""
        return self.alone if workers is None or workers > self.alone else workers

    def demand(self, allowed: int, base: int, position: float) -> int:
        """Return the number of blocks that the kernel could have resident: in its last wave, its remaining blocks.

        `allowed` is its quota, which is the size of a wave. The first wave began at block `base`, and `position`
        blocks have ended.
        """
        last = base + (self.blocks - base - 1) // allowed * allowed
        return self.blocks - last if position >= last else allowed


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
            _SHAPES.clear()  # each can be computed again
        found = _SHAPES[key] = Shape(profile, blocks, capacity), profile, capacity
    return found[0]


def with_room(running: Sequence[Job], capacity: Capacity) -> list[Job]:
    """Return the running jobs that have blocks on the device, in the order of residency."""
    found: list[Job] = []
    left = 1.0
    for job in running:
        shape = shape_of(job.task.profile, job.task.blocks, capacity)
        allowed = shape.allowed(None if job.placement is None else job.placement.workers)
        demand = shape.load * max(1, min(allowed, job.task.blocks - job.done))
        if not found or left > MIN_ROOM * demand:
            found.append(job)
            left -= demand
    return found


def fit(demands: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """Return the number of blocks of each kernel that fit on the device, given its demand, in launch order.

    Blocks of older kernels are placed first and the remaining blocks wait, as in hardware.
    """
    found: list[int] = []
    first = shapes[0].footprint
    for shape in shapes:
        if shape.footprint != first:
            break
    else:
        # All blocks have the same footprint, as often in traces: the scarcest resource decides.
        load, left = shapes[0].load, 1.0 + _SLACK
        for count in demands:
            if load * count > left:
                count = max(0, int(left / load + 1e-6))
            left -= load * count
            found.append(count)
        return found
    a = b = c = d = 1.0
    for count, shape in zip(demands, shapes, strict=True):
        w, x, y, z = shape.footprint
        # Unrolled, because simulations spend their time here.
        if w * count > a + _SLACK:
            count = int(a / w + 1e-6)
        if x * count > b + _SLACK:
            count = int(b / x + 1e-6)
        if y * count > c + _SLACK:
            count = int(c / y + 1e-6)
        if z * count > d + _SLACK:
            count = int(d / z + 1e-6)
        count = max(0, count)
        a, b, c, d = a - w * count, b - x * count, c - y * count, d - z * count
        found.append(count)
    return found


def share_of(resident: int, demand: int, allowed: int, alone: int) -> float:
    """Return `ResidentKernel.share`. A kernel in its last wave is not slower for having fewer blocks than `allowed`."""
    return allowed / alone if resident >= demand else allowed / alone * resident / demand
