"""What policies share: ranks of combinations, quotas of workers, and jobs as perfect prediction sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..executor import Capacity
from ..policy import View
from ..task import Job, Kind, Profile, State


def rank(kinds: Iterable[Kind | None]) -> tuple[int, int]:
    """Return the rank of a combination, smallest best: memory + compute, compute + compute, memory + memory.

    For more than two kernels, the pairs among them count: first those of two memory-intensive ones, then those of two
    compute-intensive ones. A kernel of unknown kind counts as memory-intensive, the worse of the two.
    """
    compute = memory = 0
    for kind in kinds:
        if kind is Kind.COMPUTE:
            compute += 1
        else:
            memory += 1
    return memory * (memory - 1) // 2, compute * (compute - 1) // 2


def demand(job: Job) -> float:
    """Return the fraction of the device's room for its blocks that a job can fill, 0 to 1."""
    left = job.task.blocks - job.done
    resident = job.task.profile.resident
    return 1.0 if left >= resident or not resident else max(1, left) / resident


def room(job: Job) -> float:
    """Return the fraction of the device's room for its blocks that a running job may fill by its placement."""
    wants = demand(job)
    placement, resident = job.placement, job.task.profile.resident
    if placement is None or placement.workers is None or not resident:
        return wants
    return min(wants, placement.workers / resident)


def quota(job: Job, fraction: float, capacity: Capacity) -> int | None:
    """Return the workers that are a fraction of the device's room for a job, None for all of it.

    Whole numbers a multiprocessor where there are several, because that is how the hardware spreads them.
    """
    if fraction >= 1.0:
        return None
    profile = job.task.profile
    resident = profile.resident or capacity.processors
    each = resident // capacity.processors
    if each >= 2:
        return capacity.processors * min(each - 1, max(1, round(each * fraction)))
    return max(1, int(resident * fraction))


def stopping(view: View) -> bool:
    """Whether some job has been asked to leave and has not left."""
    return any(job.state is State.STOPPING for job in view.running)


def preemptible(job: Job) -> bool:
    """Whether a running job can be asked to leave."""
    return job.state is State.RUNNING and job.placement is not None and not job.placement.plain


def oldest(jobs: Iterable[Job]) -> Job | None:
    """Return the job that arrived first."""
    return min(jobs, key=lambda job: (job.arrival, job.number), default=None)


class Sight:
    """Jobs as a policy sees them: as predicted, or (`perfect`) as they really are."""

    def __init__(self, perfect: bool) -> None:
        self.perfect = perfect
        self._seen: dict[Job, Job] = {}

    def profile(self, view: View, job: Job) -> Profile:
        """Return the profile that decisions are based on."""
        if self.perfect and view.truth is not None:
            return view.truth(job.task)
        return job.task.profile

    def rest(self, view: View, job: Job) -> float | None:
        """Return the seconds that a job would still take alone, None where that is not known."""
        seconds = self.profile(view, job).seconds
        return None if seconds is None else seconds * job.left

    def jobs(self, view: View, jobs: Sequence[Job]) -> list[Job]:
        """Return what estimates of rates are to be asked with."""
        if not self.perfect or view.truth is None:
            return list(jobs)
        found = []
        for job in jobs:
            profile = view.truth(job.task)
            if profile is job.task.profile:
                found.append(job)
                continue
            seen = self._seen.get(job)
            if seen is None:
                task = dataclasses.replace(job.task, profile=profile)
                seen = self._seen[job] = dataclasses.replace(job, task=task)
            seen.done, seen.state, seen.placement = job.done, job.state, job.placement
            found.append(seen)
        return found

    def ended(self, job: Job) -> None:
        """Forget a job."""
        self._seen.pop(job, None)
