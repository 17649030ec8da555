"""Replay: a trace through an executor, in virtual or in real time."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from warpwell import errors
from warpwell.scheduler import Core, Job, Log, Request, Task

from .metrics import Metrics, measure
from .simulator import Simulator


@dataclass
class ReplayResult:
    """The outcome of a replay.

    Attributes
    ----------
    jobs : list of Job
        In order of submission.
    log : Log
    steps : array
        Wall time of each step of the scheduler, in seconds.
    rejected : list of tuple
        Requests that were not taken in, each with its error.
    alone : callable
        Seconds that a task takes alone.
    """

    jobs: list[Job]
    log: Log
    alone: Callable[[Task], float | None]
    steps: array[float] = field(default_factory=lambda: array("d"))
    rejected: list[tuple[Request, errors.WarpwellError]] = field(default_factory=list)

    def metrics(self) -> Metrics:
        """Return the metrics of the run."""
        return measure(self.jobs, self.log, alone=self.alone, steps=self.steps)


def replay(
    requests: Iterable[Request],
    core: Core,
    *,
    alone: Callable[[Task], float | None] | None = None,
) -> ReplayResult:
    """Submit requests when they arrive, and let the scheduler work until all have ended.

    Parameters
    ----------
    requests : iterable of Request
        In any order. Arrivals are in seconds of the executor's clock.
    core : Core
        A new one.
    alone : callable, optional
        Seconds that a task takes alone; the true profile of the executor by default.

    Raises
    ------
    SchedulerError
        Something waits, nothing runs or is still to come, and the policy does not launch it.
    """
    executor = core.executor
    order = sorted(requests, key=lambda request: request.arrival)
    truth = executor.truth if isinstance(executor, Simulator) else attrgetter("profile")
    result = ReplayResult([], core.log, alone or (lambda task: truth(task).seconds))
    steps, clock = result.steps, time.perf_counter
    following = 0
    while following < len(order) or core.busy:
        now = executor.now()
        while following < len(order) and order[following].arrival <= now:
            try:
                result.jobs += core.submit(order[following])
            except (errors.SchedulerError, errors.QuotaError) as error:
                result.rejected.append((order[following], error))
            following += 1
        began = clock()
        until = core.step()
        steps.append(clock() - began)
        if following < len(order):
            arrival = order[following].arrival
            until = arrival if until is None else min(until, arrival)
        elif not core.busy:
            break
        elif until is None and not core.running:
            raise errors.SchedulerError(
                f"policy {core.policy.name!r} lets {len(core.waiting)} tasks wait although the device is idle: fix it"
            )
        executor.wait(until)
    return result
