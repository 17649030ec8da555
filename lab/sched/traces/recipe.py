"""Recipe: which kernels, when they arrive and how many; it reads the files and makes the trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warpwell import errors
from warpwell.scheduler import Capacity

from . import orion, rows, synthetic, table
from .arrivals import arrivals
from .trace import Arrival, Arrivals, Trace, compose, select

INFERENCE = "*_fwd"
"""Orion's files of inferences; the others are iterations of training (forward and backward)."""

CAPACITIES = {"h100": Capacity(), "v100": orion.V100}
"""Devices by name."""


@dataclass(frozen=True)
class Recipe:
    """The parameters of a trace; plain data, so that other processes make the same one.

    Attributes
    ----------
    trace : str or None
        Orion's profiles, or a table; None: a built-in mix.
    arrivals : str or None
        Azure's or Alibaba's trace; "poisson" or "bursts"; None: Poisson, or what a table says.
    mix : str
        Built-in mix.
    models : str
        Pattern of names of applications, of which arrivals are drawn.
    kernels : int
        Minimum number of kernels, except for a table.
    load : float or None
        Time that all kernels take alone over the time in which they arrive; inf: all at once. None: 1.5, or as a table
        says.
    urgent : float
        Share of requests of priority 1, where the arrivals tell no priorities.
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

    def make(self) -> Trace:
        """Read the files and make the workload.

        Raises
        ------
        MissingFileError, FormatError, ArgumentError
            A file is not there or not what it should be; a parameter cannot be.
        """
        if self.seed < 0:
            raise errors.ArgumentError(f"seed is {self.seed}: take a number from 0 up", name="seed")
        if self.kernels < 1:  # before arrivals are drawn, which are as many
            raise errors.ArgumentError(f"{self.kernels} kernels: take at least one", name="kernels")
        if self.trace is not None and _is_table(self.trace):
            return self._of_table(self.trace)
        imputed: dict[str, str] = {}
        description: dict[str, object] = {}
        if self.trace is None:
            everything, capacity = synthetic.mix(self.mix, self.seed), synthetic.CAPACITY
            name = f"built-in mix {self.mix}"
            description["mix"] = synthetic.MIXES[self.mix][1]
            chosen = everything if self.models is None else select(everything, self.models)
        else:
            models = orion.read(self.trace)
            everything, capacity, name = models.applications, orion.V100, Path(self.trace).name
            imputed |= models.imputed
            pattern = self.models
            if pattern is None:
                pattern = INFERENCE if any(a.name.endswith(INFERENCE[1:]) for a in everything) else "*"
            chosen = select(everything, pattern)
            description["placeholders"] = models.left_out
            description["not_drawn"] = [a.name for a in everything if a not in chosen]
        when = self._arrivals(len(chosen))
        load = 1.5 if self.load is None else self.load
        plan = compose(chosen, when, kernels=self.kernels, load=load, seed=self.seed, urgent=self.urgent)
        imputed |= when.notes
        if when.priorities is None:
            imputed["priority"] = f"1 with a chance of {self.urgent:g}, else 0"
        description |= {"applications": [a.name for a in chosen], "arrivals": when.name, "load": load}
        span = float(when.times[len(plan) - 1] - when.times[0])
        description["compressed"] = span / plan[-1].time if plan[-1].time else None
        return Trace(name, plan, capacity, imputed, description)

    def _of_table(self, path: str) -> Trace:
        if self.arrivals is not None:
            raise errors.ArgumentError(f"{path} says when its requests arrive: leave --arrivals out", name="arrivals")
        found = table.read(path)
        plan = found.arrivals
        if self.load is not None:
            if not self.load > 0:
                raise errors.ArgumentError(f"load is {self.load}: it must be positive", name="load")
            scale = found.load / self.load if found.load < float("inf") else 1.0
            plan = [Arrival((a.time - plan[0].time) * scale, a.application, a.tenant, a.priority) for a in plan]
        names = sorted({a.application.name for a in plan})
        description = {"applications": names, "arrivals": found.name, "load": self.load or found.load}
        return Trace(found.name, plan, found.capacity, found.imputed, description)

    def _arrivals(self, applications: int) -> Arrivals:
        if self.arrivals in (None, "poisson"):
            return synthetic.poisson(self.kernels, self.seed)
        if self.arrivals == "bursts":
            return synthetic.bursts(self.kernels, self.seed)
        return arrivals(self.arrivals)


def _is_table(path: str) -> bool:
    """Tell our own traces from Orion's archives and files."""
    file = Path(path)
    if not file.exists():
        raise errors.MissingFileError(f"{path} does not exist: give a trace, or none for a built-in mix", path=path)
    if file.is_dir() or orion.is_archive(file):
        return False
    return len(set(rows.header_of(path)) & set(orion.COLUMNS)) < 2
