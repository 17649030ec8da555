"""Recipe: the parameters of a trace; it reads the files and makes the trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from warpwell import errors
from warpwell._check import checked_integer, checked_number
from warpwell.scheduler.extend import Capacity

from . import orion, rows, synthetic, table
from .arrivals import arrivals
from .trace import Arrival, Trace, compose, select

INFERENCE = "*_fwd"
"""Orion's files of inferences; the others are iterations of training (forward and backward)."""

CAPACITIES = {"h100": Capacity(), "v100": orion.V100}
"""Devices by name."""


@dataclass(frozen=True)
class Recipe:
    """The parameters of a trace as plain data: equal recipes make equal traces.

    Attributes
    ----------
    trace : str or None
        Orion's profiles, or a table; None: a built-in mix.
    arrivals : str or None
        Azure's or Alibaba's trace; None: Poisson, or the arrivals of a table.
    mix : str
        Built-in mix.
    models : str
        Pattern of names of applications, from which requests are drawn.
    kernels : int
        Minimum number of kernels, except for a table.
    load : float or None
        Sum of all solo times over the time in which the kernels arrive; inf: all at once. None: 1.5, or the load of a
        table.
    urgent : float
        Share of requests of priority 1, if the arrivals have no priorities.
    seed : int
    """

    trace: str | None = None
    arrivals: str | None = None
    mix: str = "half"
    models: str | None = None
    kernels: int = 100_000
    load: float | None = None
    urgent: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        checked_integer(self.kernels, "kernels")
        checked_integer(self.seed, "seed", minimum=0)
        checked_number(self.urgent, "urgent", maximum=1.0)
        if self.load is not None and not self.load > 0:
            raise errors.ArgumentError(f"load must be positive, got {self.load}", name="load")

    def make(self) -> Trace:
        """Read the files and make the trace.

        Raises
        ------
        MissingFileError, FormatError, ArgumentError
            A file does not exist or is invalid, or has too few arrivals; a name is unknown.
        """
        if self.trace is not None and _is_table(self.trace):
            return self._of_table(self.trace)
        details: dict[str, object] = {}
        imputed: dict[str, str] = {}
        if self.trace is None:
            candidates, capacity = synthetic.mix(self.mix, self.seed), synthetic.CAPACITY
            name, pattern = f"built-in mix {self.mix}", self.models or "*"
        else:
            candidates, imputed, details["placeholders"] = orion.read(self.trace)
            capacity, name = orion.V100, Path(self.trace).name
            has_inference = any(a.name.endswith(INFERENCE[1:]) for a in candidates)
            pattern = self.models or (INFERENCE if has_inference else "*")
        chosen = select(candidates, pattern)
        when = arrivals(self.arrivals) if self.arrivals else synthetic.poisson(self.kernels, self.seed)
        load = 1.5 if self.load is None else self.load
        plan = compose(chosen, when, kernels=self.kernels, load=load, seed=self.seed, urgent=self.urgent)
        if when.priorities is None:
            imputed["priority"] = f"1 with a chance of {self.urgent:g}, else 0"
        details["not_drawn"] = [a.name for a in candidates if a not in chosen]
        details |= {"applications": [a.name for a in chosen], "arrivals": when.name, "load": load}
        span = float(when.times[len(plan) - 1] - when.times[0])
        details["compressed"] = span / plan[-1].time if plan[-1].time else None
        return Trace(name, plan, capacity, imputed, details)

    def _of_table(self, path: str) -> Trace:
        if self.arrivals is not None:
            raise errors.ArgumentError(f"{path} has the arrivals of its requests: omit --arrivals", name="arrivals")
        found = table.read(path)
        plan = found.arrivals
        if self.load is not None:
            scale = found.load / self.load if found.load < math.inf else 1.0
            plan = [Arrival((a.time - plan[0].time) * scale, *a[1:]) for a in plan]
        names = sorted({a.application.name for a in plan})
        details = {"applications": names, "arrivals": found.name, "load": self.load or found.load}
        return Trace(found.name, plan, found.capacity, found.imputed, details)


def _is_table(path: str) -> bool:
    """Return True for a table, and False for Orion's archives, folders and files."""
    file = Path(path)
    if not file.exists():
        raise errors.MissingFileError(f"{path} does not exist: pass a trace, or omit it for a built-in mix", path=path)
    if file.is_dir() or orion.is_archive(file):
        return False
    return len(set(rows.header_of(path)) & set(orion.COLUMNS)) < 2
