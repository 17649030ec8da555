"""Bound: the most that any schedule of two kernels at a time could get out of a device, by a linear programme."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from warpwell import errors
from warpwell._check import extra
from warpwell.scheduler import Task

if TYPE_CHECKING:
    from .rates import Matrix


def bound(tasks: Iterable[Task], pairs: Matrix) -> float:
    """Return the largest STP that work can have which is there from the beginning.

    Work is taken as a fluid: each measured pair, in each order and with each quota, may run for any time, and each
    kernel alone; changes cost nothing. The times that make all work end soonest are the bound.

    Parameters
    ----------
    tasks : iterable of Task
        With `seconds` in their profiles.
    pairs : Matrix
        Measured pairs.

    Raises
    ------
    ArgumentError
        There are no tasks, one has no time, or SciPy is not installed.
    """
    try:
        from scipy.optimize import linprog  # an extra
    except ImportError as error:
        raise errors.ArgumentError(f"the fluid bound needs SciPy: install {extra('demo')}") from error
    work: dict[str, float] = {}
    for task in tasks:
        if task.profile.seconds is None:
            raise errors.ArgumentError(f"task {task.name!r} has no time: give `seconds` in its profile", name="tasks")
        work[task.name] = work.get(task.name, 0.0) + task.profile.seconds
    if not work:
        raise errors.ArgumentError("no tasks: give at least one", name="tasks")
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
