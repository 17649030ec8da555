"""`Priority`: the order of waiting jobs: effective priority with aging, then use over weight of their tenants."""

from __future__ import annotations

import math
from collections.abc import Callable

from ... import errors
from ..._check import checked_integer
from ..policy import View
from ..task import Job

MAX_LEADS = 10
"""A tenant that is ahead by more leads is so for other reasons than priority and aging. Its kernels age again:
otherwise tenants that could not run for a long time would exclude it for as long."""


class Priority:
    """Compares jobs, in this order.

    1. Effective priority: that of the task and its tenant, one more if a deadline is near, and aging. Priorities of
       tasks above 0, deadlines and aging get a tenant at most `lead` ahead of its fair share: after that they do not
       count until the other tenants have caught up.
    2. Use of the tenants over their weight, if it differs by more than `slack`.

    Parameters
    ----------
    patience : int, optional
        Number of jobs that may pass before waiting counts as one more priority.
    slack : float, optional
        Seconds of the whole device by which tenants' use may differ; any difference by default.
    lead : float, optional
        Maximum lead that priorities of its tasks and aging give a tenant, in seconds of the whole device; no limit by
        default.
    aging : callable, optional
        ``aging(view, job)``: priorities that the waiting of a job counts as, in place of `patience`.
    """

    def __init__(
        self,
        patience: int = 32,
        slack: float = math.inf,
        lead: float = math.inf,
        *,
        aging: Callable[[View, Job], int] | None = None,
    ) -> None:
        for option, value in (("slack", slack), ("lead", lead)):
            if not value >= 0:
                raise errors.ArgumentError(f"{option} must be 0 or more, got {value}", name=option)
        self.slack = slack
        self.lead = lead
        jobs = checked_integer(patience, "patience", minimum=1)
        self._aging = aging or (lambda view, job: view.waiting.passed(job) // jobs)
        self._lead_bound = self._far_bound = math.inf

    def update(self, view: View, heads: list[Job]) -> None:
        """Compute how far ahead tenants may be. Call it before jobs are compared in a decision."""
        if len(view.tenants) > 1:
            clocks = [view.tenants[name].clock for name in {job.task.tenant for job in (*view.running, *heads)}]
            lead = self.lead * view.capacity.processors
            self._lead_bound, self._far_bound = min(clocks) + lead, min(clocks) + MAX_LEADS * lead

    def base(self, view: View, job: Job) -> int:
        """Return the sum of a job's priority, as far as it counts now, and its tenant's."""
        account = view.tenants[job.task.tenant]
        priority: int = account.tenant.priority
        return priority + (job.priority if account.clock <= self._lead_bound else min(job.priority, 0))

    def effective(self, view: View, job: Job) -> int:
        """Return the effective priority of a waiting job: that of `base`, its deadline, and aging."""
        claims = job.priority
        if job.task.deadline is not None:
            # From twice its remaining time before its deadline, it has one more priority.
            claims += view.now + (job.rest or 0.0) >= due(job)
        account = view.tenants[job.task.tenant]
        waited = self._aging(view, job)
        priority: int = account.tenant.priority + waited
        if account.clock <= self._lead_bound:
            return priority + claims
        if account.clock <= self._far_bound:
            priority -= waited  # the jobs that passed belong to tenants that are behind
        return priority + min(claims, 0)

    def first(self, view: View, heads: list[Job]) -> list[Job]:
        """Return the jobs of the highest effective priority, of the tenants with the least use over weight."""
        if len(heads) == 1:
            return heads
        priorities = [self.effective(view, job) for job in heads]
        highest = max(priorities)
        if min(priorities) < highest:
            heads = [job for job, priority in zip(heads, priorities, strict=True) if priority == highest]
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
