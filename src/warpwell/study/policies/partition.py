"""EvenPartition and BestPartition: each kernel has multiprocessors of its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ...scheduler.policies.order import at_least_one
from ...scheduler.policies.sharing import age, at_most, pairs, quota, within
from ...scheduler.policy import Decision, Launch, Policy, View
from ...scheduler.residency import remember
from ...scheduler.task import MEMORY, Job, Kind, Placement, Request


class EvenPartition(Policy):
    """The device in equal partitions, a kernel in each, in order of arrival.

    Without partitions that are equal, or with a limit of more than two kernels, each gets an equal quota of workers.
    """

    name = "even-partition"

    def bucket(self, job: Job) -> Hashable:
        """All in one: only arrival counts."""
        return None

    def decide(self, view: View) -> list[Decision]:
        """Launch the oldest in a free partition."""
        if len(view.running) >= view.limit:
            return []
        job = view.waiting.first()
        if job is None:
            return []
        if view.limit == 1:
            return [Launch(job, Placement(), {"rule": "arrival"})]
        pair = min(pairs(view.capacity), key=lambda p: abs(_size(p[0], view) - _size(p[1], view)), default=None)
        if view.limit == 2 and pair is not None and 0.8 <= _size(pair[0], view) / _size(pair[1], view) <= 1.25:
            taken = {j.placement.partition for j in view.running if j.placement is not None}
            free = [name for name in pair if name not in taken]
            if free:
                return [Launch(job, within(free[0]), {"rule": "arrival"})]
        workers = quota(job, 1.0 / view.limit, view.capacity)
        return [Launch(job, at_most(workers), {"rule": "arrival"})]


class BestPartition(Policy):
    """Two partitions, of which a memory-intensive kernel gets the smallest that keeps nearly all of its rate.

    The pair of partitions and the sides are those with the best sum of rates for a memory- and a compute-intensive
    kernel, as the rates table has it for the kernels at hand. One that would have to wait for its own side takes the
    other one where nothing waits for that. Without partitions, quotas of workers stand in for them.

    Parameters
    ----------
    keeps : float
        Part of its alone rate that the memory-intensive kernel must keep in its partition.
    quotas : sequence of float
        Parts of the device to choose from for it, without partitions.
    patience : int
        How many others may be launched before one that waits.
    """

    name = "best-partition"

    def __init__(
        self, *, keeps: float = 0.95, quotas: Sequence[float] = (0.125, 0.25, 0.5, 0.75), patience: int = 32
    ) -> None:
        self.keeps = keeps
        self.quotas = tuple(quotas)
        self.patience = at_least_one("patience", patience)
        self._last: dict[Kind | None, Job] = {}
        self._chosen: dict[tuple[str, str], tuple[Placement, Placement]] = {}

    def decide(self, view: View) -> list[Decision]:
        """Launch the kernel that belongs in the free partition."""
        running = view.running
        if len(running) >= view.limit:
            return []
        heads = view.waiting.heads()
        if not heads:
            return []
        for job in heads:
            self._last[job.task.profile.kind] = job
        late = [j for j in heads if view.waiting.passed(j) >= self.patience]
        if not running:
            job = min(late or heads, key=age)
            return [Launch(job, self._sides(view, job)[_side(job)], {"rule": "best partition"})]
        if len(running) > 1 or view.limit > 2:
            job = min(late or heads, key=age)
            return [Launch(job, Placement(workers=quota(job, 1.0 / view.limit, view.capacity)), {"rule": "arrival"})]
        other = running[0]
        # Who belongs on the side that is free, and then whoever is there.
        job = min(late or heads, key=lambda j: (_side(j) == _side(other), age(j)))
        return [Launch(job, self._beside(view, job, other), {"rule": "best partition", "beside": [other.number]})]

    def ended(self, job: Job, now: float) -> None:
        """Remember the job without its launch and its arguments."""
        for kind, last in self._last.items():
            if last is job:
                task = replace(job.task, launch=None, arguments=())
                self._last[kind] = replace(job, task=task, request=Request(task.name, [task]), error=None)

    def _beside(self, view: View, job: Job, other: Job) -> Placement:
        """Return the place that a running kernel leaves."""
        taken = other.placement
        if taken is not None and taken.partition is not None:
            for pair in pairs(view.capacity):
                if taken.partition in pair:
                    return within(pair[1 - pair.index(taken.partition)])
        sides = self._sides(view, job)
        side = _side(job) if _side(job) != _side(other) else 1 - _side(job)
        return self._fitted(view, job, sides[side])

    def _fitted(self, view: View, job: Job, place: Placement) -> Placement:
        """A quota that was chosen for another kernel, for this one."""
        if place.partition is not None or place.workers is None:
            return place
        return Placement(workers=max(1, min(place.workers, job.task.profile.resident or 1)))

    def _sides(self, view: View, job: Job) -> tuple[Placement, Placement]:
        """Return the places of memory- and of compute-intensive kernels."""
        memory = job if _side(job) == 0 else self._last.get(MEMORY)
        compute = job if _side(job) == 1 else self._last.get(Kind.COMPUTE)
        if memory is not None and compute is not None:
            chosen = self._chosen.get((memory.task.name, compute.task.name))
            if chosen is not None:
                return chosen
        choices = [(within(pair[i]), within(pair[1 - i])) for pair in pairs(view.capacity) for i in (0, 1)]
        if not choices:
            one, two = memory or job, compute or job
            choices = [
                (
                    Placement(workers=quota(one, part, view.capacity)),
                    Placement(workers=quota(two, 1 - part, view.capacity)),
                )
                for part in self.quotas
            ]
        if memory is None or compute is None:
            # Nothing to choose by yet: the most even, which is no partition's worst.
            return min(choices, key=lambda c: abs(_part(c[0], view, job) - _part(c[1], view, job)))
        rated = [(c, view.rates.together([memory, compute], list(c))) for c in choices]
        kept = [r for r in rated if r[1][0] >= self.keeps] or rated
        best = max(kept, key=lambda r: sum(r[1]))[0]
        return remember(self._chosen, (memory.task.name, compute.task.name), best)


def _size(name: str, view: View) -> int:
    return (view.capacity.partitions or {})[name]


def _part(place: Placement, view: View, job: Job) -> float:
    if place.partition is not None:
        return float(_size(place.partition, view))
    return float(place.workers or job.task.profile.resident)


def _side(job: Job) -> int:
    """0 for memory-intensive kernels, 1 for others."""
    return 0 if job.task.profile.kind is MEMORY else 1
