"""Warpwell: the source's rule extended by aging, tenants, residency, restore cost, and more than two kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ... import errors
from ..decision import SOURCE, SourceModel, together
from ..policy import Decision, Hold, Launch, Policy, Preempt, Rates, Resize, View
from ..task import COMPUTE, PREEMPTED, Job
from .arrangement import Arrangement, Arranger
from .order import at_least_one
from .sharing import Sight, age, gentlest_mode, grow, preemptible, share, stopping, swaps
from .standing import Standing, due

NAMES = 8
"""Kernels that are told apart by name while they wait, where the rates table knows names; of others only the class."""

SOONEST = 1e-3
"""Seconds after which it is looked again whether what was to be over before it could leave is over, at the least."""

LOOKS = 3
"""Preemptions that are weighed at most: those with the best remembered estimates."""


class Replacement(NamedTuple):
    """A preemption that is weighed.

    Attributes
    ----------
    gain : float
        Normalized IPC times seconds that it adds until the running kernels would have parted.
    victims : list of Job
    job : Job
        Who comes.
    why : dict
    """

    gain: float
    victims: list[Job]
    job: Job
    why: dict[str, Any]


class Warpwell(Policy):
    """Decides who runs, in this order.

    1. Priority of task and tenant, and one more for each `patience` others that passed (aging). What tasks say of
       themselves (priorities above 0, deadlines) and aging get a tenant at most `lead` ahead of the use that is its
       due: then they count no more until others have caught up.
    2. Tenants by their use over their weight, as far as they differ by more than `slack`.
    3. The sum of normalized IPC that the rates table predicts for the combination, each in its best arrangement: order
       of residency, and turns, quotas of workers, or partitions. Sharing must be better than turns by 5 %.

    A preemption is weighed as the source does, with these differences: costs are what the executor says (it measures
    them); the newcomer gains only as long as it runs itself; the victim's return costs too; a victim that drains still
    works. The combination must be better by class too: a better sum of the same classes only uses up good company that
    comes later otherwise. All running kernels may be made to leave together, so that a memory-intensive newcomer is
    resident first and they come after it. A lower priority leaves for a higher one if that is not over sooner. A kernel
    of unknown class runs alone, so that it can be measured.

    Parameters
    ----------
    patience : int
        How many others may pass before waiting counts as one more priority.
    slack : float
        Seconds of the whole device by which tenants' use may differ.
    lead : float
        Seconds of the whole device by which priorities of its tasks, and aging, get a tenant ahead of others that want
        it, at most.
    margin : float
        Part by which a combination must be better.
    restore : float
        What the return of a victim costs, in preemptions, where contexts are switched: it is restored, others make
        room for it and grow again, which are switches too, and it finds less good company than it would have had. 30
        did better in simulations of Orion's kernels than 6, 60 or 100.
    most : int
        How often a kernel is made to leave for a better combination, at most.
    model : SourceModel, optional
        Decay rates of kernels that stay while a context is switched.
    preempts, pairs, costs : bool
        False leaves a part out: no preemption; no pairing (order: preempted first, then arrival); no test of the cost.
    perfect : bool
        True profiles instead of predicted ones, where the executor knows them.
    """

    name = "warpwell"
    conserves = False
    watches = True
    adjusts = True

    def __init__(
        self,
        *,
        patience: int = 32,
        slack: float = 0.02,
        lead: float = 1.0,
        margin: float = 0.02,
        restore: float = 30.0,
        most: int = 8,
        model: SourceModel = SOURCE,
        preempts: bool = True,
        pairs: bool = True,
        costs: bool = True,
        perfect: bool = False,
        name: str | None = None,
    ) -> None:
        self._standing = Standing(patience, slack, lead)
        self.most = at_least_one("most", most)
        for option, value in (("margin", margin), ("restore", restore)):
            if not value >= 0:
                raise errors.ArgumentError(f"{option} is {value}: give 0 or more", name=option)
        self.margin = margin
        self.restore = restore
        self.model = model
        self.preempts = preempts
        self.pairs = pairs
        self.costs = costs
        self.perfect = perfect
        self.name = name or self.name
        self._sight = Sight(perfect, observes=True)
        self._arranger = Arranger(self._sight)
        self._promised: Job | None = None
        self._quiet: tuple[int, ...] = ()
        self._by_name = False
        self._names: dict[str, str] = {}

    def meets(self, rates: Rates) -> None:
        """Learn whether names tell kernels apart."""
        self._by_name = bool(getattr(rates, "by_name", True))

    def bucket(self, job: Job) -> Hashable:
        """Group by tenant, priority, class, preempted or new; tasks with a deadline apart."""
        task = job.task
        name = ""
        if self._by_name:
            names = self._names
            name = names.get(task.name) or (names.setdefault(task.name, task.name) if len(names) < NAMES else "")
        return task.tenant, job.priority, task.profile.kind, job.state is PREEMPTED, task.deadline is None, name

    def key(self, job: Job) -> float:
        """Arrival; of tasks with a deadline, when they must be launched at the latest."""
        return due(job)

    def ended(self, job: Job, now: float) -> None:
        """Forget it."""
        self._sight.ended(job)
        self._arranger.ended(job)
        if job is self._promised:
            self._promised = None

    def decide(self, view: View) -> list[Decision]:
        """Launch below the limit, weigh preemptions below it (order of residency) and at it."""
        if stopping(view):
            return []
        heads = view.waiting.heads()
        if not heads:
            return self._come_out(view) or grow(view)
        self._standing.look(view, heads)
        first = self._first(view, heads)
        # Nothing is worth more later beside the same kernels: what is left of them only shrinks.
        quiet = (*[job.number for job in view.running], -1, *[job.number for job in first])
        if quiet == self._quiet:
            return []
        if len(view.running) < view.limit:
            decisions = self._fill(view, first)
        else:
            decisions = self._replace(view, first) if self.preempts else []
        holds = all([isinstance(d, Hold) and d.again is None for d in decisions])
        if holds and all([job.task.deadline is None for job in first]):
            self._quiet = quiet
        return decisions

    # -- whose turn it is ----------------------------------------------------------------------------------
    def _first(self, view: View, heads: list[Job]) -> list[Job]:
        heads = self._standing.first(view, heads)
        if len(heads) < 3:
            return heads
        # The oldest of each class, new and preempted: more would cost more than it can find.
        found: dict[Hashable, Job] = {}
        for job in heads:
            kind = job.task.profile.kind, job.state, self._names.get(job.task.name)
            there = found.get(kind)
            if there is None or age(job) < age(there):
                found[kind] = job
        return sorted(found.values(), key=age) if len(found) > 1 else list(found.values())

    @staticmethod
    def _order(job: Job) -> tuple[bool, float, int]:
        return job.state is not PREEMPTED, *age(job)

    # -- below the limit -----------------------------------------------------------------------------------
    def _fill(self, view: View, heads: list[Job]) -> list[Decision]:
        if not self.pairs:
            # Without pairing the victim of a preemption would come first again, and leave again.
            job, promised = min(heads, key=self._order), self._promised
            if promised is not None and promised in view.waiting and view.waiting.allowed(promised):
                job = promised
            return share(view, job, {"rule": "arrival"})
        if not view.running:
            return self._begin(view, heads)
        running = view.running
        if any([_unknown(j) for j in running]):
            return []
        heads = [j for j in heads if not _unknown(j)]
        if not heads:
            return []
        arranger = self._arranger
        now = arranger.now(view)
        job = heads[0]
        if len(heads) > 1:
            sums = [round(its, 6) for its in arranger.estimates(view, running, heads)]
            most = max(sums)
            best = [j for j, its in zip(heads, sums, strict=True) if its == most]
            job = best[0] if len(best) == 1 else max(best, key=_sooner)
        found = arranger.best(view, [*running, job], len(running))
        if self.preempts:
            plan = self._reside(view, now, found, job)
            if plan is not None and plan.gain > 0:
                return self._carry_out(view, plan)
        return self._put(found, {"rule": "best sum", "S": found.sum, "before": now.sum})

    def _begin(self, view: View, heads: list[Job]) -> list[Decision]:
        """Choose the best two for an idle device, in the better order."""
        oldest = min(heads, key=self._order)
        if _unknown(oldest):
            return share(view, oldest, {"rule": "unknown"})
        heads = [j for j in heads if not _unknown(j)]
        if len(heads) == 1 or view.limit == 1:
            return share(view, oldest, {"rule": "alone"})
        # One of the two is who all have left for, or else the oldest: all pairs would take too long to look at.
        one = self._promised if self._promised in heads else oldest
        two = max(((a, b) for j in heads if j is not one for a, b in ((one, j), (j, one))), key=lambda jobs: (
            round(self._arranger.estimate(view, jobs), 6), *_sooner(jobs[0]), *_sooner(jobs[1])
        ))  # fmt: skip
        found = self._arranger.apart(view, self._arranger.best(view, two))
        return self._put(found, {"rule": "best pair", "S": found.sum})

    def _put(self, found: Arrangement, why: dict[str, Any]) -> list[Decision]:
        """Launch the waiting kernels of an arrangement, after the running ones got their new quotas."""
        resizes: list[Decision] = []
        launches: list[Decision] = []
        for job, placement in zip(found.jobs, found.placements, strict=True):
            if job.waits:
                launches.append(Launch(job, placement, why))
            elif preemptible(job) and job.placement is not None and job.placement.workers != placement.workers:
                resizes.append(Resize(job, placement.workers, {"rule": "makes room"}))
        return resizes + launches

    # -- preemption ----------------------------------------------------------------------------------------
    def _reside(self, view: View, now: Arrangement, after: Arrangement, job: Job) -> Replacement | None:
        """Weigh making everything leave for a newcomer that had better be resident first, not last."""
        running = view.running
        if not self._first_of(view, job, running) or not all([self._may_leave(j) for j in running]):
            return None
        first = self._arranger.best(view, [job, *running])
        without = after if after.sum >= now.sum else now
        if first.sum <= without.sum * (1 + self.margin):
            return None
        return self._weigh(view, without, first, running, job, "residency")

    def _replace(self, view: View, heads: list[Job]) -> list[Decision]:
        running, arranger = view.running, self._arranger
        lower = self._lower(view, heads)
        if lower is not None:
            return lower
        heads = [j for j in heads if not _unknown(j)]
        if not heads:
            return []
        if not self.pairs:
            heads = [min(heads, key=self._order)]
        newcomers = swaps(view, self._sight, self._may_leave, heads)
        if not newcomers:
            return []
        now = arranger.now(view)
        bound = now.sum * (1 + self.margin)
        queued = self._queued(view, now)
        choices: list[tuple[float, list[Job], list[Job], Job]] = []
        for job, victims in newcomers:
            above = self._standing.level(view, job)
            for victim in victims:
                if victim in queued or self._standing.of(view, victim) > above:
                    continue
                stays = [j for j in running if j is not victim]
                last = arranger.estimate(view, [*stays, job], len(stays))
                if last > bound:
                    choices.append((last, [victim], stays, job))
                if self._first_of(view, job, stays) and all(self._may_leave(j) for j in stays):
                    first = arranger.estimate(view, [job, *stays])
                    if first > max(last * (1 + self.margin), bound):
                        choices.append((first, running, stays, job))
        if not choices:
            return []
        choices.sort(key=lambda c: -c[0])
        plans = []
        for _, victims, stays, job in choices[:LOOKS]:
            alone = len(victims) == 1
            after = arranger.best(view, [*stays, job] if alone else [job, *stays], len(stays) if alone else 0)
            if after.sum > bound:
                plans.append(self._weigh(view, now, after, victims, job, "worth" if alone else "worth, and residency"))
        if not plans:
            return []
        plan = max(plans, key=lambda p: p.gain)
        return self._carry_out(view, plan) if plan.gain > 0 else [Hold(plan.job, plan.why)]

    def _lower(self, view: View, heads: list[Job]) -> list[Decision] | None:
        """Make the lowest priority leave for a higher one; often enough, and it counts as higher itself."""
        victims = [j for j in view.running if preemptible(j)]
        if not victims:
            return None
        ranks = {j: self._standing.of(view, j) + j.preemptions // self.most for j in victims}
        if max([self._standing.of(view, j) for j in heads]) <= min(ranks.values()):
            return None
        victim = min(victims, key=lambda j: (ranks[j], -j.arrival, -j.number))
        # Waiting does not make others leave; priority does.
        job = max(heads, key=lambda j: (self._standing.of(view, j), *_sooner(j)))
        cost = view.cost(victim, [j for j in view.running if j is not victim])
        rest = self._sight.rest(view, victim)
        why = {"rule": "priority", "C": cost, "rest": rest, "victim": victim.number, "newcomer": job.number}
        if self.costs and rest is not None and cost >= rest:
            return [Hold(job, why, again=max(cost, SOONEST))]  # it may go on for longer than it was said to
        victims = [victim]
        if len(view.running) > 1 and victim in self._queued(view, self._arranger.now(view)):
            # All of lower priority leave, or it could not see that it is to.
            above = self._standing.of(view, job)
            victims = [j for j, its in ranks.items() if its < above]
        return [Preempt(j, gentlest_mode(view), job, why) for j in victims]

    def _queued(self, view: View, now: Arrangement) -> list[Job]:
        """Return the jobs whose turn has not come: their workers see a stop flag only once they have room."""
        if gentlest_mode(view) == "switch":
            return []
        return [job for job, rate in zip(now.jobs, now.rates, strict=True) if rate <= 0]

    def _come_out(self, view: View) -> list[Decision]:
        """Make a kernel leave its partition in which it is alone, if the whole device repays that."""
        if len(view.running) != 1:
            return []
        job = view.running[0]
        placement, rest = job.placement, self._sight.rest(view, job)
        if placement is None or placement.partition is None or rest is None:
            return []
        rate = self._arranger.now(view).rates[0]
        if not self.preempts or not self._may_leave(job) or rate <= 0:
            return []
        cost = view.cost(job, [])
        why = {"rule": "out of its partition", "C": cost, "rate": rate, "rest": rest}
        return [Preempt(job, gentlest_mode(view), None, why)] if cost < rest / rate - rest else []

    def _first_of(self, view: View, job: Job, others: Sequence[Job]) -> bool:
        """Whether a newcomer may gain from being resident first: if it alone is memory-intensive."""
        profile = self._sight.profile
        return profile(view, job).kind is not COMPUTE and all([profile(view, j).kind is COMPUTE for j in others])

    def _may_leave(self, job: Job) -> bool:
        return preemptible(job) and job.preemptions < self.most

    def _weigh(
        self, view: View, now: Arrangement, after: Arrangement, victims: Sequence[Job], job: Job, rule: str
    ) -> Replacement:
        """Compare the sums of normalized IPC over T, with and without the preemption.

        Without: S0 * T. With: what works during C; then S1 as long as the newcomer runs; then S0 again; less what the
        victims' return costs.
        """
        running, sight = view.running, self._sight
        s0, s1 = now.sum, after.sum
        numbers = [j.number for j in victims]
        why: dict[str, Any] = {"rule": rule, "newcomer": job.number, "victims": numbers, "S0": s0, "S1": s1}
        if not self.costs:
            return Replacement(s1 - s0, list(victims), job, {**why, "rule": f"{rule}, no cost test"})
        rests = [sight.rest(view, j) for j in now.jobs]
        own = sight.rest(view, job)
        known = [rest for rest in rests if rest is not None]
        if own is None or len(known) < len(rests):
            return Replacement(-1.0, list(victims), job, {**why, "rule": "no prediction"})
        t = together(known, list(now.rates))
        stays = [j for j in running if j not in victims]
        c = max(view.cost(victim, stays) for victim in victims)
        rate = dict(zip(after.jobs, after.rates, strict=True))[job]
        runs = own / rate if rate > 0 else 0.0
        before = dict(zip(now.jobs, now.rates, strict=True))
        switches = gentlest_mode(view) == "switch"
        leaving = sum(before[j] for j in victims)
        during = sum(before[j] * (self.model.decay(sight.profile(view, j).kind) if switches else 1.0) for j in stays)
        back = 0.0
        if switches:
            back = self.restore * leaving * c
        else:
            during += leaving / 2
        if t <= c:
            return Replacement(-1.0, list(victims), job, {**why, "T": t, "C": c})
        paired = min(t - c, runs)
        gain = during * c + s1 * paired + s0 * (t - c - paired) - back - s0 * t
        why.update(T=t, C=c, R=runs, during=during, back=back, gain=gain)
        return Replacement(gain - self.margin * s0 * c, list(victims), job, why)

    def _carry_out(self, view: View, plan: Replacement) -> list[Decision]:
        mode = gentlest_mode(view)
        self._promised = plan.job
        return [Preempt(victim, mode, plan.job, plan.why) for victim in plan.victims]


def _sooner(job: Job) -> tuple[bool, float, int]:
    """Sort key, largest first: preempted before new, then by arrival."""
    return job.state is PREEMPTED, -job.arrival, -job.number


def _unknown(job: Job) -> bool:
    return job.task.profile.kind is None
