"""Executor: launches, preempts and resizes tasks on a GPU, on the CPU's threads, or in a simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import errors
from .task import Job, Placement


@dataclass(frozen=True)
class Capacity:
    """The resources of a device.

    Attributes
    ----------
    processors : int
        Multiprocessors (cores on a CPU).
    registers, shared, threads, blocks : int
        Maximum bytes, bytes, threads and blocks of a processor.
    memory : int
        Bytes of device memory that tasks may hold together.
    clock : float
        Cycles a second, for formulas in cycles.
    modes : tuple of str
        Ways to preempt that the executor knows: of "drain", "switch".
    """

    processors: int = 132
    registers: int = 256 << 10
    shared: int = 227 << 10
    threads: int = 2048
    blocks: int = 32
    memory: int = 80 << 30
    clock: float = 1.755e9
    modes: tuple[str, ...] = ("drain",)


@dataclass(frozen=True)
class Machine:
    """The peak rates of a device, in addition to its `Capacity`. The defaults are an H100's.

    Attributes
    ----------
    bandwidth : float
        Bytes a second of device memory.
    name : str
        The device's.
    """

    bandwidth: float = 3.35e12
    name: str = field(default="unknown", compare=False)


@dataclass(slots=True)
class Ended:
    """All blocks of a task have ended, or (`error`) it failed.

    `seconds` is the time of the kernel since its last launch, without compiling and copies; None if not measured.
    """

    job: Job
    time: float
    error: BaseException | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Stopped:
    """A preempted task has left: `done` blocks have ended, none is running."""

    job: Job
    time: float
    done: int


class Executor(ABC):
    """Runs tasks. Calls return at once; their outcomes come out of `poll`.

    A job is launched when it is new or has stopped, and never while it runs (`SchedulerError`). Each launch ends with
    exactly one `Ended` or `Stopped`; one that was asked to leave while its last blocks ran has `Ended`. A quota has at
    least one worker (`ArgumentError`: preempt the task instead). Only the thread of the scheduler calls these methods,
    except `wake` and `keeps`. `ExecutorConformance` in `warpwell.testing` checks this contract.

    What a launch raises is the failure of its task. `preempt` and `resize` change a running job: if one of them raises,
    the job continues to its `Ended` or `Stopped`; the scheduler logs the error and does not repeat the call.
    `TaskLostError` from either, or any error from `poll`, means that the device is lost, and ends the scheduler.

    Attributes
    ----------
    linger : float
        Seconds for which `wait` is called although nothing runs, because it is woken sooner than a thread is.
    """

    linger: float = 0.0

    @property
    @abstractmethod
    def capacity(self) -> Capacity:
        """The resources of the device."""

    @abstractmethod
    def launch(self, job: Job, placement: Placement) -> None:
        """Start a job, or continue a stopped one, at its first block that has not ended."""

    def launch_behind(self, job: Job, placement: Placement, other: Job) -> bool:
        """Queue a job on the device: it starts when `other`, the last of a train, has ended or stopped.

        Return False if that is not possible: the scheduler then launches the job at that event. If `other` was asked to
        leave, the job may start as soon as some room is free, and the event of `other` is reported first. A preemption
        withdraws a job that has not started. It stops with the blocks that it had completed before: at once if
        possible, at the latest when all jobs before it have ended or stopped. If the quota of `other` changes, all jobs
        that are queued after it remain after it.
        """
        return False

    @abstractmethod
    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Ask a running job to leave: "drain" (blocks that run end), "switch" (they are saved).

        A mode that the executor does not have is a drain. A job that runs whole (``placement.plain``) does not leave:
        its `Ended` comes when it is done. Asking twice is asking once.
        """

    @abstractmethod
    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Change the quota of a running job: it shrinks at block ends and never exceeds the new quota after that.

        With `younger`, the job is re-issued: all its workers leave at block ends, and as many new ones as the quota
        allows, which wait behind them, replace them. So it is younger than all that was launched before this call. It
        has no effect if the age of workers changes nothing (a CPU).
        """

    @abstractmethod
    def progress(self, job: Job) -> int:
        """Return how many blocks have ended."""

    def claimed(self, job: Job) -> int:
        """Return how many blocks have begun; equal to `progress` if no block runs, or if that is not known.

        For the watchdog: a job with a block in progress that starts and ends no block for a long time is stuck.
        """
        return self.progress(job)

    def completes_on_device(self, job: Job) -> bool:
        """Return whether a job that `launch_behind` starts after a running job finds all of its results.

        Return False if results of the running job are copied after its kernel has ended, or if this is not known yet.
        """
        return True

    def keeps(self, array: Any) -> bool:
        """Return whether an argument is already in device memory, so that a task needs no more of it."""
        return False

    def prepare(self, job: Job) -> None:  # noqa: B027 - most have nothing to do
        """Note that a job waits: the executor may prepare its launch while it has nothing else to do."""

    def discard(self, job: Job) -> None:  # noqa: B027 - a simulation holds nothing
        """Forget a job that was cancelled, launched or not: give back the resources that it holds."""

    def abandon(self, job: Job, error: BaseException) -> None:
        """Give up a running job that is stuck: it ends at once with ``Ended(error)``, and its workers count no more.

        Raises
        ------
        TaskLostError
            The workers cannot be stopped without losing the device (a GPU): no task on it will end.
        """
        raise errors.TaskLostError(
            f"task {job.task.name!r} is stuck, and this device cannot stop it: restart the process that owns it",
            task=job.task.name,
        ) from error

    @abstractmethod
    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """Return the seconds that preempting `victim` is expected to take, while `stays` run on."""

    @abstractmethod
    def poll(self) -> list[Ended | Stopped]:
        """Return what has happened since the last call, in order."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds since the executor was made (a simulation: simulated)."""

    @abstractmethod
    def wait(self, until: float | None) -> None:
        """Return when `poll` has events, or at time `until`. With None, wait for an event, if one is due.

        It also returns, perhaps a little later, after `wake`.
        """

    def machine(self) -> Machine | None:
        """Return the device's peaks, for the analyzer of kernels; None if they are not known."""
        return None

    def wake(self) -> None:  # noqa: B027 - virtual time does not wait
        """Make `wait` return soon, now or when it is next called. Any thread may call it."""

    def close(self) -> None:  # noqa: B027 - a simulation holds nothing
        """Stop all tasks and release the device."""
