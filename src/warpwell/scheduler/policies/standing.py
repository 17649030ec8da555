"""Standing: the order of waiting tasks: by priority with aging, within limits, then by the use of their tenants."""

from __future__ import annotations

import math

from ... import errors
from ..policy import View
from ..task import Job
from .order import at_least_one

MAX_LEADS = 10
"""A tenant that is ahead by more leads is so for other reasons than priority and aging. Its kernels age again:
otherwise tenants that could not run for a long time would exclude it for as long."""


class Standing:
    """Compares jobs, in this order.

    1. Priority of task and tenant, and one more for each `patience` jobs that passed (aging). Priorities of tasks above
       0, deadlines and aging get a tenant at most `lead` ahead of its fair share: after that they do not count until
       the other tenants have caught up.
    2. Tenants by their use over their weight, if they differ by more than `slack`.

    Parameters
    ----------
    patience : int
        Number of jobs that may pass before waiting counts as one more priority.
    slack : float
        Seconds of the whole device by which tenants' use may differ.
    lead : float
        Maximum lead that priorities of its tasks and aging give a tenant, in seconds of the whole device.
    """

    def __init__(self, patience: int, slack: float, lead: float) -> None:
        self.patience = at_least_one("patience", patience)
        for option, value in (("slack", slack), ("lead", lead)):
            if not value >= 0:
                raise errors.ArgumentError(f"{option} is {value}: give 0 or more", name=option)
        self.slack = slack
        self.lead = lead
        self._lead_bound = self._far_bound = math.inf

    def look(self, view: View, heads: list[Job]) -> None:
        """Compute how far ahead tenants may be. Call it before jobs are compared in a decision."""
        if len(view.tenants) > 1:
            clocks = [view.tenants[name].clock for name in {job.task.tenant for job in (*view.running, *heads)}]
            lead = self.lead * view.capacity.processors
            self._lead_bound, self._far_bound = min(clocks) + lead, min(clocks) + MAX_LEADS * lead

    def of(self, view: View, job: Job) -> int:
        """Return the sum of a job's priority, as far as it counts now, and its tenant's."""
        account = view.tenants[job.task.tenant]
        priority: int = account.tenant.priority
        return priority + (job.priority if account.clock <= self._lead_bound else min(job.priority, 0))

    def level(self, view: View, job: Job) -> int:
        """Return the effective priority of a waiting job: that of `of`, its deadline, and aging."""
        task, claims = job.task, job.priority
        if task.deadline is not None:
            # From twice its remaining time before its deadline, it has one more priority.
            claims += view.now + (job.rest or 0.0) >= due(job)
        account = view.tenants[task.tenant]
        waited: int = view.waiting.passed(job) // self.patience
        priority: int = account.tenant.priority + waited
        if account.clock <= self._lead_bound:
            return priority + claims
        if account.clock <= self._far_bound:
            priority -= waited  # the jobs that passed belong to tenants that are behind
        return priority + min(claims, 0)

    def first(self, view: View, heads: list[Job]) -> list[Job]:
        """Return the jobs of the highest level, of the tenants with the least use."""
        if len(heads) == 1:
            return heads
        levels = [self.level(view, job) for job in heads]
        highest = max(levels)
        if min(levels) < highest:
            heads = [job for job, level in zip(heads, levels, strict=True) if level == highest]
        if len(heads) > 1 and len(view.tenants) > 1:
            clocks = [view.tenants[job.task.tenant].clock for job in heads]
            bound = min(clocks) + self.slack * view.capacity.processors
            heads = [job for job, clock in zip(heads, clocks, strict=True) if clock <= bound]
        return heads


def due(job: Job) -> float:
    """Return the sort key of a waiting job: its arrival, or the latest time to launch it if it has a deadline."""
    if job.task.deadline is None:
        return job.arrival
    return job.arrival + job.task.deadline - (job.rest or 0.0)
