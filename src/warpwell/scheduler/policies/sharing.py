"""Helpers of all policies: ranks of combinations, parts of the device, quotas."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from ..executor import Capacity
from ..policy import Decision, Launch, Resize, View
from ..residency import demand, shape_of
from ..task import COMPUTE, RUNNING, STOPPING, Job, Kind, Placement

_FULL = Placement()


cached_placement = functools.lru_cache(maxsize=4096)(Placement)
"""Return a placement. Policies need few different placements, very often."""


def rank(kinds: Iterable[Kind | None]) -> tuple[int, int]:
    """Return the rank of a combination, smallest best: memory + compute, compute + compute, memory + memory.

    For more than two kernels, the number of memory + memory pairs is compared first, then the number of compute +
    compute pairs. A kernel of unknown kind counts as memory-intensive, the worse of the two.
    """
    is_memory = [kind is not COMPUTE for kind in kinds]
    memory = sum(is_memory)
    compute = len(is_memory) - memory
    return memory * (memory - 1) // 2, compute * (compute - 1) // 2


def quota(job: Job, fraction: float, capacity: Capacity) -> int | None:
    """Return the workers that fill a part of the device; None if the job does not have more of them when it runs solo.

    If there are several on each multiprocessor, the number is the same on all, as the hardware distributes them.
    """
    if fraction >= 1.0:
        return None
    shape = shape_of(job.task.profile, job.task.blocks, capacity)
    workers = int(fraction / shape.load + 1e-6)
    if workers >= capacity.processors:
        workers -= workers % capacity.processors
    return None if workers >= shape.alone else max(1, workers)


def stopping(view: View) -> bool:
    """Return True if a preempted job has not left yet."""
    return any([job.state is STOPPING for job in view.running])


def preemptible(job: Job) -> bool:
    """Return True if a running job can be preempted."""
    return job.state is RUNNING and job.placement is not None and not job.placement.plain


def age(job: Job) -> tuple[float, int]:
    """Sort key: order of arrival."""
    return job.arrival, job.number


def joined(view: View, running: Sequence[Job], job: Job) -> list[Placement]:
    """Return the placements of running jobs and of an arriving one, which comes last.

    The arriving job takes the free part of the device, or an equal part if that is larger; the others make room.
    """
    capacity = view.capacity
    placements = [j.placement or _FULL for j in running]
    parts = [demand(j, capacity, j.placement) for j in running]
    free = 1.0 - sum(parts)
    if not running or demand(job, capacity) <= free + 1e-9:
        return [*placements, _FULL]
    own_part = max(free, 1.0 / (len(running) + 1))
    equal_part = (1.0 - own_part) / len(running)
    for i, j in enumerate(running):
        if parts[i] > equal_part + 1e-9 and preemptible(j):
            placements[i] = cached_placement(quota(j, equal_part, capacity), placements[i].priority)
    return [*placements, cached_placement(quota(job, own_part, capacity))]


def share(view: View, job: Job, why: dict[str, Any]) -> list[Decision]:
    """Launch a job with the running ones, placed as by `joined`."""
    running = view.running
    *placements, own = joined(view, running, job)
    decisions: list[Decision] = [
        Resize(j, placement.workers, {"rule": "makes room", "for": job.number})
        for j, placement in zip(running, placements, strict=True)
        if j.placement is not None and placement.workers != j.placement.workers
    ]
    decisions.append(Launch(job, own, why))
    return decisions


def grow(view: View) -> list[Decision]:
    """Divide free room among the running kernels: no quota if all of them fit, otherwise equal parts."""
    running = view.running
    if all([j.placement is None or j.placement.workers is None for j in running]) or stopping(view):
        return []
    if len(running) == 1:
        return [Resize(running[0], None, {"rule": "alone"})]
    capacity = view.capacity
    if sum([demand(j, capacity, j.placement) for j in running]) > 1.0 - 0.5 / len(running):
        return []
    all_fit = sum(demand(job, capacity) for job in running) <= 1.0 + 1e-9
    decisions: list[Decision] = []
    for job in running:
        workers = None if all_fit else quota(job, 1.0 / len(running), capacity)
        if preemptible(job) and job.placement is not None and workers != job.placement.workers:
            decisions.append(Resize(job, workers, {"rule": "grows"}))
    return decisions


def remaining_seconds(job: Job, now: float) -> float | None:
    """Return the remaining solo seconds of a job, or None if unknown.

    A prediction counts until the job has been resident for longer. After that, the remaining time is extrapolated from
    the completed blocks; without any, it is as long as the time so far.
    """
    seconds = job.task.profile.seconds
    if seconds is None:
        return None
    fraction = job.left
    resident = job.ran if job.placement is None else job.ran + now - job.since
    if resident > seconds:
        return resident * fraction / (1.0 - fraction) if fraction < 1.0 else resident
    return seconds * fraction


def gentlest_mode(view: View) -> str:
    """Return the default mode of a preemption: a switch if the device has it, else a drain."""
    return "switch" if "switch" in view.capacity.modes else "drain"
