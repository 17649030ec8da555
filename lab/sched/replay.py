"""Replay: a trace through an executor, in virtual or in real time."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from warpwell import errors
from warpwell.scheduler.extend import Core, Job, Log, Request, Task

from .metrics import Metrics, measure
from .simulator import Simulator


class ReplayResult(NamedTuple):
    """The outcome of a replay.

    Attributes
    ----------
    jobs : list of Job
        In order of submission.
    log : Log
    alone : callable
        Returns the solo seconds of a task.
    steps : array
        Wall time of each step of the scheduler, in seconds.
    rejected : list of tuple
        Requests that the scheduler rejected, each with its error.
    """

    jobs: list[Job]
    log: Log
    alone: Callable[[Task], float | None]
    steps: array[float]
    rejected: list[tuple[Request, errors.WarpwellError]]

    def metrics(self) -> Metrics:
        """Return the metrics of the run."""
        return measure(self.jobs, self.log, alone=self.alone, steps=self.steps)


def replay(
    requests: Iterable[Request], core: Core, *, alone: Callable[[Task], float | None] | None = None
) -> ReplayResult:
    """Submit requests when they arrive, and let the scheduler work until all have ended.

    Parameters
    ----------
    requests : iterable of Request
        In any order. Arrivals are in seconds of the executor's clock.
    core : Core
        A new core.
    alone : callable, optional
        Returns the solo seconds of a task; by default, the time in the executor's true profile.

    Raises
    ------
    SchedulerError
        Tasks wait although the device is idle and no request will arrive, and the policy does not launch them.
    """
    executor, clock = core.executor, time.perf_counter
    truth = executor.truth if isinstance(executor, Simulator) else attrgetter("profile")
    result = ReplayResult([], core.log, alone or (lambda task: truth(task).seconds), array("d"), [])
    pending = deque(sorted(requests, key=attrgetter("arrival")))
    while pending or core.busy:
        now = executor.now()
        while pending and pending[0].arrival <= now:
            request = pending.popleft()
            try:
                result.jobs.extend(core.submit(request))
            except (errors.SchedulerError, errors.QuotaError) as error:
                result.rejected.append((request, error))
        start = clock()
        until = core.step()
        result.steps.append(clock() - start)
        if pending:
            until = pending[0].arrival if until is None else min(until, pending[0].arrival)
        elif not core.busy:
            break
        elif until is None and not core.running:
            message = (
                f"policy {core.policy.name!r} lets {len(core.waiting)} tasks wait although the device is idle: fix it"
            )
            raise errors.SchedulerError(message)
        executor.wait(until)
    return result
