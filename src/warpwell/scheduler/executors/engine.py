"""`Engine`: the protocol of tasks on a device, which the executors of a GPU and of a CPU share.

A run is the life of a task from its first launch to its end. Only the scheduler's thread changes its phase. Helper
threads prepare arguments, compile, and copy arrays back; they post the outcome. ::

            launch             prepared              no block left, no worker left
    (none) ───────► PREPARING ─────────► RUNNING ─────────────────────────────────► ENDING ──► Ended
                        │                 │   ▲                                       ▲
                        │ preempted       │   │ launch                                │ the same, while it stopped
                        │ before          ▼   │                                       │
                        └────────────► STOPPING ──────────────────────────────────────┘
                                          │ all workers have left
                                          └──► STOPPED ──► Stopped

- Workers claim blocks of the task from a cursor, which is the entire state of the task. They have consecutive numbers.
  Before each claim, a worker compares its number with `STOP` and leaves if it is smaller.
- A preemption sets `STOP` to the number of the next worker. Workers of later launches have larger numbers.
- Shrinking raises `STOP` by the number of workers that must leave: the oldest. Growing starts the missing workers when
  the leaving ones have left: a quota is never exceeded.
- STOPPED: the arguments stay begun. A task begins and ends them once, so an error that device code latches in a
  storage-backed array is raised at the end of that task.
- An unmodified kernel (``placement.plain``, or a launch that cannot be cut into blocks) cannot be preempted or resized.
- A request between an `Ended` or `Stopped` and the `poll` that returns it is too late and has no effect.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ... import errors
from ..._os import Threads, clock
from ..batch import Batch
from ..executor import Capacity, Ended, Executor, Stopped
from ..task import RUNNING, Job, Placement, Task

LATENCY_WEIGHT = 0.2
"""Weight of a new measurement in the average latency."""


class Phase(enum.Enum):
    """Phase of a run. A run of a CPU that was given up is ABANDONED: it reports no further event."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ENDING = "ending"
    ABANDONED = "abandoned"


class Run:
    """The state of a task in an executor, from its first launch to its end.

    Attributes
    ----------
    job : Job
    placement : Placement
    phase : Phase
    leave : bool
        Whether the run must stop as soon as it is prepared.
    error : BaseException or None
        The first failure.
    seconds : float or None
        Runtime of the kernel without copies; None if it was not measured.
    blocks : BlockLaunch or None
        The launch with its arguments; None until it has begun.
    top : int
        Number of the next worker, which equals the number of workers so far.
    floor : int
        `STOP` as it was last set: workers with a smaller number must leave.
    done : int
        Completed blocks, as last read.
    resources : mapping
        Resources of its form; "resident" is the maximum number of its workers.
    inside : int
        Number of threads of this process that work for the run, according to the posts that were read.
    """

    # Most fields of a short task are never set: their defaults are attributes of the class.
    phase = Phase.PREPARING
    leave = False
    error: BaseException | None = None
    seconds: float | None = None
    blocks: Any = None
    top = 0
    floor = 0
    done = 0
    resources: Mapping[str, int] = MappingProxyType({})
    inside = 0

    def __init__(self, job: Job, placement: Placement) -> None:
        self.job = job
        self.placement = placement

    @property
    def is_batch(self) -> bool:
        """Whether the blocks of the task are launches."""
        return isinstance(self.job.task.launch, Batch)

    @property
    @abstractmethod
    def is_unmodified(self) -> bool:
        """Whether it is prepared to run unmodified."""

    @property
    @abstractmethod
    def has_workers(self) -> bool:
        """Whether the task runs in workers, which `STOP` stops."""

    @property
    @abstractmethod
    def drain_seconds(self) -> float:
        """The expected time from a preemption until the running blocks have ended, or 0 if unknown."""

    def max_workers(self) -> int:
        """Return its quota of workers, at most as many as can be resident."""
        resident = self.resources["resident"]
        quota = resident if self.placement.workers is None else min(self.placement.workers, resident)
        return max(1, quota)


class Pace:
    """Average latency from the end of a task to the next launch, and of the launch itself.

    Parameters
    ----------
    launching : float
        Assumed seconds of a launch until one has been measured.

    Attributes
    ----------
    launching : float
        Seconds of a launch.
    seconds : float
        Sum of both latencies.
    """

    def __init__(self, launching: float) -> None:
        self.launching = launching
        self._handing = 0.0
        self._free: float | None = None

    @property
    def seconds(self) -> float:
        """See the class."""
        return self.launching + self._handing

    def freed(self, now: float) -> float:
        """Record that a task has left or ended; return `now`."""
        self._free = now
        return now

    def launched(self, start: float, now: float) -> None:
        """Record a launch that was requested at `start` and is complete."""
        self.launching += LATENCY_WEIGHT * (now - start - self.launching)
        if self._free is not None:
            self._handing += LATENCY_WEIGHT * (start - self._free - self._handing)
            self._free = None


R = TypeVar("R", bound=Run)


class Engine(Executor, Generic[R]):
    """Runs tasks on a device. A subclass starts workers and reports when they have left.

    Parameters
    ----------
    capacity : Capacity
        Capacity of the device.
    device : str
        "cuda" or "cpu": launches are cut for this device.
    launch_seconds : float
        Assumed time of a launch until one has been measured.
    """

    stop_seconds = 0.0
    """Time from setting `STOP` until the last worker reads it between two blocks."""

    def __init__(self, capacity: Capacity, device: str, launch_seconds: float) -> None:
        self.capacity = capacity
        self._device = device
        self._began = clock.monotonic()
        self._runs: dict[Job, R] = {}
        self._events: list[Ended | Stopped] = []
        self._closed = False
        self._helpers = Threads(f"warpwell-{device}-tasks")
        self._posts: deque[tuple[R, BaseException | None, Callable[[R, BaseException | None], None]]] = deque()
        self._abandoned: set[R] = set()
        self._pace = Pace(launch_seconds)

    def now(self) -> float:
        """Return the seconds since the executor was created."""
        return self._time()

    def _time(self) -> float:
        return clock.monotonic() - self._began

    # -- calls of the scheduler ----------------------------------------------------------------------------------

    def launch(self, job: Job, placement: Placement) -> None:
        """See `Executor`. A kernel is compiled before its first block runs, in another thread."""
        self._enter()
        start = self._time()
        self._check_quota(placement.workers)
        run = self._runs.get(job)
        if run is None:
            run = self._runs[job] = self._new_run(job, placement)
            if run.blocks is not None:
                self._ready(run, None)
            elif self._at_hand(job, placement):
                # Nothing is copied or compiled: waking another thread would take longer.
                self._ready(run, self._begin(run))
            else:
                self._in_background(run, self._begin, self._prepared)
                return
        elif self._may_launch_again(run):
            run.placement = placement
            run.leave = False
            self._start(run)
        else:
            raise errors.SchedulerError(f"task {job.task.name!r} runs already", task=job.task.name)
        self._pace.launched(start, self._time())

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. Every mode is a drain."""
        if mode not in ("drain", "switch"):
            raise errors.ArgumentError(f"mode must be drain or switch, got {mode!r}", name="mode")
        run = self._running(job)
        run.leave = True
        if run.phase is Phase.RUNNING:
            self._stop(run)

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """See `Executor`. It does not affect unmodified launches and stopping tasks."""
        self._check_quota(workers)
        run = self._running(job)
        run.placement = replace(run.placement, workers=workers)
        if run.phase is Phase.RUNNING and run.has_workers:
            self._change_quota(run, younger)

    def cost(self, victim: Job, residents: Sequence[Job]) -> float:
        """See `Executor`: a block, the stop flag, and the average latency of the next decision and launch."""
        run = self._runs.get(victim)
        drain_seconds = 0.0 if run is None or run.blocks is None else run.drain_seconds
        return drain_seconds + self.stop_seconds + self._pace.seconds

    def discard(self, job: Job) -> None:
        """See `Executor`."""
        run = self._runs.pop(job, None)
        if run is not None:
            self._release(run)
            self._end(run)

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`."""
        self._advance()
        return self._take_events()

    def wait(self, until: float | None) -> None:
        """See `Executor`. With None, return at once if no task runs."""
        while not self._woken:
            self._advance()
            now = self._time()
            if self._events or (until is not None and now >= until):
                break
            if until is None and all(run.phase is Phase.STOPPED for run in self._runs.values()):
                break
            if not self._prepare_ahead():
                self._watch(now + 1.0 if until is None else until)
        self._clear_wake()

    # -- interface of a device -----------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Raise if no task can be launched."""
        if self._closed:
            raise errors.ClosedError("the executor is closed: create a new one")

    @abstractmethod
    def _new_run(self, job: Job, placement: Placement) -> R:
        """Return the run of a job, prepared or not."""

    @abstractmethod
    def _at_hand(self, job: Job, placement: Placement) -> bool:
        """Return True if `_begin` copies nothing and compiles nothing."""

    @abstractmethod
    def _load(self, run: R) -> None:
        """Begin the arguments, set `blocks` and `resources` of the run, and compile."""

    @abstractmethod
    def _start(self, run: R) -> None:
        """Start a run at its first block that has not been claimed: it is RUNNING."""

    @abstractmethod
    def _grow(self, run: R) -> None:
        """Start the missing workers of a larger quota."""

    @abstractmethod
    def _set_stop(self, run: R) -> None:
        """Set `STOP` of a run to its `floor`."""

    @property
    @abstractmethod
    def _woken(self) -> bool:
        """Whether `wake` was called since `_clear_wake`."""

    @abstractmethod
    def _clear_wake(self) -> None:
        """Reset `_woken`."""

    @abstractmethod
    def _watch(self, until: float) -> None:
        """Return at a time, or earlier when `_advance` has work or after `wake`."""

    @abstractmethod
    def _notify(self) -> None:
        """Make `_watch` return because of a post (any thread)."""

    def _prepare_ahead(self) -> bool:
        """Prepare a waiting task while the device is busy; return False if no work is left."""
        return False

    def _enter_helper(self) -> None:
        """Prepare a helper thread for calls of the device."""

    def _release(self, run: R) -> None:
        """Release the device resources of an ended task's run."""

    # -- phases --------------------------------------------------------------------------------------------------

    def _in_background(
        self,
        run: R,
        step: Callable[[R], BaseException | None],
        then: Callable[[R, BaseException | None], None],
    ) -> None:
        """Call ``step(run)`` in a helper thread, and with its result ``then(run, error)`` in the scheduler's thread."""

        def work() -> None:
            self._enter_helper()
            self._posts.append((run, step(run), then))
            self._notify()

        run.inside += 1
        self._helpers.run(work)

    def _advance(self) -> None:
        """Advance every run and record its events."""
        while self._posts:
            run, error, then = self._posts.popleft()
            run.inside -= 1
            if run.phase is not Phase.ABANDONED:
                then(run, error)
            elif not run.inside:
                self._abandoned.discard(run)
                self._end(run)

    def _begin(self, run: R) -> BaseException | None:
        """Begin the arguments and compile; return the error, if any."""
        try:
            self._load(run)
        except BaseException as failure:  # it fails the task
            return failure
        return None

    def _cut(self, task: Task) -> Any:
        """Return the launch of a task with its arguments, in blocks."""
        blocks, task.cut = task.cut, None
        if blocks is None or blocks.device != self._device:
            blocks = task.launch.cut(task.arguments, self._device)
        return blocks

    def _prepared(self, run: R, error: BaseException | None) -> None:
        """Start a run that a helper thread has prepared. The preparation does not count as time on the device."""
        job, now = run.job, self._time()
        if job.state is RUNNING:
            job.prepared += now - job.since
            job.since = now
        self._ready(run, error)

    def _ready(self, run: R, error: BaseException | None) -> None:
        """Start a run that is prepared."""
        if self._runs.get(run.job) is not run:
            return
        if error is not None:
            run.error = error
            self._finish(run, self._time())
        elif run.leave and not run.is_unmodified:
            run.phase = Phase.STOPPED
            self._events.append(Stopped(run.job, self._time(), 0))
        else:
            self._start(run)

    def _stop(self, run: R) -> None:
        """Make all workers leave at the end of their blocks."""
        if run.has_workers:
            run.phase = Phase.STOPPING
            self._leave(run, run.top)

    def _change_quota(self, run: R, younger: bool) -> None:
        quota = run.max_workers()
        if quota < run.top - run.floor:
            self._leave(run, run.top - quota)
        else:
            self._grow(run)

    def _leave(self, run: R, floor: int) -> None:
        """Make workers below a number leave at the end of their blocks."""
        run.floor = max(run.floor, floor)
        self._set_stop(run)

    def _finish_or_continue(self, run: R, time: float) -> None:
        """Continue or finish a run without workers; `done` is up to date."""
        if run.done == run.blocks.blocks or run.error is not None:
            self._finish(run, time)
            return
        run.seconds = None
        if run.phase is Phase.STOPPING:
            run.phase = Phase.STOPPED
            self._events.append(Stopped(run.job, self._pace.freed(time), run.done))
        else:
            self._start(run)

    def _finish(self, run: R, time: float) -> None:
        """End a task whose last worker has left at `time`."""
        run.phase = Phase.ENDING
        if run.blocks is None or run.blocks.ends_at_once:
            self._report_end(run, self._end(run), time)
        else:
            self._in_background(run, self._end, self._ended)

    def _ended(self, run: R, error: BaseException | None) -> None:
        """Report the end of a task whose arguments have ended."""
        if self._runs.get(run.job) is run:
            self._report_end(run, error, self._time())

    def _report_end(self, run: R, error: BaseException | None, time: float) -> None:
        self._release(run)
        self._events.append(Ended(run.job, self._pace.freed(time), error, run.seconds))

    @staticmethod
    def _end(run: R) -> BaseException | None:
        """End the arguments; return the task's failure."""
        try:
            if run.blocks is not None:
                run.blocks.end()
        except BaseException as failure:  # an error latched by device code fails the task
            return run.error or failure
        return run.error

    def _may_launch_again(self, run: R) -> bool:
        """Return True if a run has stopped and `poll` has returned its event."""
        return run.phase is Phase.STOPPED and all(event.job is not run.job for event in self._events)

    def _running(self, job: Job) -> R:
        """Return the run of a job. A stopped or ended run is included until `poll` returns its event."""
        run = self._runs.get(job)
        if run is None or self._may_launch_again(run):
            raise errors.SchedulerError(f"task {job.task.name!r} does not run: launch it first", task=job.task.name)
        return run

    def _take_events(self) -> list[Ended | Stopped]:
        """Return the events since the last call, and forget the runs that have ended."""
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, Ended):
                self._runs.pop(event.job, None)
        return events

    @staticmethod
    def _check_quota(workers: int | None) -> None:
        if workers is not None and workers < 1:
            raise errors.ArgumentError(f"a quota of {workers} workers: pass at least 1, or preempt", name="workers")
