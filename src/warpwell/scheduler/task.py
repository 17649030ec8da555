"""Task: one kernel launch that waits for, or has, a share of a GPU; requests are tasks in order."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import errors


class Kind(enum.Enum):
    """What bounds a kernel: the memory, or the arithmetic units (section "classes" of the source)."""

    MEMORY = "memory"
    COMPUTE = "compute"

    __hash__ = object.__hash__  # Enum's is a Python function, and policies sort into buckets by class all the time


@dataclass(frozen=True)
class Profile:
    """What is known, or predicted, of a kernel that runs alone on the whole GPU.

    Attributes
    ----------
    kind : Kind or None
        None where nothing is known: the kernel is probed first.
    seconds : float or None
        Time that the untransformed kernel takes alone.
    instructions : float or None
        Warp instructions of the whole launch. ``instructions / seconds`` is its instruction rate alone.
    registers, shared : int
        Bytes a block holds while it is resident: 4 times the allocated registers a thread times its threads; static and
        dynamic shared memory.
    threads : int
        Threads a block.
    resident : int
        Blocks resident on the whole GPU when it runs alone.
    miss_rate : float
        Misses of the second-level cache as a ratio of its accesses, 0 to 1.
    bandwidth : float
        Fraction of the memory's bandwidth that it takes alone, 0 to 1.
    compute : float
        Fraction of the issue slots that it takes alone, 0 to 1.
    need : float
        Fraction of the multiprocessors that it needs to run as fast as alone (Orion's ``SM_usage``), 0 to 1.
    source : str
        Where the figures come from: "measured", "predicted", "static" (code and peaks), "cold" (nothing is known: the
        conservative answer), "imputed", "trace", "given".
    """

    kind: Kind | None = None
    seconds: float | None = None
    instructions: float | None = None
    registers: int = 32 * 4 * 256
    shared: int = 0
    threads: int = 256
    resident: int = 8 * 132
    miss_rate: float = 0.5
    bandwidth: float = 0.0
    compute: float = 0.0
    need: float = 1.0
    source: str = "given"

    def __post_init__(self) -> None:
        for name in ("seconds", "instructions"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise errors.ArgumentError(f"{name} of a profile is {value}: it cannot be negative", name=name)
        for name in ("miss_rate", "bandwidth", "compute", "need"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise errors.ArgumentError(f"{name} of a profile is {value}: it is a ratio, 0 to 1", name=name)
        for name in ("registers", "shared", "threads", "resident"):
            if getattr(self, name) < 0:
                raise errors.ArgumentError(f"{name} of a profile is negative", name=name)


@dataclass(eq=False)
class Task:
    """One launch.

    Attributes
    ----------
    name : str
        The kernel's name: what history and the pair matrix are kept under.
    blocks : int
        Thread blocks of the launch.
    profile : Profile
        What the scheduler believes. An executor that simulates has its own truth (see `Simulator`).
    launch, arguments : object
        ``kernel[n]`` and what it is called with; None in a simulation.
    tenant : str
    priority : int
        Larger is sooner. 0 by default.
    deadline : float or None
        Seconds after arrival.
    memory : int
        Bytes of device memory that it holds from admission to its end, preempted or not.
    idempotent : bool
        Whether blocks may be run once more from their start (flush). Never true where storage-backed arrays or stores
        are among the arguments.
    size : dict
        Names and numbers that say how large the input is: features of the predictor.
    whole : str
        Why the kernel cannot be cut into blocks, empty where it can: it then runs whole (``placement.plain``), cannot
        be preempted, and the log has this text (``why["whole"]`` of its "launch").
    number : int
        Given by the scheduler, in order of submission.
    """

    name: str
    blocks: int
    profile: Profile = field(default_factory=Profile)
    launch: Any = None
    arguments: tuple[Any, ...] = ()
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    memory: int = 0
    idempotent: bool = False
    size: dict[str, float] = field(default_factory=dict)
    whole: str = ""
    number: int = -1

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise errors.ArgumentError(f"task {self.name!r} has {self.blocks} blocks: it needs at least one")
        if self.memory < 0:
            raise errors.ArgumentError(f"task {self.name!r} has {self.memory} bytes of memory: give none or more")
        if self.deadline is not None and not self.deadline > 0:
            raise errors.ArgumentError(f"task {self.name!r} has a deadline of {self.deadline} s: it must be positive")


@dataclass(eq=False)
class Request:
    """An application: tasks in order, of which only the head competes (claim 1 of the source)."""

    name: str
    tasks: Sequence[Task]
    arrival: float = 0.0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise errors.ArgumentError(f"request {self.name!r} has no tasks")
        if not self.arrival >= 0:
            raise errors.ArgumentError(f"request {self.name!r} arrives at {self.arrival} s: time begins at 0")


class State(enum.Enum):
    """Where a task is: WAITING, RUNNING, STOPPING (asked to leave), PREEMPTED (waits again), and the ends."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    PREEMPTED = "preempted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__


# Members by name: of an enum, one takes five times as long to look up.
MEMORY, COMPUTE = Kind.MEMORY, Kind.COMPUTE
WAITING, RUNNING, PREEMPTED, STOPPING = State.WAITING, State.RUNNING, State.PREEMPTED, State.STOPPING
DONE, CANCELLED = State.DONE, State.CANCELLED


@dataclass(frozen=True)
class Placement:
    """How a task is put on the GPU.

    Attributes
    ----------
    workers : int or None
        Blocks resident at most on the whole GPU (its quota); None: as many as fit.
    partition : str or None
        Name of a partition of multiprocessors made at start (a green context); None: the whole GPU.
    priority : int
        Priority of the stream; larger is sooner.
    plain : bool
        Launch the untransformed kernel, which cannot be preempted (left-over, and kernels that cannot be transformed).
    """

    workers: int | None = None
    partition: str | None = None
    priority: int = 0
    plain: bool = False


@dataclass(eq=False)
class Job:
    """A task's record in the scheduler: what policies see and the scheduler alone changes.

    Attributes
    ----------
    arrival : float
        When it could first have been launched: the request's arrival, or the end of the task before it.
    since : float
        When it last entered its state.
    done : int
        Blocks that have ended, as the executor last said.
    ran : float
        Seconds in which it was resident, up to `since`.
    preemptions : int
    placement : Placement or None
        Where it runs; None while it waits.
    number : int
        Its place in the order of submission: what logs call it, and what ties are broken by.
    """

    task: Task
    request: Request
    arrival: float
    state: State = State.WAITING
    since: float = 0.0
    started: float | None = None
    ended: float | None = None
    done: int = 0
    ran: float = 0.0
    preemptions: int = 0
    placement: Placement | None = None
    error: BaseException | None = None
    number: int = -1

    @property
    def waits(self) -> bool:
        """Whether a policy may launch it."""
        return self.state is WAITING or self.state is PREEMPTED

    @property
    def left(self) -> float:
        """Fraction of its blocks that have not ended."""
        return 1.0 - self.done / self.task.blocks

    @property
    def rest(self) -> float | None:
        """Seconds that it would still take alone; None where that is not known."""
        seconds = self.task.profile.seconds
        return None if seconds is None else seconds * self.left
