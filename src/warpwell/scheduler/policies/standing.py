"""Standing: whose turn it is among tasks that wait: priority with aging, within limits, then tenants by their use."""

from __future__ import annotations

import math

from ... import errors
from ..policy import View
from ..task import Job
from .order import at_least_one

FAR = 10
"""Leads by which a tenant is ahead for other reasons than priority and aging: its kernels age again, or those who
could not run for long would shut it out for as long."""


class Standing:
    """Compares jobs, in this order.

    1. Priority of task and tenant, and one more for each `patience` others that passed (aging). What tasks say of
       themselves (priorities above 0, deadlines) and aging get a tenant at most `lead` ahead of the use that is its
       due: then they count no more until others have caught up.
    2. Tenants by their use over their weight, as far as they differ by more than `slack`.

    Parameters
    ----------
    patience : int
        How many others may pass before waiting counts as one more priority.
    slack : float
        Seconds of the whole device by which tenants' use may differ.
    lead : float
        Seconds of the whole device by which priorities of its tasks, and aging, get a tenant ahead of others that want
        it, at most.
    """

    def __init__(self, patience: int, slack: float, lead: float) -> None:
        self.patience = at_least_one("patience", patience)
        for option, value in (("slack", slack), ("lead", lead)):
            if not value >= 0:
                raise errors.ArgumentError(f"{option} is {value}: give 0 or more", name=option)
        self.slack = slack
        self.lead = lead
        self._bound = self._far = math.inf

    def look(self, view: View, heads: list[Job]) -> None:
        """Note how far ahead tenants may be, before jobs are compared in a decision."""
        if len(view.tenants) > 1:
            least = min([view.tenants[name].clock for name in {job.task.tenant for job in (*view.running, *heads)}])
            lead = self.lead * view.capacity.processors
            self._bound, self._far = least + lead, least + FAR * lead

    def of(self, view: View, job: Job) -> int:
        """Return a job's priority, as far as it counts now, and its tenant's."""
        account = view.tenants[job.task.tenant]
        its: int = account.tenant.priority
        return its + (job.priority if account.clock <= self._bound else min(job.priority, 0))

    def level(self, view: View, job: Job) -> int:
        """Return the same of a job that waits, with its deadline and aging."""
        task, claims = job.task, job.priority
        if task.deadline is not None:
            # Twice its rest from its deadline: one more priority.
            claims += view.now + (job.rest or 0.0) >= due(job)
        account = view.tenants[task.tenant]
        waited: int = view.waiting.passed(job) // self.patience
        its: int = account.tenant.priority + waited
        if account.clock <= self._bound:
            return its + claims
        if account.clock <= self._far:
            its -= waited  # others pass because they are owed it
        return its + min(claims, 0)

    def first(self, view: View, heads: list[Job]) -> list[Job]:
        """Return the jobs of the highest level, of the tenants that used least."""
        if len(heads) == 1:
            return heads
        levels = [self.level(view, job) for job in heads]
        most = max(levels)
        if min(levels) < most:
            heads = [job for job, its in zip(heads, levels, strict=True) if its == most]
        if len(heads) > 1 and len(view.tenants) > 1:
            clocks = [view.tenants[job.task.tenant].clock for job in heads]
            bound = min(clocks) + self.slack * view.capacity.processors
            heads = [job for job, clock in zip(heads, clocks, strict=True) if clock <= bound]
        return heads


def due(job: Job) -> float:
    """Return the key by which jobs wait: arrival; of one with a deadline, when it must be launched at the latest."""
    if job.task.deadline is None:
        return job.arrival
    return job.arrival + job.task.deadline - (job.rest or 0.0)
