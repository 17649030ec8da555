"""Simulator: an executor of discrete events in virtual time."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from warpwell import errors
from warpwell.scheduler import Capacity, Ended, Executor, Job, Kind, Placement, Profile, SourceModel, Stopped, Task
from warpwell.scheduler.predict.rates import RateModel, class_of
from warpwell.scheduler.residency import ResidentKernel, Shape, fit, shape_of

NEVER = math.inf

FLAG_SECONDS = 48e-6
"""Median time until workers see a stop flag: on an H100 they idled 53 us (p50) after the call, with blocks of 10 us."""
FLAG_SPREAD = 0.3
"""Standard deviation of its logarithm: p99 is twice the median, as measured."""

RELIEVED = 0.91
"""Part of its rate beside an older memory-intensive kernel that a compute-intensive one keeps once it was relieved.

On an H200 it had 0.77 with half of the device, in place of 0.84 where the memory-intensive one had begun first, and
0.75 with a quarter, in place of 0.81. Why is not known: workers lie evenly, and 2 to 5 ms later it still had 0.84
(lab/results/h200/sched).
"""


LAUNCH, SIGNAL, NOTICE = 60e-6, 15e-6, 100e-6
"""Seconds of a host beside an H200 for a launch and for a word to workers, and from an event to its decision with the
way from its launch to the first block: 248 us lay between kernels that it launched, with decisions of 145 us."""


class HostDelays(NamedTuple):
    """Seconds that the host takes, one thing after another, while the device goes on with what it has.

    Attributes
    ----------
    decision : float
        From the moment that something is noticed to the first command, or until nothing is decided.
    launch : float
        For a launch, also of workers that relieve others or that a larger quota wants; who is behind these on the
        device is launched once more.
    signal : float
        For a preemption or a smaller quota, before workers can see it.
    notice : float
        From an event to the moment that a host that waits has noticed it.
    """

    decision: float = 0.0
    launch: float = 0.0
    signal: float = 0.0
    notice: float = 0.0

    @classmethod
    def of(cls, step: float, launch: float = LAUNCH) -> HostDelays:
        """Return those of a host that takes `step` seconds for a decision with its launch; none where that is 0."""
        return cls(max(0.0, step - launch), min(step, launch), SIGNAL, NOTICE) if step else cls()


NO_DELAYS = HostDelays()


class Simulated:
    """A job that was launched.

    Blocks run in waves: as many as are resident begin together and end together, so a drain lasts to the end of the
    wave, however long one that starves takes for it. Positions are in blocks and may lie within a block.

    Attributes
    ----------
    position : float
        Blocks of work that are done.
    base : int
        Where the waves began: the position at launch, or at the last change of the quota.
    alone, allowed, wanted, found, kept : int
        Blocks that would be resident alone; that the quota allows; that are left of those; that have found room; that
        had it before.
    width : int
        Blocks of a wave.
    said : int
        Blocks that it was said to have done: none of them is taken back.
    speed : float
        Blocks a second.
    hold : float or None
        Time until which nothing is done, because registers are saved or restored.
    easy : bool
        Whether it has never been asked for anything.
    saving : bool
        Whether it leaves at `hold`.
    younger : bool
        Whether its workers are relieved when the quota changes, so that it is the youngest from then on.
    relieved : bool
        Whether that slows it beside an older memory-intensive kernel; see `RELIEVED`.
    stop_at, resize_at : float
        Time at which it sees that it is to stop, or that its quota is `next_allowed`.
    stop_goal, resize_goal : float
        Position, once it has seen that, at which it does so.
    goal : float
        The next position at which something happens.
    goal_due, due : float
        Times of that, and of the next thing at all.
    """

    def __init__(self, job: Job, shape: Shape, position: float, placement: Placement) -> None:
        self.job = job
        self.shape = shape
        self.profile = shape.profile
        self.blocks = shape.blocks
        # A kernel of no duration still ends after it has begun.
        self.per_block = max(shape.profile.seconds or 0.0, 1e-9) / shape.blocks
        self.position = position
        self.base = int(position)
        self.alone = shape.alone
        self.allowed = shape.allowed(placement.workers)
        self.next_allowed = self.allowed
        self.load = shape.load
        self.width = self.allowed
        self.said = self.base
        self.plain = placement.plain
        self.goal: float = shape.blocks
        self.found = self.kept = self.wanted = 0
        self.rate = self.speed = 0.0
        self.stop_at = self.resize_at = self.stop_goal = self.resize_goal = self.goal_due = self.due = NEVER
        self.hold: float | None = None
        self.resident: ResidentKernel | None = None
        self.easy = True
        self.saving = self.younger = self.relieved = False
        self.mode = ""

    def last_wave(self) -> int:
        """Return the position at which its last wave begins."""
        base, allowed = self.base, self.allowed
        return base + (self.blocks - base - 1) // allowed * allowed

    def wave_end(self) -> int:
        """Return the position at which its blocks will have ended: who has room has some, though none is done yet."""
        waves = (self.position - self.base) / self.width
        whole = math.floor(waves + 1e-9) + 1 if self.found else math.ceil(waves - 1e-9)
        return min(self.blocks, self.base + whole * self.width)

    def wave_begin(self) -> int:
        """Return the position at which the blocks that run now began."""
        waves = math.floor((self.position - self.base) / self.width + 1e-9)
        return min(self.blocks, self.base + waves * self.width)

    def plan(self, now: float, squeezed: bool) -> None:
        """Find the next event and its time.

        Parameters
        ----------
        now : float
        squeezed : bool
            Whether a younger kernel waits for room, so that it matters when the last wave begins.
        """
        if self.easy and not squeezed:
            # Nothing is asked of it, and nobody waits for its room: it just goes on.
            self.goal = self.blocks
            rate = self.rate
            if rate > 0:
                self.speed = rate / self.per_block
                self.due = self.goal_due = now + (self.blocks - self.position) / self.speed
            else:
                self.speed = 0.0
                self.due = self.goal_due = NEVER
            return
        goal = float(self.blocks)
        if self.stop_goal < goal:
            goal = self.stop_goal
        if self.resize_goal < goal:
            goal = self.resize_goal
        if squeezed:
            tail = self.last_wave()
            if self.position < tail < goal:
                goal = tail
        self.goal = goal
        if self.hold is not None:
            self.speed = 0.0
            self.goal_due = NEVER
            self.due = self.hold
            return
        self.speed = self.rate / self.per_block
        left = goal - self.position
        if left <= 0:
            due = now
        else:
            due = now + left / self.speed if self.speed > 0 else NEVER
        self.goal_due = due
        if self.stop_at < due:
            due = self.stop_at
        if self.resize_at < due:
            due = self.resize_at
        self.due = due


class Simulator(Executor):
    """Simulates a device by rates alone: the normalized IPC of kernels that run together, and costs of preemptions.

    Parameters
    ----------
    rates : RateModel
        How fast kernels really run together.
    capacity : Capacity, optional
        That of the rates by default.
    model : SourceModel, optional
        Cost of a switch, and what it does to those that stay.
    mode : {"switch", "drain"}
        "switch": the source's hardware. Registers and shared memory of resident blocks are saved in `model`'s cycles
        (all multiprocessors at the same time, so its `tb` are the blocks of one of them) and restored before the job
        goes on; progress is known by instruction. A flush drops the
        work of resident blocks at once. "drain": stock hardware. The flag is seen after `flag` seconds
        (seeded, lognormal), then the wave ends; progress is known in whole waves; a relief slows (`RELIEVED`).
    truth : mapping, optional
        What tasks are really like; what is not there is as its `Task.profile` says. `Profile.seconds` must be known.
    flag : float
        Median seconds until a flag is seen.
    seed : int
        Of the time until a flag is seen.
    host : HostDelays
        What the host takes to notice, decide and command; nothing by default.
    workers : float
        Rate of a kernel that is alone and can be preempted, over that of the untransformed one.

    Attributes
    ----------
    saved_seconds : float
        Time spent on saving and restoring, summed over jobs.
    """

    def __init__(
        self,
        rates: RateModel,
        capacity: Capacity | None = None,
        model: SourceModel | None = None,
        mode: str = "switch",
        seed: int = 0,
        *,
        truth: Mapping[Task, Profile] | None = None,
        flag: float = FLAG_SECONDS,
        host: HostDelays = NO_DELAYS,
        workers: float = 1.0,
    ) -> None:
        if mode not in ("switch", "drain"):
            raise errors.ArgumentError(f'mode of a simulator is {mode!r}: take "switch" or "drain"', name="mode")
        if not (flag >= 0 and math.isfinite(flag)):
            raise errors.ArgumentError(f"flag takes {flag} s: give 0 or more", name="flag")
        for what, seconds in host._asdict().items():
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise errors.ArgumentError(f"{what} of the host takes {seconds} s: give 0 or more", name="host")
        modes = ("switch", "drain", "flush") if mode == "switch" else ("drain",)
        self.rates = rates
        self.model = model or SourceModel()
        self.mode = mode
        self.saved_seconds = 0.0
        self._capacity = dataclasses.replace(capacity or rates.capacity, modes=modes)
        self._flag = flag
        self._host = host
        self._workers = workers
        self._slow = host != NO_DELAYS
        self._thinks = False
        self._random = random.Random(seed)
        self._truth: Mapping[Task, Profile] = truth or {}
        self._now = 0.0
        self._settled = 0.0
        self._changed = False
        self._runs: dict[Job, Simulated] = {}
        self._kept: dict[Job, float] = {}
        self._behind: dict[Job, tuple[Job, Placement]] = {}
        self._relieves: dict[Job, Job] = {}
        self._said: list[Ended | Stopped] = []

    @property
    def capacity(self) -> Capacity:
        """The simulated device."""
        return self._capacity

    def now(self) -> float:
        """Return simulated seconds."""
        return self._now

    def truth(self, task: Task) -> Profile:
        """Return the true profile of a task: only a simulation knows more than its profile says."""
        return self._truth.get(task, task.profile)

    def launch(self, job: Job, placement: Placement) -> None:
        """Start or resume a job; blocks without room wait on the device."""
        self._take(job, placement)
        self._begin(job, placement)

    def launch_behind(self, job: Job, placement: Placement, other: Job) -> bool:
        """Start or resume a job when another one has left; no host takes part."""
        self._take(job, placement)
        if self._there(other):
            self._behind[other] = job, placement
        else:
            self._begin(job, placement)
        return True

    def relieve_when(self, mate: Job, job: Job) -> bool:
        """Relieve the workers of a job when another one begins; no host takes part."""
        self._command(mate, True)
        if job in self._runs:
            self._relieve(mate)  # it has begun
        elif self._there(job):
            self._relieves[job] = mate
        return True

    def _relieve(self, job: Job) -> None:
        run = self._runs.get(job)
        if run is not None and not run.plain and not run.mode:
            self._ask(run, run.next_allowed, True)

    def _take(self, job: Job, placement: Placement) -> None:
        """Check a launch, and let the time pass that the host takes for it."""
        if self._there(job):
            raise errors.SchedulerError(f"task {job.task.name!r} runs already", task=job.task.name)
        if placement.workers is not None and placement.workers < 1:
            raise errors.ArgumentError(f"a quota of {placement.workers} workers: give at least one", name="workers")
        if self.truth(job.task).seconds is None:
            raise errors.ArgumentError(
                f"task {job.task.name!r} has no time: a simulation needs `seconds` in its profile", name="seconds"
            )
        if self._slow:
            self._busy(self._host.launch)

    def _there(self, job: Job) -> bool:
        """Return whether a job runs, or is to begin when another one has left."""
        return job in self._runs or any([its is job for its, _ in self._behind.values()])

    def _begin(self, job: Job, placement: Placement) -> None:
        """Start a job now."""
        task = job.task
        profile = self._truth.get(task, task.profile)
        position = self._kept.pop(job, None)
        shape = shape_of(profile, task.blocks, self._capacity)
        run = Simulated(job, shape, float(job.done) if position is None else position, placement)
        if position is not None:
            waiting = shape.wanted(run.allowed, run.base, position)
            self._transfer(run, waiting, list(self._runs.values()))
        self._runs[job] = run
        self._changed = True

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Ask a running job to leave; see `Executor.preempt`."""
        self._busy(self._host.signal)
        other = next((other for other, its in self._behind.items() if its[0] is job), None)
        if other is not None:
            self._withdraw(job, other)
            return
        run = self._find(job)
        if run is None or run.plain or run.mode:
            return
        run.easy = False
        run.mode = mode if mode in self._capacity.modes else "drain"
        if run.mode == "flush":
            self._settle()
            self._leave(run, Stopped(job, self._now, run.wave_begin()))
        elif run.mode == "switch":
            self._settle()
            run.saving = True
            run.resize_at = run.resize_goal = NEVER
            self._transfer(run, run.found, [other for other in self._runs.values() if other is not run])
        else:
            run.stop_at = self._now + self._latency()
        self._changed = True

    def _withdraw(self, job: Job, other: Job) -> None:
        """Take back what has not begun: who is behind it comes behind `other`."""
        del self._behind[other]
        self._relieves.pop(job, None)
        following = self._behind.pop(job, None)
        if following is not None:
            self._behind[other] = following
        self._said.append(Stopped(job, self._now, job.done))

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Change a quota. It holds from the end of the wave on; where contexts are switched, when blocks are saved."""
        if workers is not None and workers < 1:
            raise errors.ArgumentError(f"a quota of {workers} workers: give at least one", name="workers")
        run = self._runs.get(job)
        self._command(job, younger or (run is not None and run.shape.allowed(workers) > run.next_allowed))
        run = self._find(job)
        if run is None or run.plain or run.mode:
            return
        self._ask(run, run.shape.allowed(workers), younger)

    def _command(self, job: Job, more: bool) -> None:
        """Let the time pass that the host takes to tell workers something, or to launch more of them."""
        self._busy(self._host.launch * (1 + (job in self._behind)) if more else self._host.signal)

    def _ask(self, run: Simulated, allowed: int, younger: bool) -> None:
        """Tell workers of their new quota."""
        run.easy = False
        run.younger |= younger
        run.next_allowed = allowed
        if run.resize_at is NEVER and run.resize_goal is NEVER:
            if self.mode == "switch":
                gone = run.found if run.younger else max(0, run.found - run.next_allowed)
                run.resize_at = self._now + self._switch_seconds(run.profile, gone, self._stays(run))
            else:
                run.resize_at = self._now + self._latency()
        self._changed = True

    def progress(self, job: Job) -> int:
        """Return how many blocks have ended."""
        run = self._runs.get(job)
        if run is None:
            return job.done
        if run.plain and self.mode == "drain":
            return run.said  # nobody counts its blocks
        self._settle()
        done = int(run.position + 1e-9) if self.mode == "switch" else run.wave_begin()
        if done > run.said:
            run.said = done
        if run.said >= run.blocks:
            run.said = run.blocks - 1
        return run.said

    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """Return the expected seconds of a preemption, from predicted figures."""
        run = self._runs.get(victim)
        profile = victim.task.profile
        if run is not None and run.plain:
            return math.inf
        if run is not None and self.mode == "switch":
            return self._switch_seconds(profile, run.found, [job.task.profile for job in stays])
        alone = shape_of(profile, victim.task.blocks, self._capacity).alone
        if self.mode == "switch":
            return self._switch_seconds(profile, alone, [job.task.profile for job in stays])
        again = self._host.notice + self._host.decision + self._host.launch
        return self._flag + again + 0.5 * (profile.seconds or 0.0) * min(1.0, alone / victim.task.blocks)

    def poll(self) -> list[Ended | Stopped]:
        """Return the events so far; the host begins to decide."""
        self._thinks = self._slow and self._host.decision > 0
        said = self._said
        if said:
            self._said = []
        return said

    def wait(self, until: float | None) -> None:
        """Let time pass until something happens, and at most until `until`."""
        if self._thinks:
            self._busy(0.0)
        if self._said:
            return
        while not self._said:
            due = self._due()
            if until is not None and until < due:
                self._now = max(self._now, until)
                return
            if due is NEVER:
                return
            if due > self._now:
                self._now = due
            self._fire()
        if self._host.notice:
            self._pass(self._host.notice)

    def _due(self) -> float:
        """Return when something happens next."""
        if self._changed:
            self._plan()
        due = NEVER
        for run in self._runs.values():
            if run.due < due:
                due = run.due
        return due

    def _busy(self, seconds: float) -> None:
        """Let the time pass that the host takes for a command, and before the first one for the decision."""
        if self._thinks:
            self._thinks = False
            seconds += self._host.decision
        if seconds:
            self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        """Let time pass on the device, whatever happens there."""
        until = self._now + seconds
        while (due := self._due()) <= until:
            self._now = max(self._now, due)
            self._fire()
        self._now = until

    def abandon(self, job: Job, error: BaseException) -> None:
        """End a job with an error."""
        self._settle()
        if self._runs.pop(job, None) is not None:
            self._changed = True
            self._said.append(Ended(job, self._now, error))
            self._succeed(job)

    def discard(self, job: Job) -> None:
        """Forget where a job stopped."""
        self._kept.pop(job, None)

    def _find(self, job: Job) -> Simulated | None:
        """Return the run of a job; None if it has left and its event was not polled yet."""
        run = self._runs.get(job)
        if run is None and not any(event.job is job for event in self._said):
            raise errors.SchedulerError(f"task {job.task.name!r} does not run", task=job.task.name)
        return run

    # -- time --------------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Bring positions up to now; speeds have not changed since they were last."""
        seconds = self._now - self._settled
        if seconds > 0:
            for run in self._runs.values():
                if run.speed:
                    position = run.position + run.speed * seconds
                    run.position = position if position < run.goal else run.goal
            self._settled = self._now

    def _fire(self) -> None:
        """Process everything that is due now, the oldest kernel first."""
        self._settle()
        now = self._now
        self._changed = True
        for run in [run for run in self._runs.values() if run.due <= now]:
            if run.goal_due <= now:
                run.position = run.goal
                if run.goal >= run.blocks:
                    self._leave(run, Ended(run.job, now))
                    continue
                if run.position == run.stop_goal:
                    self._leave(run, Stopped(run.job, now, int(run.position)))
                    continue
                if run.position == run.resize_goal:
                    run.resize_goal = NEVER
                    self._apply_quota(run)
                # else its last wave has begun, and leaves room
            elif run.hold is not None and run.hold <= now:
                run.hold = None
                if run.saving:
                    self._kept[run.job] = run.position
                    self._leave(run, Stopped(run.job, now, min(run.blocks - 1, int(run.position + 1e-9))))
            elif run.stop_at <= now:
                run.stop_at = run.resize_at = run.resize_goal = NEVER
                run.stop_goal = run.wave_end()
            elif run.resize_at <= now:
                run.resize_at = NEVER
                if self.mode == "switch":
                    self._apply_quota(run)
                else:
                    run.resize_goal = run.wave_end()

    def _leave(self, run: Simulated, event: Ended | Stopped) -> None:
        del self._runs[run.job]
        self._said.append(event)
        self._succeed(run.job)

    def _succeed(self, job: Job) -> None:
        """Begin who waits on the device for a job that has left."""
        following = self._behind.pop(job, None)
        if following is not None:
            self._begin(*following)
            mate = self._relieves.pop(following[0], None)
            if mate is not None:
                self._relieve(mate)

    def _apply_quota(self, run: Simulated) -> None:
        run.allowed = run.next_allowed
        run.base = int(run.position)
        run.found = min(run.found, run.allowed)
        if run.younger:
            run.younger, run.found = False, 0
            run.relieved = self.mode == "drain" and class_of(run.profile) is Kind.COMPUTE
            self._runs[run.job] = self._runs.pop(run.job)

    # -- rates -------------------------------------------------------------------------------------------------
    def _plan(self) -> None:
        """Find room, rates and next events after a change."""
        self._settle()
        self._changed = False
        runs = list(self._runs.values())
        if len(runs) == 1:
            run = runs[0]
            run.found = run.width = run.allowed  # more than there are in its last wave, which nobody is in need of
            run.rate = 0.0
            if run.hold is None:
                share = run.allowed / run.alone
                resident = run.resident
                if resident is None or resident.share != share:
                    resident = self._resident(run, share)
                run.rate = self.rates.of((resident,))[0] * (1.0 if run.plain else self._workers)
            run.plan(self._now, False)
            return
        lacks = self._find_room(runs)
        residents: list[ResidentKernel] = []
        there = []
        moving = False
        for run in runs:
            run.rate = 0.0
            if run.hold is not None:
                moving = True
            elif run.found:
                share = run.allowed / run.alone
                if run.found < run.wanted:
                    share *= run.found / run.wanted
                resident = run.resident
                if resident is None or resident.share != share:
                    resident = self._resident(run, share)
                residents.append(resident)
                there.append(run)
        if there:
            beside = False
            for run, rate in zip(there, self.rates.of(residents), strict=True):
                # What is saved and restored takes bandwidth from those that stay.
                run.rate = rate * self.model.decay(run.profile.kind) if moving else rate
                if run.relieved and beside:
                    run.rate *= RELIEVED
                beside = beside or class_of(run.profile) is Kind.MEMORY
        now = self._now
        for i, run in enumerate(runs):
            # The end of a kernel's waves matters where a younger one waits for its room.
            run.plan(now, i < lacks)

    def _resident(self, run: Simulated, share: float) -> ResidentKernel:
        run.resident = found = ResidentKernel(run.job.task.name, run.profile, share)
        return found

    def _find_room(self, runs: list[Simulated]) -> int:
        """Give blocks room: resident ones stay, then the oldest takes first. Return the last that lacks some, or -1."""
        load = 0.0
        for run in runs:
            base, allowed = run.base, run.allowed
            last = base + (run.blocks - base - 1) // allowed * allowed
            # In its last wave, what is left; as `Shape.wanted`, written out.
            wanted = run.blocks - last if run.position >= last else allowed
            load += run.load * wanted
            run.kept = run.found
            run.found = run.wanted = wanted
            run.width = allowed
        if load <= 1.0:
            return -1
        takers, asked = [], []
        for run in runs:
            if run.kept > run.wanted:
                run.kept = run.wanted
            if run.kept:
                takers.append(run)
                asked.append(run.kept)
            run.found = 0
        for run in runs:
            if run.wanted > run.kept:
                takers.append(run)
                asked.append(run.wanted - run.kept)
        counts = fit(asked, [run.shape for run in takers])
        for run, count in zip(takers, counts, strict=True):
            run.found += count
        lacks = -1
        for i, run in enumerate(runs):
            if run.found < run.wanted:
                lacks = i
                run.width = run.found or run.allowed
        return lacks

    # -- costs ---------------------------------------------------------------------------------------------------
    def _latency(self) -> float:
        return self._flag * math.exp(FLAG_SPREAD * self._random.gauss(0.0, 1.0)) if self._flag else 0.0

    def _stays(self, run: Simulated) -> list[Profile]:
        return [other.profile for other in self._runs.values() if other is not run]

    def _switch_seconds(self, profile: Profile, blocks: int, stays: Sequence[Profile]) -> float:
        """Return how long blocks of all multiprocessors take to be saved, or restored."""
        miss_rate = max([other.miss_rate for other in stays], default=0.0)
        each = math.ceil(blocks / self._capacity.processors)
        return self.model.preempt_cycles(miss_rate, profile.registers, profile.shared, each) / self._capacity.clock

    def _transfer(self, run: Simulated, blocks: int, stays: Sequence[Simulated]) -> None:
        """Let a job pause while its blocks are saved or restored."""
        seconds = self._switch_seconds(run.profile, blocks, [other.profile for other in stays])
        self.saved_seconds += seconds
        run.hold = self._now + seconds
        run.easy = False
