"""Bound: the upper bound of the throughput of any schedule of two kernels at a time, by a linear program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from warpwell import errors
from warpwell._check import imported
from warpwell.scheduler.extend import Task

if TYPE_CHECKING:
    from .rates import Matrix


def bound(tasks: Iterable[Task], pairs: Matrix) -> float:
    """Return the largest STP of a backlog of tasks.

    Work is a fluid: each measured pair, in each order and with each quota, and each solo kernel may run for any time,
    and changes cost nothing. The bound is the schedule that completes all work first.

    Parameters
    ----------
    tasks : iterable of Task
        With `seconds` in their profiles.
    pairs : Matrix
        Measured pairs.

    Raises
    ------
    ArgumentError
        There are no tasks, a task has no time, or SciPy is not installed.
    """
    linprog = imported("scipy.optimize", "demo").linprog
    work: dict[str, float] = {}
    for task in tasks:
        if task.profile.seconds is None:
            raise errors.ArgumentError(f"task {task.name!r} has no time: set `seconds` in its profile", name="tasks")
        work[task.name] = work.get(task.name, 0.0) + task.profile.seconds
    if not work:
        raise errors.ArgumentError("tasks is empty: pass at least one task", name="tasks")
    rows = {name: k for k, name in enumerate(work)}
    rates = [*np.eye(len(work))]
    for pair in pairs.pairs:
        if pair.first in rows and pair.second in rows:
            pair_rates = np.zeros(len(work))
            for name, rate in zip((pair.first, pair.second), pair.rates, strict=True):
                pair_rates[rows[name]] += rate
            rates.append(pair_rates)
    found = linprog(np.ones(len(rates)), A_ub=-np.array(rates).T, b_ub=[-seconds for seconds in work.values()])
    return sum(work.values()) / float(found.fun)
