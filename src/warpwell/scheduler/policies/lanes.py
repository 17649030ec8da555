"""Lanes: a memory- and a compute-intensive kernel at a time, and the latter is always the younger."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ... import errors
from ..decision import SOURCE, SourceModel, gain, together, worth
from ..policy import Decision, Hold, Launch, Policy, Preempt, Resize, View
from ..task import COMPUTE, MEMORY, PREEMPTED, Job, Kind, Placement
from .live import Live, in_order
from .order import PLAIN, at_least_one
from .sharing import Sight, age, at_most, gentlest_mode, preemptible, quota, stopping
from .standing import Standing, due

SHARES = (0.75, 0.625, 0.5)
"""Parts of the device that the memory-intensive kernel of a pair may get; the first is tried first."""

NAMES = 8
"""Kernels that are told apart by name while they wait, to find the best company; of others only the class."""

SOONEST = 1e-3
"""Seconds after which it is looked again whether what was to be over before it could leave is over, at the least."""


class Lanes(Policy):
    """Two lanes, one a class, with one kernel each at a time; see ``docs/scheduler.md``.

    A GPU issues its oldest warps first. A compute-intensive kernel that is older takes all there is to issue; a
    memory-intensive one that is older leaves nearly all of it. So the memory-intensive kernel has workers that stay,
    and the compute-intensive one beside it workers in shifts, which are always younger, whichever came first. Nobody is
    preempted for that.

    Where nothing can be gained, kernels are launched as they are, in order: where only one class is about, where they
    are short, where they cannot be cut, and for a second after a pair whose live rates added up to less than `least`.

    In a lane, who waits is ordered by `Standing`. A kernel leaves for one of higher priority if that is sooner than its
    end, and for one of equal priority by the source's test, with the live rates of both pairs. A task that others
    passed too often runs beside whatever runs, so neither lane can starve it.

    Parameters
    ----------
    shift : float
        Seconds of a shift.
    short : float
        Kernels of fewer seconds are launched as they are.
    least : float
        Sum of live rates of which a pair must have more to run together.
    pause : float
        Seconds for which a pair that had less is left alone, and in which both classes must have been seen.
    most : int
        How often a kernel is made to leave for a better combination, at most.
    patience, slack, lead
        See `Standing`.
    model : SourceModel, optional
        Decay rates in the source's test.
    """

    name = "lanes"
    conserves = False
    watches = True
    adjusts = True

    def __init__(
        self,
        *,
        shift: float = 2e-3,
        short: float = 1e-3,
        least: float = 1.02,
        pause: float = 1.0,
        most: int = 8,
        patience: int = 32,
        slack: float = 0.02,
        lead: float = 1.0,
        model: SourceModel = SOURCE,
    ) -> None:
        for option, value in (("shift", shift), ("short", short), ("least", least), ("pause", pause)):
            if not value >= 0 or (option == "shift" and not value):
                raise errors.ArgumentError(f"{option} is {value}: give more than 0", name=option)
        self.shift = shift
        self.short = short
        self.least = least
        self.pause = pause
        self.most = at_least_one("most", most)
        self.model = model
        self._standing = Standing(patience, slack, lead)
        self._sight = Sight(False, observes=True)
        self._live = Live()
        self._seen: dict[Kind, float] = {}
        self._names: dict[str, str] = {}

    def bucket(self, job: Job) -> Hashable:
        """Group by tenant, priority, class, preempted or new, and name; tasks with a deadline apart."""
        task, names = job.task, self._names
        name = names.get(task.name) or (names.setdefault(task.name, task.name) if len(names) < NAMES else "")
        return task.tenant, job.priority, task.profile.kind, job.state is PREEMPTED, task.deadline is None, name

    def key(self, job: Job) -> float:
        """Arrival; of tasks with a deadline, when they must be launched at the latest."""
        return due(job)

    def ended(self, job: Job, now: float) -> None:
        """Note its rate in its last pair, and forget it."""
        self._live.ended(job, now)
        self._sight.ended(job)

    def decide(self, view: View) -> list[Decision]:
        """Fill both lanes, memory first; make a kernel leave only where all places are taken, or for a priority."""
        running = view.running
        self._live.look(running, view.now)
        if stopping(view):
            return []
        heads = view.waiting.heads()
        for job in (*running, *heads):
            if job.task.profile.kind is not None:
                self._seen[job.task.profile.kind] = view.now
        if not heads:
            return self._ease(view)
        self._standing.look(view, heads)
        if not running:
            return self._begin(view, heads)
        if any([_unknown(job) for job in running]):
            return []  # it is measured
        first = self._best(view, heads)
        if _unknown(first):
            return []  # it comes when it can be alone
        if len(running) >= view.limit:
            return self._lower(view, first) or self._swap(view, heads)
        busy = {job.task.profile.kind for job in running}
        if first.task.profile.kind not in busy:
            kind = first.task.profile.kind
            lane = [job for job in heads if job.task.profile.kind is kind]
            return self._join(view, self._best(view, lane, running[0]))
        company = [job for job in heads if job.task.profile.kind not in busy and not _unknown(job)]
        if company:
            mate = self._best(view, company, running[0])
            if self._standing.level(view, mate) < self._standing.level(view, first):
                return self._lower(view, first) or self._behind(first)
            return self._join(view, mate)
        lower = self._lower(view, first)
        if lower:
            return lower
        if len(busy) == 1 and not self._mixed(view.now):
            return self._behind(first)
        return self._ease(view)

    # -- who -----------------------------------------------------------------------------------------------
    def _best(self, view: View, jobs: list[Job], mate: Job | None = None) -> Job:
        """Return whose turn it is: among equals the best company of `mate`, a preempted one, the oldest.

        A pair that was never measured comes before all that were.
        """
        equals = self._standing.first(view, jobs)
        sums = dict.fromkeys(equals, 0.0) if mate is None else {job: self._live.sum(job, mate) for job in equals}
        return min(equals, key=lambda job: (-sums[job], job.state is not PREEMPTED, *age(job)))

    def _mixed(self, now: float) -> bool:
        """Whether both classes were about lately, so that company may come."""
        return all(now - self._seen.get(kind, -self.pause) < self.pause for kind in (MEMORY, COMPUTE))

    def _short(self, job: Job) -> bool:
        seconds = job.task.profile.seconds
        return bool(job.task.whole) or (seconds is not None and seconds < self.short)

    # -- where ---------------------------------------------------------------------------------------------
    def _begin(self, view: View, heads: list[Job]) -> list[Decision]:
        """Give the idle device to the first, and to one of the other class."""
        first = self._best(view, heads)
        if _unknown(first):
            return [Launch(first, Placement(), {"rule": "unknown"})]
        company = [job for job in heads if job.task.profile.kind not in (None, first.task.profile.kind)]
        if company and view.limit > 1:
            mate = self._best(view, company, first)
            if not self._alone(first, mate, view.now):
                why = {"rule": "lanes", "beside": []}
                return [self._launch(view, job, share, why) for job, share in self._divide(view, first, mate)]
        if self._short(first) or (view.waiting.count > 1 and not self._mixed(view.now)):
            return self._behind(first)
        return [Launch(first, Placement(), {"rule": "alone"})]

    def _join(self, view: View, job: Job) -> list[Decision]:
        """Launch a job beside one of the other class, which makes room for it."""
        running = view.running
        mate = running[0]
        if len(running) > 1 or self._alone(job, mate, view.now):
            return self._behind(job)
        why = {"rule": "lanes", "beside": [mate.number]}
        comes = job.task.profile.kind is MEMORY
        shares = dict(self._divide(view, job, mate))
        launch = self._launch(view, job, shares[job], why)
        if not preemptible(mate):
            return [launch]
        place = self._place(view, mate, shares[mate])
        room = Resize(mate, place.workers, {"rule": "makes room", "for": job.number}, place.shift)
        # A memory-intensive newcomer waits for the room that the other one leaves, and is older than its next shift.
        return [launch, room] if comes else [room, launch]

    def _launch(self, view: View, job: Job, share: float, why: dict[str, Any]) -> Launch:
        if self._short(job):
            return Launch(job, PLAIN, why)
        return Launch(job, self._place(view, job, share), {**why, "share": share})

    def _place(self, view: View, job: Job, share: float) -> Placement:
        workers = quota(job, share, view.capacity)
        if job.task.profile.kind is MEMORY:
            return at_most(workers)
        return Placement(workers, shift=self.shift)

    def _divide(self, view: View, one: Job, two: Job) -> list[tuple[Job, float]]:
        """Return the share of each, memory-intensive first, and measure what comes of it."""
        memory, compute = in_order(one, two)
        share = self._live.choose(memory, compute, SHARES)
        if all([job.waits or preemptible(job) for job in (one, two)]):  # else nothing is known of its progress
            self._live.begin(memory, compute, view.now)
        return [(memory, share), (compute, 1.0 - share)]

    def _alone(self, job: Job, mate: Job, now: float) -> bool:
        """Whether two kernels are better launched as they are: they are short, or gained nothing lately."""
        if self._short(job) and (self._short(mate) or not preemptible(mate)):
            return True
        return self._live.poor(job, mate, self.least, now - self.pause)

    @staticmethod
    def _behind(job: Job) -> list[Decision]:
        return [Launch(job, PLAIN, {"rule": "arrival"})]

    @staticmethod
    def _ease(view: View) -> list[Decision]:
        """Give the whole device to one that is alone, and let its workers stay."""
        if len(view.running) != 1:
            return []
        job = view.running[0]
        place = job.placement
        if place is None or not preemptible(job):
            return []
        return [Resize(job, None, {"rule": "alone"})] if place.workers is not None or place.shift is not None else []

    # -- who leaves ----------------------------------------------------------------------------------------
    def _lower(self, view: View, job: Job) -> list[Decision]:
        """Make a lower priority leave for a higher one, in its lane if it can; not what ends sooner than it leaves."""
        ranks = {j: self._standing.of(view, j) + j.preemptions // self.most for j in view.running if preemptible(j)}
        victims = [j for j, its in ranks.items() if its < self._standing.of(view, job)]
        if not victims:
            return []
        kind = job.task.profile.kind
        victim = min(victims, key=lambda j: (j.task.profile.kind is not kind, ranks[j], -j.arrival, -j.number))
        cost = view.cost(victim, [j for j in view.running if j is not victim])
        rest = self._sight.rest(view, victim)
        why = {"rule": "priority", "C": cost, "rest": rest, "victim": victim.number, "newcomer": job.number}
        if rest is not None and cost >= rest:
            return [Hold(job, why, again=max(cost, SOONEST))]
        return [Preempt(victim, gentlest_mode(view), job, why)]

    def _swap(self, view: View, heads: list[Job]) -> list[Decision]:
        """Weigh, as the source does, a pair that is known to be better against the pair that runs."""
        running = view.running
        if len(running) != 2 or not all([preemptible(j) for j in running]):
            return []
        memory, compute = in_order(*running)
        before = self._live.rates(memory, compute)
        if before is None:
            return []
        s0 = sum(before)
        for job in heads:
            if _unknown(job):
                continue
            comes = job.task.profile.kind is MEMORY
            victim, stays = (memory, compute) if comes else (compute, memory)
            after = self._live.rates(job, stays)
            if after is None or sum(after) <= s0 or victim.preemptions >= self.most:
                continue
            if self._standing.level(view, job) < self._standing.of(view, victim):
                continue
            rests = [self._sight.rest(view, j) for j in (memory, compute)]
            t = together([rest for rest in rests if rest is not None], list(before)) if None not in rests else 0.0
            s1, n, d = sum(after), before[comes], self.model.decay(stays.task.profile.kind)
            c = view.cost(victim, [stays])
            if worth(s0, n, s1, t, c, d):
                why = {"rule": "worth", "victim": victim.number, "newcomer": job.number, "S0": s0, "S1": s1, "n": n,
                       "T": t, "C": c, "d": d, "gain": gain(s0, n, s1, t, c, d)}  # fmt: skip
                return [Preempt(victim, gentlest_mode(view), job, why)]
        return []


def _unknown(job: Job) -> bool:
    return job.task.profile.kind is None
