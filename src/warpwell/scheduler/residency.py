"""Residency: which part of its blocks each kernel gets on the device, in the order in which they were launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .executor import Capacity
from .task import Placement, Profile


class Resident(NamedTuple):
    """A kernel that has blocks on the device.

    Attributes
    ----------
    name : str
    profile : Profile
    share : float
        Blocks that it may have resident, as a part of those it has when it runs alone: 0 to 1.
    partition : str or None
        Where; None is the whole device.
    """

    name: str
    profile: Profile
    share: float
    partition: str | None


def footprint(profile: Profile, capacity: Capacity) -> tuple[float, float, float, float]:
    """Return the parts of the device's registers, shared memory, threads and block slots that one block holds."""
    return _footprint(profile.registers, profile.shared, profile.threads, capacity.processors, capacity.registers,
                      capacity.shared, capacity.threads, capacity.blocks)  # fmt: skip


@lru_cache(maxsize=1 << 14)
def _footprint(
    registers: int, shared: int, threads: int, processors: int, all_registers: int, all_shared: int, all_threads: int,
    all_blocks: int,
) -> tuple[float, float, float, float]:  # fmt: skip
    return (
        registers / (processors * all_registers),
        shared / (processors * all_shared) if shared else 0.0,
        threads / (processors * all_threads),
        1 / (processors * all_blocks),
    )


def resident_alone(profile: Profile, blocks: int, capacity: Capacity) -> int:
    """Return how many blocks are resident when a kernel has the whole device: at least 1."""
    most = max(footprint(profile, capacity))
    return max(1, min(profile.resident, blocks, int(1 / most + 1e-6)))


def part_of(partition: str | None, capacity: Capacity) -> float:
    """Return which part of the multiprocessors a partition has.

    Raises
    ------
    KeyError
        The device has no such partition.
    """
    if partition is None:
        return 1.0
    return (capacity.partitions or {})[partition] / capacity.processors


def quota(alone: int, placement: Placement, capacity: Capacity) -> int:
    """Return how many blocks a placement lets be resident, of those that are when it runs alone."""
    most = alone
    if placement.partition is not None:
        most = max(1, int(alone * part_of(placement.partition, capacity) + 1e-9))
    return most if placement.workers is None else min(most, placement.workers)


def fit(
    wanted: Sequence[int],
    footprints: Sequence[tuple[float, float, float, float]],
    partitions: Sequence[str | None],
    capacity: Capacity,
) -> list[int]:
    """Return how many blocks of each kernel find room: the older take theirs first, the rest waits, as in hardware.

    Parameters
    ----------
    wanted : sequence of int
        Blocks that each would have resident, in the order of launch.
    footprints : sequence of tuple
        `footprint` of each.
    partitions : sequence
        Partition of each: kernels of different partitions do not take each other's room.
    capacity : Capacity
    """
    free: dict[str | None, list[float]] = {}
    found = []
    for blocks, each, partition in zip(wanted, footprints, partitions, strict=True):
        room = free.get(partition)
        if room is None:
            room = free[partition] = [part_of(partition, capacity)] * 4
        count = blocks
        for left, one in zip(room, each, strict=True):
            if one * count > left + 1e-9:
                count = max(0, int(left / one + 1e-6))
        if count:
            free[partition] = [left - one * count for left, one in zip(room, each, strict=True)]
        found.append(count)
    return found
