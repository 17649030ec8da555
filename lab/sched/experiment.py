"""Experiment: policies on a workload in the simulator."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell._check import checked_integer, checked_number
from warpwell.cli._common import new_file
from warpwell.scheduler.decision import SOURCE
from warpwell.scheduler.extend import Capacity, Core, Log, SourceModel

from .metrics import NEEDED
from .policies import NAMES, make_policy
from .rates import ClassTable, Matrix, RateModel
from .replay import ReplayResult, replay
from .simulator import HostDelays, Simulator
from .traces.recipe import Recipe
from .traces.trace import Trace

ERROR = 0.05
"""Default of the median relative error of predicted times: the predictor's goal for known applications."""


@dataclass(frozen=True)
class Experiment:
    """The inputs of a run as plain data: equal experiments have equal logs.

    Attributes
    ----------
    recipe : Recipe
        The workload.
    matrix : str or None
        File of measured pairs; without one, the class table has the rates.
    mode : {"switch", "drain"}
        How the simulated device preempts; see `Simulator`.
    limit : int
        Kernels that may run at the same time.
    error : float
        Median relative error of predicted times.
    device : Capacity or None
        The simulated device; the device of the workload by default.
    model : SourceModel
        Constants of the source's formula.
    host : float
        Host time of a decision with its launch in seconds; see `HostDelays.of`.
    """

    recipe: Recipe = field(default_factory=Recipe)
    matrix: str | None = None
    mode: str = "switch"
    limit: int = 2
    error: float = ERROR
    device: Capacity | None = None
    model: SourceModel = SOURCE
    host: float = 0.0

    def __post_init__(self) -> None:
        checked_number(self.error, "error", maximum=1e6)
        checked_integer(self.limit, "limit")

    def rates(self, capacity: Capacity) -> RateModel:
        """Return the rates of kernels that run together.

        Raises
        ------
        MissingFileError, FormatError
            The file of measured pairs does not exist or is damaged.
        """
        table = ClassTable(capacity)
        return table if self.matrix is None else Matrix.read(self.matrix, table)

    def run(self, name: str, workload: Trace | None = None, *, log: Log | None = None) -> ReplayResult:
        """Replay a workload (default: the recipe) under a policy; the log describes the run."""
        workload = workload or self.recipe.make()
        capacity = self.device or workload.capacity
        requests, truth = workload.requests(self.error, self.recipe.seed)
        table, host = self.rates(capacity), HostDelays.of(self.host)
        simulator = Simulator(table, capacity, self.model, self.mode, self.recipe.seed, truth=truth, host=host)
        options: dict[str, Any] = {"source": {"model": self.model}, "chimera": {"idempotent": workload.idempotent}}
        core = Core(simulator, make_policy(name, **options.get(name, {})), limit=self.limit, rates=table, log=log)
        core.log.about = {**self.describe(workload), "policy": name, "rates": table.name}
        is_enabled = gc.isenabled()
        gc.disable()  # A run creates millions of objects, hardly any of them in cycles.
        try:
            return replay(requests, core)
        finally:
            if is_enabled:
                gc.enable()

    def metrics(self, name: str, workload: Trace, log: Path | None = None) -> dict[str, Any]:
        """Run a policy, write its log if a path is given, and return its metrics as plain data."""
        result = self.run(name, workload, log=Log(NEEDED) if log is None else None)
        if log is not None:
            write_log(result.log, log)
        rejected = {"rejected": len(result.rejected)} if result.rejected else {}
        return {**result.metrics().as_dict(), "rates": result.log.about["rates"], **rejected}

    def describe(self, workload: Trace) -> dict[str, Any]:
        """Return a description of the run as plain data."""
        capacity = self.device or workload.capacity
        return {
            **workload.describe(),
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


def chosen(names: str) -> list[str]:
    """Return the policies of a list such as ``source,lanes``, or all of them.

    Raises
    ------
    ArgumentError
        A name is unknown, or the list is empty.
    """
    found = list(NAMES) if names == "all" else list(dict.fromkeys(n.strip() for n in names.split(",") if n.strip()))
    if not found:
        raise errors.ArgumentError(f"no policy named: expected some of {', '.join(NAMES)}, or all", name="policy")
    for name in found:
        make_policy(name)
    return found


def file_of(path: str, option: str, name: str, several: bool) -> Path:
    """Return the path of a policy's file: NAME.POLICY.SUFFIX if several policies have one each.

    Raises
    ------
    MissingFileError
        The folder does not exist.
    ArgumentError
        The path is a folder, or not writable.
    """
    target = new_file(path, option)
    return target.with_name(f"{target.stem}.{name}{target.suffix}") if several else target


def write_log(log: Log, path: Path) -> None:
    """Write a log to a file."""
    with path.open("w", encoding="utf-8") as stream:
        log.write(stream)
