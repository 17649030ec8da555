"""`Priority`: the order of waiting jobs: effective priority with aging, then use over weight of their tenants."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..._check import checked_integer, checked_number
from ..policy import View
from ..task import Job

MAX_LEADS = 10
"""If a tenant is ahead by more than this number of leads, the cause is not priority and aging. Its kernels then age
again; otherwise, tenants that could not run for a long time would exclude it for as long. Protection, not tuned."""


class Priority:
    """Compares jobs, in this order.

    1. Effective priority: the sum of the priorities of the task and its tenant, one if a deadline is near, and aging.
       Task priorities above 0, deadlines and aging bring a tenant at most `lead_seconds` ahead of its fair share. After
       that, they do not count until the other tenants have caught up.
    2. Use of the tenants over their weight, if it differs by more than `tolerance_seconds`.

    Parameters
    ----------
    aging_jobs : int, optional
        Number of jobs that may be launched before a waiting job; then waiting raises its priority by one.
    tolerance_seconds : float, optional
        Difference between the uses of tenants, in time of the whole device, that is ignored. Default: none.
    lead_seconds : float, optional
        Maximum lead that a tenant gets by its tasks' priorities and aging, in time of the whole device. Default: no
        limit.
    aging : callable, optional
        Replaces `aging_jobs`: ``aging(view, job)`` returns the value that waiting adds to a job's priority.
    """

    def __init__(
        self,
        aging_jobs: int = 32,
        tolerance_seconds: float = math.inf,
        lead_seconds: float = math.inf,
        *,
        aging: Callable[[View, Job], int] | None = None,
    ) -> None:
        self._tolerance_seconds = checked_number(tolerance_seconds, "tolerance_seconds", maximum=math.inf)
        self._lead_seconds = checked_number(lead_seconds, "lead_seconds", maximum=math.inf)
        jobs = checked_integer(aging_jobs, "aging_jobs", minimum=1)
        self._aging = aging or (lambda view, job: view.waiting.passed(job) // jobs)
        self._lead_bound = self._far_bound = math.inf

    def update(self, view: View, heads: list[Job]) -> None:
        """Compute how far ahead tenants may be. Call it before jobs are compared in a decision."""
        if len(view.tenants) > 1:
            clocks = [view.tenants[name].clock for name in {job.task.tenant for job in (*view.running, *heads)}]
            lead = self._lead_seconds * view.capacity.processors
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
            priority -= waited  # The jobs that passed belong to tenants that have used less than their share.
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
            bound = min(clocks) + self._tolerance_seconds * view.capacity.processors
            heads = [job for job, clock in zip(heads, clocks, strict=True) if clock <= bound]
        return heads


def due(job: Job) -> float:
    """Return the sort key of a waiting job: its arrival, or the latest time to launch it if it has a deadline."""
    if job.task.deadline is None:
        return job.arrival
    return job.arrival + job.task.deadline - (job.rest or 0.0)
