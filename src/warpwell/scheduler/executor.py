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
        Limits of one processor: bytes of registers, bytes of shared memory, threads, and blocks.
    memory : int
        Bytes of device memory that all tasks together may hold.
    clock : float
        Cycles a second, for formulas in cycles.
    modes : tuple of str
        Methods of preemption that the executor supports: "drain" or "switch", or both.
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
        Name of the device.
    """

    bandwidth: float = 3.35e12
    name: str = field(default="unknown", compare=False)


@dataclass(slots=True)
class Ended:
    """All blocks of a task have ended; or the task failed, and `error` is set.

    `seconds` is the time of the kernel since its last launch, without compiling and copies; None if not measured.
    """

    job: Job
    time: float
    error: BaseException | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Stopped:
    """A preempted task has left the device: `done` of its blocks have ended, and no block is running."""

    job: Job
    time: float
    done: int


class Executor(ABC):
    """Runs tasks. Calls return at once; `poll` returns their outcomes.

    A job is launched when it is new or has stopped; a launch while it runs raises `SchedulerError`. Each launch ends
    with exactly one `Ended` or `Stopped`; a job that is asked to leave while its last blocks run ends with `Ended`. A
    quota below one worker raises `ArgumentError`: preempt the task instead. Only the thread of the scheduler calls
    these methods, except `wake` and `keeps`. `ExecutorConformance` in `warpwell.testing` checks this contract.

    If a launch raises an error, the task fails with it. If `preempt` or `resize` raises an error, the running job
    continues until its `Ended` or `Stopped`, and the scheduler logs the error and does not repeat the call.
    `TaskLostError` from these two methods, or any error from `poll`, means that the device is lost, and ends the
    scheduler.

    Attributes
    ----------
    capacity : Capacity
        The resources of the device. On a CPU, processors are cores and blocks are threads.
    linger : float
        Seconds for which the scheduler still calls `wait` when nothing runs, because `wait` wakes up faster than a
        sleeping thread.
    """

    capacity: Capacity
    linger: float = 0.0

    @abstractmethod
    def launch(self, job: Job, placement: Placement) -> None:
        """Start a job, or continue a stopped one, at its first block that has not ended."""

    def launch_behind(self, job: Job, placement: Placement, predecessor: Job) -> bool:
        """Queue a job on the device: it starts when `predecessor`, the last of a launch queue, has ended or stopped.

        Return False if that is not possible: the job then waits, and the policy decides again when `predecessor` has
        ended or stopped. If `predecessor` was asked to leave, the job may start as soon as some room is free, but the
        event of `predecessor` is reported first. Preempting a queued job that has not started withdraws it: the job
        stops with the blocks that it had completed before, at once if possible, otherwise when all jobs before it have
        ended or stopped. If the quota of `predecessor` changes, all jobs that are queued after it remain after it.
        """
        return False

    @abstractmethod
    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Ask a running job to leave: with "drain" its running blocks end, with "switch" they are saved.

        A mode that the executor does not support counts as "drain". A job that runs unmodified (``placement.plain``)
        does not leave: its `Ended` follows when it is done. A second request for the same job has no effect.
        """

    @abstractmethod
    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Change the quota of a running job: it shrinks at block ends and never exceeds the new quota after that.

        With `younger`, the job is re-issued: its workers leave at block ends, and as many new workers as the quota
        allows, which wait until then, replace them. So the job is younger than every job that was launched before this
        call. `younger` has no effect on a device where the age of workers does not matter (a CPU).
        """

    @abstractmethod
    def progress(self, job: Job) -> int:
        """Return how many blocks have ended."""

    def claimed(self, job: Job) -> int:
        """Return how many blocks have begun; equal to `progress` if no block runs, or if that is not known.

        This is for the watchdog: a job is stuck if one of its blocks runs, but for a long time no block begins or ends.
        """
        return self.progress(job)

    def completes_on_device(self, job: Job) -> bool:
        """Return whether a job that `launch_behind` starts after a running job finds all of its results.

        Return False if results of the running job are copied after its kernel has ended, or if this is not known yet.
        """
        return True

    def keeps(self, array: Any) -> bool:
        """Return whether an argument is already in device memory, so that a task needs no further memory for it."""
        return False

    def prepare(self, job: Job) -> None:  # noqa: B027 - most executors have nothing to prepare
        """Record that a job waits: the executor may prepare its launch while it has nothing else to do."""

    def discard(self, job: Job) -> None:  # noqa: B027 - a simulation holds nothing
        """Forget a job that was cancelled before or after a launch, and release its resources."""

    def abandon(self, job: Job, error: BaseException) -> None:
        """Give up a stuck job: it ends at once with ``Ended(error)``, and its workers do not count any more.

        Raises
        ------
        TaskLostError
            The workers cannot be stopped without losing the device (a GPU). No task on the device will end.
        """
        raise errors.TaskLostError(
            f"task {job.task.name!r} is stuck, and this device cannot stop it: restart the process of the device",
            task=job.task.name,
        ) from error

    @abstractmethod
    def cost(self, victim: Job, residents: Sequence[Job]) -> float:
        """Return the seconds that preempting `victim` is expected to take, while `residents` continue."""

    @abstractmethod
    def poll(self) -> list[Ended | Stopped]:
        """Return what has happened since the last call, in order."""

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since the executor was created, in simulated time if it is a simulation."""

    @abstractmethod
    def wait(self, until: float | None) -> None:
        """Return when `poll` has events, or at time `until`. With None, wait for an event, if one is due.

        This also returns after `wake`, perhaps a little later.
        """

    def machine(self) -> Machine | None:
        """Return the device's peaks, for the analyzer of kernels; None if they are not known."""
        return None

    def wake(self) -> None:  # noqa: B027 - virtual time does not wait
        """Make `wait` return soon, now or when it is next called. Any thread may call it."""

    def close(self) -> None:  # noqa: B027 - a simulation holds nothing
        """Stop all tasks and release the device."""
