"""Source: the rule of the source, point by point (``docs/scheduler.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decision import SOURCE, SourceModel, gain, together, worth
from ..policy import Decision, Hold, Policy, Preempt, View
from ..predict.pairs import key_of
from ..residency import demand
from ..task import COMPUTE, MEMORY, PREEMPTED, Job, Placement
from .sharing import age, gentlest_mode, grow, joined, preemptible, rank, share, stopping


class Source(Policy):
    """The source's rule.

    Below the limit, the kernel that makes the best combination with those running is launched, a preempted one first
    among equals, then the oldest. It takes the free part of the device, and running kernels make room for it without a
    cost test. At the limit, a kernel that would make a better combination replaces a running one if `worth` returns
    True: all blocks of the victim leave, and the other kernel is not affected.

    The rates of a pair are measured (`View.pairs`) or, without a measurement, the scheduler's estimate (`View.rates`).

    The rule has no aging: a kernel whose class makes the worse combination may wait forever.

    Parameters
    ----------
    model : SourceModel, optional
        Decay rates. Costs come from the executor; a simulation computes them with the source's formula.
    """

    name = "source"
    starves = True
    watches = True
    adjusts = True

    def __init__(self, *, model: SourceModel = SOURCE) -> None:
        self.model = model

    def decide(self, view: View) -> list[Decision]:
        """Launch jobs below the limit; at the limit, decide about a preemption."""
        if len(view.running) < view.limit:
            return self._fill(view)
        return [] if stopping(view) else self._replace(view)

    # -- below the limit -----------------------------------------------------------------------------------
    def _order(self, running: Sequence[Job], job: Job) -> tuple[Any, ...]:
        """Return the sort key of a waiting job: its combination, then preempted before new, then arrival."""
        return (*rank([j.task.profile.kind for j in (*running, job)]), job.state is not PREEMPTED, *age(job))

    def _fill(self, view: View) -> list[Decision]:
        running = view.running
        jobs = view.waiting.heads()
        if not jobs:
            return grow(view)
        job = min(jobs, key=lambda j: self._order(running, j)) if len(jobs) > 1 else jobs[0]
        return share(view, job, {"rule": "best combination", "co_runners": [j.number for j in running]})

    # -- at the limit --------------------------------------------------------------------------------------
    def _replace(self, view: View) -> list[Decision]:
        running = view.running
        current = rank([j.task.profile.kind for j in running])
        choices = []
        for job in view.waiting.heads():
            for victim in filter(preemptible, running):
                remaining = [j for j in running if j is not victim]
                order = self._order(remaining, job)
                if order[:2] < current:  # only a better combination is weighed
                    choices.append((order, victim, remaining, job))
        if not choices:
            return []
        best = min([choice[0] for choice in choices])
        before = _rates(view, running, [j.placement or Placement() for j in running])
        weighed = [self._weigh(view, *choice[1:], before) for choice in choices if choice[0] == best]
        # Two victims may give equal combinations: the larger gain decides.
        yes, why, victim, job = max(weighed, key=lambda w: (w[0], w[1].get("gain") or 0.0, -w[2].number))
        if not yes:
            return [Hold(job, why)]
        return [Preempt(victim, gentlest_mode(view), job, why)]

    def _weigh(
        self, view: View, victim: Job, remaining: list[Job], job: Job, before: list[float]
    ) -> tuple[bool, dict[str, Any], Job, Job]:
        running = view.running
        why: dict[str, Any] = {"rule": "worth", "victim": victim.number, "newcomer": job.number}
        seconds = [j.rest for j in running if j.rest is not None]
        if len(seconds) < len(running):
            return False, {**why, "rule": "no prediction"}, victim, job
        after = _rates(view, [*remaining, job], joined(view, remaining, job))
        s0, s1 = sum(before), sum(after)
        rates = [rate for rate, j in zip(before, running, strict=True) if j is not victim]
        n = sum(rates)
        # With one remaining kernel, d is its decay rate; with more, their mean by rate.
        decays = [rate * self.model.decay(j.task.profile.kind) for rate, j in zip(rates, remaining, strict=True)]
        d = sum(decays) / n if n else 1.0
        t = together(seconds, before)
        c = view.cost(victim, remaining)
        why.update(S0=s0, S1=s1, n=n, T=t, C=c, d=d, gain=gain(s0, n, s1, t, c, d))
        return worth(s0, n, s1, t, c, d), why, victim, job


def _rates(view: View, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
    """Return how fast jobs run together: as measured, or as the scheduler estimates.

    Pairs were measured with the memory-intensive kernel older. In the other order, the memory-intensive kernel may
    starve.
    """
    if [job.task.profile.kind for job in jobs] == [MEMORY, COMPUTE]:
        memory, compute = jobs
        found = view.pairs.get((key_of(memory.task), key_of(compute.task)))
        if found:
            memory_part = demand(memory, view.capacity, placements[0])
            return [*found[min(found, key=lambda share: abs(share - memory_part))]]
    return view.rates.together(jobs, placements)
