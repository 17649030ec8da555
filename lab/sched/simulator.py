"""Simulator: an executor of discrete events in virtual time."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Ended, Executor, Job, Kind, Placement, SourceModel, Stopped, Task
from warpwell.scheduler.residency import Shape, shape_of

from .rates import RateModel, class_of
from .residency import ResidentKernel, allowed_blocks, demand_of, fit

NEVER = math.inf

FLAG_SECONDS = 48e-6
"""Median time until workers see a stop flag: on an H100 they idled 53 us (p50) after the call, with blocks of 10 us."""
FLAG_SPREAD = 0.3
"""Standard deviation of its logarithm: p99 is twice the median, as measured."""

RELIEVED = 0.91
"""Relative rate of a compute-intensive kernel that was re-issued while an older memory-intensive kernel runs.

On an H200 with half of the device, its rate was 0.77 after a re-issue and 0.84 if the memory-intensive kernel had begun
first; with a quarter, 0.75 and 0.81. The reason is unknown (lab/results/h200/sched).
"""

LAUNCH, SIGNAL, NOTICE = 60e-6, 15e-6, 100e-6
"""Seconds of a host with an H200: for a launch, for a word to workers, and from an event to its decision plus from a
launch to its first block. The host left 248 us between two kernels, with decisions of 145 us."""


class HostDelays(NamedTuple):
    """Delays of the host in seconds, one after another. The device continues in the meantime.

    Attributes
    ----------
    decision : float
        From the detection of an event to the first command, or to the end of a decision without commands.
    launch : float
        For a launch, including workers that replace others or raise a quota. Jobs behind them on the device are
        launched again.
    signal : float
        For a preemption or a smaller quota, until workers can see it.
    notice : float
        From an event to its detection by a waiting host.
    """

    decision: float = 0.0
    launch: float = 0.0
    signal: float = 0.0
    notice: float = 0.0

    @classmethod
    def of(cls, step: float, launch: float = LAUNCH) -> HostDelays:
        """Return the delays of a host that takes `step` seconds for a decision with its launch; no delays for 0."""
        return cls(max(0.0, step - launch), min(step, launch), SIGNAL, NOTICE) if step else cls()


NO_DELAYS = HostDelays()


class Simulated:
    """A job that was launched.

    Blocks run in waves: all resident blocks begin and end together, so a drain lasts to the end of the wave, even at a
    low rate. Positions are in blocks and may lie within a block.

    Attributes
    ----------
    position : float
        Blocks of work that are done.
    base : int
        Where the waves began: the position at launch, or at the last change of the quota.
    alone, allowed, demand, found, previous : int
        Blocks that would be resident without other kernels; that the quota allows; that remain of those; that have
        room; that had room before.
    width : int
        Blocks of a wave.
    reported : int
        Blocks reported as done, which are not run again.
    speed : float
        Blocks a second.
    hold : float or None
        Time until which registers are saved or restored, and no block runs.
    saving : bool
        Whether the job leaves at `hold`.
    younger : bool
        Whether its workers are replaced when the quota changes, so that they become the youngest.
    relieved : bool
        Whether the re-issue slows the job while an older memory-intensive kernel runs; see `RELIEVED`.
    stop_at, resize_at : float
        Time at which workers see a stop flag, or the quota `next_allowed`.
    stop_goal, resize_goal : float
        Position at which they then stop, or change to the quota.
    goal : float
        Position of the next event.
    goal_due, due : float
        Times of that event, and of the next event of any type.
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
        self.allowed = allowed_blocks(shape, placement.workers)
        self.next_allowed = self.allowed
        self.load = shape.load
        self.width = self.allowed
        self.reported = self.base
        self.plain = placement.plain
        self.goal: float = shape.blocks
        self.found = self.previous = self.demand = 0
        self.rate = self.speed = 0.0
        self.stop_at = self.resize_at = self.stop_goal = self.resize_goal = self.goal_due = self.due = NEVER
        self.hold: float | None = None
        self.resident: ResidentKernel | None = None
        self.saving = self.younger = self.relieved = False
        self.mode = ""

    def last_wave(self) -> int:
        """Return the position at which its last wave begins."""
        base, allowed = self.base, self.allowed
        return base + (self.blocks - base - 1) // allowed * allowed

    def wave_end(self) -> int:
        """Return the position at which the resident blocks will have ended."""
        waves = (self.position - self.base) / self.width
        count = math.floor(waves + 1e-9) + 1 if self.found else math.ceil(waves - 1e-9)
        return min(self.blocks, self.base + count * self.width)

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
            Whether a younger kernel waits for room, so that the begin of the last wave is an event.
        """
        goal = min(float(self.blocks), self.stop_goal, self.resize_goal)
        if squeezed:
            tail = self.last_wave()
            if self.position < tail < goal:
                goal = tail
        self.goal = goal
        if self.hold is not None:
            self.speed, self.goal_due, self.due = 0.0, NEVER, self.hold
            return
        self.speed = self.rate / self.per_block
        left = goal - self.position
        if left <= 0:
            self.goal_due = now
        else:
            self.goal_due = now + left / self.speed if self.speed > 0 else NEVER
        self.due = min(self.goal_due, self.stop_at, self.resize_at)


class Simulator(Executor):
    """A device that consists of rates: the normalized IPC of kernels that run together, and the costs of preemptions.

    Parameters
    ----------
    rates : RateModel
        Rates of kernels that run together.
    capacity : Capacity, optional
        The capacity of the rates by default.
    model : SourceModel, optional
        Cost of a switch, and its effect on the other kernels.
    mode : {"switch", "drain"}
        "switch": the source's hardware. Registers and shared memory of resident blocks are saved in `model`'s cycles
        (all multiprocessors at the same time, so its `tb` are the blocks of one of them) and restored before the job
        continues; progress is known by instruction. A flush drops the work of resident blocks at once. "drain": stock
        hardware. The flag is seen after `flag` seconds (seeded, lognormal), then the wave ends; progress is known in
        waves; a re-issue slows a kernel (`RELIEVED`).
    truth : mapping, optional
        True profiles of tasks, `Task.profile` by default. `Profile.seconds` must be known.
    flag : float
        Median seconds until a flag is seen.
    seed : int
        Seed of the time until a flag is seen.
    host : HostDelays
        Times of the host; no delays by default.
    workers : float
        Relative rate of a solo kernel that can be preempted; the unmodified kernel has 1.

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
            raise errors.ArgumentError(f'mode must be "switch" or "drain", got {mode!r}', name="mode")
        modes = ("switch", "drain", "flush") if mode == "switch" else ("drain",)
        self.rates = rates
        self.model = model or SourceModel()
        self.mode = mode
        self.saved_seconds = 0.0
        self.capacity = dataclasses.replace(capacity or rates.capacity, modes=modes)
        self._flag = flag
        self._host = host
        self._workers = workers
        self._thinks = False
        self._random = random.Random(seed)
        self._truth: Mapping[Task, Profile] = truth or {}
        self._now = 0.0
        self._settled = 0.0
        self._changed = False
        self._runs: dict[Job, Simulated] = {}
        self._saved_positions: dict[Job, float] = {}
        self._behind: dict[Job, tuple[Job, Placement]] = {}
        self._events: list[Ended | Stopped] = []

    def now(self) -> float:
        """Return simulated seconds."""
        return self._now

    def truth(self, task: Task) -> Profile:
        """Return the true profile of a task; only a simulation has more than the estimate in the task's profile."""
        return self._truth.get(task, task.profile)

    def launch(self, job: Job, placement: Placement) -> None:
        """Start or resume a job; blocks without room wait on the device."""
        self._begin_launch(job, placement)
        self._begin(job, placement)

    def launch_behind(self, job: Job, placement: Placement, predecessor: Job) -> bool:
        """Start or resume a job when another job has left, without the host."""
        self._begin_launch(job, placement)
        if self._is_present(predecessor):
            self._behind[predecessor] = job, placement
        else:
            self._begin(job, placement)
        return True

    def _begin_launch(self, job: Job, placement: Placement) -> None:
        """Check a launch, and let the host's time for it pass."""
        if self._is_present(job):
            raise errors.SchedulerError(f"task {job.task.name!r} runs already", task=job.task.name)
        if placement.workers is not None and placement.workers < 1:
            raise errors.ArgumentError(f"a quota of {placement.workers} workers: give at least one", name="workers")
        if self.truth(job.task).seconds is None:
            message = f"task {job.task.name!r} has no time: a simulation needs `seconds` in its profile"
            raise errors.ArgumentError(message, name="seconds")
        self._busy(self._host.launch)

    def _is_present(self, job: Job) -> bool:
        """Return True if a job runs, or begins when another job has left."""
        return job in self._runs or any([successor is job for successor, _ in self._behind.values()])

    def _begin(self, job: Job, placement: Placement) -> None:
        """Start a job now."""
        task = job.task
        profile = self._truth.get(task, task.profile)
        position = self._saved_positions.pop(job, None)
        shape = shape_of(profile, task.blocks, self.capacity)
        run = Simulated(job, shape, float(job.done) if position is None else position, placement)
        if position is not None:
            self._transfer(run, demand_of(shape, run.allowed, run.base, position))
        self._runs[job] = run
        self._changed = True

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Ask a running job to leave; see `Executor.preempt`."""
        self._busy(self._host.signal)
        predecessor = next((first for first, (second, _) in self._behind.items() if second is job), None)
        if predecessor is not None:
            self._withdraw(job, predecessor)
            return
        run = self._find(job)
        if run is None or run.plain or run.mode:
            return
        run.mode = mode if mode in self.capacity.modes else "drain"
        if run.mode == "flush":
            self._settle()
            self._leave(run, Stopped(job, self._now, run.wave_begin()))
        elif run.mode == "switch":
            self._settle()
            run.saving = True
            run.resize_at = run.resize_goal = NEVER
            self._transfer(run, run.found)
        else:
            run.stop_at = self._now + self._latency()
        self._changed = True

    def _withdraw(self, job: Job, predecessor: Job) -> None:
        """Withdraw a job that has not begun; its successor follows its predecessor."""
        del self._behind[predecessor]
        following = self._behind.pop(job, None)
        if following is not None:
            self._behind[predecessor] = following
        self._events.append(Stopped(job, self._now, job.done))

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Change a quota, with effect from the end of the wave, or, if contexts are switched, when blocks are saved."""
        if workers is not None and workers < 1:
            raise errors.ArgumentError(f"a quota of {workers} workers: give at least one", name="workers")
        run = self._runs.get(job)
        has_launch = younger or (run is not None and allowed_blocks(run.shape, workers) > run.next_allowed)
        self._busy(self._host.launch * (1 + (job in self._behind)) if has_launch else self._host.signal)
        run = self._find(job)
        if run is None or run.plain or run.mode:
            return
        run.younger |= younger
        run.next_allowed = allowed_blocks(run.shape, workers)
        if run.resize_at is NEVER and run.resize_goal is NEVER:
            if self.mode == "switch":
                leaving = run.found if run.younger else max(0, run.found - run.next_allowed)
                run.resize_at = self._now + self._switch_seconds(run.profile, leaving, self._co_runners(run))
            else:
                run.resize_at = self._now + self._latency()
        self._changed = True

    def progress(self, job: Job) -> int:
        """Return how many blocks have ended."""
        run = self._runs.get(job)
        if run is None:
            return job.done
        if run.plain and self.mode == "drain":
            return run.reported  # the blocks of an unmodified kernel are not counted
        self._settle()
        done = int(run.position + 1e-9) if self.mode == "switch" else run.wave_begin()
        run.reported = min(max(done, run.reported), run.blocks - 1)
        return run.reported

    def cost(self, victim: Job, staying: Sequence[Job]) -> float:
        """Return the expected seconds of a preemption, from predicted figures."""
        run = self._runs.get(victim)
        profile = victim.task.profile
        if run is not None and run.plain:
            return math.inf
        alone = shape_of(profile, victim.task.blocks, self.capacity).alone
        if self.mode == "switch":
            blocks = alone if run is None else run.found
            return self._switch_seconds(profile, blocks, [job.task.profile for job in staying])
        again = self._host.notice + self._host.decision + self._host.launch
        return self._flag + again + 0.5 * (profile.seconds or 0.0) * min(1.0, alone / victim.task.blocks)

    def poll(self) -> list[Ended | Stopped]:
        """Return the events so far; the host begins to decide."""
        self._thinks = self._host.decision > 0
        events, self._events = self._events, []
        return events

    def wait(self, until: float | None) -> None:
        """Let time pass until something happens, and at most until `until`."""
        if self._thinks:
            self._busy(0.0)
        if self._events:
            return
        while not self._events:
            due = self._due()
            if until is not None and until < due:
                self._now = max(self._now, until)
                return
            if due is NEVER:
                return
            self._now = max(self._now, due)
            self._fire()
        if self._host.notice:
            self._pass(self._host.notice)

    def _due(self) -> float:
        """Return the time of the next event."""
        if self._changed:
            self._plan()
        return min([run.due for run in self._runs.values()], default=NEVER)

    def _busy(self, seconds: float) -> None:
        """Let the host's time for a command pass, and before the first command also its time for the decision."""
        if self._thinks:
            self._thinks = False
            seconds += self._host.decision
        if seconds:
            self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        """Let time pass on the device, and process all events in this time."""
        until = self._now + seconds
        while (due := self._due()) <= until:
            self._now = max(self._now, due)
            self._fire()
        self._now = until

    def abandon(self, job: Job, error: BaseException) -> None:
        """End a job with an error."""
        self._settle()
        if job in self._runs:
            self._changed = True
            self._leave(self._runs[job], Ended(job, self._now, error))

    def discard(self, job: Job) -> None:
        """Forget where a job stopped."""
        self._saved_positions.pop(job, None)

    def _find(self, job: Job) -> Simulated | None:
        """Return the run of a job; None if it has left and its event was not polled yet."""
        run = self._runs.get(job)
        if run is None and not any(event.job is job for event in self._events):
            raise errors.SchedulerError(f"task {job.task.name!r} does not run", task=job.task.name)
        return run

    # -- time --------------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Update positions to the current time; speeds have not changed since the last update."""
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
                # else the last wave has begun, and leaves room
            elif run.hold is not None and run.hold <= now:
                run.hold = None
                if run.saving:
                    self._saved_positions[run.job] = run.position
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
        """Remove a job, and start the job that waits on the device for it."""
        del self._runs[run.job]
        self._events.append(event)
        following = self._behind.pop(run.job, None)
        if following is not None:
            self._begin(*following)

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
        """Compute room, rates and next events after a change."""
        self._settle()
        self._changed = False
        runs = list(self._runs.values())
        lacks = self._find_room(runs)
        residents, active = [], []
        moving = any([run.hold is not None for run in runs])
        for run in runs:
            run.rate = 0.0
            if run.hold is None and run.found:
                share = run.allowed / run.alone
                if run.found < run.demand:
                    share *= run.found / run.demand
                residents.append(self._resident(run, share))
                active.append(run)
        if len(runs) == 1 and active:
            runs[0].rate = self.rates.of(residents)[0] * (1.0 if runs[0].plain else self._workers)
        elif active:
            is_contended = False
            for run, rate in zip(active, self.rates.of(residents), strict=True):
                # Saving and restoring registers takes bandwidth from the other kernels.
                run.rate = rate * self.model.decay(run.profile.kind) if moving else rate
                if run.relieved and is_contended:
                    run.rate *= RELIEVED
                is_contended = is_contended or class_of(run.profile) is Kind.MEMORY
        for i, run in enumerate(runs):
            # The end of its waves matters if a younger kernel waits for its room.
            run.plan(self._now, i < lacks)

    @staticmethod
    def _resident(run: Simulated, share: float) -> ResidentKernel:
        if run.resident is None or run.resident.share != share:
            run.resident = ResidentKernel(run.job.task.name, run.profile, share)
        return run.resident

    def _find_room(self, runs: list[Simulated]) -> int:
        """Place blocks: resident blocks stay, then the oldest kernel is first. Return the last without room."""
        load = 0.0
        for run in runs:
            last = run.last_wave()
            # As `demand_of`, inlined: in its last wave, a kernel needs the remaining blocks.
            run.previous = run.found
            run.found = run.demand = run.blocks - last if run.position >= last else run.allowed
            load += run.load * run.demand
            run.width = run.allowed
        if load <= 1.0:
            return -1
        for run in runs:
            run.previous = min(run.previous, run.demand)
            run.found = 0
        takers = [(run, run.previous) for run in runs if run.previous]
        takers += [(run, run.demand - run.previous) for run in runs if run.demand > run.previous]
        counts = fit([count for _, count in takers], [run.shape for run, _ in takers])
        for (run, _), count in zip(takers, counts, strict=True):
            run.found += count
        lacks = -1
        for i, run in enumerate(runs):
            if run.found < run.demand:
                lacks = i
                run.width = run.found or run.allowed
        return lacks

    # -- costs ---------------------------------------------------------------------------------------------------
    def _latency(self) -> float:
        return self._flag * math.exp(FLAG_SPREAD * self._random.gauss(0.0, 1.0)) if self._flag else 0.0

    def _co_runners(self, run: Simulated) -> list[Profile]:
        return [r.profile for r in self._runs.values() if r is not run]

    def _switch_seconds(self, profile: Profile, blocks: int, staying: Sequence[Profile]) -> float:
        """Return the seconds for saving or restoring blocks, on all multiprocessors at the same time."""
        miss_rate = max([profile.miss_rate for profile in staying], default=0.0)
        each = math.ceil(blocks / self.capacity.processors)
        return self.model.preempt_cycles(miss_rate, profile.registers, profile.shared, each) / self.capacity.clock

    def _transfer(self, run: Simulated, blocks: int) -> None:
        """Let a job pause while its blocks are saved or restored."""
        seconds = self._switch_seconds(run.profile, blocks, self._co_runners(run))
        self.saved_seconds += seconds
        run.hold = self._now + seconds
