"""Reads the measurements of ``benchmarks/sched_counts.py`` as samples for the predictor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import errors
from ...study.workloads import WORKLOADS, Application, Step, make
from ..executor import Capacity
from .analyzer import Analyzer
from .counting import Counts, count
from .roofline import Machine, machine_for
from .sample import Sample, sized

_NEEDED = ("app", "kernel", "n", "size", "warps", "instructions", "seconds")


def read_counts(
    path: str | os.PathLike[str],
    *,
    capacity: Capacity | None = None,
    machine: Machine | None = None,
    static: bool = True,
    data: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[list[Sample], str]:
    """Return what was measured of each launch, with its static estimate, and the device's name.

    Parameters
    ----------
    path : str or os.PathLike
        JSON that ``sched_counts.py parse`` wrote.
    capacity : Capacity, optional
    machine : Machine, optional
        By default that of the device that the file names.
    static : bool
        Whether to add static estimates: launches are built once more on the CPU, and counted, not run.
    data : bool
        Whether counts may look at the input's data. On a GPU they cannot, so the default is what a scheduler sees.
    progress : callable, optional
        ``progress(done, total)``.

    Raises
    ------
    MissingFileError, FormatError
    """
    content = _content(path)
    if not isinstance(content.get("machine", {}), dict):
        raise errors.FormatError(f"{path} says nothing of its machine: give what sched_counts.py wrote", path=path)
    device = str(content.get("machine", {}).get("gpu", "unknown"))
    machine = machine or machine_for(device)
    analyzer = Analyzer(capacity=capacity, machine=machine, counter=lambda *launch: _count(*launch, data=data))
    samples = []
    built: Application | None = None
    for number, row in enumerate(content["rows"]):
        place = f"{path}: row {number}"
        if not isinstance(row, dict) or not set(_NEEDED) <= set(row):
            raise errors.FormatError(f"{place} must have {', '.join(_NEEDED)}: is it sched_counts.py's?", path=path)
        if progress is not None:
            progress(number, len(content["rows"]))
        features: dict[str, float] = {}
        if static and row["app"] in WORKLOADS:
            if built is None or (built.workload.name, built.size) != (row["app"], row["n"]):
                built = make(row["app"], int(row["n"]))
            step = _step(built, row["kernel"], row["size"])
            found = None if step is None else analyzer.estimate(step.launch, step.arguments)
            features = {} if found is None else dict(found.features)
        try:
            samples.append(_measured(row, features, analyzer.capacity, analyzer.machine))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise errors.FormatError(f"{place} is damaged: {error}", path=path) from error
    return samples, device


def _content(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise errors.MissingFileError(f"{path} does not exist: give what sched_counts.py wrote", path=path) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise errors.FormatError(f"{path} is not JSON ({error}): give what sched_counts.py wrote", path=path) from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise errors.FormatError(f'{path} has no list "rows": give what sched_counts.py wrote', path=path)
    return content


def _count(launch: Any, arguments: Any, *, data: bool) -> Counts:
    return count(launch, arguments, data=data)


def _step(app: Application, kernel: str, size: dict[str, float]) -> Step | None:
    return next((s for s in app if s.name == kernel and sized(s.size) == sized(size)), None)


def _measured(row: dict[str, Any], static: dict[str, float], capacity: Capacity, machine: Machine) -> Sample:
    seconds, instructions = float(row["seconds"]), float(row["instructions"])
    cycles = float(row.get("cycles") or seconds * capacity.clock)
    moved = row.get("dram_bytes")
    miss = row.get("miss_rate")
    return Sample(
        row["kernel"], sized(row["size"]), int(row["warps"]), static, row["app"], row.get("family", ""),
        instructions, seconds, None if miss is None else _ratio(float(miss)),
        None if moved is None else _ratio(float(moved) / seconds / machine.bandwidth),
        _ratio(instructions / (machine.schedulers * capacity.processors * cycles)),
    )  # fmt: skip


def _ratio(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no ratio")
    return min(1.0, max(0.0, value))
