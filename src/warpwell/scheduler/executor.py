"""Executor: what launches, preempts and resizes tasks; a GPU, the CPU's threads, or a simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from .task import Job, Placement


@dataclass(frozen=True)
class Capacity:
    """What a device has.

    Attributes
    ----------
    processors : int
        Multiprocessors (cores on a CPU).
    registers, shared, threads, blocks : int
        Bytes, bytes, threads and blocks that a processor holds at most.
    memory : int
        Bytes of device memory that tasks may hold together.
    partitions : dict
        Name of each partition made at start, and its processors.
    clock : float
        Cycles a second, for formulas in cycles.
    """

    processors: int = 132
    registers: int = 256 << 10
    shared: int = 227 << 10
    threads: int = 2048
    blocks: int = 32
    memory: int = 80 << 30
    partitions: dict[str, int] | None = None
    clock: float = 1.755e9


@dataclass(frozen=True)
class Ended:
    """All blocks of a task have ended, or (`error`) it failed."""

    job: Job
    time: float
    error: BaseException | None = None


@dataclass(frozen=True)
class Stopped:
    """A preempted task has left: `done` blocks have ended, none is running. `wasted` blocks will run once more."""

    job: Job
    time: float
    done: int
    wasted: int = 0


class Executor(ABC):
    """Runs tasks. Calls return at once; what became of them comes out of `poll`.

    A job is launched when it is new or has stopped, and never while it runs. Each launch ends with exactly one `Ended`
    or `Stopped`. Only the thread of the scheduler calls these methods.
    """

    @property
    @abstractmethod
    def capacity(self) -> Capacity:
        """What the device has."""

    @abstractmethod
    def launch(self, job: Job, placement: Placement) -> None:
        """Start a job, or go on with one that stopped, at its first block that has not ended."""

    @abstractmethod
    def preempt(self, job: Job, mode: str = "drain") -> None:
        """Ask a running job to leave: "drain" (blocks that run end), "flush" (they are dropped), "switch" (saved)."""

    @abstractmethod
    def resize(self, job: Job, workers: int | None) -> None:
        """Change the quota of a running job: it shrinks at block ends and never exceeds the new quota after that."""

    @abstractmethod
    def progress(self, job: Job) -> int:
        """Return how many blocks have ended."""

    @abstractmethod
    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """Return the seconds that preempting `victim` is expected to take, while `stays` run on."""

    @abstractmethod
    def poll(self) -> list[Ended | Stopped]:
        """Return what has happened since the last call, in the order in which it happened."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds since the executor was made (a simulation: simulated)."""

    @abstractmethod
    def wait(self, until: float | None) -> None:
        """Return when `poll` has something to say, or at time `until`. With None, wait for an event, if one is due."""

    def close(self) -> None:  # noqa: B027 - a simulation holds nothing
        """Stop everything and give the device back."""
