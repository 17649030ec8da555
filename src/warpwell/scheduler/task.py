"""`Task`: one kernel launch and its state in a scheduler. A request is a sequence of tasks."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from .. import errors
from .._check import LONGEST, checked_integer, checked_nbytes, checked_number, shown
from .data_order import Access

INT64_MAX = 2**63 - 1
"""Largest integer of a task: policies, logs and services use signed 64-bit integers."""

_AMOUNTS = {"seconds": 1e15, "instructions": 1e30, "miss_rate": 1.0, "bandwidth": 1.0, "compute": 1.0, "need": 1.0}
_COUNTS = ("registers", "shared", "threads", "resident")


class Kind(enum.Enum):
    """The resource that bounds a kernel: memory, or the arithmetic units (section "classes" of the source)."""

    MEMORY = "memory"
    COMPUTE = "compute"

    __hash__ = object.__hash__  # faster than Enum.__hash__; policies hash classes for each bucket


@dataclass(frozen=True)
class Profile:
    """Known or predicted properties of a kernel that runs alone on the whole GPU.

    Attributes
    ----------
    kind : Kind, {"memory", "compute"} or None
        None if the class is unknown: the scheduler probes the kernel first.
    seconds : float or None
        Solo runtime of the unmodified kernel.
    instructions : float or None
        Warp instructions of the whole launch. ``instructions / seconds`` is its solo instruction rate.
    registers, shared : int
        Bytes that a resident block holds: `registers` is 4 times its threads times the allocated registers per thread;
        `shared` is static and dynamic shared memory.
    threads : int
        Threads per block.
    resident : int
        Resident blocks on the whole GPU when the kernel runs alone.
    miss_rate : float
        L2 miss rate, 0 to 1.
    bandwidth : float
        Fraction of the memory bandwidth that the kernel uses alone, 0 to 1.
    compute : float
        Fraction of the issue slots that the kernel uses alone, 0 to 1.
    need : float
        Fraction of the multiprocessors that the kernel needs for its solo speed (``SM_usage`` of Orion), 0 to 1.
    source : str
        Origin of the values: "measured", "predicted" (from other sizes), "cold" (conservative defaults of an unprofiled
        kernel), "imputed", "trace", "given".
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
        if self.kind is not None and type(self.kind) is not Kind:
            try:
                object.__setattr__(self, "kind", Kind(self.kind))
            except ValueError:
                message = f"kind of a profile must be memory, compute or None, got {shown(self.kind)}"
                raise errors.ArgumentError(message, name="kind") from None
        for name, maximum in _AMOUNTS.items():
            value = getattr(self, name)
            if value is not None or maximum == 1:
                object.__setattr__(self, name, checked_number(value, name, maximum=maximum, of="a profile"))
        for name in _COUNTS:
            count = checked_integer(getattr(self, name), name, minimum=0, maximum=INT64_MAX, of="a profile")
            object.__setattr__(self, name, count)


@dataclass(eq=False)
class Task:
    """One launch.

    Attributes
    ----------
    name : str
        Name of the kernel, the key of its history and of its row in the pair matrix.
    blocks : int
        Thread blocks of the launch.
    profile : Profile
        Estimate of the scheduler. A simulator has its own ground-truth profile (see `Simulator`).
    launch, arguments : object
        ``kernel[n]`` and its arguments; None in a simulation.
    tenant : str
    priority : int
        A task with a larger priority runs sooner; default 0. A signed 64-bit integer, limited by the ceiling of the
        tenant (see `Tenant`), which is 8 by default.
    deadline : float or None
        Seconds after arrival, up to 1e9.
    memory : int or str
        Device memory that the task holds from its admission to its end, also while it is preempted; in bytes or as
        "1GiB".
    resident_bytes : int
        Bytes of `memory` that are already in device memory. They count towards the tenant's quota, but need no free
        memory.
    size : dict
        Input sizes by name: features of the predictor.
    whole : str
        Why the kernel cannot be cut into blocks; empty if it can be cut. A kernel that cannot be cut runs unmodified
        (``placement.plain``) and cannot be preempted, and the log has this text (``why["whole"]`` of its "launch").
    number : int
        Number that the scheduler assigns, in order of submission.
    known : KernelRecord or None
        What the scheduler's analyzer has learnt of this code and size (see `warpwell.scheduler.predict.learner`).
    cut : object
        The launch cut into blocks (`Launch.cut`) for the first executor that launches the task; None after its use.
    prepared : Prepared or None
        The state that tasks of the same prepared launch share.
    accesses : sequence of Access
        Memory that the task uses. The task runs after earlier tasks that use the same memory, unless all of them only
        read it.
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
    resident_bytes: int = 0
    size: dict[str, float] = field(default_factory=dict)
    whole: str = ""
    number: int = -1
    known: Any = None
    cut: Any = None
    prepared: Prepared | None = None
    accesses: Sequence[Access] = ()

    def __post_init__(self) -> None:
        # Reject invalid values here: in the scheduler's thread they would end all tasks.
        _require_text(self.name, "name")
        _require_text(self.tenant, "tenant")
        label = f"task {self.name!r}"
        self.blocks = checked_integer(self.blocks, "blocks", maximum=INT64_MAX, of=label)
        self.memory = checked_nbytes(self.memory, "memory", minimum=0, maximum=INT64_MAX, of=label)
        self.priority = checked_integer(self.priority, "priority", minimum=-INT64_MAX - 1, maximum=INT64_MAX, of=label)
        if self.deadline is not None:
            self.deadline = checked_number(self.deadline, "deadline", maximum=LONGEST, of=label)
            if not self.deadline:
                message = f"deadline of task {self.name!r} is 0 s: give a positive number, or None"
                raise errors.ArgumentError(message, name="deadline")
        require_profile(self.profile, self.name)

    def again(self) -> Task:
        """Return another task of the same launch, whose fields have been checked."""
        task = copy.copy(self)
        task.cut = None
        if task.known is not None:
            task.profile = task.known.profile
        return task


class TaskOptions(TypedDict, total=False):
    """Options of a submitted launch; see `Scheduler.submit`."""

    tenant: str
    priority: int
    deadline: float | None
    name: str | None
    memory: int | str | None
    profile: Profile | None
    size: dict[str, float] | None
    order: str


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
        """Return another task of the launch."""
        return self.task.again()


@dataclass(eq=False)
class Request:
    """An application: tasks in order. Only its first unfinished task competes for the device (claim 1 of the source).

    Attributes
    ----------
    name : str
    tasks : sequence of Task
    arrival : float
        Seconds since the executor was created.
    first : int or None
        Number of the first task if the caller numbers tasks; the later tasks get the next numbers. No unfinished task
        may have one of these numbers. None: the scheduler numbers the tasks.
    """

    name: str
    tasks: Sequence[Task]
    arrival: float = 0.0
    first: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise errors.ArgumentError(f"request {self.name!r} has no tasks: pass at least one")
        if not self.arrival >= 0:
            raise errors.ArgumentError(f"request {self.name!r} arrives at {self.arrival} s: give 0 or more")


class State(enum.Enum):
    """State of a task: WAITING, RUNNING, STOPPING (asked to leave), PREEMPTED (waits again), or a final state."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    PREEMPTED = "preempted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__


# Module-level names: the lookup of an enum member takes five times as long.
MEMORY, COMPUTE = Kind.MEMORY, Kind.COMPUTE
WAITING, RUNNING, PREEMPTED, STOPPING = State.WAITING, State.RUNNING, State.PREEMPTED, State.STOPPING
DONE, CANCELLED = State.DONE, State.CANCELLED


@dataclass(frozen=True)
class Placement:
    """How a task is put on the GPU.

    Attributes
    ----------
    workers : int or None
        Maximum number of resident blocks on the whole GPU (the quota); None: no limit.
    priority : int
        Priority of the stream; a stream with a larger priority runs sooner.
    plain : bool
        Launch the unmodified kernel, which cannot be preempted: for the policy left-over, and for kernels that cannot
        be transformed.
    """

    workers: int | None = None
    priority: int = 0
    plain: bool = False


@dataclass(eq=False)
class Job:
    """The state of a task in the scheduler. Policies read it, and only the scheduler changes it.

    Attributes
    ----------
    priority : int
        Priority of the task, limited by `Tenant.ceiling`.
    arrival : float
        Earliest time of a launch: the arrival of the request, or the end of the task before it.
    since : float
        Time of the last change of `state`, or of the end of the preparation that followed a launch.
    prepared : float
        Seconds of compilation and copies between launches and the first blocks. `ran` does not contain them.
    done : int
        Completed blocks, as last reported by the executor.
    alone : bool
        Whether the job has had the whole device since its launch, so that its time is the solo runtime.
    ran : float
        Resident seconds up to `since`.
    preemptions : int
    placement : Placement or None
        Placement of the current launch; None while the job waits.
    number : int
        Position in the order of submission. Logs identify a job by it, and policies break ties by it.
    after : tuple of int
        Numbers of the tasks that the job follows because of their data.
    handle : Handle or None
        Future of the submitter, until the job has ended.
    train : deque of Job or None
        Launch queue that contains the job: the jobs that the executor starts, in order, after a running job. None if
        the job is not queued.
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
    prepared: float = 0.0
    preemptions: int = 0
    placement: Placement | None = None
    error: BaseException | None = None
    number: int = -1
    alone: bool = False
    priority: int = 0
    after: tuple[int, ...] = ()
    handle: Any = None
    train: deque[Job] | None = None

    @property
    def needs(self) -> int:
        """Bytes of free memory that the job must allocate."""
        return self.task.memory - self.task.resident_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether a policy may launch the job."""
        return self.state is WAITING or self.state is PREEMPTED

    @property
    def left(self) -> float:
        """Fraction of the blocks that have not ended."""
        return 1.0 - self.done / self.task.blocks

    @property
    def rest(self) -> float | None:
        """Remaining solo time in seconds; None if it is unknown."""
        seconds = self.task.profile.seconds
        return None if seconds is None else seconds * self.left


def require_profile(profile: Any, task: str) -> Profile:
    """Return the profile of a task. Raise `ArgumentError` if it has another type."""
    if not isinstance(profile, Profile):
        raise errors.ArgumentError(f"profile of task {task!r} is {shown(profile)}: give a Profile", name="profile")
    return profile


def checked_size(size: Any) -> Any:
    """Return the size of a task. Raise `ArgumentError` if it is not a mapping or None."""
    if size is not None and not isinstance(size, Mapping):
        raise errors.ArgumentError(f"size is {size!r:.60}: give names and numbers", name="size")
    return size


def _require_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise errors.ArgumentError(f"{name} of a task is {shown(value)}: give a string", name=name)
