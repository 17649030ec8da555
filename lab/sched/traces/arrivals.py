"""Arrivals: when requests come, from the traces of others.

Azure: inferences of large language models (public data set of 2023, described in Splitwise, ISCA 2024).
Alibaba: pods of a GPU cluster, with priorities (cluster-trace-gpu-v2023, ``openb_pod_list_*.csv``).
"""

from __future__ import annotations

import os
from datetime import datetime

import numpy as np

from warpwell import errors

from . import rows
from .trace import Arrivals

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
ALIBABA = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
)
PRIORITIES = {"LS": 1, "Guaranteed": 1, "Burstable": 0, "BE": 0}
"""Latency-sensitive pods are urgent, best-effort ones are not."""


def arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Read when requests arrive, from Azure's or Alibaba's trace.

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
    """Read when requests arrived; the counts of tokens are checked, and of no use here.

    Raises
    ------
    MissingFileError, FormatError
    """
    times: list[float] = []
    epoch = None
    with rows.opened(path) as text:
        for row in rows.read(text, path, AZURE):
            for column in AZURE[1:]:
                row.whole(column)
            stamp = _azure_seconds(row)
            epoch = stamp if epoch is None else epoch
            times.append(stamp - epoch)
    if not times:
        raise errors.FormatError(f"{path} has no arrivals: give a trace with rows", path=path)
    ordered = np.sort(np.array(times, dtype=np.float64))
    return Arrivals(
        rows.name_of(path),
        ordered - ordered[0],
        notes={"application": "drawn with equal chances (the trace has tokens, not kernels)"},
    )


def _azure_seconds(row: rows.Row) -> float:
    """Return the seconds of a time such as ``2023-11-16 18:15:46.6805900``: seven decimals, one more than Python's."""
    whole, _, fraction = row["TIMESTAMP"].strip().partition(".")
    try:
        if fraction and not fraction.isdigit():
            raise ValueError(fraction)
        moment = datetime.fromisoformat(whole)
        return (moment - datetime(2000, 1, 1)).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, TypeError) as error:
        raise row.wrong("TIMESTAMP", "a time such as 2023-11-16 18:15:46.68") from error


def read_alibaba(path: str | os.PathLike[str]) -> Arrivals:
    """Read when pods that ask for a GPU were created, and how urgent they are.

    Raises
    ------
    MissingFileError, FormatError
    """
    found: list[tuple[float, int]] = []
    left_out = 0
    with rows.opened(path) as text:
        for row in rows.read(text, path, ALIBABA):
            time = row.number("creation_time")
            for column in ("num_gpu", "gpu_milli"):
                row.whole(column)
            if row["qos"] not in PRIORITIES:
                raise row.wrong("qos", f"one of {', '.join(PRIORITIES)}")
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
