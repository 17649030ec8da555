"""Reads the launches that ``sched_counts.py`` measured under a profiler, as samples for the predictor."""

from __future__ import annotations

import math
import os
from typing import Any

from warpwell import errors
from warpwell.json_file import read_json
from warpwell.scheduler import Capacity
from warpwell.scheduler.executor import Machine
from warpwell.scheduler.predict.peaks import machine_for
from warpwell.scheduler.predict.sample import Sample, sized

ISSUED = 4
"""Maximum number of warp instructions that a multiprocessor issues in a cycle."""


def read_counts(
    path: str | os.PathLike[str], *, capacity: Capacity | None = None, machine: Machine | None = None
) -> tuple[list[Sample], str]:
    """Return a sample of each launch, and the device's name.

    Parameters
    ----------
    path : str or os.PathLike
        JSON that ``sched_counts.py parse`` wrote.
    capacity : Capacity, optional
    machine : Machine, optional
        The machine that the file names by default.

    Raises
    ------
    MissingFileError, FormatError
    """
    content = read_json(path, "a file of sched_counts.py")
    if not isinstance(content.get("rows"), list) or not content["rows"]:
        raise errors.FormatError(f'{path} has no list "rows": give a file of sched_counts.py', path=path)
    if not isinstance(content.get("machine", {}), dict):
        raise errors.FormatError(f"{path} does not name its machine: give a file of sched_counts.py", path=path)
    device = str(content.get("machine", {}).get("gpu", "unknown"))
    machine, capacity = machine or machine_for(device), capacity or Capacity()
    samples = []
    for number, row in enumerate(content["rows"]):
        try:
            samples.append(_measured(row, capacity, machine))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise errors.FormatError(f"{path}: row {number} is damaged: {error!r}", path=path) from error
    return samples, device


def _measured(row: dict[str, Any], capacity: Capacity, machine: Machine) -> Sample:
    seconds, instructions = float(row["seconds"]), float(row["instructions"])
    cycles = float(row.get("cycles") or seconds * capacity.clock)
    moved = row.get("dram_bytes")
    miss = row.get("miss_rate")
    moving = float(row.get("bytes", 0)) / machine.bandwidth
    return Sample(
        row["kernel"],
        sized(row["size"]),
        int(row["warps"]),
        moving,
        row.get("app", ""),
        instructions=instructions,
        seconds=seconds,
        miss_rate=None if miss is None else _ratio(float(miss)),
        bandwidth=None if moved is None else _ratio(float(moved) / seconds / machine.bandwidth),
        compute=_ratio(instructions / (ISSUED * capacity.processors * cycles)),
    )


def _ratio(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a ratio")
    return min(1.0, max(0.0, value))
