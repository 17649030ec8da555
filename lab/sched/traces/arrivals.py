"""Arrivals of requests, from public traces.

Azure: inferences of large language models (public data set of 2023, described in Splitwise, ISCA 2024).
Alibaba: pods of a GPU cluster, with priorities (cluster-trace-gpu-v2023, ``openb_pod_list_*.csv``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
"""Latency-sensitive pods are urgent, best-effort pods are not."""


def arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Read the arrivals of Azure's or Alibaba's trace.

    Raises
    ------
    MissingFileError, FormatError
    """
    header = set(rows.header_of(path))
    is_azure = len(header & set(AZURE)) > 1
    if not is_azure and len(header & set(ALIBABA)) <= 2:
        expected = f"{','.join(AZURE)} (Azure) or {','.join(ALIBABA)} (Alibaba)"
        raise errors.FormatError(f"{path} has no arrivals: its first line must be {expected}", path=path)
    found = sorted(_azure(path) if is_azure else _alibaba(path), key=lambda entry: entry[0])
    if not found:
        raise errors.FormatError(f"{path} has no arrivals: pass a trace with rows", path=path)
    times = np.array([time for time, _ in found])
    priorities = None if is_azure else np.array([priority for _, priority in found], dtype=np.int64)
    return Arrivals(Path(path).name, times - times[0], priorities)


def _azure(path: str | os.PathLike[str]) -> Iterator[tuple[float, int]]:
    """Yield the time of each inference, with priority 0. The counts of tokens are checked and not used."""
    for row in rows.read_file(path, AZURE):
        for column in AZURE[1:]:
            row.integer(column)
        # The times have seven decimals, one more than `datetime` reads.
        date, _, fraction = row["TIMESTAMP"].strip().partition(".")
        try:
            moment = datetime.fromisoformat(date)
            yield (moment - datetime(2000, 1, 1)).total_seconds() + float(f"0.{fraction or 0}"), 0
        except (ValueError, TypeError) as error:
            raise row.error("TIMESTAMP", "a time such as 2023-11-16 18:15:46.6805900") from error


def _alibaba(path: str | os.PathLike[str]) -> Iterator[tuple[float, int]]:
    """Yield the time and priority of each pod that requests a GPU."""
    for row in rows.read_file(path, ALIBABA):
        time, count = row.number("creation_time"), row.integer("num_gpu")
        if row["qos"] not in PRIORITIES:
            raise row.error("qos", f"one of {', '.join(PRIORITIES)}")
        if count:
            yield time, PRIORITIES[row["qos"]]
