"""Lanes: a memory- and a compute-intensive kernel at a time, and the latter is always the younger."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import chain
from typing import Any

from ... import errors
from ..._check import checked_integer
from ..batch import Batch
from ..policy import Decision, Hold, Launch, Policy, Preempt, Resize, View
from ..residency import shape_of
from ..task import COMPUTE, MEMORY, PREEMPTED, RUNNING, Job, Kind, Placement
from .live import Live, in_order
from .order import ARRIVAL, MAX_QUEUED_LAUNCHES
from .priority import Priority, due
from .sharing import age, demand, gentlest_mode, preemptible, quota, rest_of, stopping, unmodified, with_quota

MAX_DISTINCT_KERNELS = 8
"""Waiting kernels that are distinguished by name, to find the best pair. Only the class of all further ones counts."""

MIN_RECHECK_SECONDS = 1e-3
"""Minimum time before the policy checks again whether a kernel that was too short to preempt has ended, and minimum
length of both kernels of a pair if another share is tried."""

RECHECK_SECONDS = 1e-4
"""Shortest time after which a decision that waits for the end of a kernel is made again."""

UNMODIFIED_BELOW_SECONDS = 5e-3
"""Kernels shorter than this are launched unmodified if no co-runner waits: the next co-runner follows soon enough."""

PREEMPTIBLE_FROM_SECONDS = 0.25
"""Kernels of at least this length always run as workers: they can be preempted, and a stuck one is detected."""

LOOKAHEAD_DECISIONS = 4
"""Lookahead before the end of a lane's kernel, in decision latencies, if that exceeds `soon`."""

PAIR_RATE_STEP = 0.2
"""Pairs are ranked by their sums of rates, rounded to this step."""

MIN_WINDOW_SECONDS = 3e-3
"""Minimum length of a measurement that starts with a launch by the host. The launch is part of it: in shorter windows,
a pair of short kernels that gains 50 % seemed to gain nothing."""

MIN_SHARE_TRIAL_DECISIONS = 5
"""Minimum length of both kernels of a pair, in decision latencies, if another share is tried. The rates of shorter
kernels depend on how fast the host re-issues one of them."""

MIN_FREE_PART = 0.25
"""Smallest part of the device that a running kernel leaves free for another of its class. Chosen in the simulator, with
Orion's kernels and Azure's arrivals (seeds 1000 to 1004)."""


class Lanes(Policy):
    """Two lanes, one a class, with one kernel each at a time; see ``docs/scheduler.md``.

    A GPU issues its oldest warps first. An older compute-intensive kernel takes all issue slots; an older
    memory-intensive kernel leaves nearly all of them free. So if a memory-intensive kernel starts while a
    compute-intensive one runs, the latter is re-issued once: its workers leave at the end of their blocks, and younger
    workers replace them. No kernel is preempted for that.

    Jobs that cannot gain are launched unmodified, in order, several ahead if they are short. This applies if only one
    class waits or runs, to kernels that cannot be cut or are shorter than `worthwhile` decision latencies, and, for
    `rest` seconds, to pairs whose measured rates added up to less than `least`. A short compute-intensive kernel is
    launched unmodified next to a long kernel of the other class, too: its blocks are always younger.

    The next kernel of a lane is queued on the device shortly before the running one ends, so that the lane is not idle
    while the host decides.

    `Priority` orders the waiting jobs of a lane. A kernel is preempted for one of higher priority if that is faster
    than to wait for its end. A task that was passed too often runs with any running kernel, so neither lane can starve
    it.

    Parameters
    ----------
    worthwhile : float
        Minimum length of a kernel that is launched as workers, in decision latencies.
    least : float
        Minimum sum of measured rates of a pair that runs together.
    rest : float
        Seconds for which a pair with a smaller sum is not tried again.
    pause : float
        Seconds within which both classes must have arrived or run. Otherwise no pair is expected.
    soon : float
        Minimum lookahead in seconds: the next kernel of a lane is queued this long before the running one ends. 0: it
        is launched after that end.
    most : int
        Number of preemptions after which a kernel counts as one priority higher.
    patience, slack, lead
        See `Priority`.
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
        self._min_decisions = worthwhile
        self._min_pair_rate = least
        self._cooldown = rest
        self._idle_timeout = pause
        self._lookahead_seconds = soon
        self._max_preemptions = checked_integer(most, "most", minimum=1)
        self._order = Priority(patience, slack, lead)
        self._live = Live()
        self._last_seen: dict[Kind, float] = {}
        self._ranked = -math.inf
        self._names: dict[str, str] = {}
        self._queued: dict[Job, int] = {}

    def bucket(self, job: Job) -> Hashable:
        """Group by tenant, priority, class, preempted or new, name, and with or without a deadline."""
        task, names = job.task, self._names
        name = names.get(task.name) or (
            names.setdefault(task.name, task.name) if len(names) < MAX_DISTINCT_KERNELS else ""
        )
        return task.tenant, job.priority, task.profile.kind, job.state is PREEMPTED, task.deadline is None, name

    def key(self, job: Job) -> float:
        """Return the arrival time, or the latest time to launch a task that has a deadline."""
        return due(job)

    def ended(self, job: Job, now: float) -> None:
        """Measure the rate of the job in its last pair."""
        self._live.ended(job, now)

    def decide(self, view: View) -> list[Decision]:
        """Fill both lanes, memory first. Preempt only if no lane is free, or for a higher priority."""
        running = view.running
        self._live.pairs = view.pairs
        self._live.look(running, view.now)
        if stopping(view):
            return []
        heads = view.waiting.heads()
        self._look(view, heads)
        adjustments = self._adjust_begun(view) if self._queued else []
        followers = self._follow_data(view) if view.followers else []
        return adjustments + self._choose(view, heads) + followers

    def _choose(self, view: View, heads: list[Job]) -> list[Decision]:
        running = view.running
        if not heads:
            return self._ease(view)
        self._order.update(view, heads)
        if None in [job.task.profile.kind for job in running]:
            return []  # it runs solo and is measured
        if not running:
            return self._begin(view, heads)
        first = self._best(view, heads)
        if _unknown(first):
            return []  # it is launched when it can run solo
        if len(running) >= min(2, view.limit):
            return self._full(view, heads, first)
        mate = running[0]
        kind = first.task.profile.kind
        if kind is not mate.task.profile.kind:
            lane = [job for job in heads if job.task.profile.kind is kind]
            return self._join(view, self._best(view, lane, mate), mate)
        company = [job for job in heads if job.task.profile.kind not in (None, kind)]
        if company:
            partner = self._best(view, company, mate)
            if self._order.effective(view, partner) >= self._order.effective(view, first):
                return self._join(view, partner, mate)
            return self._lower(view, first) or self._behind(view, first)
        return self._lower(view, first) or self._follow(view, first, mate)

    # -- choice of a job -----------------------------------------------------------------------------------
    def _look(self, view: View, heads: list[Job]) -> None:
        """Record which classes run or wait, and whether priorities differ."""
        ranks = set()
        for job in chain(view.running, heads):
            kind = job.task.profile.kind
            if kind is not None:
                self._last_seen[kind] = view.now
            ranks.add(job.priority + view.tenants[job.task.tenant].tenant.priority)
        if len(ranks) > 1:
            self._ranked = view.now

    def _best(self, view: View, jobs: list[Job], mate: Job | None = None) -> Job:
        """Return the job to launch next: among equals the best pair with `mate`, a preempted job, the oldest."""
        equals = self._order.first(view, jobs)
        if len(equals) == 1:
            return equals[0]
        sums = {job: 0 if mate is None else round(self._live.sum(job, mate) / PAIR_RATE_STEP) for job in equals}
        return min(equals, key=lambda job: (-sums[job], job.state is not PREEMPTED, job.rest or 0.0, *age(job)))

    def _mixed(self, now: float) -> bool:
        """Return True if both classes ran or waited recently, so that a pair is likely."""
        return all(
            now - self._last_seen.get(kind, -self._idle_timeout) < self._idle_timeout for kind in (MEMORY, COMPUTE)
        )

    def _short(self, view: View, job: Job) -> bool:
        seconds = job.task.profile.seconds
        if job.task.whole:
            return True
        return _may_stay(view, job) and seconds is not None and seconds < self._min_decisions * view.overhead

    # -- launches ------------------------------------------------------------------------------------------
    def _begin(self, view: View, heads: list[Job]) -> list[Decision]:
        """Launch the first job, and one of the other class, on the idle device."""
        first = self._best(view, heads)
        if _unknown(first):
            return [Launch(first, self._placement(view, first), {"rule": "unknown"})]
        company = [job for job in heads if job.task.profile.kind not in (None, first.task.profile.kind)]
        if company and view.limit > 1:
            mate = self._best(view, company, first)
            if self._alone(view, first, mate):
                return self._behind(view, first)
            why = {"rule": "lanes", "beside": []}
            return [self._launch(view, job, share, why) for job, share in self._divide(view, first, mate)]
        if self._brief(view, first) or (view.waiting.count > 1 and not self._waits_for_others(view)):
            return self._behind(view, first)
        return [Launch(first, self._placement(view, first), {"rule": "alone"})]

    def _brief(self, view: View, job: Job) -> bool:
        """Return True if a solo job is launched unmodified: as workers it would take longer."""
        return (
            self._as_it_is(view, job)
            and (job.task.profile.seconds or PREEMPTIBLE_FROM_SECONDS) < UNMODIFIED_BELOW_SECONDS
        )

    def _waits_for_others(self, view: View) -> bool:
        """Return True if a job may arrive for which a kernel should make room, or leave."""
        return self._mixed(view.now) or view.now - self._ranked < self._cooldown

    def _join(self, view: View, job: Job, mate: Job) -> list[Decision]:
        """Launch a job with a running one of the other class, which makes room and is re-issued if it is older."""
        kind = job.task.profile.kind
        higher = self._order.base(view, job) > self._order.base(view, mate)
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
        workers = self._placement(view, mate, shares[mate]).workers
        older = kind is MEMORY and (higher or not launch.placement.plain)
        room = Resize(mate, workers, {"rule": "makes room", "for": job.number}, older)
        # An arriving memory-intensive kernel waits for the room of the leaving workers, and is older than the new ones.
        return [launch, room] if older else [room, launch]

    def _follow(self, view: View, job: Job, mate: Job) -> list[Decision]:
        """Queue a job after a running one of its class, or let it wait for its lane if other jobs may arrive.

        It is launched unmodified, unless the running one can be preempted because priorities differ.
        """
        if preemptible(mate) and not self._short(view, mate):
            shape = shape_of(mate.task.profile, mate.task.blocks, view.capacity)
            fits = demand(mate, view.capacity) + demand(job, view.capacity) <= 1.0
            if fits or shape.alone * shape.load <= 1.0 - MIN_FREE_PART:
                return [Launch(job, self._placement(view, job), {"rule": "room"})]
            if self._mixed(view.now):
                return self._ease(view) + self._next(view, view.waiting.heads(), job)
            if self._waits_for_others(view):
                return [Launch(job, self._placement(view, job), {"rule": "arrival"})]
        return self._behind(view, job)

    def _follow_data(self, view: View) -> list[Decision]:
        """Queue a short job after the jobs whose data it uses, so that the device starts it without the host."""
        if sum(map(len, view.trains.values())) >= self.ahead:
            return []
        for job, head in view.followers:
            if not _unknown(job) and not job.task.whole and self._short(view, job):
                return [Launch(job, self._plain(view, job), {"rule": "data"}, head)]
        return []

    def _full(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """Preempt a kernel, or queue the next kernel of a lane, or queue short kernels."""
        running = view.running
        if len(running) == view.limit:
            decisions = self._lower(view, first)
            if decisions:
                return decisions
        decisions = self._next(view, heads, first)
        if decisions:
            return decisions
        # A launch queue continues in its own lane, or in both lanes if no other kernel runs.
        train = [job for job in running if not preemptible(job)]
        if len(train) < len(running):
            kind = first.task.profile.kind
            if kind is MEMORY or any([job.task.profile.kind is not kind for job in train]):
                return []
        # With a limit of one kernel, a job is queued even after a long one.
        long = view.limit == 1 and not self._waits_for_others(view)
        return self._behind(view, first) if train and (long or self._short(view, first)) else []

    def _next(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """Queue the next kernel of a lane when the running one has almost ended."""
        running = view.running
        if not self._lookahead_seconds or len({job.task.profile.kind for job in running}) < len(running):
            return []
        lookahead = self._lookahead(view)
        again = math.inf
        for job in running:
            remaining = rest_of(job, view.now)
            if remaining is None or not preemptible(job) or job in view.trains:
                continue
            lane = [head for head in heads if head.task.profile.kind is job.task.profile.kind]
            if not lane:
                continue
            mate = next((candidate for candidate in running if candidate is not job), None)
            coming = view.trains.get(mate, ()) if mate is not None else ()
            following = self._best(view, lane, coming[-1] if coming else mate)
            if self._order.effective(view, following) < self._order.effective(view, first):
                continue
            if remaining <= lookahead:
                launch, _ = self._ahead_of(view, following, job, mate, {"rule": "next"})
                poor = mate is not None and self._poor(view, following, mate) and self._as_it_is(view, following)
                if poor or (mate is None and self._brief(view, following)):
                    launch.placement = self._plain(view, following)
                return [launch]
            again = min(again, max(remaining - lookahead, RECHECK_SECONDS))
        return [Hold(first, {"rule": "next"}, again=again)] if again < math.inf else []

    def _ahead_of(self, view: View, job: Job, head: Job, mate: Job | None, why: dict[str, Any]) -> tuple[Launch, float]:
        """Queue a job after `head`; return the share of `mate`, too, which `_adjust_begun` may re-issue later."""
        share = mate_share = 1.0
        if mate is not None and mate.task.profile.kind is not job.task.profile.kind:
            share = self._live.share(job, mate, lambda: _work(view), _shortest(view))
            mate_share = 1.0 - share
        launch = self._launch(view, job, share, why)
        launch.behind = head
        self._queued[job] = self._order.effective(view, job)
        return launch, mate_share

    def _adjust_begun(self, view: View) -> list[Decision]:
        """Resize queued jobs that have begun to their shares; re-issue the compute-intensive kernel if it is older."""
        running = view.running
        fresh = [job for job in running if job in self._queued]
        self._queued = {job: level for job, level in self._queued.items() if job.state is RUNNING and job not in fresh}
        if not fresh or len(running) != 2:
            return []
        memory, compute = in_order(*running)
        if compute.task.profile.kind is not COMPUTE or memory.task.profile.kind is not MEMORY:
            return []
        shares = dict(self._divide(view, memory, compute, 0.0))
        older = running[0] is compute
        decisions: list[Decision] = []
        for job in (memory, compute):
            if preemptible(job):
                workers, reissue = self._placement(view, job, shares[job]).workers, older and job is compute
                assert job.placement is not None
                if reissue or job.placement.workers != workers:
                    why = {"rule": "makes room", "for": fresh[0].number}
                    decisions.append(Resize(job, workers, why, reissue))
        return decisions

    def _as_it_is(self, view: View, job: Job) -> bool:
        """Return True if a job may be launched unmodified: it is short, or all priorities are equal."""
        return self._short(view, job) or (_may_stay(view, job) and view.now - self._ranked >= self._cooldown)

    def _launch(self, view: View, job: Job, share: float, why: dict[str, Any]) -> Launch:
        if self._short(view, job):
            return Launch(job, self._plain(view, job), why)
        return Launch(job, self._placement(view, job, share), {**why, "share": share})

    def _placement(self, view: View, job: Job, share: float = 1.0) -> Placement:
        return with_quota(quota(job, share, view.capacity), self._priority(view, job))

    def _plain(self, view: View, job: Job) -> Placement:
        return unmodified(self._priority(view, job))

    def _priority(self, view: View, job: Job) -> int:
        """Return the priority of a job's stream: if blocks of several streams wait for room, the highest get it."""
        return max(0, self._order.base(view, job))

    def _divide(
        self, view: View, job: Job, mate: Job, min_seconds: float = MIN_WINDOW_SECONDS
    ) -> list[tuple[Job, float]]:
        """Return the share of each kernel of a pair, memory-intensive first, and start to measure their rates."""
        memory, compute = in_order(job, mate)
        share = self._live.choose(memory, compute, lambda: _work(view), _shortest(view))
        if all([(j.is_waiting and not self._short(view, j)) or preemptible(j) for j in (job, mate)]):
            self._live.begin(memory, compute, view.now, min_seconds)  # otherwise their progress is unknown
        return [(memory, share), (compute, 1.0 - share)]

    def _alone(self, view: View, job: Job, mate: Job) -> bool:
        """Return True if a pair is launched unmodified: its memory-intensive kernel is short, or it gains nothing."""
        return self._short(view, in_order(job, mate)[0]) or self._poor(view, job, mate)

    def _lookahead(self, view: View) -> float:
        return max(self._lookahead_seconds, LOOKAHEAD_DECISIONS * view.overhead)

    def _poor(self, view: View, job: Job, mate: Job) -> bool:
        return self._live.poor(job, mate, self._min_pair_rate, view.now, self._cooldown)

    def _behind(self, view: View, first: Job) -> list[Decision]:
        """Launch a job unmodified, and the short ones that wait behind it; a few of them queue on the device."""
        running = view.running
        queued = sum(map(len, view.trains.values()))
        lookahead, seconds = self._lookahead(view), sum([_remaining(job, view.now) for job in running])
        is_plain = any([job.placement is not None and job.placement.plain for job in running])
        # a job that can leave is in no other job's way
        room = 1.0 - sum([demand(job, view.capacity) for job in running if not preemptible(job)])
        decisions: list[Decision] = []
        for job in chain((first,), view.waiting.behind(first)):
            short = self._short(view, job)
            placement = self._plain(view, job) if self._as_it_is(view, job) else self._placement(view, job)
            full = len(running) + len(decisions) >= view.limit
            may_queue = is_plain and placement.plain and queued < self.ahead and (short or view.limit == 1)
            if (full and not may_queue) or (decisions and not short):
                break
            if not short and seconds >= lookahead and (full or room <= 0.0):
                # It would only wait on the device, in the way of arriving jobs.
                return decisions or [Hold(job, {"rule": "soon"}, again=max(seconds - lookahead, RECHECK_SECONDS))]
            decisions.append(Launch(job, placement, ARRIVAL))
            # A batch is launched so that it can be preempted: no kernel queues after it on the device.
            is_plain |= placement.plain and not isinstance(job.task.launch, Batch)
            queued += full
            seconds += job.task.profile.seconds or 0.0
            room -= demand(job, view.capacity)
        return decisions

    @staticmethod
    def _ease(view: View) -> list[Decision]:
        """Give the whole device to a kernel that runs solo."""
        if len(view.running) != 1:
            return []
        job = view.running[0]
        if job.placement is None or not preemptible(job) or job.placement.workers is None:
            return []
        return [Resize(job, None, {"rule": "alone"})]

    # -- preemption ----------------------------------------------------------------------------------------
    def _lower(self, view: View, job: Job) -> list[Decision]:
        """Preempt a kernel of lower priority, of the same lane if possible, unless it ends sooner than it leaves."""
        priority, kind = self._order.base(view, job), job.task.profile.kind
        ranks = {
            j: self._order.base(view, j) + j.preemptions // self._max_preemptions
            for j in view.running
            if preemptible(j)
        }
        victims = [j for j, rank in ranks.items() if rank < priority]
        if not victims:
            return []
        victim = min(victims, key=lambda j: (j.task.profile.kind is not kind, ranks[j], -j.arrival, -j.number))
        cost = view.cost(victim, [j for j in view.running if j is not victim])
        remaining = rest_of(victim, view.now)
        why = {"rule": "priority", "C": cost, "rest": remaining, "victim": victim.number, "newcomer": job.number}
        if remaining is None or cost < remaining:
            return self._replace(view, victim, job, why)
        # The level while waiting counts: a job that was passed too often would be chosen again at once.
        queued = [j for j in view.trains.get(victim, ()) if j.state is RUNNING]
        lower = [j for j in queued if self._queued.get(j, priority) < priority]
        return [
            *[Preempt(j, gentlest_mode(view), job, {**why, "victim": j.number}) for j in reversed(lower)],
            Hold(job, why, again=max(cost, MIN_RECHECK_SECONDS)),
        ]

    def _replace(self, view: View, victim: Job, job: Job, why: dict[str, Any]) -> list[Decision]:
        """Preempt a kernel and queue the arriving one after it, so that it starts without the host."""
        leaves = Preempt(victim, gentlest_mode(view), job, why)
        if not self._lookahead_seconds:
            return [leaves]
        mate = next((candidate for candidate in view.running if candidate is not victim), None)
        launch, share = self._ahead_of(view, job, victim, mate, {"rule": why["rule"]})
        decisions: list[Decision] = [leaves, launch]
        if mate is not None and preemptible(mate) and mate.task.profile.kind is not job.task.profile.kind:
            workers = quota(mate, share, view.capacity)
            assert mate.placement is not None
            if workers is not None and workers < (mate.placement.workers or math.inf):
                decisions.append(Resize(mate, workers, {"rule": "makes room", "for": job.number}))
        return decisions


def _may_stay(view: View, job: Job) -> bool:
    """Return True if a job may be launched so that it cannot leave: it cannot be cut, or it is short.

    If tenants do not trust each other, times that the submitter gave do not count.
    """
    profile = job.task.profile
    if job.task.whole:
        return True
    is_time_trusted = profile.source != "given" or view.trusts
    return is_time_trusted and profile.seconds is not None and 0 < profile.seconds < PREEMPTIBLE_FROM_SECONDS


def _shortest(view: View) -> float:
    """Return the minimum length in seconds of both kernels of a pair if another share is tried."""
    return max(MIN_RECHECK_SECONDS, MIN_SHARE_TRIAL_DECISIONS * view.overhead)


def _work(view: View) -> tuple[float, float]:
    """Return the remaining solo seconds of all running and waiting jobs, by class, memory-intensive first."""
    seconds: dict[Kind | None, float] = {MEMORY: 0.0, COMPUTE: 0.0, None: 0.0}
    for job in view.running:
        seconds[job.task.profile.kind] += _remaining(job, view.now)
    for job, count in chain(view.waiting.buckets(), ((job, 1) for job in chain(*view.trains.values()))):
        seconds[job.task.profile.kind] += count * (job.rest or 0.0)
    return seconds[MEMORY], seconds[COMPUTE]


def _remaining(job: Job, now: float) -> float:
    """Return the remaining seconds of a running job. Blocks of an unmodified launch are not counted, its time is."""
    if job.placement is None or not job.placement.plain:
        return rest_of(job, now) or 0.0
    return max(0.0, (job.task.profile.seconds or 0.0) - (now - job.since))


def _unknown(job: Job) -> bool:
    return job.task.profile.kind is None
