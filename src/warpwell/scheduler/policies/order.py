"""Policies that launch in an order and never preempt: first-come, left-over, stream-priority."""

from __future__ import annotations

from collections.abc import Hashable

from ... import errors
from ..policy import Decision, Launch, Policy, View
from ..task import MEMORY, Job, Placement
from .sharing import age, highest, standing

PLAIN = Placement(plain=True)
ARRIVAL = {"rule": "arrival"}

MAX_QUEUED_LAUNCHES = 4
"""Launches that wait on the device beyond the limit of running kernels. Simulator, 10 seeds: as good as 512 (STP)."""


class LeftOver(Policy):
    """Everything at once in streams, in order of arrival: a kernel gets what those before it leave."""

    name = "left-over"

    def bucket(self, job: Job) -> Hashable:
        """All in one: only arrival counts."""
        return None

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest while there is a place."""
        if len(view.running) >= view.limit:
            return []
        job = view.waiting.first()
        return [] if job is None else [Launch(job, PLAIN, ARRIVAL)]


class FirstCome(LeftOver):
    """One kernel at a time, in order of arrival, as a queue of whole GPUs does.

    Who comes next is known before the one that runs has ended. So where the limit is one kernel, too, those whose time
    is known wait on the device, at most `MAX_QUEUED_LAUNCHES`.
    """

    name = "first-come"
    conserves = False
    ahead = MAX_QUEUED_LAUNCHES

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest on an idle device, or behind the one that runs."""
        running, job = view.running, view.waiting.first()
        if job is None:
            return []
        if not running:
            return [Launch(job, PLAIN, ARRIVAL)]
        if view.limit > 1 or not job.task.profile.seconds or job.preemptions or running[0].placement != PLAIN:
            return []
        return [Launch(job, PLAIN, ARRIVAL)] if len(view.trains.get(running[0], ())) < self.ahead else []


class StreamPriority(Policy):
    """Left-over with stream priorities: the block scheduler takes blocks of the highest priority first.

    At equal `Task.priority`, memory-intensive tasks have a higher one than others. The order of launches is by priority
    too, and then by arrival; one more for each `patience` others that passed.

    Parameters
    ----------
    patience : int
    """

    name = "stream-priority"

    def __init__(self, *, patience: int = 32) -> None:
        self.patience = at_least_one("patience", patience)

    def bucket(self, job: Job) -> Hashable:
        """Group by priority, tenant and class."""
        return job.priority, job.task.tenant, job.task.profile.kind is MEMORY

    def decide(self, view: View) -> list[Decision]:
        """Launch the highest."""
        if len(view.running) >= view.limit:
            return []
        jobs = highest(view, self.patience)
        if not jobs:
            return []
        job = min(jobs, key=lambda j: (j.task.profile.kind is not MEMORY and not self._waited(view, j), age(j)))
        priority = 2 * standing(view, job) + (job.task.profile.kind is MEMORY)
        return [Launch(job, Placement(priority=priority, plain=True), {"rule": "priority", "priority": priority})]

    def _waited(self, view: View, job: Job) -> bool:
        return view.waiting.passed(job) >= self.patience


def at_least_one(name: str, value: int) -> int:
    """Return an option that counts something.

    Raises
    ------
    ArgumentError
        It is less than 1.
    """
    if value < 1:
        raise errors.ArgumentError(f"{name} is {value}: give at least 1", name=name)
    return value
