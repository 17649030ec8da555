"""Policy: decides which tasks run, without a clock, threads or random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .executor import Capacity
from .predict.pairs import Pairs
from .task import Job, Placement, State
from .waiting import Waiting


class Rates(Protocol):
    """Estimates of how fast kernels run together (`warpwell.scheduler.predict.rates`)."""

    def together(self, jobs: Sequence[Job], placements: Sequence[Placement]) -> list[float]:
        """Return each job's normalized IPC, ipc_shared / ipc_alone, when exactly these jobs run together.

        The order of `jobs` is the order of residency: the first was launched first.
        """


@dataclass
class View:
    """The state of the scheduler that a policy decides on.

    Attributes
    ----------
    now : float
        Time of the executor's clock, in seconds.
    running : list of Job
        Running jobs in the order of residency: the job that was launched first is first. A STOPPING job is in the list
        until it has left the device.
    waiting : Waiting
        Jobs that can be launched, including preempted ones, in order of arrival; of a request, only its first
        unfinished job. `Waiting.heads` returns the first job of each of the policy's buckets, so that a decision need
        not look at hundreds of jobs.
    limit : int
        Maximum number of kernels that run at the same time.
    rates : Rates
    cost : callable
        ``cost(victim, stays)``: seconds that a preemption is expected to take (`Executor.cost`).
    capacity : Capacity
    tenants : mapping
        Settings of each tenant (`warpwell.scheduler.tenants`): weight, quota, and use so far.
    overhead : float
        Decision latency: measured seconds of a decision and its launches, except for launches into launch queues.
    trusts : bool
        True if the policy may rely on times that submitters gave. Otherwise, a kernel whose submitter states that it is
        short must be preemptible.
    trains : mapping
        Launch queues: for each running job, the jobs that were queued after it, in order (see `Launch`).
    followers : list of (Job, Job)
        Pairs of a waiting job and a running job: the first waits only for data of the second, or of a job in its launch
        queue. If no other job waits, a policy may launch such a waiting job unmodified, `behind` the running job.
    pairs : Pairs
        Measured rates of kernels that ran together; policies that measure rates record them here. They are more
        accurate than `rates`, which may depend only on the classes of the kernels.
    """

    now: float
    running: list[Job]
    waiting: Waiting
    limit: int
    rates: Rates
    cost: Callable[[Job, Sequence[Job]], float]
    capacity: Capacity
    tenants: Mapping[str, Any]
    overhead: float = 0.0
    pairs: Pairs = field(default_factory=Pairs)
    trains: Mapping[Job, Sequence[Job]] = field(default_factory=dict)
    trusts: bool = True
    followers: Sequence[tuple[Job, Job]] = ()


@dataclass(slots=True)
class Launch:
    """Put a waiting job on the device.

    At the limit of running kernels, a job may still be launched unmodified (`Policy.ahead`): it is queued after an
    unmodified job, in the shortest launch queue (`View.trains`), and begins when all jobs before it have ended. One
    decision may launch several short jobs in this way, and the device starts one after the other without the scheduler.
    Jobs that have not begun may still be preempted. If the device cannot queue a job, the job still waits, and the
    scheduler skips the later decisions.

    With `behind`, the job enters the launch queue of the running job that `behind` names, whether the two are
    unmodified or not: the workers of the launched job begin when the workers of the running job have left, and
    `Policy.ahead` does not limit such launches. The policy may resize the launched job once it is the first of its
    queue. If a running job is preempted, the jobs in its launch queue are withdrawn first. A job that is launched
    `behind` a job that was asked to leave replaces that job.

    A job that starts behind another one is the youngest job. If a running job must be younger, re-issue that running
    job (`Resize.younger`) after the start.
    """

    job: Job
    placement: Placement = field(default_factory=Placement)
    why: dict[str, Any] = field(default_factory=dict)
    behind: Job | None = None


@dataclass(slots=True)
class Preempt:
    """Preempt a running job for `newcomer`, the arriving job that the policy launches when the running job has left."""

    job: Job
    mode: str = "drain"
    newcomer: Job | None = None
    why: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Resize:
    """Change a running job's quota; with `younger`, re-issue the job, so that it is the last in order of residency."""

    job: Job
    workers: int | None
    why: dict[str, Any] = field(default_factory=dict)
    younger: bool = False


@dataclass(slots=True)
class Hold:
    """Record in the log that a launch or preemption was considered and declined; decide again after `again` seconds."""

    job: Job
    why: dict[str, Any] = field(default_factory=dict)
    again: float | None = None


Decision = Launch | Preempt | Resize | Hold


class Policy(ABC):
    """Decides which jobs run, after each arrival, end or departure of a job, and every `period` seconds if that is set.

    Attributes
    ----------
    name : str
        Value of ``--policy``.
    starves : bool
        True if a task may wait forever under this policy.
    conserves : bool
        True if the policy launches a waiting job whenever fewer kernels run than the limit. Any policy must launch a
        waiting job on an idle device.
    watches : bool
        True if the scheduler updates `Job.done` of running jobs before each decision.
    adjusts : bool
        True if the policy also decides when no job waits, to give free room to running jobs.
    period : float or None
        Seconds between decisions without an event, for aging.
    ahead : int
        Maximum number of launches in launch queues, beyond `View.limit`. They occupy the device while the scheduler
        makes the next decision.
    """

    name: str
    starves: bool = False
    conserves: bool = True
    watches: bool = False
    adjusts: bool = False
    period: float | None = None
    ahead: int = 0

    def bucket(self, job: Job) -> Hashable:
        """Return the bucket of a waiting job: the policy can choose only the first job of a bucket.

        The default has a bucket for each class, and for preempted and new jobs.
        """
        return job.task.profile.kind, job.state is State.PREEMPTED

    def key(self, job: Job) -> float:
        """Return a job's sort key in its bucket, smallest first; ties by number. It is constant while the job waits."""
        return job.arrival

    @abstractmethod
    def decide(self, view: View) -> list[Decision]:
        """Return decisions, in the order in which the scheduler must execute them.

        The scheduler executes the decisions, and calls `decide` again whenever they launched a job. So a policy may
        return one decision at a time.
        """

    def ended(self, job: Job, now: float) -> None:  # noqa: B027 - most keep nothing
        """Discard results that were derived from a job. It has ended, or it waits and has got another profile."""
