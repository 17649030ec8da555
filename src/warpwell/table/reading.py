"""`IoCounters`: the bytes that a query reads, by column; `read_ranges`, by which columns are read ahead."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ..array.gather import Pieces, fetch_pieces, read_ahead
from .column import Column, ColumnRun
from .extent import Extent

Ranges = list[tuple[int, int]]
"""Rows [first, end) of a table, ascending and disjoint."""
MAX_PIECE_BYTES = 1 << 17
"""Maximum size in bytes of a piece of a range of rows. A piece is looked up in the page cache and read ahead as a
whole."""


@dataclass
class ColumnReads:
    """The bytes that a query reads of a column.

    Attributes
    ----------
    column : str
    wanted : int
        Bytes of the items that the query uses.
    read : int
        Bytes of the reads that contain them, in units of 512 bytes or 4 KiB, with the gaps that are cheaper to read
        than another command.
    commands : int
        Number of these reads.
    from_storage : int
        Bytes of the reads of items that the page cache does not have, or does not have yet. All of them if kernels
        do not read the column from the mapped file: on a GPU, and through a cache.
    """

    column: str
    wanted: int = 0
    read: int = 0
    commands: int = 0
    from_storage: int = 0


class IoCounters:
    """The bytes that a query reads, by column."""

    def __init__(self) -> None:
        self.columns: dict[str, ColumnReads] = {}
        self._lock = threading.Lock()  # several threads may read for one query

    def add(self, column: str, pieces: Iterable[Pieces], *, is_mapped: bool = True) -> None:
        """Add pieces that were fetched, read ahead, or only planned."""
        for each in pieces:
            count = len(each.starts)
            nbytes = each.sizes * count if isinstance(each.sizes, int) else int(each.sizes.sum())
            read = each.from_storage if is_mapped else each.read
            self.add_reads(ColumnReads(column, nbytes, each.read, each.commands, read))

    def add_reads(self, reads: ColumnReads) -> None:
        """Add reads of a column."""
        with self._lock:
            counts = self.columns.setdefault(reads.column, ColumnReads(reads.column))
            for each in fields(ColumnReads)[1:]:
                setattr(counts, each.name, getattr(counts, each.name) + getattr(reads, each.name))

    def listed(self) -> list[ColumnReads]:
        """Return the counts, in the order in which columns were first read."""
        return list(self.columns.values())


def split_ranges(runs: Sequence[ColumnRun], ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of the runs that contain ranges of rows, and these rows relative to the run."""
    for start, stop in ranges:
        number = max(0, bisect_right(runs, start, key=lambda run: run.first) - 1)
        while number < len(runs) and runs[number].first < stop:
            first, end = max(start - runs[number].first, 0), min(stop - runs[number].first, runs[number].rows)
            if end > first:
                yield number, first, end
            number += 1


def set_bits(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the positions of set bits, the lowest bit of each byte first; fast if few bits are set."""
    used = np.flatnonzero(packed != 0)  # `flatnonzero` is several times as fast with booleans
    bits = np.flatnonzero(np.unpackbits(packed[used], bitorder="little"))
    return np.asarray((used[bits >> 3] << 3) + (bits & 7))


def read_ranges(column: Column, ranges: Ranges, counters: IoCounters | None, *, is_mapped: bool = True) -> None:
    """Have the system read ranges of rows ahead, unless kernels do not use the mapped file; count the reads."""
    for number, parts in groupby(split_ranges(column.runs, ranges), itemgetter(0)):
        pieces = _span_pieces(column.runs[number], [(first, end) for _, first, end in parts])
        read_ahead(pieces, is_counted=counters is not None) if is_mapped else fetch_pieces(pieces, plan_only=True)
        if counters is not None:
            counters.add(column.name, pieces, is_mapped=is_mapped)


def _span_pieces(run: ColumnRun, ranges: Sequence[tuple[int, int]]) -> list[Pieces]:
    """Return all bytes of some ranges of rows of a run, ascending, except those that views point to."""
    first, end = np.array(ranges, np.int64).reshape(-1, 2).T
    parts = [_pieces(run.valid, first >> 3, (end + 7) >> 3)]
    for extent in (run.values, run.codes, run.views):
        if run.layout.kind == "bits":
            parts.append(_pieces(extent, first >> 3, (end + 7) >> 3))
        elif extent is not None:
            width = extent.nbytes // extent.shape[0]
            parts.append(_pieces(extent, first * width, end * width))
    if run.offsets is not None and run.bytes is not None:
        offsets, width = run.offsets.numpy(), run.offsets.dtype.itemsize
        parts.append(_pieces(run.offsets, first * width, (end + 1) * width))
        low, high = offsets[first].astype(np.int64), offsets[end].astype(np.int64)
        edges = np.stack([low, high], axis=1).reshape(-1)
        if len(edges) and edges[0] >= 0 and edges[-1] <= run.bytes.nbytes and (np.diff(edges) >= 0).all():
            parts.append(_pieces(run.bytes, low, high))  # damaged offsets raise an error when they are used
    return [pieces for pieces in parts if pieces is not None]


def _pieces(extent: Extent | None, first: NDArray[np.int64], end: NDArray[np.int64]) -> Pieces | None:
    """Return ranges of the bytes of an extent, in pieces of at most `MAX_PIECE_BYTES`."""
    counts = -(-(end - first) // MAX_PIECE_BYTES)
    if extent is None or not counts.sum():
        return None
    starts = np.repeat(first - (np.cumsum(counts) - counts) * MAX_PIECE_BYTES, counts)
    starts += np.arange(len(starts)) * MAX_PIECE_BYTES
    return extent.file.pieces(extent.offset + starts, np.minimum(np.repeat(end, counts) - starts, MAX_PIECE_BYTES))
