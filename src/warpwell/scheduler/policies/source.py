"""Source: the rule of the source, point by point (``docs/scheduler.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decision import SOURCE, SourceModel, gain, together, worth
from ..policy import Decision, Hold, Policy, Preempt, View
from ..task import PREEMPTED, Job, Placement
from .sharing import Sight, gentlest_mode, grow, joined, preemptible, rank, share, stopping, swaps


class Source(Policy):
    """The source's rule.

    Below the limit, the kernel that makes the best combination with those running is launched, a preempted one first
    among equals, then the oldest. It takes what is free, and part of what runs makes room for it (no cost test). At
    the limit, a kernel that would make a better combination replaces a running one if `worth` says so; then all
    blocks of that one go, and the other runs on untouched.

    The rule has no aging: a kernel whose class makes the worse combination may wait forever.

    Parameters
    ----------
    model : SourceModel, optional
        Decay rates. Costs are what the executor says: a simulation, the source's formula.
    preempts, pairs, costs : bool
        False leaves a part of the rule out: no preemption at the limit; no pairing (order: preempted first, then
        arrival); no test of the cost.
    perfect : bool
        True profiles instead of predicted ones, where the executor knows them.
    mode : str
        How to preempt: "switch" where the executor has it, otherwise "drain". None chooses so.
    """

    name = "source"
    starves = True
    watches = True
    adjusts = True

    def __init__(
        self,
        *,
        model: SourceModel = SOURCE,
        preempts: bool = True,
        pairs: bool = True,
        costs: bool = True,
        perfect: bool = False,
        mode: str | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model
        self.preempts = preempts
        self.pairs = pairs
        self.costs = costs
        self.perfect = perfect
        self.mode = mode
        self.name = name or self.name
        self._sight = Sight(perfect)
        self._promised: Job | None = None

    def ended(self, job: Job, now: float) -> None:
        """Forget it."""
        self._sight.ended(job)
        if job is self._promised:
            self._promised = None

    def decide(self, view: View) -> list[Decision]:
        """Launch below the limit, weigh a preemption at it."""
        if len(view.running) < view.limit:
            return self._fill(view)
        if not self.preempts or stopping(view):
            return []
        return self._replace(view)

    # -- below the limit -----------------------------------------------------------------------------------
    def _order(self, view: View, stays: Sequence[Job], job: Job) -> tuple[Any, ...]:
        """Sort key of a waiting job: its combination, then preempted before new, then arrival."""
        place = rank([self._sight.profile(view, j).kind for j in (*stays, job)]) if self.pairs else (0, 0)
        return (*place, job.state is not PREEMPTED, job.arrival, job.number)

    def _fill(self, view: View) -> list[Decision]:
        running = view.running
        jobs = view.waiting.heads()
        if not jobs:
            return grow(view)
        job = min(jobs, key=lambda j: self._order(view, running, j)) if len(jobs) > 1 else jobs[0]
        promised = self._promised
        if not self.pairs and promised is not None and promised in view.waiting and view.waiting.allowed(promised):
            # Without pairing the victim would come first again, and leave again, forever.
            job = promised
        why = {"rule": "best combination", "beside": [j.number for j in running]}
        return share(view, job, why)

    # -- at the limit --------------------------------------------------------------------------------------
    def _replace(self, view: View) -> list[Decision]:
        running = view.running
        if self.pairs:
            choices = []
            for job, victims in swaps(view, self._sight, preemptible):
                for victim in victims:
                    stays = [j for j in running if j is not victim]
                    choices.append((self._order(view, stays, job), victim, stays, job))
            if not choices:
                return []
            best = min(choice[0] for choice in choices)
            choices = [choice for choice in choices if choice[0] == best]
        else:
            first = min(view.waiting.heads(), key=lambda j: self._order(view, (), j), default=None)
            if first is None:
                return []
            choices = [((), v, [j for j in running if j is not v], first) for v in running if preemptible(v)]
        before = self._now(view) if self.costs and choices else []
        weighed = [self._weigh(view, victim, stays, job, before) for _, victim, stays, job in choices]
        if not weighed:
            return []
        # Two victims may make equal combinations: the one whose loss is worth more.
        yes, why, victim, job = max(weighed, key=lambda w: (w[0], w[1].get("gain") or 0.0, -w[2].number))
        if not yes:
            return [Hold(job, why)]
        self._promised = job
        return [Preempt(victim, self.mode or gentlest_mode(view), job, why)]

    def _now(self, view: View) -> list[float]:
        running = view.running
        return view.rates.together(self._sight.jobs(view, running), [j.placement or Placement() for j in running])

    def _weigh(
        self, view: View, victim: Job, stays: list[Job], job: Job, before: list[float]
    ) -> tuple[bool, dict[str, Any], Job, Job]:
        sight, running = self._sight, view.running
        why: dict[str, Any] = {"rule": "worth", "victim": victim.number, "newcomer": job.number}
        if not self.costs:
            return True, {**why, "rule": "no cost test"}, victim, job
        rests = [sight.rest(view, j) for j in running]
        known = [rest for rest in rests if rest is not None]
        if len(known) < len(rests):
            return False, {**why, "rule": "no prediction"}, victim, job
        after = view.rates.together(sight.jobs(view, [*stays, job]), joined(view, stays, job))
        s0, s1 = sum(before), sum(after)
        kept = [rate for rate, j in zip(before, running, strict=True) if j is not victim]
        n = sum(kept)
        # With one kernel that stays, d is its decay rate; with more, their mean by rate.
        decays = [rate * self.model.decay(sight.profile(view, j).kind) for rate, j in zip(kept, stays, strict=True)]
        d = sum(decays) / n if n else 1.0
        t = together(known, before)
        c = view.cost(victim, stays)
        yes = worth(s0, n, s1, t, c, d)
        why.update(S0=s0, S1=s1, n=n, T=t, C=c, d=d, gain=gain(s0, n, s1, t, c, d))
        return yes, why, victim, job
