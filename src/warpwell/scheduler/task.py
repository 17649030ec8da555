"""Task: one kernel launch that waits for, or has, a share of a GPU; requests are tasks in order."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import errors
from .._check import LONGEST, checked_integer, checked_nbytes, checked_number, shown
from .data_order import Access

INT64_MAX = 2**63 - 1
"""Largest integer of a task: policies, logs and services use signed 64-bit integers."""

_AMOUNTS = {"seconds": 1e15, "instructions": 1e30, "miss_rate": 1.0, "bandwidth": 1.0, "compute": 1.0, "need": 1.0}
_NUMBERS = (float, int)
_COUNTS = ("registers", "shared", "threads", "resident")


class Kind(enum.Enum):
    """The resource that bounds a kernel: memory, or the arithmetic units (section "classes" of the source)."""

    MEMORY = "memory"
    COMPUTE = "compute"

    __hash__ = object.__hash__  # Enum's is a Python function, and policies sort into buckets by class all the time


@dataclass(frozen=True)
class Profile:
    """Known or predicted figures of a kernel that runs alone on the whole GPU.

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
        Where the figures come from: "measured", "predicted" (from other sizes), "cold" (nothing is known: the
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
        # a simulation makes one for every task: correct values cost no loop and no call
        seconds, instructions = self.seconds, self.instructions
        if not (
            (seconds is None or (type(seconds) in _NUMBERS and 0 <= seconds <= 1e15))
            and (instructions is None or (type(instructions) in _NUMBERS and 0 <= instructions <= 1e30))
            and (self.kind is None or type(self.kind) is Kind)
            and type(self.miss_rate) in _NUMBERS
            and 0 <= self.miss_rate <= 1
            and type(self.bandwidth) in _NUMBERS
            and 0 <= self.bandwidth <= 1
            and type(self.compute) in _NUMBERS
            and 0 <= self.compute <= 1
            and type(self.need) in _NUMBERS
            and 0 <= self.need <= 1
            and type(self.registers) is int
            and 0 <= self.registers <= INT64_MAX
            and type(self.shared) is int
            and 0 <= self.shared <= INT64_MAX
            and type(self.threads) is int
            and 0 <= self.threads <= INT64_MAX
            and type(self.resident) is int
            and 0 <= self.resident <= INT64_MAX
        ):
            self._convert()

    def _convert(self) -> None:
        """Convert numbers of other types, and refuse other values."""
        if self.kind is not None and not isinstance(self.kind, Kind):
            raise errors.ArgumentError(f"kind of a profile is {shown(self.kind)}: give a Kind, or None", name="kind")
        for name, most in _AMOUNTS.items():
            value = getattr(self, name)
            if type(value) is float and 0 <= value <= most:
                continue
            if value is not None or most == 1:
                object.__setattr__(self, name, checked_number(value, name, maximum=most, of="a profile"))
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= INT64_MAX:
                object.__setattr__(
                    self, name, checked_integer(value, name, minimum=0, maximum=INT64_MAX, of="a profile")
                )


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
        ``kernel[n]`` and its arguments; None in a simulation.
    tenant : str
    priority : int
        Larger is sooner. 0 by default. Of 64 bits, as all whole numbers here; it counts as far as the ceiling of its
        tenant (see `Tenant`), which is 8 unless a setting says otherwise.
    deadline : float or None
        Seconds after arrival, up to 1e9.
    memory : int or str
        Device memory, in bytes or as "1GiB", that it holds from admission to its end, preempted or not.
    there : int
        Of these, bytes that are in the device's memory already: they count for its tenant, and need no free memory.
    size : dict
        Names and numbers that say how large the input is: features of the predictor.
    whole : str
        Why the kernel cannot be cut into blocks, empty where it can: it then runs whole (``placement.plain``), cannot
        be preempted, and the log has this text (``why["whole"]`` of its "launch").
    number : int
        Given by the scheduler, in order of submission.
    known : KernelRecord or None
        What the scheduler's analyzer has learnt of this code and size (see `warpwell.scheduler.predict.learner`).
    cut : object
        The launch cut into blocks (`Launch.cut`), for the first executor that launches it; None once it has been used.
    prepared : Prepared or None
        What it shares with other tasks of the same prepared launch.
    accesses : sequence of Access
        Memory that it uses: it follows earlier tasks that use the same memory, unless all of them only read it.
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
    there: int = 0
    size: dict[str, float] = field(default_factory=dict)
    whole: str = ""
    number: int = -1
    known: Any = None
    cut: Any = None
    prepared: Prepared | None = None
    accesses: Sequence[Access] = ()

    def __post_init__(self) -> None:
        # Invalid values must be found here: in the scheduler's thread they would end all tasks. A simulation makes a
        # hundred thousand of these, so correct values cost a comparison and no call.
        if type(self.name) is not str or type(self.tenant) is not str:
            _require_text(self.name, "name")
            _require_text(self.tenant, "tenant")
        if type(self.blocks) is not int or not 1 <= self.blocks <= INT64_MAX:
            self.blocks = checked_integer(self.blocks, "blocks", maximum=INT64_MAX, of=f"task {self.name!r}")
        if type(self.memory) is not int or not 0 <= self.memory <= INT64_MAX:
            self.memory = checked_nbytes(self.memory, "memory", minimum=0, maximum=INT64_MAX, of=f"task {self.name!r}")
        if type(self.priority) is not int or not -INT64_MAX <= self.priority <= INT64_MAX:
            self.priority = checked_integer(
                self.priority, "priority", minimum=-INT64_MAX - 1, maximum=INT64_MAX, of=f"task {self.name!r}"
            )
        if self.deadline is not None:
            self.deadline = checked_number(self.deadline, "deadline", maximum=LONGEST, of=f"task {self.name!r}")
            if not self.deadline:
                message = f"deadline of task {self.name!r} is 0 s: give a positive number, or None"
                raise errors.ArgumentError(message, name="deadline")
        if type(self.profile) is not Profile:
            require_profile(self.profile, self.name)


class Prepared:
    """A launch that `Scheduler.prepare` has checked once, for many submissions.

    Attributes
    ----------
    forms : object
        The compiled launch of the first task that an executor has run; None until then.
    """

    __slots__ = ("forms", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        task.prepared = self
        self.forms: Any = None

    def new_task(self) -> Task:
        """Return one more task of the launch, whose fields were checked when it was prepared."""
        task = copy.copy(self.task)
        task.cut = None
        if task.known is not None:
            task.profile = task.known.profile
        return task


@dataclass(eq=False)
class Request:
    """An application: tasks in order, of which only the head competes (claim 1 of the source).

    Attributes
    ----------
    name : str
    tasks : sequence of Task
    arrival : float
        Seconds since the executor was made.
    first : int or None
        Number of its first task, where the caller numbers tasks; the others follow. No task that has not ended may
        have one of these. None: the scheduler numbers them.
    """

    name: str
    tasks: Sequence[Task]
    arrival: float = 0.0
    first: int | None = None

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
    priority : int
        Priority of the stream; larger is sooner.
    plain : bool
        Launch the untransformed kernel, which cannot be preempted (left-over, and kernels that cannot be transformed).
    """

    workers: int | None = None
    priority: int = 0
    plain: bool = False


@dataclass(eq=False)
class Job:
    """A task's record in the scheduler: what policies see and the scheduler alone changes.

    Attributes
    ----------
    priority : int
        That of its task, as far as it counts (`Tenant.ceiling`).
    arrival : float
        When it could first have been launched: the request's arrival, or the end of the task before it.
    since : float
        When it last entered its state.
    done : int
        Blocks that have ended, as the executor last said.
    alone : bool
        Whether it has had the whole device since its launch, so that its time says what it takes alone.
    ran : float
        Seconds in which it was resident, up to `since`.
    preemptions : int
    placement : Placement or None
        Where it runs; None while it waits.
    number : int
        Its place in the order of submission: what logs call it, and what ties are broken by.
    after : tuple of int
        Numbers of the tasks whose data it waits for, or waited for.
    handle : Handle or None
        The future of its submitter, until it has ended.
    train : Train or None
        What it is in, behind a running job; None where it does not wait for the end of one.
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
    alone: bool = False
    priority: int = 0
    after: tuple[int, ...] = ()
    handle: Any = None
    train: Train | None = None

    @property
    def needs(self) -> int:
        """Bytes of free memory that it is to have."""
        return self.task.memory - self.task.there

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


class Train(deque[Job]):
    """Jobs behind a running one, in the order in which they are to begin.

    Attributes
    ----------
    given : int
        How many of them, the first ones, the executor has (`Executor.launch_behind`). The others wait for their turn
        in the scheduler.
    """

    given = 0


def require_profile(profile: Any, task: str) -> Profile:
    """Return the profile of a task. Raises `ArgumentError` where it is something else."""
    if not isinstance(profile, Profile):
        raise errors.ArgumentError(f"profile of task {task!r} is {shown(profile)}: give a Profile", name="profile")
    return profile


def checked_size(size: Any) -> Any:
    """Return the size of a task. Raises `ArgumentError` where it is no mapping, and not None."""
    if size is not None and not isinstance(size, Mapping):
        raise errors.ArgumentError(f"size is {size!r:.60}: give names and numbers", name="size")
    return size


def _require_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise errors.ArgumentError(f"{name} of a task is {shown(value)}: give a string", name=name)
