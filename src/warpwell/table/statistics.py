"""`Blocks`: which blocks of 8,192 rows a query may leave out, by the least and the greatest value of each.

A block is left out only if no row of it can match. Nulls match nothing; a block with NaN stays, since NaN lies between
no least and greatest; so do the blocks of runs without statistics. Zeros of both signs are one value to every filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .column import Column, ColumnRun
from .column_files import HAS_NAN, HAS_NULL, STATISTICS_ROWS
from .key_sets import Flips
from .layout import storage_of
from .library import arrow
from .reading import Reads

Ranges = list[tuple[int, int]]
"""Rows [first, end) of a table, ascending."""
Kept = NDArray[np.bool_]


class Blocks:
    """The blocks of a column's runs, in order, and which of them may have rows that match.

    Parameters
    ----------
    runs : sequence of ColumnRun
        Of any column of the table that has blocks: each begins new ones.
    """

    def __init__(self, runs: Sequence[ColumnRun]) -> None:
        counts = [-(-run.rows // STATISTICS_ROWS) for run in runs]
        self.edges = np.cumsum([0, *counts])
        """The first block of each run, and how many there are."""
        self._runs = list(runs)
        self.kept: Kept = np.ones(int(self.edges[-1]), np.bool_)

    @property
    def all(self) -> bool:
        """Whether no block is left out."""
        return bool(self.kept.all())

    def of_run(self, number: int) -> Kept:
        """Return which blocks of a run are kept."""
        return self.kept[self.edges[number] : self.edges[number + 1]]

    def ranges(self, end: int) -> Ranges:
        """Return the rows of the blocks that are kept, below row `end`; neighbours are one range."""
        found: Ranges = []
        for number, run in enumerate(self._runs):
            for first, last in spans(self.of_run(number)):
                start, stop = run.first + first, min(run.first + min(last, run.rows), end)
                if found and found[-1][1] == start:
                    found[-1] = found[-1][0], stop
                elif start < stop:
                    found.append((start, stop))
        return [(start, stop) for start, stop in found if start < stop]


def spans(kept: Kept) -> list[tuple[int, int]]:
    """Return the rows of the blocks of a run that are kept, from its first: may go beyond its last block's end."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], kept.astype(np.int8), [0])))) * STATISTICS_ROWS
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def statistics_of(column: Column, run: ColumnRun, reads: Reads) -> NDArray[Any] | None:
    """Return the records of a run's blocks, or None: there are none, or only one block, which is as soon read."""
    extent = run.statistics
    if extent is None or run.rows <= STATISTICS_ROWS:
        return None
    reads.whole(column.name, extent)
    found = extent.numpy().copy()
    extent.file.require()  # zeros of a file that was cut would leave rows out
    return found


def blocks_of(column: Column, kept_of: Callable[[ColumnRun, NDArray[Any]], Kept], reads: Reads) -> Kept:
    """Return which blocks of a column may match, by a function of a run and its records."""
    parts: list[Kept] = []
    for run in column.runs:
        records = statistics_of(column, run, reads)
        if records is None:
            parts.append(np.ones(-(-run.rows // STATISTICS_ROWS), np.bool_))
        else:
            parts.append(kept_of(run, records) | (records["flags"] & HAS_NAN != 0))
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def by_keys(records: NDArray[Any], flips: Flips) -> Kept:
    """Return which blocks have a key between their least and greatest that is in a set."""
    least, greatest = _keys(records["least"]), _keys(records["greatest"])
    edges = np.array([min(max(flip, -(1 << 63)), (1 << 63) - 1) for flip in flips], np.int64)
    edges = edges[: len([flip for flip in flips if flip < 1 << 63])]  # no key reaches the others
    below = np.searchsorted(edges, least, "right")
    return np.asarray(((below % 2 == 1) | (np.searchsorted(edges, greatest, "right") > below)) & (least <= greatest))


def by_codes(records: NDArray[Any], matches: NDArray[np.bool_], null: bool) -> Kept:
    """Return which blocks have a code between least and greatest that matches; a null matches if `null` says so."""
    before = np.concatenate(([0], np.cumsum(matches)))
    most = len(matches)
    least = np.minimum(records["least"].astype(np.int64), most)
    end = np.minimum(records["greatest"].astype(np.int64) + 1, most)
    found = before[np.maximum(end, least)] > before[least]
    return found | ((records["flags"] & HAS_NULL != 0) if null else False)


def values_of(run: ColumnRun, items: NDArray[Any]) -> Any:
    """Return leasts or greatests as a `pyarrow.Array` of the run's type."""
    data = arrow().py_buffer(np.ascontiguousarray(items))
    return arrow().Array.from_buffers(storage_of(run.type), len(items), [None, data])


def _keys(items: NDArray[Any]) -> NDArray[np.int64]:
    """Return the keys of numbers, as `key_sets` defines them."""
    bits = 8 * items.dtype.itemsize
    raw = np.ascontiguousarray(items).view(f"<i{items.dtype.itemsize}").astype(np.int64)
    if items.dtype.kind == "f":
        return np.where(raw < 0, raw ^ ((1 << (bits - 1)) - 1), raw)
    if items.dtype.kind == "u":
        raw = np.ascontiguousarray(items).astype(np.uint64).view(np.int64)
        return raw - (1 << (bits - 1)) if bits < 64 else raw ^ np.int64(-(1 << 63))
    return raw
