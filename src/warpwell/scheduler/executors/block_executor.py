"""`BlockExecutor`: base of the executors of real devices, with runs of tasks, their phases, events and the clock."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

from ... import errors
from ..._os import clock
from ..executor import Capacity, Ended, Executor, Stopped
from ..task import Job


class Phase(enum.Enum):
    """Phase of a run. `cpu_executor` and `cuda_executor` show the transitions. Only the CPU uses ABANDONED."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ENDING = "ending"
    ABANDONED = "abandoned"


class BlockRun:
    """The state of a task in an executor, from its first launch to its end.

    Attributes
    ----------
    job : Job
    phase : Phase
    quota : int
        Maximum number of workers.
    leave : bool
        Whether the run must stop as soon as it is prepared.
    error : BaseException or None
        The first failure.
    since : float
        Time of the last launch of its blocks.
    seconds : float or None
        Runtime of the kernel without copies; None if it was not measured.
    """

    phase = Phase.PREPARING
    quota = 0
    leave = False
    error: BaseException | None = None
    since = 0.0
    seconds: float | None = None

    def __init__(self, job: Job) -> None:
        self.job = job


R = TypeVar("R", bound=BlockRun)


class BlockExecutor(Executor, Generic[R]):
    """Base of `CpuExecutor` and `CudaExecutor`.

    Parameters
    ----------
    capacity : Capacity
        Capacity of the device.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._began = clock.monotonic()
        self._runs: dict[Job, R] = {}
        self._events: list[Ended | Stopped] = []
        self._closed = False

    @property
    def capacity(self) -> Capacity:
        """Capacity of the device. On a CPU, processors are cores and blocks are threads."""
        return self._capacity

    def now(self) -> float:
        """Return the seconds since the executor was created."""
        return self._time()

    def _time(self) -> float:
        return clock.monotonic() - self._began

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the executor is closed: make another one")

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
    def _check_mode(mode: str) -> None:
        if mode not in ("drain", "switch"):
            raise errors.ArgumentError(f"mode {mode!r} is unknown: choose drain or switch", name="mode")

    @staticmethod
    def _check_quota(workers: int | None) -> None:
        if workers is not None and workers < 1:
            raise errors.ArgumentError(f"a quota of {workers} workers: give at least one, or preempt", name="workers")

    @staticmethod
    def _runs_already(job: Job) -> Any:
        return errors.SchedulerError(f"task {job.task.name!r} runs already", task=job.task.name)
