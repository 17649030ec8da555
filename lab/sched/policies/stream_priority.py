"""Left-over with stream priorities: the block scheduler takes blocks of the highest priority first."""

from __future__ import annotations

from collections.abc import Hashable

from warpwell.scheduler import Policy
from warpwell.scheduler.extend import Decision, Job, Kind, Launch, Placement, Priority, View
from warpwell.scheduler.policies.sharing import age


class StreamPriority(Policy):
    """Kernels at once in streams, in order of effective priority and arrival.

    At equal `Task.priority`, memory-intensive tasks have a higher stream priority than the other class. A task that
    `aging_jobs` tasks have passed counts as memory-intensive in the order of launches.

    Parameters
    ----------
    aging_jobs : int
        Number of tasks that may pass before waiting counts as one more priority.
    """

    name = "stream-priority"

    def __init__(self, *, aging_jobs: int = 32) -> None:
        self._aging_jobs = aging_jobs
        self._priority = Priority(aging_jobs)

    def bucket(self, job: Job) -> Hashable:
        """Group by priority, tenant and class."""
        return job.priority, job.task.tenant, job.task.profile.kind is Kind.MEMORY

    def decide(self, view: View) -> list[Decision]:
        """Launch the job of the highest priority."""
        heads = view.waiting.heads()
        if not heads or len(view.running) >= view.limit:
            return []
        job = min(self._priority.first(view, heads), key=lambda job: (not self._is_early(view, job), *age(job)))
        priority = 2 * self._priority.base(view, job) + (job.task.profile.kind is Kind.MEMORY)
        return [Launch(job, Placement(priority=priority, plain=True), {"rule": "priority", "priority": priority})]

    def _is_early(self, view: View, job: Job) -> bool:
        return job.task.profile.kind is Kind.MEMORY or view.waiting.passed(job) >= self._aging_jobs
