"""Alibaba: arrivals and priorities of pods in a GPU cluster (cluster-trace-gpu-v2023, ``openb_pod_list_*.csv``)."""

from __future__ import annotations

import os

import numpy as np

from ... import errors
from . import rows
from .workload import Arrivals

COLUMNS = (
    "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase", "creation_time",
    "deletion_time", "scheduled_time",
)  # fmt: skip
PRIORITIES = {"LS": 1, "Guaranteed": 1, "Burstable": 0, "BE": 0}
"""Latency-sensitive pods are urgent, best-effort ones are not."""


def arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Read when pods that ask for a GPU were created, and how urgent they are.

    Raises
    ------
    MissingFileError, FormatError
    """
    found: list[tuple[float, int]] = []
    left_out = 0
    with rows.opened(path) as text:
        for line, row in rows.read(text, path, COLUMNS):
            time = rows.number(row, "creation_time", line, path)
            for column in ("num_gpu", "gpu_milli"):
                rows.whole(row, column, line, path)
            if row["qos"] not in PRIORITIES:
                message = f"{path}, line {line}: qos is {row['qos']!r}; give one of {', '.join(PRIORITIES)}"
                raise errors.FormatError(message, path=path)
            if row["num_gpu"] == "0":
                left_out += 1
            else:
                found.append((time, PRIORITIES[row["qos"]]))
    if not found:
        raise errors.FormatError(f"{path} has no pods with a GPU: give a trace with rows", path=path)
    found.sort(key=lambda entry: entry[0])
    times = np.array([time for time, _ in found], dtype=np.float64)
    notes = {
        "application": "drawn with equal chances (the trace has pods, not kernels)",
        "pods without a GPU": f"{left_out} left out",
    }
    return Arrivals(rows.name_of(path), times - times[0], np.array([p for _, p in found], dtype=np.int64), notes)
