"""Orion: best-effort kernels run beside one of high priority where their profiles are opposite and they fit."""

from __future__ import annotations

from collections.abc import Hashable

from ...scheduler.policies.order import at_least_one
from ...scheduler.policies.sharing import age, level, standing
from ...scheduler.policy import Decision, Launch, Policy, View
from ...scheduler.task import Job, Placement


class Orion(Policy):
    """As Orion (EuroSys 2024) decides, kernel by kernel.

    A kernel of the highest priority that is about is launched at once, in a stream of higher priority. Others are best
    effort: launched where nothing of high priority runs, or where the classes are opposite, they need few enough
    multiprocessors, and those outstanding would not take too much of the request that they run beside. Where all have
    the same priority, the first that runs counts as high.

    Parameters
    ----------
    need : float
        Part of the multiprocessors that a best-effort kernel may need (``Profile.need``). The original tunes it for
        each job of high priority, up to all of them, which is the default.
    outstanding : float or None
        Predicted time of best-effort kernels that run, as a part of that of the request of high priority: 0.025 in the
        original, which knows the latency of a request. None: no bound.
    patience : int
        How many others may pass before waiting counts as one more priority.
    """

    name = "orion"
    conserves = False

    def __init__(self, *, need: float = 1.0, outstanding: float | None = None, patience: int = 32) -> None:
        self.need = need
        self.outstanding = outstanding
        self.patience = at_least_one("patience", patience)

    def bucket(self, job: Job) -> Hashable:
        """Group by priority, tenant and class."""
        return job.priority, job.task.tenant, job.task.profile.kind

    def decide(self, view: View) -> list[Decision]:
        """Launch kernels of high priority, then best effort that does not disturb them."""
        running = view.running
        if len(running) >= view.limit:
            return []
        jobs = [(level(view, job, self.patience), job) for job in view.waiting.heads()]
        jobs.sort(key=lambda entry: (-entry[0], age(entry[1])))
        if not jobs:
            return []
        if not running:
            return [self._launch(jobs[0][1], 1, "first")]
        ranks = [job.placement.priority if job.placement is not None else 0 for job in running]
        high = [job for job, its in zip(running, ranks, strict=True) if its > 0] or running[:1]
        above = max(standing(view, job) for job in high)
        for its, job in jobs:
            if its > above:
                return [self._launch(job, 1, "high priority")]
            if self._fits(job, running, high):
                return [self._launch(job, 0, "opposite profile")]
        return []

    def _fits(self, job: Job, running: list[Job], high: list[Job]) -> bool:
        profile = job.task.profile
        if profile.kind is None or profile.need > self.need:
            return False
        if any(other.task.profile.kind in (None, profile.kind) for other in high):
            return False
        if self.outstanding is None:
            return True
        low = sum(other.rest or 0.0 for other in running if other not in high) + (job.rest or 0.0)
        request = sum(task.profile.seconds or 0.0 for other in high for task in other.request.tasks)
        return low <= self.outstanding * request

    def _launch(self, job: Job, priority: int, rule: str) -> Launch:
        return Launch(job, Placement(priority=priority, plain=True), {"rule": rule})
