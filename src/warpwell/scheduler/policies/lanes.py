"""Lanes: a memory- and a compute-intensive kernel at a time, and the latter is always the younger."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import chain
from typing import Any

from ... import errors
from ..policy import Decision, Hold, Launch, Policy, Preempt, Resize, View
from ..residency import shape_of
from ..task import COMPUTE, MEMORY, PREEMPTED, RUNNING, Job, Kind, Placement
from .live import Live, in_order
from .order import ARRIVAL, MAX_QUEUED_LAUNCHES, at_least_one
from .sharing import age, at_most, demand, gentlest_mode, plainly, preemptible, quota, rest_of, stopping
from .standing import Standing, due

NAMES = 8
"""Kernels that are told apart by name while they wait, to find the best company; of others only the class."""

SOONEST = 1e-3
"""Seconds after which it is looked again whether what was to be over before it could leave is over, at the least."""

RECHECK_SECONDS = 1e-4
"""Shortest time after which a decision that waits for the end of a kernel is made again."""

BRIEF = 5e-3
"""Seconds of kernels that are launched as they are where no company waits, for it comes soon enough behind them."""

LONG = 0.25
"""Seconds from which a kernel always runs as workers, so that it can leave and is found if it is stuck."""

DECISIONS = 4
"""Decisions with their launches, as long as these take, before the end of a lane's kernel, that the next one is chosen
at the latest."""

ALIKE = 0.2
"""Sums of rates that differ by less are alike."""

FRESH = 3e-3
"""Seconds that a window must last that begins with a launch by the host: the launch is in it, and two short kernels
that gain half were taken for a pair that gains nothing."""

TRIED = 5
"""Decisions with their launches, as long as these take, that both of a pair take at the least to try another share: of
shorter ones, the rates are those of how soon the host relieves one."""

MIN_FREE_PART = 0.25
"""Smallest part of the device that a running kernel leaves free for another of its class. Chosen in the simulator, with
Orion's kernels and Azure's arrivals (seeds 1000 to 1004)."""


class Lanes(Policy):
    """Two lanes, one a class, with one kernel each at a time; see ``docs/scheduler.md``.

    A GPU issues its oldest warps first. A compute-intensive kernel that is older takes all there is to issue; a
    memory-intensive one that is older leaves nearly all of it. So each memory-intensive kernel that begins beside a
    compute-intensive one has the latter relieved, once: its workers leave at the end of their blocks, and others come
    that are younger. Nobody is preempted for that.

    Where nothing can be gained, kernels are launched as they are, in order, several ahead if they are short: where only
    one class is about, where a kernel takes less than `worthwhile` decisions with their launches, where it cannot be
    cut, and for `rest` seconds after a pair whose live rates added up to less than `least`. A short kernel that is
    compute-intensive is launched as it is beside a long one of the other class, too: its blocks are always the younger.

    Each lane has its next kernel on the device shortly before the one that runs has ended, so that it does not stand
    still while the host decides.

    In a lane, who waits is ordered by `Standing`. A kernel leaves for one of higher priority if that is sooner than its
    end, and for one of equal priority by the source's test, with the live rates of both pairs. A task that others
    passed too often runs beside whatever runs, so neither lane can starve it.

    Parameters
    ----------
    worthwhile : float
        Decisions with their launches, as long as these take, that a kernel must take to be launched as workers.
    least : float
        Sum of live rates of which a pair must have more to run together.
    rest : float
        Seconds for which a pair that had less is left alone.
    pause : float
        Seconds in which both classes must have been seen: else nothing comes that could be gained by.
    soon : float
        Seconds before the end of a lane's kernel at which the next one is launched behind it, at the least; 0: the next
        one is launched when that has ended.
    most : int
        How often a kernel is made to leave for a better combination, at most.
    patience, slack, lead
        See `Standing`.
    """

    name = "lanes"
    conserves = False
    watches = True
    adjusts = True
    ahead = MAX_QUEUED_LAUNCHES

    def __init__(
        self,
        *,
        worthwhile: float = 3.0,
        least: float = 1.1,
        rest: float = 1.0,
        pause: float = 0.03,
        soon: float = 1e-3,
        most: int = 8,
        patience: int = 32,
        slack: float = 0.02,
        lead: float = 1.0,
    ) -> None:
        for option, value in (
            ("worthwhile", worthwhile),
            ("least", least),
            ("rest", rest),
            ("pause", pause),
            ("soon", soon),
        ):
            if not value >= 0:
                raise errors.ArgumentError(f"{option} is {value}: give 0 or more", name=option)
        self.worthwhile = worthwhile
        self.least = least
        self.rest = rest
        self.pause = pause
        self.soon = soon
        self.most = at_least_one("most", most)
        self._standing = Standing(patience, slack, lead)
        self._live = Live()
        self._seen: dict[Kind, float] = {}
        self._ranked = -math.inf
        self._names: dict[str, str] = {}
        self._queued: dict[Job, int] = {}

    def bucket(self, job: Job) -> Hashable:
        """Group by tenant, priority, class, preempted or new, and name; tasks with a deadline apart."""
        task, names = job.task, self._names
        name = names.get(task.name) or (names.setdefault(task.name, task.name) if len(names) < NAMES else "")
        return task.tenant, job.priority, task.profile.kind, job.state is PREEMPTED, task.deadline is None, name

    def key(self, job: Job) -> float:
        """Arrival; of tasks with a deadline, when they must be launched at the latest."""
        return due(job)

    def ended(self, job: Job, now: float) -> None:
        """Note its rate in its last pair."""
        self._live.ended(job, now)

    def decide(self, view: View) -> list[Decision]:
        """Fill both lanes, memory first; make a kernel leave only where all places are taken, or for a priority."""
        running = view.running
        self._live.pairs = view.pairs
        self._live.look(running, view.now)
        if stopping(view):
            return []
        heads = view.waiting.heads()
        self._look(view, heads)
        begun = self._begun(view) if self._queued else []
        return begun + self._choose(view, heads)

    def _choose(self, view: View, heads: list[Job]) -> list[Decision]:
        running = view.running
        if not heads:
            return self._ease(view)
        self._standing.look(view, heads)
        if None in [job.task.profile.kind for job in running]:
            return []  # it is measured
        if not running:
            return self._begin(view, heads)
        first = self._best(view, heads)
        if _unknown(first):
            return []  # it comes when it can be alone
        if len(running) >= min(2, view.limit):
            return self._full(view, heads, first)
        mate = running[0]
        kind = first.task.profile.kind
        if kind is not mate.task.profile.kind:
            lane = [job for job in heads if job.task.profile.kind is kind]
            return self._join(view, self._best(view, lane, mate), mate)
        company = [job for job in heads if job.task.profile.kind not in (None, kind)]
        if company:
            other = self._best(view, company, mate)
            if self._standing.level(view, other) >= self._standing.level(view, first):
                return self._join(view, other, mate)
            return self._lower(view, first) or self._behind(view, first)
        return self._lower(view, first) or self._follow(view, first, mate)

    # -- who -----------------------------------------------------------------------------------------------
    def _look(self, view: View, heads: list[Job]) -> None:
        """Note which classes are about, and whether priorities differ."""
        ranks = set()
        for job in chain(view.running, heads):
            kind = job.task.profile.kind
            if kind is not None:
                self._seen[kind] = view.now
            ranks.add(job.priority + view.tenants[job.task.tenant].tenant.priority)
        if len(ranks) > 1:
            self._ranked = view.now

    def _best(self, view: View, jobs: list[Job], mate: Job | None = None) -> Job:
        """Return whose turn it is: among equals the best company of `mate`, a preempted one, the oldest."""
        equals = self._standing.first(view, jobs)
        if len(equals) == 1:
            return equals[0]
        sums = {job: 0 if mate is None else round(self._live.sum(job, mate) / ALIKE) for job in equals}
        return min(equals, key=lambda job: (-sums[job], job.state is not PREEMPTED, job.rest or 0.0, *age(job)))

    def _mixed(self, now: float) -> bool:
        """Whether both classes were about lately, so that company may come."""
        return all(now - self._seen.get(kind, -self.pause) < self.pause for kind in (MEMORY, COMPUTE))

    def _short(self, view: View, job: Job) -> bool:
        seconds = job.task.profile.seconds
        if job.task.whole:
            return True
        return _may_stay(view, job) and seconds is not None and seconds < self.worthwhile * view.overhead

    # -- where ---------------------------------------------------------------------------------------------
    def _begin(self, view: View, heads: list[Job]) -> list[Decision]:
        """Give the idle device to the first, and to one of the other class."""
        first = self._best(view, heads)
        if _unknown(first):
            return [Launch(first, self._place(view, first), {"rule": "unknown"})]
        company = [job for job in heads if job.task.profile.kind not in (None, first.task.profile.kind)]
        if company and view.limit > 1:
            mate = self._best(view, company, first)
            if self._alone(view, first, mate):
                return self._behind(view, first)
            why = {"rule": "lanes", "beside": []}
            return [self._launch(view, job, share, why) for job, share in self._divide(view, first, mate)]
        if self._brief(view, first) or (view.waiting.count > 1 and not self._waits_for_others(view)):
            return self._behind(view, first)
        return [Launch(first, self._place(view, first), {"rule": "alone"})]

    def _brief(self, view: View, job: Job) -> bool:
        """Whether a job that is alone is launched as it is: as workers it takes longer."""
        return self._as_it_is(view, job) and (job.task.profile.seconds or LONG) < BRIEF

    def _waits_for_others(self, view: View) -> bool:
        """Whether somebody may come for whom a kernel should make room, or leave."""
        return self._mixed(view.now) or view.now - self._ranked < self.rest

    def _join(self, view: View, job: Job, mate: Job) -> list[Decision]:
        """Launch a job beside one of the other class, which makes room for it and is relieved if it is in the way."""
        kind = job.task.profile.kind
        higher = self._standing.of(view, job) > self._standing.of(view, mate)
        if (
            not higher
            and self._as_it_is(view, job)
            and self._alone(view, job, mate)
            and (kind is MEMORY or self._short(view, job) or self._poor(view, job, mate))
        ):
            return self._behind(view, job)
        why = {"rule": "lanes", "beside": [mate.number]}
        shares = dict(self._divide(view, job, mate))
        launch = self._launch(view, job, shares[job], why)
        if not preemptible(mate):
            return [launch]
        place = self._place(view, mate, shares[mate])
        older = kind is MEMORY and (higher or not launch.placement.plain)
        room = Resize(mate, place.workers, {"rule": "makes room", "for": job.number}, older)
        # A memory-intensive newcomer waits for the room that the other one leaves, and is older than who comes back.
        return [launch, room] if older else [room, launch]

    def _follow(self, view: View, job: Job, mate: Job) -> list[Decision]:
        """Launch a job behind one of its class, where no other one may come; else it waits for its lane.

        As it is, unless that one can be asked to leave because priorities differ: then this one can, too.
        """
        if preemptible(mate) and not self._short(view, mate):
            shape = shape_of(mate.task.profile, mate.task.blocks, view.capacity)
            fits = demand(mate, view.capacity) + demand(job, view.capacity) <= 1.0
            if fits or shape.alone * shape.load <= 1.0 - MIN_FREE_PART:
                return [Launch(job, self._place(view, job), {"rule": "room"})]
            if self._mixed(view.now):
                return self._ease(view) + self._next(view, view.waiting.heads(), job)
            if self._waits_for_others(view):
                return [Launch(job, self._place(view, job), {"rule": "arrival"})]
        return self._behind(view, job)

    def _full(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """See whether somebody must leave, or what is short may be launched ahead."""
        running = view.running
        if len(running) == view.limit:
            found = self._lower(view, first)
            if found:
                return found
        ahead = self._next(view, heads, first)
        if ahead:
            return ahead
        # a train goes on in its own lane, or in both if nothing else is there
        train = [job for job in running if not preemptible(job)]
        if len(train) < len(running):
            kind = first.task.profile.kind
            if kind is MEMORY or any([job.task.profile.kind is not kind for job in train]):
                return []
        # with one place, a long one has the next behind it, as it has beside it with two
        long = view.limit == 1 and not self._waits_for_others(view)
        return self._behind(view, first) if train and (long or self._short(view, first)) else []

    def _next(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """Launch the next kernel of a lane behind the one that runs, when that is nearly over."""
        running = view.running
        if not self.soon or len({job.task.profile.kind for job in running}) < len(running):
            return []
        soon = self._lookahead(view)
        again = math.inf
        for job in running:
            rest = rest_of(job, view.now)
            if rest is None or not preemptible(job) or job in view.trains:
                continue
            lane = [its for its in heads if its.task.profile.kind is job.task.profile.kind]
            if not lane:
                continue
            mate = next((other for other in running if other is not job), None)
            coming = view.trains.get(mate, ()) if mate is not None else ()
            following = self._best(view, lane, coming[-1] if coming else mate)
            if self._standing.level(view, following) < self._standing.level(view, first):
                continue
            if rest <= soon:
                launch, _ = self._ahead_of(view, following, job, mate, {"rule": "next"})
                poor = mate is not None and self._poor(view, following, mate) and self._as_it_is(view, following)
                if poor or (mate is None and self._brief(view, following)):
                    launch.placement, launch.relieves = self._plain(view, following), None
                return [launch]
            again = min(again, max(rest - soon, RECHECK_SECONDS))
        return [Hold(first, {"rule": "next"}, again=again)] if again < math.inf else []

    def _ahead_of(
        self, view: View, job: Job, other: Job, mate: Job | None, why: dict[str, Any]
    ) -> tuple[Launch, float]:
        """Launch a job behind a running one, older than `mate` if it is memory-intensive; return that one's share."""
        paired = mate is not None and mate.task.profile.kind is not job.task.profile.kind
        share = rest = 1.0
        if mate and paired:
            share = self._live.share(job, mate, lambda: _work(view), _shortest(view))
            rest = 1.0 - share
        launch = self._launch(view, job, share, why)
        launch.behind = other
        if mate and paired and job.task.profile.kind is MEMORY and preemptible(mate):
            older = not launch.placement.plain or self._standing.of(view, job) > self._standing.of(view, mate)
            launch.relieves = mate if older else None
        self._queued[job] = self._standing.level(view, job)
        return launch, rest

    def _begun(self, view: View) -> list[Decision]:
        """Give those that began behind others their shares; the compute-intensive kernel of a pair is the younger."""
        running = view.running
        begun = [job for job in running if job in self._queued]
        self._queued = {job: its for job, its in self._queued.items() if job.state is RUNNING and job not in begun}
        if not begun or len(running) != 2:
            return []
        memory, compute = in_order(*running)
        if compute.task.profile.kind is not COMPUTE or memory.task.profile.kind is not MEMORY:
            return []
        shares = dict(self._divide(view, memory, compute, 0.0))
        older = running[0] is compute
        found: list[Decision] = []
        for job in (memory, compute):
            if preemptible(job):
                place, relieve = self._place(view, job, shares[job]), older and job is compute
                assert job.placement is not None
                if relieve or job.placement.workers != place.workers:
                    found.append(Resize(job, place.workers, {"rule": "makes room", "for": begun[0].number}, relieve))
        return found

    def _as_it_is(self, view: View, job: Job) -> bool:
        """Whether a job may be launched so that it cannot leave, and need not, for priorities do not differ."""
        return self._short(view, job) or (_may_stay(view, job) and view.now - self._ranked >= self.rest)

    def _launch(self, view: View, job: Job, share: float, why: dict[str, Any]) -> Launch:
        if self._short(view, job):
            return Launch(job, self._plain(view, job), why)
        return Launch(job, self._place(view, job, share), {**why, "share": share})

    def _place(self, view: View, job: Job, share: float = 1.0) -> Placement:
        return at_most(quota(job, share, view.capacity), self._priority(view, job))

    def _plain(self, view: View, job: Job) -> Placement:
        return plainly(self._priority(view, job))

    def _priority(self, view: View, job: Job) -> int:
        """Return the priority of a job's stream: where blocks of several wait for room, the highest get it."""
        return max(0, self._standing.of(view, job))

    def _divide(self, view: View, one: Job, two: Job, least: float = FRESH) -> list[tuple[Job, float]]:
        """Return the share of each, memory-intensive first, and measure what comes of it."""
        memory, compute = in_order(one, two)
        share = self._live.choose(memory, compute, lambda: _work(view), _shortest(view))
        if all([(job.waits and not self._short(view, job)) or preemptible(job) for job in (one, two)]):
            self._live.begin(memory, compute, view.now, least)  # else nothing is known of their progress
        return [(memory, share), (compute, 1.0 - share)]

    def _alone(self, view: View, job: Job, mate: Job) -> bool:
        """Whether to launch a pair as it is: the one that must be the older is short, or nothing was gained."""
        return self._short(view, in_order(job, mate)[0]) or self._poor(view, job, mate)

    def _lookahead(self, view: View) -> float:
        return max(self.soon, DECISIONS * view.overhead)

    def _poor(self, view: View, job: Job, mate: Job) -> bool:
        return self._live.poor(job, mate, self.least, view.now, self.rest)

    def _behind(self, view: View, first: Job) -> list[Decision]:
        """Launch a job as it is, and the short ones that wait behind it; a few of them queue on the device."""
        running = view.running
        queued = sum(map(len, view.trains.values()))
        soon, seconds = self._lookahead(view), sum([_rest(job, view.now) for job in running])
        is_plain = any([job.placement is not None and job.placement.plain for job in running])
        # a job that can leave is in no other job's way
        room = 1.0 - sum([demand(job, view.capacity) for job in running if not preemptible(job)])
        found: list[Decision] = []
        for job in chain((first,), view.waiting.behind(first)):
            short = self._short(view, job)
            place = self._plain(view, job) if self._as_it_is(view, job) else self._place(view, job)
            full = len(running) + len(found) >= view.limit
            may_queue = is_plain and place.plain and queued < self.ahead and (short or view.limit == 1)
            if (full and not may_queue) or (found and not short):
                break
            if not short and seconds >= soon and (full or room <= 0.0):
                # It would only wait on the device, in the way of arriving jobs.
                return found or [Hold(job, {"rule": "soon"}, again=max(seconds - soon, RECHECK_SECONDS))]
            found.append(Launch(job, place, ARRIVAL))
            is_plain |= place.plain
            queued += full
            seconds += job.task.profile.seconds or 0.0
            room -= demand(job, view.capacity)
        return found

    @staticmethod
    def _ease(view: View) -> list[Decision]:
        """Give the whole device to one that is alone."""
        if len(view.running) != 1:
            return []
        job = view.running[0]
        if job.placement is None or not preemptible(job) or job.placement.workers is None:
            return []
        return [Resize(job, None, {"rule": "alone"})]

    # -- who leaves ----------------------------------------------------------------------------------------
    def _lower(self, view: View, job: Job) -> list[Decision]:
        """Make a lower priority leave for a higher one, in its lane if it can; not what ends sooner than it leaves."""
        its, kind = self._standing.of(view, job), job.task.profile.kind
        ranks = {j: self._standing.of(view, j) + j.preemptions // self.most for j in view.running if preemptible(j)}
        victims = [j for j, rank in ranks.items() if rank < its]
        if not victims:
            return []
        victim = min(victims, key=lambda j: (j.task.profile.kind is not kind, ranks[j], -j.arrival, -j.number))
        cost = view.cost(victim, [j for j in view.running if j is not victim])
        rest = rest_of(victim, view.now)
        why = {"rule": "priority", "C": cost, "rest": rest, "victim": victim.number, "newcomer": job.number}
        if rest is None or cost < rest:
            return self._replace(view, victim, job, why)
        # By the level that it had while it waited: one that others had passed too often would be chosen again at once.
        ahead = [j for j in view.trains.get(victim, ()) if j.state is RUNNING and self._queued.get(j, its) < its]
        return [
            *[Preempt(j, gentlest_mode(view), job, {**why, "victim": j.number}) for j in reversed(ahead)],
            Hold(job, why, again=max(cost, SOONEST)),
        ]

    def _replace(self, view: View, victim: Job, job: Job, why: dict[str, Any]) -> list[Decision]:
        """Make a kernel leave; the newcomer takes its place on the device, without the host."""
        leaves = Preempt(victim, gentlest_mode(view), job, why)
        if not self.soon:
            return [leaves]
        mate = next((other for other in view.running if other is not victim), None)
        launch, share = self._ahead_of(view, job, victim, mate, {"rule": why["rule"]})
        found: list[Decision] = [leaves, launch]
        if mate is not None and preemptible(mate) and mate.task.profile.kind is not job.task.profile.kind:
            part = quota(mate, share, view.capacity)
            assert mate.placement is not None
            if part is not None and part < (mate.placement.workers or math.inf):
                found.append(Resize(mate, part, {"rule": "makes room", "for": job.number}))
        return found


def _may_stay(view: View, job: Job) -> bool:
    """Whether a job may be launched so that it cannot leave: it cannot anyway, or will not stay for long.

    Where tenants do not trust each other, a time that was only said does not count.
    """
    profile = job.task.profile
    known = profile.source != "given" or view.trusts
    return bool(job.task.whole) or (known and (profile.seconds or LONG) < LONG)


def _shortest(view: View) -> float:
    """Return the seconds that both of a pair must take for another share to be tried."""
    return max(SOONEST, TRIED * view.overhead)


def _work(view: View) -> tuple[float, float]:
    """Return the seconds alone of what runs and waits, memory-intensive first."""
    found: dict[Kind | None, float] = {MEMORY: 0.0, COMPUTE: 0.0, None: 0.0}
    for job in view.running:
        found[job.task.profile.kind] += _rest(job, view.now)
    for job, count in chain(view.waiting.buckets(), ((job, 1) for job in chain(*view.trains.values()))):
        found[job.task.profile.kind] += count * (job.rest or 0.0)
    return found[MEMORY], found[COMPUTE]


def _rest(job: Job, now: float) -> float:
    """Return the seconds that a running job still takes; nobody counts the blocks of one that was launched as it is."""
    if job.placement is None or not job.placement.plain:
        return rest_of(job, now) or 0.0
    return max(0.0, (job.task.profile.seconds or 0.0) - (now - job.since))


def _unknown(job: Job) -> bool:
    return job.task.profile.kind is None
