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
    """Launch everything at once in streams, in order of arrival: a kernel gets the room that earlier ones leave."""

    name = "left-over"

    def bucket(self, job: Job) -> Hashable:
        """Return one bucket for all: only arrival counts."""
        return None

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest while fewer kernels run than the limit."""
        if len(view.running) >= view.limit:
            return []
        job = view.waiting.first()
        return [] if job is None else [Launch(job, PLAIN, ARRIVAL)]


class FirstCome(LeftOver):
    """Run one kernel at a time, in order of arrival, as a queue of whole GPUs does.

    The next kernel is known before the running one ends. So if the limit is one kernel, at most `MAX_QUEUED_LAUNCHES`
    kernels of known time wait on the device.
    """

    name = "first-come"
    conserves = False
    ahead = MAX_QUEUED_LAUNCHES

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest on an idle device, or queue it after the running kernel."""
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

    At equal `Task.priority`, memory-intensive tasks have a higher stream priority than others. Launches are ordered by
    priority, too, with one more for each `patience` tasks that passed, and then by arrival.

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
    """Return a count that is an option.

    Raises
    ------
    ArgumentError
        It is less than 1.
    """
    if value < 1:
        raise errors.ArgumentError(f"{name} is {value}: give at least 1", name=name)
    return value
