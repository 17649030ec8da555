"""SmkDrf: kernels share every multiprocessor, in parts that dominant resource fairness gives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ...scheduler.executor import Capacity
from ...scheduler.policies.order import at_least_one
from ...scheduler.policies.sharing import age, at_most, highest, preemptible
from ...scheduler.policy import Decision, Launch, Policy, Resize, View
from ...scheduler.residency import remember, shape_of
from ...scheduler.task import Job


class SmkDrf(Policy):
    """Simultaneous kernels with dominant resource fairness over registers, shared memory, threads and block slots.

    Whenever a kernel comes or goes, quotas are filled progressively: one more block a multiprocessor for the kernel
    whose dominant share, by the weight of its tenant, is smallest. Partial preemption is a smaller quota, which is
    obeyed at block ends.

    Parameters
    ----------
    patience : int
        How many others may pass before waiting counts as one more priority.
    """

    name = "smk-drf"
    watches = True
    adjusts = True

    def __init__(self, *, patience: int = 32) -> None:
        self.patience = at_least_one("patience", patience)
        self._known: dict[tuple[Any, ...], list[int | None]] = {}

    def bucket(self, job: Job) -> Hashable:
        """Group by priority and tenant."""
        return job.priority, job.task.tenant

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest of the highest, and divide anew."""
        running = view.running
        jobs = highest(view, self.patience) if len(running) < view.limit else []
        decisions: list[Decision] = []
        if jobs:
            job = min(jobs, key=age)
            quotas = self._divide(view, [*running, job])
            decisions.append(Launch(job, at_most(quotas.pop()), {"rule": "dominant share"}))
        elif running:
            quotas = self._divide(view, running)
        else:
            return []
        resizes: list[Decision] = [
            Resize(j, workers, {"rule": "dominant share"})
            for j, workers in zip(running, quotas, strict=True)
            if preemptible(j) and j.placement is not None and j.placement.workers != workers
        ]
        return resizes + decisions

    def _divide(self, view: View, jobs: Sequence[Job]) -> list[int | None]:
        # It is asked once before a launch and once after it, and most kernels come many times.
        key: list[Any] = [view.capacity.processors]
        for job in jobs:
            task = job.task
            shape = shape_of(task.profile, task.blocks, view.capacity)
            left = shape.blocks - job.done
            weight = view.tenants[task.tenant].tenant.weight
            key += weight, shape.alone if shape.alone < left else max(1, left), shape.alone, shape.footprint
        known = self._known.get(tuple(key))
        if known is None:
            weights = [view.tenants[j.task.tenant].tenant.weight for j in jobs]
            known = remember(self._known, tuple(key), divide(jobs, weights, view.capacity))
        return known.copy()


def divide(jobs: Sequence[Job], weights: Sequence[float], capacity: Capacity) -> list[int | None]:
    """Return quotas of workers by dominant resource fairness; None for a job that gets as many as it can use.

    Each gets at least one worker.
    """
    processors = capacity.processors
    shapes = [shape_of(job.task.profile, job.task.blocks, capacity) for job in jobs]
    wanted = [max(1, min(shape.alone, shape.blocks - job.done)) for shape, job in zip(shapes, jobs, strict=True)]
    units = [min(shape.alone, processors) for shape in shapes]
    a = b = c = d = 1.0 + 1e-9  # what is free of each resource
    given = [0] * len(jobs)
    shares = [0.0] * len(jobs)
    open_ = list(range(len(jobs)))
    while open_:
        i = open_[0]
        for k in open_:
            if shares[k] < shares[i]:
                i = k
        step = min(units[i], wanted[i] - given[i])
        w, x, y, z = shapes[i].footprint
        if step <= 0 or w * step > a or x * step > b or y * step > c or z * step > d:
            open_.remove(i)
            continue
        given[i] += step
        shares[i] = given[i] * shapes[i].load / weights[i]
        a, b, c, d = a - w * step, b - x * step, c - y * step, d - z * step
    return [None if got >= want else max(1, got) for got, want in zip(given, wanted, strict=True)]
