"""Azure: arrivals of LLM inferences (Azure public data set, 2023, described in Splitwise, ISCA 2024)."""

from __future__ import annotations

import os
from datetime import datetime

import numpy as np

from ... import errors
from . import rows
from .workload import Arrivals

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def arrivals(path: str | os.PathLike[str]) -> Arrivals:
    """Read when requests arrived; the counts of tokens are checked, and of no use here.

    Raises
    ------
    MissingFileError, FormatError
    """
    times: list[float] = []
    epoch = None
    with rows.opened(path) as text:
        for line, row in rows.read(text, path, COLUMNS):
            for column in COLUMNS[1:]:
                rows.whole(row, column, line, path)
            stamp = _seconds(row["TIMESTAMP"], line, path)
            epoch = stamp if epoch is None else epoch
            times.append(stamp - epoch)
    if not times:
        raise errors.FormatError(f"{path} has no arrivals: give a trace with rows", path=path)
    ordered = np.sort(np.array(times, dtype=np.float64))
    return Arrivals(rows.name_of(path), ordered - ordered[0],
                    notes={"application": "drawn with equal chances (the trace has tokens, not kernels)"})  # fmt: skip


def _seconds(stamp: str, line: int, path: str | os.PathLike[str]) -> float:
    """Return seconds of a time such as ``2023-11-16 18:15:46.6805900``: seven decimals, one more than Python takes."""
    whole, _, fraction = stamp.strip().partition(".")
    try:
        if fraction and not fraction.isdigit():
            raise ValueError(stamp)
        moment = datetime.fromisoformat(whole)
        return (moment - datetime(2000, 1, 1)).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, TypeError) as error:
        message = f"{path}, line {line}: TIMESTAMP is {stamp!r}; give a time such as 2023-11-16 18:15:46.68"
        raise errors.FormatError(message, path=path) from error
