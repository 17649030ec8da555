"""Simultaneous multikernel (HPCA 2016): every multiprocessor is shared by dominant resource fairness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warpwell.scheduler import Policy
from warpwell.scheduler.extend import Capacity, Decision, Job, Launch, Placement, Resize, View
from warpwell.scheduler.policies.sharing import preemptible

RESOURCES = ("registers", "shared", "threads")
"""Resources of a block, as `Profile` and `Capacity` name them. The fourth resource is the block slot itself."""


def dominant_share_counts(jobs: Sequence[Job], capacity: Capacity) -> list[int]:
    """Return the blocks of each kernel on a multiprocessor, max-min fair by dominant share.

    The dominant share of a kernel is the largest of its shares of registers, shared memory, threads and block slots.
    The kernel with the smallest dominant share gets one more block, until no kernel has blocks that fit. Ties go to the
    first.
    """
    needs = []
    for job in jobs:
        profile = job.task.profile
        needs.append([*(getattr(profile, name) / getattr(capacity, name) for name in RESOURCES), 1 / capacity.blocks])
    limits = [-(-min(job.task.profile.resident, job.task.blocks) // capacity.processors) for job in jobs]
    counts, used = [0] * len(jobs), [0.0] * (len(RESOURCES) + 1)
    growing = [k for k in range(len(jobs)) if limits[k]]
    while growing:
        k = min(growing, key=lambda k: counts[k] * max(needs[k]))
        total = [part + need for part, need in zip(used, needs[k], strict=True)]
        if max(total) <= 1.0 + 1e-9:
            counts[k], used = counts[k] + 1, total
        if max(total) > 1.0 + 1e-9 or counts[k] == limits[k]:
            growing.remove(k)
    return counts


class SmkDrf(Policy):
    """Kernels in order of arrival, each with its fair number of blocks on every multiprocessor.

    When a kernel arrives or ends, the numbers of blocks change: running kernels give up single blocks (partial context
    switch) or get more. No kernel is preempted as a whole.
    """

    name = "smk-drf"
    conserves = False
    adjusts = True

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest kernel below the limit if a block of it fits; divide the device again."""
        first = view.waiting.first() if len(view.running) < view.limit else None
        if first is not None:
            counts = dominant_share_counts([*view.running, first], view.capacity)
            if counts[-1] or not view.running:
                workers = self._workers(view, first, max(1, counts[-1]))
                launch = Launch(first, Placement(workers), {"rule": "dominant share"})
                return [*self._divide(view, counts), launch]
        return self._divide(view, dominant_share_counts(view.running, view.capacity))

    def _divide(self, view: View, counts: Sequence[int]) -> list[Decision]:
        why: dict[str, Any] = {"rule": "dominant share"}
        decisions: list[Decision] = []
        for job, count in zip(view.running, counts, strict=False):
            workers = self._workers(view, job, count)
            if count and preemptible(job) and job.placement is not None and job.placement.workers != workers:
                decisions.append(Resize(job, workers, why))
        return decisions

    @staticmethod
    def _workers(view: View, job: Job, count: int) -> int | None:
        """Return the quota for some blocks on each multiprocessor; None if the kernel has no more when it is solo."""
        workers = count * view.capacity.processors
        return None if workers >= min(job.task.profile.resident, job.task.blocks) else workers
