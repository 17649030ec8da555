"""Oracle: tries all types of kernels that wait, with true times, rates and costs. Simulator only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ...scheduler.decision import SOURCE, SourceModel, together
from ...scheduler.policies.sharing import Sight, at_most, demand, gentlest_mode, preemptible, quota, stopping
from ...scheduler.policy import Decision, Launch, Policy, Preempt, Resize, View
from ...scheduler.task import DONE, PREEMPTED, Job, Kind, Placement, Request, Task

PARTS = (0.25, 0.5, 0.75)
"""Parts of the device that the older of two kernels may get, to choose from."""
LEVELS = 4
"""Types of kernels are told apart by class and by the quarters of the device that they need."""

Type = tuple[Kind | None, int]


class Option(NamedTuple):
    """One way to run kernels together: quotas, the normalized IPC of each, and its sum."""

    quotas: tuple[int | None, ...]
    rates: tuple[float, ...]
    sum: float


class Oracle(Policy):
    """The combination that has the largest sum of normalized IPC, on average until all its kernels have ended.

    Until the first has ended that is the sum of the rates; the other then finds company that is worth `later` in all:
    so a kernel may be launched where it starves, to be the older one of the next pair. All types of kernels that wait
    are tried, in both orders on an idle device, with several quotas. Of a type, the one whose request is over first
    goes first: long requests may wait for as long as others come. At the limit a kernel leaves for another one where
    true times and the executor's costs say that this adds normalized IPC.

    It does not know what will arrive and does not plan further than two kernels, so it is no bound.

    Parameters
    ----------
    later : float
        Sum of normalized IPC that is expected of the pair after the next.
    model : SourceModel, optional
        Decay rates of kernels that stay while a context is switched.
    margin : float
        Part of the normalized IPC, while it lasts, that a preemption must add.
    most : int
        How often a kernel is made to leave, at most.
    """

    name = "oracle"
    starves = True
    conserves = True
    watches = True
    perfect = True

    def __init__(self, *, later: float = 1.5, model: SourceModel = SOURCE, margin: float = 0.5, most: int = 8) -> None:
        self.later = later
        self.model = model
        self.margin = margin
        self.most = most
        self._sight = Sight(True)
        self._options: dict[tuple[Hashable, ...], Option] = {}
        self._likes: dict[Task, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._rests: dict[Request, dict[Task, float]] = {}

    def bucket(self, job: Job) -> Hashable:
        """By type, and preempted or new."""
        return _type(job.task), job.state is PREEMPTED

    def key(self, job: Job) -> float:
        """Return the predicted rest of the request: among jobs of a type, the one that ends first goes first."""
        rests = self._rests.get(job.request)
        if rests is None:
            rests, rest = {}, 0.0
            for task in reversed(job.request.tasks):
                rest += task.profile.seconds or 0.0
                rests[task] = rest
            self._rests[job.request] = rests
        return rests[job.task]

    def ended(self, job: Job, now: float) -> None:
        """Forget it; one that failed or was cancelled takes the rest of its request with it."""
        self._sight.ended(job)
        tasks = job.request.tasks
        gone: Sequence[Task] = (job.task,)
        if job.state is not DONE:
            gone = tasks[tasks.index(job.task) :]
        for task in gone:
            self._likes.pop(task, None)
        if gone[-1] is tasks[-1]:
            self._rests.pop(job.request, None)

    def decide(self, view: View) -> list[Decision]:
        """Launch the best combination below the limit, weigh every other one at it."""
        if stopping(view):
            return []
        heads = view.waiting.heads()
        if not heads:
            return []
        if len(view.running) < view.limit:
            return self._fill(view, heads)
        return self._replace(view, heads)

    # -- below the limit -----------------------------------------------------------------------------------
    def _fill(self, view: View, heads: list[Job]) -> list[Decision]:
        running = view.running
        choices: list[Sequence[Job]] = [[*running, job] for job in heads]
        if not running and view.limit > 1:
            choices += itertools.permutations(heads, 2)
        # Of equal ones the first: jobs themselves are never compared.
        value, *_, jobs = max([
            (self._value(view, jobs), -self.key(jobs[-1]), -jobs[-1].number, len(jobs), -i, jobs)
            for i, jobs in enumerate(choices)
        ])  # fmt: skip
        option = self._option(view, jobs)
        decisions: list[Decision] = []
        launches: list[Decision] = []
        for job, workers in zip(jobs, option.quotas, strict=True):
            if job.waits:
                why = {"rule": "best of all", "mean": value, "S": option.sum}
                launches.append(Launch(job, at_most(workers), why))
            elif preemptible(job) and job.placement is not None and job.placement.workers != workers:
                decisions.append(Resize(job, workers, {"rule": "makes room"}))
        return decisions + launches

    # -- at the limit --------------------------------------------------------------------------------------
    def _replace(self, view: View, heads: list[Job]) -> list[Decision]:
        running, sight = view.running, self._sight
        placements = [job.placement or Placement() for job in running]
        before = view.rates.together(running, placements)  # only times differ from what is predicted
        s0 = sum(before)
        t = together([sight.rest(view, j) or 0.0 for j in running], before)
        best: tuple[float, Job, Job, dict[str, Any]] | None = None
        for i, victim in enumerate(running):
            if not preemptible(victim) or victim.preemptions >= self.most:
                continue
            stays = [*running[:i], *running[i + 1 :]]
            s1, _, job = max([(self._option(view, [*stays, j]).sum, -j.number, j) for j in heads])
            c = view.cost(victim, stays) if s1 > s0 * (1 + self.margin) else t
            if c >= t:
                continue
            during = sum(
                rate * self.model.decay(sight.profile(view, j).kind)
                for j, rate in zip(running, before, strict=True)
                if j is not victim
            )
            paired = min(t - c, sight.rest(view, job) or 0.0)
            # The victim comes back: that costs as much again.
            gain = during * c + s1 * paired + s0 * (t - c - paired) - s0 * t - before[i] * c
            if gain > self.margin * s0 * (c + paired) and (best is None or gain > best[0]):
                best = gain, victim, job, {"rule": "adds", "S0": s0, "S1": s1, "T": t, "C": c, "gain": gain}
        if best is None:
            return []
        _, victim, job, why = best
        return [Preempt(victim, gentlest_mode(view), job, why)]

    # -- rates ---------------------------------------------------------------------------------------------
    def _value(self, view: View, jobs: Sequence[Job]) -> float:
        """Return the mean sum of rates of kernels in this order of residency, until all of them have ended."""
        _, rates, value = self._option(view, jobs)
        if len(jobs) != 2:
            return value
        rest = self._sight.rest
        a, b = rest(view, jobs[0]) or 0.0, rest(view, jobs[1]) or 0.0
        ra, rb = rates
        # When each would end, if the rates stayed.
        first, second = a / ra if ra > 0 else math.inf, b / rb if rb > 0 else math.inf
        if first > second:
            first, after = second, a - ra * second
        else:
            after = b - rb * first
        if not 0 < first < math.inf:
            return value
        after = max(0.0, after)
        return (value * first + self.later * after) / (first + after)

    def _option(self, view: View, jobs: Sequence[Job]) -> Option:
        """Return the quotas that give the largest sum of rates to kernels in this order of residency."""
        likes = self._likes
        key = tuple([likes.get(job.task) or self._like(job.task) for job in jobs])
        known = self._options.get(key)
        if known is None:
            if len(self._options) > 1 << 18:
                self._options.clear()
            known = self._options[key] = self._evaluate(view, jobs)
        return known

    def _evaluate(self, view: View, jobs: Sequence[Job]) -> Option:
        seen = self._sight.jobs(view, jobs)
        count = len(jobs)
        shares = [[1.0 / count] * count]
        if count == 1 or sum(demand(job, view.capacity) for job in jobs) <= 1.0 + 1e-9:
            shares = [[1.0] * count]
        elif count == 2:
            shares = [[part, 1.0 - part] for part in PARTS]
        found = []
        for each in shares:
            quotas = tuple(quota(job, part, view.capacity) for job, part in zip(jobs, each, strict=True))
            rates = view.rates.together(seen, [at_most(workers) for workers in quotas])
            found.append(Option(quotas, tuple(rates), sum(rates)))
        return max(found, key=lambda option: option.sum)

    def _like(self, task: Task) -> int:
        """Return a number that kernels of equal figures have in common."""
        like = self._likes.get(task)
        if like is None:
            profile = task.profile
            figures = (
                task.name, task.blocks, profile.kind, profile.need, profile.bandwidth, profile.compute,
                profile.resident, profile.registers, profile.shared, profile.threads,
            )  # fmt: skip
            like = self._likes[task] = self._numbers.setdefault(figures, 1 + len(self._numbers))
        return like


def _type(task: Task) -> Type:
    return task.profile.kind, math.ceil(task.profile.need * LEVELS)
