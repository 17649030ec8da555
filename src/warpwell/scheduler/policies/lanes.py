"""Lanes: a memory- and a compute-intensive kernel at a time; the compute-intensive one is always the younger."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import chain
from typing import Any

from ..._check import checked_number
from ..batch import Batch
from ..policy import Decision, Hold, Launch, Policy, Preempt, Resize, View
from ..residency import demand, shape_of
from ..task import COMPUTE, MEMORY, PREEMPTED, RUNNING, Job, Kind, Placement
from .live import Live, in_order
from .order import ARRIVAL, MAX_QUEUED_LAUNCHES
from .priority import Priority, due
from .sharing import age, cached_placement, gentlest_mode, grow, preemptible, quota, remaining_seconds, stopping

MIN_RUNTIME_DECISIONS = 3.0
"""Minimum length of a kernel that is launched as workers, in decision latencies. From traces of short kernels on an
H200."""

MIN_PAIR_RATE = 1.1
"""Minimum sum of measured rates of a pair that runs together. From the pair matrix of an H200; half of it gives the
same throughput in the simulator."""

PAIR_COOLDOWN_SECONDS = 1.0
"""Time for which a pair with a smaller sum is not tried again. Protection against bad measurements, not tuned."""

CLASS_IDLE_SECONDS = 0.03
"""Time within which both classes must have arrived or run. Otherwise no pair is expected. Chosen, not fitted: half and
double change simulated throughput by less than 2 %."""

PREEMPTIONS_PER_PRIORITY = 8
"""Number of preemptions after which a kernel counts as one priority higher. Protection against starvation, not
tuned."""

LEAD_SECONDS = 1.0
"""Maximum lead that priorities of its tasks and aging give a tenant, in time of the whole device. Protection, not
tuned."""

MAX_DISTINCT_KERNELS = 8
"""Number of waiting kernels that the policy distinguishes by name to find the best pair. It distinguishes further
kernels only by class. In the simulator, 4 cost 30 % of turnaround (ANTT) on the trace of seven kernels."""

MIN_RECHECK_SECONDS = 1e-3
"""Minimum time before the policy checks again whether a kernel that was too short to preempt has ended, and minimum
length of both kernels of a pair if another share is tried. In the simulator, 2 ms lose 7 % of throughput on the trace
of seven kernels."""

RECHECK_SECONDS = 1e-4
"""Minimum time before the policy repeats a decision that waits for the end of a kernel. Chosen: about one decision."""

UNMODIFIED_BELOW_SECONDS = 5e-3
"""Kernels shorter than this are launched unmodified if no co-runner waits: the next kernel can be paired soon enough.
Chosen, not fitted."""

PREEMPTIBLE_FROM_SECONDS = 0.25
"""Kernels of at least this length always run as workers: they can be preempted, and a stuck one is detected.
Protection, not tuned."""

LOOKAHEAD_DECISIONS = 4
"""Lookahead before the end of a lane's kernel, in decision latencies, if that exceeds `lookahead_seconds`. From
simulations of seeds 0 to 9."""

PAIR_RATE_STEP = 0.2
"""Pairs are ranked by their sums of rates, rounded to this step. In the simulator, 0.1 costs 30 % of turnaround (ANTT)
on the trace of seven kernels."""

MIN_WINDOW_SECONDS = 3e-3
"""Minimum length of a measurement that starts with a launch by the host. The launch is part of it: in shorter windows,
a pair of short kernels on an H200 that gains 50 % seemed to gain nothing."""

MIN_SHARE_TRIAL_DECISIONS = 5
"""Minimum length of both kernels of a pair, in decision latencies, if another share is tried. The rates of shorter
kernels depend on how fast the host re-issues one of them. From simulations: 10 lose 7 % of throughput on the trace of
seven kernels."""

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
    class waits or runs, to kernels that cannot be cut or are shorter than `MIN_RUNTIME_DECISIONS` decision latencies,
    and, for `PAIR_COOLDOWN_SECONDS`, to pairs whose measured rates added up to less than `MIN_PAIR_RATE`. A short
    compute-intensive kernel is also launched unmodified next to a long kernel of the other class: its blocks are always
    younger.

    The next kernel of a lane is queued on the device shortly before the running one ends, so that the lane is not idle
    while the host decides.

    `Priority` orders the waiting jobs of a lane. A kernel is preempted for one of higher priority if its blocks are
    expected to leave before the kernel would end. A task that was passed too often runs with any running kernel, so
    neither lane can starve it.

    Parameters
    ----------
    lookahead_seconds : float
        Minimum lookahead: the next kernel of a lane is queued this long before the running one ends. 0: it is launched
        after that end. 1 ms is from simulations of seeds 0 to 9; 2 ms lose 2 % on the random mix.
    tolerance_seconds : float
        See `Priority`.
    """

    name = "lanes"
    conserves = False
    watches = True
    adjusts = True
    ahead = MAX_QUEUED_LAUNCHES

    def __init__(self, *, lookahead_seconds: float = 1e-3, tolerance_seconds: float = 0.02) -> None:
        self._lookahead_seconds = checked_number(lookahead_seconds, "lookahead_seconds", maximum=math.inf)
        self._priority_order = Priority(tolerance_seconds=tolerance_seconds, lead_seconds=LEAD_SECONDS)
        self._live = Live()
        self._last_seen: dict[Kind, float] = {}
        self._priorities_differed = -math.inf
        self._names: set[str] = set()
        self._queued: dict[Job, int] = {}

    def bucket(self, job: Job) -> Hashable:
        """Group by tenant, priority, class, preempted or new, name, and with or without a deadline."""
        task, names = job.task, self._names
        if len(names) < MAX_DISTINCT_KERNELS:
            names.add(task.name)
        name = task.name if task.name in names else ""
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
        self._live.update(running, view.now)
        if stopping(view):
            return []
        heads = view.waiting.heads()
        self._record_classes(view, heads)
        if view.waiting.count < 2:  # otherwise, the next job might not join the bucket of an older job of its kernel
            self._names &= {job.task.name for job in heads}
        adjustments = self._adjust_started(view) if self._queued else []
        followers = self._queue_after_data(view) if view.followers else []
        return adjustments + self._choose(view, heads) + followers

    def _choose(self, view: View, heads: list[Job]) -> list[Decision]:
        running = view.running
        if not heads:
            return grow(view) if len(running) == 1 else []
        self._priority_order.update(view, heads)
        if None in [job.task.profile.kind for job in running]:
            return []  # An unprofiled kernel runs solo, because it is measured.
        if not running:
            return self._launch_idle(view, heads)
        first = self._first(view, heads)
        if _is_unprofiled(first):
            return []  # This kernel is launched when it can run solo.
        if len(running) >= min(2, view.limit):
            return self._decide_full(view, heads, first)
        co_runner = running[0]
        kind = first.task.profile.kind
        if kind is not co_runner.task.profile.kind:
            lane = [job for job in heads if job.task.profile.kind is kind]
            return self._pair(view, self._first(view, lane, co_runner), co_runner)
        candidates = [job for job in heads if job.task.profile.kind not in (None, kind)]
        if candidates:
            partner = self._first(view, candidates, co_runner)
            if self._priority_order.effective(view, partner) >= self._priority_order.effective(view, first):
                return self._pair(view, partner, co_runner)
            return self._preempt_for_priority(view, first) or self._queue_in_order(view, first)
        return self._preempt_for_priority(view, first) or self._follow_class(view, first, co_runner)

    # -- choice of a job -----------------------------------------------------------------------------------
    def _record_classes(self, view: View, heads: list[Job]) -> None:
        """Record which classes run or wait, and whether priorities differ."""
        ranks = set()
        for job in chain(view.running, heads):
            kind = job.task.profile.kind
            if kind is not None:
                self._last_seen[kind] = view.now
            ranks.add(job.priority + view.tenants[job.task.tenant].tenant.priority)
        if len(ranks) > 1:
            self._priorities_differed = view.now

    def _first(self, view: View, jobs: list[Job], co_runner: Job | None = None) -> Job:
        """Return the job to launch next. Ties: the best pair with `co_runner`, a preempted job, then the oldest."""
        equals = self._priority_order.first(view, jobs)
        if len(equals) == 1:
            return equals[0]
        sums = {
            job: 0 if co_runner is None else round(self._live.sum(job, co_runner) / PAIR_RATE_STEP) for job in equals
        }
        return min(equals, key=lambda job: (-sums[job], job.state is not PREEMPTED, job.rest or 0.0, *age(job)))

    def _has_both_classes(self, now: float) -> bool:
        """Return True if both classes ran or waited recently, so that a pair is likely."""
        return all(
            now - self._last_seen.get(kind, -CLASS_IDLE_SECONDS) < CLASS_IDLE_SECONDS for kind in (MEMORY, COMPUTE)
        )

    def _is_short(self, view: View, job: Job) -> bool:
        seconds = job.task.profile.seconds
        takes_few_decisions = seconds is not None and seconds < MIN_RUNTIME_DECISIONS * view.overhead
        return bool(job.task.whole) or (takes_few_decisions and _may_bar_preemption(view, job))

    # -- launches ------------------------------------------------------------------------------------------
    def _launch_idle(self, view: View, heads: list[Job]) -> list[Decision]:
        """Launch the first job, and one of the other class, on the idle device."""
        first = self._first(view, heads)
        if _is_unprofiled(first):
            return [Launch(first, self._placement(view, first), {"rule": "unknown"})]
        candidates = [job for job in heads if job.task.profile.kind not in (None, first.task.profile.kind)]
        if candidates and view.limit > 1:
            co_runner = self._first(view, candidates, first)
            if self._is_short(view, in_order(first, co_runner)[0]) or self._is_poor(view, first, co_runner):
                return self._queue_in_order(view, first)
            why = {"rule": "lanes", "co_runners": []}
            return [
                self._launch(view, job, share, why) for job, share in self._split_device(view, first, co_runner).items()
            ]
        if self._is_brief(view, first) or (view.waiting.count > 1 and not self._expects_arrivals(view)):
            return self._queue_in_order(view, first)
        return [Launch(first, self._placement(view, first), {"rule": "alone"})]

    def _is_brief(self, view: View, job: Job) -> bool:
        """Return True if a solo job is launched unmodified: as workers it would take longer."""
        seconds = job.task.profile.seconds or PREEMPTIBLE_FROM_SECONDS
        return seconds < UNMODIFIED_BELOW_SECONDS and self._may_be_unmodified(view, job)

    def _expects_arrivals(self, view: View) -> bool:
        """Return True if a job may arrive for which a kernel should make room, or leave."""
        return self._has_both_classes(view.now) or view.now - self._priorities_differed < PAIR_COOLDOWN_SECONDS

    def _pair(self, view: View, job: Job, co_runner: Job) -> list[Decision]:
        """Launch a job with a running one of the other class, which makes room and is re-issued if it is older."""
        kind = job.task.profile.kind
        higher = self._priority_order.base(view, job) > self._priority_order.base(view, co_runner)
        both_short = self._is_short(view, job) and self._is_short(view, in_order(job, co_runner)[0])
        if not higher and self._may_be_unmodified(view, job) and (both_short or self._is_poor(view, job, co_runner)):
            return self._queue_in_order(view, job)
        why = {"rule": "lanes", "co_runners": [co_runner.number]}
        shares = self._split_device(view, job, co_runner)
        launch = self._launch(view, job, shares[job], why)
        if not preemptible(co_runner):
            return [launch]
        workers = self._placement(view, co_runner, shares[co_runner]).workers
        older = kind is MEMORY and (higher or not launch.placement.plain)
        room = Resize(co_runner, workers, {"rule": "makes room", "for": job.number}, older)
        # An arriving memory-intensive kernel waits for the room of the leaving workers, and is older than the new ones.
        return [launch, room] if older else [room, launch]

    def _follow_class(self, view: View, job: Job, co_runner: Job) -> list[Decision]:
        """Queue a job after a running one of its class, or let it wait for its lane if other jobs may arrive.

        The job is launched unmodified, unless the running job can be preempted because priorities differ.
        """
        if preemptible(co_runner) and not self._is_short(view, co_runner):
            shape = shape_of(co_runner.task.profile, co_runner.task.blocks, view.capacity)
            fits = demand(co_runner, view.capacity) + demand(job, view.capacity) <= 1.0
            if fits or shape.alone * shape.load <= 1.0 - MIN_FREE_PART:
                return [Launch(job, self._placement(view, job), {"rule": "room"})]
            if self._has_both_classes(view.now):
                return grow(view) + self._queue_next(view, view.waiting.heads(), job)
            if self._expects_arrivals(view):
                return [Launch(job, self._placement(view, job), {"rule": "arrival"})]
        return self._queue_in_order(view, job)

    def _queue_after_data(self, view: View) -> list[Decision]:
        """Queue a short job after the jobs whose data it uses, so that the device starts it without the host."""
        if sum(map(len, view.trains.values())) >= self.ahead:
            return []
        for job, head in view.followers:
            if not _is_unprofiled(job) and not job.task.whole and self._is_short(view, job):
                return [Launch(job, self._unmodified(view, job), {"rule": "data"}, head)]
        return []

    def _decide_full(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """Preempt a kernel, or queue the next kernel of a lane, or queue short kernels."""
        running = view.running
        decisions = self._preempt_for_priority(view, first) if len(running) == view.limit else []
        decisions = decisions or self._queue_next(view, heads, first)
        if decisions:
            return decisions
        # A launch queue continues in its own lane, or in both lanes if no other kernel runs.
        train = [job for job in running if not preemptible(job)]
        if len(train) < len(running):
            kind = first.task.profile.kind
            if kind is MEMORY or any([job.task.profile.kind is not kind for job in train]):
                return []
        # With a limit of one kernel, a job is queued even after a long one.
        long = view.limit == 1 and not self._expects_arrivals(view)
        return self._queue_in_order(view, first) if train and (long or self._is_short(view, first)) else []

    def _queue_next(self, view: View, heads: list[Job], first: Job) -> list[Decision]:
        """Queue the next kernel of a lane when the running one has almost ended."""
        running = view.running
        if not self._lookahead_seconds or len({job.task.profile.kind for job in running}) < len(running):
            return []
        lookahead = self._lookahead(view)
        again = math.inf
        for job in running:
            remaining = remaining_seconds(job, view.now)
            if remaining is None or not preemptible(job) or job in view.trains:
                continue
            lane = [head for head in heads if head.task.profile.kind is job.task.profile.kind]
            if not lane:
                continue
            co_runner = next((candidate for candidate in running if candidate is not job), None)
            coming = view.trains.get(co_runner, ()) if co_runner is not None else ()
            following = self._first(view, lane, coming[-1] if coming else co_runner)
            if self._priority_order.effective(view, following) < self._priority_order.effective(view, first):
                continue
            if remaining <= lookahead:
                launch, _ = self._queue_after(view, following, job, co_runner, {"rule": "next"})
                if co_runner is None:
                    is_unmodified = self._is_brief(view, following)
                else:
                    is_poor = self._is_poor(view, following, co_runner)
                    is_unmodified = is_poor and self._may_be_unmodified(view, following)
                if is_unmodified:
                    launch.placement = self._unmodified(view, following)
                return [launch]
            again = min(again, max(remaining - lookahead, RECHECK_SECONDS))
        return [Hold(first, {"rule": "next"}, again=again)] if again < math.inf else []

    def _queue_after(
        self, view: View, job: Job, head: Job, co_runner: Job | None, why: dict[str, Any]
    ) -> tuple[Launch, dict[Job, float]]:
        """Queue a job after `head`; also return the shares of the job and of a `co_runner` of the other class."""
        if co_runner is None or co_runner.task.profile.kind is job.task.profile.kind:
            shares = {job: 1.0}
        else:
            shares = self._shares(view, job, co_runner)
        launch = self._launch(view, job, shares[job], why)
        launch.behind = head
        self._queued[job] = self._priority_order.effective(view, job)
        return launch, shares

    def _adjust_started(self, view: View) -> list[Decision]:
        """Resize queued jobs that have begun to their shares; re-issue the compute-intensive kernel if it is older."""
        running = view.running
        fresh = [job for job in running if job in self._queued]
        self._queued = {job: level for job, level in self._queued.items() if job.state is RUNNING and job not in fresh}
        if not fresh or len(running) != 2:
            return []
        memory, compute = in_order(*running)
        if compute.task.profile.kind is not COMPUTE or memory.task.profile.kind is not MEMORY:
            return []
        shares = self._split_device(view, memory, compute, 0.0)
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

    def _may_be_unmodified(self, view: View, job: Job) -> bool:
        """Return True if a job may be launched unmodified: it is short, or all priorities are equal."""
        return self._is_short(view, job) or (
            _may_bar_preemption(view, job) and view.now - self._priorities_differed >= PAIR_COOLDOWN_SECONDS
        )

    def _launch(self, view: View, job: Job, share: float, why: dict[str, Any]) -> Launch:
        if self._is_short(view, job):
            return Launch(job, self._unmodified(view, job), why)
        return Launch(job, self._placement(view, job, share), {**why, "share": share})

    def _placement(self, view: View, job: Job, share: float = 1.0) -> Placement:
        return cached_placement(quota(job, share, view.capacity), self._priority(view, job))

    def _unmodified(self, view: View, job: Job) -> Placement:
        return cached_placement(None, self._priority(view, job), True)

    def _priority(self, view: View, job: Job) -> int:
        """Return the priority of a job's stream: if blocks of several streams wait for room, the highest get it."""
        return max(0, self._priority_order.base(view, job))

    def _shares(self, view: View, job: Job, co_runner: Job) -> dict[Job, float]:
        """Return the share of each kernel of a pair, memory-intensive first."""
        memory, compute = in_order(job, co_runner)
        min_trial_seconds = max(MIN_RECHECK_SECONDS, MIN_SHARE_TRIAL_DECISIONS * view.overhead)
        share = self._live.share(memory, compute, lambda: _class_seconds(view), min_trial_seconds)
        return {memory: share, compute: 1.0 - share}

    def _split_device(
        self, view: View, job: Job, co_runner: Job, min_seconds: float = MIN_WINDOW_SECONDS
    ) -> dict[Job, float]:
        """Return the share of each kernel of a pair, memory-intensive first, and start to measure their rates."""
        shares = self._shares(view, job, co_runner)
        if all([(j.is_waiting and not self._is_short(view, j)) or preemptible(j) for j in (job, co_runner)]):
            memory, compute = shares
            # The progress of unmodified launches is unknown.
            self._live.begin(memory, compute, shares[memory], view.now, min_seconds)
        return shares

    def _lookahead(self, view: View) -> float:
        return max(self._lookahead_seconds, LOOKAHEAD_DECISIONS * view.overhead)

    def _is_poor(self, view: View, job: Job, co_runner: Job) -> bool:
        return self._live.poor(job, co_runner, MIN_PAIR_RATE, view.now, PAIR_COOLDOWN_SECONDS)

    def _queue_in_order(self, view: View, first: Job) -> list[Decision]:
        """Launch a job unmodified, and the short jobs that wait behind it; a few of these queue on the device."""
        running = view.running
        queued = sum(map(len, view.trains.values()))
        lookahead, seconds = self._lookahead(view), sum([_remaining_seconds(job, view.now) for job in running])
        is_plain = any([job.placement is not None and job.placement.plain for job in running])
        # A preemptible job never blocks another one.
        room = 1.0 - sum([demand(job, view.capacity) for job in running if not preemptible(job)])
        decisions: list[Decision] = []
        for job in chain((first,), view.waiting.behind(first)):
            short = self._is_short(view, job)
            placement = (
                self._unmodified(view, job) if self._may_be_unmodified(view, job) else self._placement(view, job)
            )
            full = len(running) + len(decisions) >= view.limit
            may_queue = is_plain and placement.plain and queued < self.ahead and (short or view.limit == 1)
            if (full and not may_queue) or (decisions and not short):
                break
            if not short and seconds >= lookahead and (full or room <= 0.0):
                # The job would only wait on the device, and block arriving jobs.
                return decisions or [Hold(job, {"rule": "soon"}, again=max(seconds - lookahead, RECHECK_SECONDS))]
            decisions.append(Launch(job, placement, ARRIVAL))
            # A batch is launched so that it can be preempted: no kernel queues after it on the device.
            is_plain |= placement.plain and not isinstance(job.task.launch, Batch)
            queued += full
            seconds += job.task.profile.seconds or 0.0
            room -= demand(job, view.capacity)
        return decisions

    # -- preemption ----------------------------------------------------------------------------------------
    def _preempt_for_priority(self, view: View, job: Job) -> list[Decision]:
        """Preempt a kernel of lower priority, if possible of the same lane, unless it would end before it leaves."""
        priority, kind = self._priority_order.base(view, job), job.task.profile.kind
        ranks = {
            j: self._priority_order.base(view, j) + j.preemptions // PREEMPTIONS_PER_PRIORITY
            for j in view.running
            if preemptible(j)
        }
        victims = [j for j, rank in ranks.items() if rank < priority]
        if not victims:
            return []
        victim = min(victims, key=lambda j: (j.task.profile.kind is not kind, ranks[j], -j.arrival, -j.number))
        cost = view.cost(victim, [j for j in view.running if j is not victim])
        remaining = remaining_seconds(victim, view.now)
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
        """Preempt a kernel and queue the arriving kernel after it, which then starts without the host."""
        leaves = Preempt(victim, gentlest_mode(view), job, why)
        if not self._lookahead_seconds:
            return [leaves]
        co_runner = next((candidate for candidate in view.running if candidate is not victim), None)
        launch, shares = self._queue_after(view, job, victim, co_runner, {"rule": why["rule"]})
        decisions: list[Decision] = [leaves, launch]
        if co_runner in shares and preemptible(co_runner):
            workers = quota(co_runner, shares[co_runner], view.capacity)
            assert co_runner.placement is not None
            if workers is not None and workers < (co_runner.placement.workers or math.inf):
                decisions.append(Resize(co_runner, workers, {"rule": "makes room", "for": job.number}))
        return decisions


def _may_bar_preemption(view: View, job: Job) -> bool:
    """Return True if a job may be launched without preemption: the job cannot be cut, or is short.

    If tenants do not trust each other, times that the submitter gave do not count.
    """
    profile = job.task.profile
    if job.task.whole:
        return True
    is_time_trusted = profile.source != "given" or view.trusts
    return is_time_trusted and profile.seconds is not None and 0 < profile.seconds < PREEMPTIBLE_FROM_SECONDS


def _class_seconds(view: View) -> tuple[float, float]:
    """Return the remaining solo seconds of all running and waiting jobs, by class, memory-intensive first."""
    seconds: dict[Kind | None, float] = {MEMORY: 0.0, COMPUTE: 0.0, None: 0.0}
    for job in view.running:
        seconds[job.task.profile.kind] += _remaining_seconds(job, view.now)
    for job, count in chain(view.waiting.buckets(), ((job, 1) for job in chain(*view.trains.values()))):
        seconds[job.task.profile.kind] += count * (job.rest or 0.0)
    return seconds[MEMORY], seconds[COMPUTE]


def _remaining_seconds(job: Job, now: float) -> float:
    """Return the remaining seconds of a running job. For an unmodified launch, time counts instead of blocks."""
    if job.placement is None or not job.placement.plain:
        return remaining_seconds(job, now) or 0.0
    return max(0.0, (job.task.profile.seconds or 0.0) - (now - job.since))


def _is_unprofiled(job: Job) -> bool:
    return job.task.profile.kind is None
