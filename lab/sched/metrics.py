"""Metrics: figures of a run, made of its jobs; the same for a simulation and for hardware.

Eyerman and Eeckhout (IEEE Micro 2008) define the terms. They are taken over requests, which are the programs here: a
request is a chain of kernels, of which only the head competes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from warpwell.scheduler import Event, Job, Kind, Request, State, Task
from warpwell.scheduler.task import DONE


@dataclass(frozen=True)
class Turnaround:
    """Turnaround times of one class.

    Attributes
    ----------
    count : int
    p50, p95, p99 : float
        Seconds from arrival to end.
    """

    count: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Metrics:
    """Figures of a run.

    Attributes
    ----------
    stp : float
        Sum of the times alone of the kernels that ended, over the makespan. On a backlogged trace this is the mean sum
        of normalized IPC; on an open one below saturation every policy that keeps up has the load.
    antt : float
        Mean of turnaround over time alone, of requests. At least 1.
    fairness : float
        Smallest over largest normalized progress (time alone over turnaround) among programs: requests of one name
        count as one, with their mean.
    jain : float
        Jain's index of the same.
    makespan : float
        Seconds from the first arrival to the last end.
    requests, kernels : int
        That were done.
    failed : int
        Kernels that failed or were cancelled.
    turnaround : dict
        `Turnaround` of kernels by class: "memory", "compute", "unknown". A kernel arrives when its predecessor ends.
    requests_by_priority : dict
        `Turnaround` of requests by priority of their first kernel.
    deadlines, missed : int
        Kernels with a deadline, and how many missed it.
    preemptions : int
    preemption_p50, preemption_p99 : float
        Seconds from a preemption to when the kernel has left. (nan: no preemption.)
    holds : int
        Preemptions that were weighed and not done.
    decisions : int
        Steps of the scheduler.
    decision_mean, decision_p99 : float
        Seconds of wall time that a step took.
    """

    stp: float
    antt: float
    fairness: float
    jain: float
    makespan: float
    requests: int
    kernels: int
    failed: int = 0
    turnaround: dict[str, Turnaround] = field(default_factory=dict)
    requests_by_priority: dict[int, Turnaround] = field(default_factory=dict)
    deadlines: int = 0
    missed: int = 0
    preemptions: int = 0
    preemption_p50: float = math.nan
    preemption_p99: float = math.nan
    holds: int = 0
    decisions: int = 0
    decision_mean: float = math.nan
    decision_p99: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; unknown figures (nan) are None."""
        return {key: _plain(value) for key, value in asdict(self).items()}


NEEDED = frozenset({"preempt", "stop", "hold"})
"""Kinds of events that metrics are made of."""


def measure(
    jobs: Iterable[Job],
    events: Iterable[Event] = (),
    *,
    alone: Callable[[Task], float | None] | None = None,
    steps: Sequence[float] = (),
) -> Metrics:
    """Return the metrics of a run.

    Parameters
    ----------
    jobs : iterable of Job
        All jobs of the run, in order of submission.
    events : iterable of Event
        Its log: preemptions.
    alone : callable, optional
        Seconds that a task takes alone, measured with the untransformed kernel. `Profile.seconds` by default; a task
        for which it is None counts in no figure that needs it.
    steps : sequence of float
        Wall time of each step of the scheduler, in seconds.
    """
    alone = alone or (lambda task: task.profile.seconds)
    jobs = list(jobs)
    by_kind: dict[Kind | None, list[float]] = {None: [], **{kind: [] for kind in Kind}}
    requests: dict[Request, list[tuple[Job, float | None]]] = {}
    total = 0.0
    deadlines = missed = failed = done = 0
    for job in jobs:
        task = job.task
        own = alone(task) if job.state is DONE else None
        requests.setdefault(job.request, []).append((job, own))
        if job.state is not DONE or job.ended is None:
            failed += job.state in (State.FAILED, State.CANCELLED)
            continue
        done += 1
        total += own or 0.0
        took = job.ended - job.arrival
        by_kind[task.profile.kind].append(took)
        if task.deadline is not None:
            deadlines += 1
            missed += took > task.deadline
    by_class = {"unknown" if kind is None else kind.value: times for kind, times in by_kind.items() if times}
    return Metrics(
        makespan=(makespan := _makespan(jobs)),
        stp=total / makespan if makespan else 0.0,
        kernels=done,
        failed=failed,
        turnaround={name: turnaround(by_class[name]) for name in sorted(by_class)},
        deadlines=deadlines,
        missed=missed,
        preemptions=sum(job.preemptions for job in jobs),
        decisions=len(steps),
        decision_mean=float(np.mean(steps)) if len(steps) else math.nan,
        decision_p99=float(np.percentile(steps, 99)) if len(steps) else math.nan,
        **_of_requests(requests),
        **_of_events(events),
    )


def turnaround(seconds: Sequence[float]) -> Turnaround:
    """Return percentiles (linear interpolation) of turnaround times."""
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
    return Turnaround(len(seconds), float(p50), float(p95), float(p99))


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1/n if one has everything; 1 of nothing."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _makespan(jobs: Sequence[Job]) -> float:
    ends = [job.ended for job in jobs if job.ended is not None]
    return max(ends) - min(job.request.arrival for job in jobs) if ends else 0.0


def _of_requests(requests: dict[Request, list[tuple[Job, float | None]]]) -> dict[str, Any]:
    """Return figures of requests; each job has its time alone, where known."""
    slowdowns: list[float] = []
    progress: dict[str, list[float]] = {}
    by_priority: dict[int, list[float]] = {}
    count = 0
    for request, jobs in requests.items():
        if any([job.state is not DONE for job, _ in jobs]):
            continue
        count += 1
        took = max([job.ended or 0.0 for job, _ in jobs]) - request.arrival
        by_priority.setdefault(jobs[0][0].task.priority, []).append(took)
        times = [own for _, own in jobs]
        own = sum(time for time in times if time is not None)
        if None not in times and own > 0 and took > 0:
            slowdowns.append(took / own)
            progress.setdefault(request.name, []).append(own / took)
    means = [float(np.mean(times)) for times in progress.values()]
    return {
        "requests": count,
        "antt": float(np.mean(slowdowns)) if slowdowns else math.nan,
        "fairness": min(means) / max(means) if means else math.nan,
        "jain": jain(means),
        "requests_by_priority": {level: turnaround(by_priority[level]) for level in sorted(by_priority)},
    }


def _of_events(events: Iterable[Event]) -> dict[str, Any]:
    requested: dict[int, float] = {}
    latencies = []
    holds = 0
    for event in events:
        kind = event.kind
        if kind == "preempt":
            requested[event.task] = event.time
        elif kind == "hold":
            holds += 1
        elif kind == "stop":
            if event.task in requested:
                latencies.append(event.time - requested.pop(event.task))
    found: dict[str, Any] = {"holds": holds}
    if latencies:
        p50, p99 = np.percentile(latencies, (50, 99))
        found |= {"preemption_p50": float(p50), "preemption_p99": float(p99)}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
