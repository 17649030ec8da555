"""Experiment: policies on a workload in the simulator, each a run of its own that other processes can make."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell._check import checked_integer, checked_seconds
from warpwell.scheduler import Capacity, Core, Log, SourceModel
from warpwell.scheduler.decision import SOURCE

from .metrics import NEEDED
from .policies import NAMES, make_policy
from .rates import rates
from .replay import ReplayResult, replay
from .simulator import HostDelays, Simulator
from .traces import Recipe, Trace

ERROR = 0.05
"""Default of the median relative error of predicted times: the predictor's goal for known applications."""


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run is like, as plain data: equal experiments have equal logs.

    Attributes
    ----------
    recipe : Recipe
        The workload.
    rates : {"class", "maxmin", "matrix"}
    matrix : str or None
        File of measured pairs, for "matrix".
    mode : {"switch", "drain"}
        How the simulated device preempts; see `Simulator`.
    limit : int
        Kernels that may run at the same time.
    error : float
        Median relative error of predicted times.
    device : Capacity or None
        None: that of the workload.
    model : SourceModel
        Constants of the source's formula.
    host : float
        Seconds that the host takes for a decision with its launch; see `HostDelays.of`.
    """

    recipe: Recipe = field(default_factory=Recipe)
    rates: str = "class"
    matrix: str | None = None
    mode: str = "switch"
    limit: int = 2
    error: float = ERROR
    device: Capacity | None = None
    model: SourceModel = SOURCE
    host: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.error < float("inf"):
            raise errors.ArgumentError(f"error of predictions is {self.error}: give 0 or more", name="error")
        checked_integer(self.limit, "limit")
        checked_seconds(self.host, "host", zero=True, maximum=1.0)

    def capacity(self, workload: Trace) -> Capacity:
        """Return the simulated device."""
        return self.device or workload.capacity

    def check(self) -> None:
        """Find out, without running anything, whether the rates and the mode can be.

        Raises
        ------
        ArgumentError, MissingFileError, FormatError
        """
        Simulator(rates(self.rates, Capacity(), matrix=self.matrix), mode=self.mode)

    def run(
        self,
        name: str,
        workload: Trace | None = None,
        *,
        log: Log | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> ReplayResult:
        """Replay the workload, or the one of the recipe, under a policy; the log describes the run."""
        workload = workload or self.recipe.make()
        capacity = self.capacity(workload)
        requests, truth = workload.requests(self.error, self.recipe.seed)
        table = rates(self.rates, capacity, matrix=self.matrix)
        host = HostDelays.of(self.host)
        simulator = Simulator(table, capacity, self.model, self.mode, self.recipe.seed, truth=truth, host=host)
        known: dict[str, Any] = {"source": {"model": self.model}, "chimera": {"idempotent": workload.idempotent}}
        options = known.get(name, {})
        core = Core(simulator, make_policy(name, **options), limit=self.limit, rates=table, log=log)
        core.log.about = {**self.about(workload), "policy": name, "rates": table.name}
        return replay(requests, core, progress=progress)

    def about(self, workload: Trace) -> dict[str, Any]:
        """Return a description of the run as plain data."""
        capacity = self.capacity(workload)
        return {
            "workload": workload.name,
            **workload.about,
            "requests": len(workload.arrivals),
            "kernels": workload.kernels,
            "seconds_alone": workload.seconds,
            "imputed": workload.imputed,
            "seed": self.recipe.seed,
            "limit": self.limit,
            "mode": self.mode,
            "prediction_error": self.error,
            "host": self.host,
            "processors": capacity.processors,
            "clock": capacity.clock,
            "cost": self.model.origin,
            "executor": "simulator",
        }


def run_to_dict(
    experiment: Experiment,
    name: str,
    workload: Trace | None = None,
    log: str | os.PathLike[str] | None = None,
    *,
    last: bool = False,
) -> dict[str, Any]:
    """Run a policy, write its log if asked to, and return its metrics as plain data.

    Parameters
    ----------
    experiment : Experiment
    name : str
        The policy.
    workload : Trace, optional
        That of the recipe, where it has been made.
    log : path, optional
    last : bool
        Whether the process ends after it: then it need not free what the run made, one object after the other.
    """
    enabled = gc.isenabled()
    gc.disable()  # a run makes millions of objects, hardly any in cycles
    result = None
    try:
        result = experiment.run(name, workload, log=Log(NEEDED) if log is None else None)
        if last:
            _left.append(result)
        found = {**result.metrics().as_dict(), "rates": result.log.about["rates"]}
        if result.rejected:
            found["rejected"] = len(result.rejected)
        if log is not None:
            with open(log, "w", encoding="utf-8") as stream:
                result.log.write(stream)
        return found
    finally:
        result = None
        if enabled and not last:
            gc.enable()
            gc.collect()


def chosen(names: str) -> list[str]:
    """Return the policies of a list such as ``source,orion``, or all of them.

    Raises
    ------
    ArgumentError
        One of them is unknown, or there is none.
    """
    found = list(NAMES) if names == "all" else list(dict.fromkeys(n.strip() for n in names.split(",") if n.strip()))
    if not found:
        raise errors.ArgumentError(f"no policy named: choose of {', '.join(NAMES)}, or all", name="policy")
    for name in found:
        make_policy(name)
    return found


def log_path(path: str | os.PathLike[str], name: str, several: bool) -> Path:
    """Return where a policy's log goes: one file a policy, NAME.POLICY.SUFFIX, if there are several.

    Raises
    ------
    MissingFileError
        Its folder does not exist.
    ArgumentError
        It is a folder.
    """
    place = Path(path)
    if place.is_dir():
        raise errors.ArgumentError(f"{place} is a folder: give the name of a file", name="path")
    if not place.parent.is_dir():
        message = f"{place.parent} does not exist: create it, or write elsewhere"
        raise errors.MissingFileError(message, path=place.parent)
    return place.with_name(f"{place.stem}.{name}{place.suffix}") if several else place


_left: list[ReplayResult] = []
