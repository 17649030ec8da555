"""Policies that launch in an order and never preempt: first-come, left-over, stream-priority, shortest."""

from __future__ import annotations

from collections.abc import Hashable

from ..policy import Decision, Launch, Policy, View
from ..task import Job, Placement

PLAIN = Placement(plain=True)
ARRIVAL = {"rule": "arrival"}


class FirstCome(Policy):
    """One kernel at a time, in order of arrival, as a queue of whole GPUs does."""

    name = "first-come"
    conserves = False

    def bucket(self, job: Job) -> Hashable:
        """All in one: only arrival counts."""
        return None

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest on an idle device."""
        if view.running:
            return []
        job = view.waiting.first()
        return [] if job is None else [Launch(job, PLAIN, ARRIVAL)]


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
