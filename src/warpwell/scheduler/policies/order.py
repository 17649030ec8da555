"""Policies that launch in an order and never preempt: first-come, left-over."""

from __future__ import annotations

from collections.abc import Hashable

from ..policy import Decision, Launch, Policy, View
from ..task import Job, Placement

PLAIN = Placement(plain=True)
ARRIVAL = {"rule": "arrival"}

MAX_QUEUED_LAUNCHES = 4
"""Maximum number of launches that wait on the device beyond the limit of running kernels. In simulations of 10 seeds,
throughput (STP) is as high as with 512."""


class LeftOver(Policy):
    """Launch all kernels at once in streams, in order of arrival: a kernel gets the room that earlier ones leave."""

    name = "left-over"

    def bucket(self, job: Job) -> Hashable:
        """Return one bucket for all: only arrival counts."""
        return None

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest while fewer kernels run than the limit."""
        jobs = view.waiting.heads() if len(view.running) < view.limit else []
        return [Launch(job, PLAIN, ARRIVAL) for job in jobs]


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
        running, jobs = view.running, view.waiting.heads()
        if not (jobs and running):
            return [Launch(job, PLAIN, ARRIVAL) for job in jobs]
        (job,) = jobs
        if view.limit > 1 or not job.task.profile.seconds or job.preemptions or running[0].placement != PLAIN:
            return []
        return [Launch(job, PLAIN, ARRIVAL)] if len(view.trains.get(running[0], ())) < self.ahead else []
