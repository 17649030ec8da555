"""Metrics of a run, from its jobs and its log; the same for a simulation and for hardware.

Eyerman and Eeckhout (IEEE Micro 2008) define the terms. They are taken over requests, which are the programs here: a
request is a chain of kernels, of which only the head competes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from warpwell.cli._common import Output
from warpwell.scheduler.extend import Event, Job, Request, State, Task
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
    """Metrics of a run; a value without measurements is nan.

    Attributes
    ----------
    stp : float
        Sum of the solo times of the completed kernels, over the makespan. On a backlogged trace, this is the mean sum
        of normalized IPC. On an open trace below saturation, it equals the load for every policy that keeps up.
    antt : float
        Mean of turnaround over solo time, of requests. At least 1.
    fairness : float
        Smallest over largest normalized progress (solo time over turnaround) among programs: requests of one name
        count as one, with their mean.
    jain : float
        Jain's index of the same.
    makespan : float
        Seconds from the first arrival to the last end.
    requests, kernels : int
        Number of completed requests and kernels.
    failed : int
        Kernels that failed or were cancelled.
    turnaround : dict
        `Turnaround` of kernels by class: "memory", "compute", "unknown". A kernel arrives when its predecessor ends.
    requests_by_priority : dict
        `Turnaround` of requests by priority of their first kernel.
    preemptions : int
    preemption_p50, preemption_p99 : float
        Seconds from a preemption to the time at which the kernel has left.
    holds : int
        Preemptions that were considered and declined.
    decisions : int
        Steps of the scheduler.
    decision_mean, decision_p99 : float
        Seconds of wall time of a step.
    """

    stp: float
    antt: float
    fairness: float
    jain: float
    makespan: float
    requests: int
    kernels: int
    failed: int
    turnaround: dict[str, Turnaround] = field(default_factory=dict)
    requests_by_priority: dict[int, Turnaround] = field(default_factory=dict)
    preemptions: int = 0
    preemption_p50: float = math.nan
    preemption_p99: float = math.nan
    holds: int = 0
    decisions: int = 0
    decision_mean: float = math.nan
    decision_p99: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with None for nan."""
        return {key: _plain(value) for key, value in asdict(self).items()}


NEEDED = frozenset({"preempt", "stop", "hold"})
"""Types of the events that metrics are computed from."""


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
        The log of the run.
    alone : callable, optional
        Returns the solo seconds of a task, measured with the untransformed kernel. `Profile.seconds` by default. If it
        returns None, the task counts in no metric of solo times.
    steps : sequence of float
        Wall time of each step of the scheduler, in seconds.
    """
    alone = alone or (lambda task: task.profile.seconds)
    jobs = list(jobs)
    by_kind: dict[str, list[float]] = defaultdict(list)
    requests: dict[Request, list[tuple[Job, float | None]]] = {}
    total = 0.0
    for job in jobs:
        seconds = alone(job.task) if job.state is DONE else None
        requests.setdefault(job.request, []).append((job, seconds))
        total += seconds or 0.0
        if job.state is DONE and job.ended is not None:
            kind = job.task.profile.kind
            by_kind["unknown" if kind is None else kind.value].append(job.ended - job.arrival)
    ends = [job.ended for job in jobs if job.ended is not None]
    makespan = max(ends) - min(job.request.arrival for job in jobs) if ends else 0.0
    mean, p99 = (float(np.mean(steps)), float(np.percentile(steps, 99))) if len(steps) else (math.nan, math.nan)
    return Metrics(
        makespan=makespan,
        stp=total / makespan if makespan else 0.0,
        kernels=sum(map(len, by_kind.values())),
        failed=sum(job.state in (State.FAILED, State.CANCELLED) for job in jobs),
        turnaround={name: turnaround(by_kind[name]) for name in sorted(by_kind)},
        preemptions=sum(job.preemptions for job in jobs),
        decisions=len(steps),
        decision_mean=mean,
        decision_p99=p99,
        **_measure_requests(requests),
        **_measure_events(events),
    )


def turnaround(seconds: Sequence[float]) -> Turnaround:
    """Return percentiles (linear interpolation) of turnaround times."""
    return Turnaround(len(seconds), *np.percentile(seconds, (50, 95, 99)).tolist())


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1/n if one value has everything; 1 without values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _measure_requests(requests: dict[Request, list[tuple[Job, float | None]]]) -> dict[str, Any]:
    """Return the metrics of requests; each job comes with its solo time, if known."""
    slowdowns: list[float] = []
    progress: dict[str, list[float]] = defaultdict(list)
    by_priority: dict[int, list[float]] = defaultdict(list)
    for request, jobs in requests.items():
        if any([job.state is not DONE for job, _ in jobs]):
            continue
        took = max([job.ended or 0.0 for job, _ in jobs]) - request.arrival
        by_priority[jobs[0][0].task.priority].append(took)
        times = [seconds for _, seconds in jobs]
        solo = sum(seconds for seconds in times if seconds is not None)
        if None not in times and solo > 0 and took > 0:
            slowdowns.append(took / solo)
            progress[request.name].append(solo / took)
    means = [float(np.mean(times)) for times in progress.values()]
    return {
        "requests": sum(map(len, by_priority.values())),
        "antt": float(np.mean(slowdowns)) if slowdowns else math.nan,
        "fairness": min(means) / max(means) if means else math.nan,
        "jain": jain(means),
        "requests_by_priority": {level: turnaround(by_priority[level]) for level in sorted(by_priority)},
    }


def _measure_events(events: Iterable[Event]) -> dict[str, Any]:
    requested: dict[int, float] = {}
    latencies = []
    holds = 0
    for event in events:
        if event.kind == "preempt":
            requested[event.task] = event.time
        elif event.kind == "stop" and event.task in requested:
            latencies.append(event.time - requested.pop(event.task))
        holds += event.kind == "hold"
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if latencies else (math.nan, math.nan)
    return {"holds": holds, "preemption_p50": p50, "preemption_p99": p99}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def print_table(output: Output, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print metrics by policy, as `Metrics.as_dict` returns them."""
    classes = sorted({name for values in found.values() for name in values["turnaround"]})
    levels = sorted({level for values in found.values() for level in values["requests_by_priority"]}, key=int)
    heads = ["policy", "STP", "ANTT", "fairness", "Jain", "makespan\ns"]
    heads += [f"p99 {name}\nkernel, ms" for name in classes] + [f"p99 priority {n}\nrequest, ms" for n in levels]
    rows = []
    for name, values in found.items():
        cells = [_cell(values[key]) for key in ("stp", "antt", "fairness", "jain", "makespan")]
        cells += [_cell(values["turnaround"].get(c, {}).get("p99"), 1e3) for c in classes]
        cells += [_cell(values["requests_by_priority"].get(n, {}).get("p99"), 1e3) for n in levels]
        preempted = f"{values['preemptions']:,}", _cell(values["preemption_p50"], 1e6)
        rows.append((name, *cells, *preempted, _cell(values["decision_mean"], 1e6)))
    output.table("Policies", [*heads, "preempted", "in us\n(p50)", "decision\nus"], rows)


def _cell(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.3f}"
