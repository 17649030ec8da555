"""Residency in a simulation: the blocks of each kernel that fit on the device, in launch order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from warpwell.scheduler import Profile
from warpwell.scheduler.residency import Shape

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


def allowed_blocks(shape: Shape, workers: int | None) -> int:
    """Return the number of blocks that may be resident with a quota."""
    return shape.alone if workers is None or workers > shape.alone else workers


def demand_of(shape: Shape, allowed: int, base: int, position: float) -> int:
    """Return the number of blocks that a kernel could have resident: in its last wave, its remaining blocks.

    `allowed` is its quota, which is the size of a wave. The first wave began at block `base`, and `position` blocks
    have ended.
    """
    last = base + (shape.blocks - base - 1) // allowed * allowed
    return shape.blocks - last if position >= last else allowed


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
