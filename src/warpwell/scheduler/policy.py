"""Policy: decides which tasks run. Pure: no clock, no threads, no random numbers."""

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
        """Return each job's normalized IPC, ipc_shared / ipc_alone, when exactly these run together.

        The order of `jobs` is the order of residency: the first was launched first.
        """


@dataclass
class View:
    """The state of the scheduler that a policy decides on.

    Attributes
    ----------
    now : float
    running : list of Job
        In the order of residency (launched first, first). STOPPING ones are among them until they have left.
    waiting : Waiting
        Heads of requests that could be launched, in order of arrival; preempted ones are among them. `Waiting.heads`
        has the first of each of the policy's buckets, so that a decision need not look at hundreds.
    limit : int
        Kernels that may run at the same time.
    rates : Rates
    cost : callable
        ``cost(victim, stays)``: seconds that a preemption is expected to take (`Executor.cost`).
    capacity : Capacity
    tenants : mapping
        Settings of each tenant (`warpwell.scheduler.tenants`): weight, quota, and use so far.
    overhead : float
        Seconds that a decision with its launches takes (but those into trains), as they were so far.
    trusts : bool
        Whether times that submitters gave are true. If not, a kernel that is only claimed to be short must be
        preemptible.
    trains : mapping
        Of running jobs behind which others were launched (see `Launch`): these, in order.
    followers : list of (Job, Job)
        Jobs that wait for the data of running jobs and of jobs in their trains, with the running job. If no other job
        waits, a policy may launch one unmodified `behind` that running job.
    pairs : Pairs
        How fast kernels ran together, as it was measured; policies that measure it write there. They are better than
        `rates`, which may depend on classes only.
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

    If all places are taken, a job may still be launched unmodified (`Policy.ahead`): it is queued after an unmodified
    job, in the shortest train (`View.trains`), and begins when all jobs before it have ended. One decision may launch
    several short jobs in this way, and the device continues with the next one without the scheduler. Jobs that have not
    begun may still be preempted.

    With `behind`, a job is queued in the train of that running job, whether the two are unmodified or not: its workers
    begin when the workers of that job have left, and `Policy.ahead` does not limit it. When it is the first of its
    train, the policy decides on it. If a job is preempted, the jobs in its train are withdrawn first; a job that is
    launched `behind` it after that takes its place.

    A job that starts behind another one is the youngest: if it must be older than a running job, re-issue that job
    (`Resize.younger`) when it has started.
    """

    job: Job
    placement: Placement = field(default_factory=Placement)
    why: dict[str, Any] = field(default_factory=dict)
    behind: Job | None = None


@dataclass(slots=True)
class Preempt:
    """Make a running job leave: for `newcomer`, which the policy will launch when it has left."""

    job: Job
    mode: str = "drain"
    newcomer: Job | None = None
    why: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Resize:
    """Change a running job's quota; with `younger`, re-issue it, so that it is the last in order of residency."""

    job: Job
    workers: int | None
    why: dict[str, Any] = field(default_factory=dict)
    younger: bool = False


@dataclass(slots=True)
class Hold:
    """Leave things as they are, although a preemption was weighed (for the log); look again after some seconds."""

    job: Job
    why: dict[str, Any] = field(default_factory=dict)
    again: float | None = None


Decision = Launch | Preempt | Resize | Hold


class Policy(ABC):
    """Decides, whenever something arrived, ended or left, and every `period` seconds where it is set.

    Attributes
    ----------
    name : str
        As ``--policy`` has it.
    starves : bool
        Whether a task may wait forever under this policy.
    conserves : bool
        Whether it fills a free place whenever something waits that may be launched. All keep an idle device busy.
    watches : bool
        Whether `Job.done` of running jobs is updated before each decision.
    adjusts : bool
        Whether it is also asked when nothing waits, to give free room to running jobs.
    period : float or None
        Seconds between decisions without an event (aging).
    ahead : int
        Launches that may be in trains, beyond `View.limit`, so that the device has work while the next decision is
        made.
    """

    name: str
    starves: bool = False
    conserves: bool = True
    watches: bool = False
    adjusts: bool = False
    period: float | None = None
    ahead: int = 0

    def bucket(self, job: Job) -> Hashable:
        """Return the part of the waiting list that a job belongs to: in a part, only the first may be chosen.

        By class, and preempted or new.
        """
        return job.task.profile.kind, job.state is State.PREEMPTED

    def key(self, job: Job) -> float:
        """Return the sort key in a bucket, smallest first; ties by number. It must not change while a job waits."""
        return job.arrival

    @abstractmethod
    def decide(self, view: View) -> list[Decision]:
        """Return decisions, in the order in which they are to be carried out.

        The scheduler carries them out, and asks once more as long as something was launched, so a policy may decide one
        thing at a time.
        """

    def ended(self, job: Job, now: float) -> None:  # noqa: B027 - most keep nothing
        """Note that a job has ended, or that a waiting job has another profile: forget figures derived from it."""
