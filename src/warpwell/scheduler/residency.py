"""Residency: which part of its blocks each kernel gets on the device, in the order in which they were launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .executor import Capacity
from .task import Job, Profile

REMEMBERED = 1 << 13
"""Kernels whose figures are kept, at most: each is asked for many times in a simulation."""

MIN_ROOM = 0.1
"""Part of the blocks of a kernel that must find room for the kernel to count as running. Chosen, not fitted."""

_SLACK = 1e-9


class ResidentKernel(NamedTuple):
    """A kernel that has blocks on the device.

    Attributes
    ----------
    name : str
    profile : Profile
    share : float
        Blocks that it may have resident, as a part of those it has when it runs alone: 0 to 1.
    """

    name: str
    profile: Profile
    share: float


class Shape:
    """How much of a device the blocks of a kernel take.

    Attributes
    ----------
    profile : Profile
    footprint : tuple of float
        The parts of the device's registers, shared memory, threads and block slots that one block holds.
    load : float
        The largest of them.
    alone : int
        Blocks that are resident when it has the whole device: at least 1.
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
        """Return how many blocks a quota lets be resident."""
        return self.alone if workers is None or workers > self.alone else workers

    def wanted(self, allowed: int, base: int, position: float) -> int:
        """Return how many blocks it would have resident: in its last wave, the rest of its blocks.

        `allowed` is its quota, which is the size of its waves; they began at block `base`, and `position` blocks are
        done.
        """
        last = base + (self.blocks - base - 1) // allowed * allowed
        return self.blocks - last if position >= last else allowed


_SHAPES: dict[tuple[int, int, int], tuple[Shape, Profile, Capacity]] = {}


def shape_of(profile: Profile, blocks: int, capacity: Capacity) -> Shape:
    """Return the shape of a kernel.

    It is asked for again and again, so it is kept by the identity of profile and capacity. These are kept with it: no
    other object can have their identity meanwhile.
    """
    key = id(profile), blocks, id(capacity)
    found = _SHAPES.get(key)
    if found is None:
        if len(_SHAPES) >= REMEMBERED:
            _SHAPES.clear()  # all can be computed again
        found = _SHAPES[key] = Shape(profile, blocks, capacity), profile, capacity
    return found[0]


def with_room(running: Sequence[Job], capacity: Capacity) -> list[Job]:
    """Return the jobs that have blocks on the device, of those that run, in the order of residency."""
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


def fit(wanted: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """Return how many blocks of each kernel find room, of those that each would have resident, in the order of launch.

    The older take their room first, the rest waits, as in hardware.
    """
    found: list[int] = []
    first = shapes[0].footprint
    for shape in shapes:
        if shape.footprint != first:
            break
    else:
        # Blocks of one size, as often in traces: one resource tells.
        one, left = shapes[0].load, 1.0 + _SLACK
        for count in wanted:
            if one * count > left:
                count = max(0, int(left / one + 1e-6))
            left -= one * count
            found.append(count)
        return found
    a = b = c = d = 1.0
    for count, shape in zip(wanted, shapes, strict=True):
        w, x, y, z = shape.footprint
        # Written out, because simulations spend their time here.
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


def share_of(found: int, wanted: int, allowed: int, alone: int) -> float:
    """Return `ResidentKernel.share`: a kernel whose last blocks run is not slower for having no more of them."""
    return allowed / alone if found >= wanted else allowed / alone * found / wanted
