"""Arrivals of requests, from public traces.

Azure: inferences of large language models (public data set of 2023, described in Splitwise, ISCA 2024).
Alibaba: pods of a GPU cluster, with priorities (cluster-trace-gpu-v2023, ``openb_pod_list_*.csv``).
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import numpy as np

from warpwell import errors

from . import rows
from .trace import Arrivals

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
ALIBABA = (
    *("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase"),
    *("creation_time", "deletion_time", "scheduled_time"),
)
PRIORITIES = {"LS": 1, "Guaranteed": 1, "Burstable": 0, "BE": 0}
"""Latency-sensitive pods are urgent, best-effort ones are not."""


def arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Read the arrivals of Azure's or Alibaba's trace.

    Raises
    ------
    MissingFileError, FormatError
    """
    header = set(rows.header_of(path))
    if len(header & set(AZURE)) > 1:
        return read_azure(path)
    if len(header & set(ALIBABA)) > 2:
        return read_alibaba(path)
    kinds = f"{','.join(AZURE)} (Azure) or {','.join(ALIBABA)} (Alibaba)"
    raise errors.FormatError(f"{path} has no arrivals: its first line must be {kinds}", path=path)


def read_azure(path: str | os.PathLike[str]) -> Arrivals:
    """Read the arrivals of inferences; the counts of tokens are checked and not used.

    Raises
    ------
    MissingFileError, FormatError
    """
    times = []
    with rows.opened(path) as text:
        for row in rows.read(text, path, AZURE):
            for column in AZURE[1:]:
                row.integer(column)
            # Seven decimals, one more than Python's times have.
            date, _, fraction = row["TIMESTAMP"].strip().partition(".")
            try:
                moment = datetime.fromisoformat(date)
                times.append((moment - datetime(2000, 1, 1)).total_seconds() + float(f"0.{fraction or 0}"))
            except (ValueError, TypeError) as error:
                raise row.error("TIMESTAMP", "a time such as 2023-11-16 18:15:46.6805900") from error
    if not times:
        raise errors.FormatError(f"{path} has no arrivals: give a trace with rows", path=path)
    notes = {"application": "drawn with equal chances (the trace has tokens, not kernels)"}
    ordered = np.sort(np.array(times))
    return Arrivals(Path(path).name, ordered - ordered[0], notes=notes)


def read_alibaba(path: str | os.PathLike[str]) -> Arrivals:
    """Read the arrivals and priorities of pods that request a GPU.

    Raises
    ------
    MissingFileError, FormatError
    """
    found: list[tuple[float, int]] = []
    left_out = 0
    with rows.opened(path) as text:
        for row in rows.read(text, path, ALIBABA):
            time, count = row.number("creation_time"), row.integer("num_gpu")
            if row["qos"] not in PRIORITIES:
                raise row.error("qos", f"one of {', '.join(PRIORITIES)}")
            if count:
                found.append((time, PRIORITIES[row["qos"]]))
            left_out += not count
    if not found:
        raise errors.FormatError(f"{path} has no pods with a GPU: give a trace with rows", path=path)
    found.sort(key=lambda entry: entry[0])
    times = np.array([time for time, _ in found])
    notes = {
        "application": "drawn with equal chances (the trace has pods, not kernels)",
        "pods without a GPU": f"{left_out} left out",
    }
    return Arrivals(Path(path).name, times - times[0], np.array([p for _, p in found], dtype=np.int64), notes)
