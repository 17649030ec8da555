"""`Reads`: which pages of its files a query reads, and what it asks the system to read before it looks at them.

What is read whole is given to the system before its first page is looked at (``posix_fadvise``), in commands of which
many are in flight; pages that its page cache has cost none. Rows that are known are pieces of files, which
`warpwell.array.gather.fetch` fetches.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array.gather import Pieces
from ..storage import is_in_page_cache
from .column import ColumnRun
from .extent import Extent, MappedFile

PAGE = 4096
"""Bytes of a page of the system's page cache, in which it reads."""
COMMAND = 1 << 17
"""Longest command, in bytes: the system reads only the beginning of longer ones."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

_Places = NDArray[np.int64]
Ranges = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First bytes of ascending, disjoint ranges, and their ends: whole pages."""


@dataclass
class ColumnReads:
    """What a query reads of a column.

    Attributes
    ----------
    column : str
    wanted : int
        Bytes of the items that the query uses.
    read : int
        Bytes of the runs in which they lie, of 4 KiB or of 512 bytes, with gaps that are cheaper to read than another
        command.
    commands : int
        Commands for these runs.
    from_storage : int
        Bytes of the runs of what the system's page cache did not have, or does not have yet. All of them where kernels
        read a column otherwise than from the mapped file: on a GPU, and through a cache.
    """

    column: str
    wanted: int = 0
    read: int = 0
    commands: int = 0
    from_storage: int = 0


class Reads:
    """What a query reads, by column.

    Parameters
    ----------
    dry : bool
        Whether the system is not asked to read anything.
    mapped : bool
        Whether what is read whole is looked at where it is mapped.
    """

    def __init__(self, dry: bool = False, mapped: bool = True) -> None:
        self.columns: dict[str, ColumnReads] = {}
        self._dry, self._mapped = dry or not mapped, mapped
        self._lock = threading.Lock()  # several threads may read for one query

    def add(self, column: str, file: MappedFile, wanted: int, ranges: Ranges) -> None:
        """Count ranges of a file, and have the system begin to read them."""
        starts, ends = ranges
        read = int((np.minimum(ends, file.nbytes) - starts).sum())
        commands = int((-(-(ends - starts) // COMMAND)).sum())
        if self._mapped:
            starts, ends = _absent(file, starts, ends)
        with self._lock:
            counts = self.columns.setdefault(column, ColumnReads(column))
            counts.wanted += wanted
            counts.read += read
            counts.commands += commands
            counts.from_storage += int((np.minimum(ends, file.nbytes) - starts).sum())
        if not self._dry:
            _begin(file, starts, ends)

    def spans(self, column: str, run: ColumnRun, ranges: Sequence[tuple[int, int]]) -> None:
        """Count all bytes of some ranges of rows of a run, ascending, but those that views lead to."""
        first, end = np.array(ranges, np.int64).reshape(-1, 2).T
        self._bytes(column, run.valid, first >> 3, (end + 7) >> 3)
        bits = run.layout.kind == "bits"
        self._rows(column, run.values, *((first >> 3, (end + 7) >> 3) if bits else (first, end)))
        for extent in (run.codes, run.views):
            self._rows(column, extent, first, end)
        self._rows(column, run.offsets, first, end + 1)
        if run.offsets is not None and run.bytes is not None:
            offsets = run.offsets.numpy()
            low, high = offsets[first].astype(np.int64), offsets[end].astype(np.int64)
            sound = np.maximum.accumulate(high) == high  # else whoever follows them raises
            if sound.all() and (low >= 0).all() and (low <= high).all() and (high <= run.bytes.nbytes).all():
                self._bytes(column, run.bytes, low, high)

    def whole(self, column: str, extent: Extent) -> None:
        """Count all bytes of an extent that helps to decide, but has no items that the query uses."""
        start = np.array([extent.offset])
        self.add(column, extent.file, 0, pages_of(start, start + extent.nbytes))

    def _rows(self, column: str, extent: Extent | None, first: _Places, end: _Places) -> None:
        if extent is not None and extent.nbytes:
            width = extent.nbytes // extent.shape[0]
            self._bytes(column, extent, first * width, end * width)

    def _bytes(self, column: str, extent: Extent | None, first: _Places, end: _Places) -> None:
        if extent is not None and len(first):
            pages = pages_of(extent.offset + first, extent.offset + end)
            self.add(column, extent.file, int((end - first).sum()), pages)

    def pieces(self, column: str, pieces: Pieces) -> None:
        """Count pieces that were fetched, or would be."""
        with self._lock:
            counts = self.columns.setdefault(column, ColumnReads(column))
            fixed = isinstance(pieces.sizes, int)
            counts.wanted += pieces.sizes * len(pieces.starts) if fixed else int(pieces.sizes.sum())
            counts.read += pieces.read
            counts.commands += pieces.commands
            counts.from_storage += pieces.from_storage

    def gathered(self, column: str, wanted: int, asked: int) -> None:
        """Count rows that `warpwell.gather` has read, of whose commands nobody knows."""
        with self._lock:
            counts = self.columns.setdefault(column, ColumnReads(column))
            counts.wanted += wanted
            counts.read += asked
            counts.from_storage += asked

    def listed(self) -> list[ColumnReads]:
        """Return the counts, in the order in which columns were met."""
        return list(self.columns.values())


def together(parts: Iterable[Reads]) -> list[ColumnReads]:
    """Return the counts of several steps of one query, added."""
    found: dict[str, ColumnReads] = {}
    for one in (one for part in parts for one in part.listed()):
        counts = found.setdefault(one.column, ColumnReads(one.column))
        for name in ("wanted", "read", "commands", "from_storage"):
            setattr(counts, name, getattr(counts, name) + getattr(one, name))
    return list(found.values())


def pages_of(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
    """Return the pages of bytes [start, end), which ascend; pages that touch are one range."""
    keep = ends > starts
    first, last = starts[keep] // PAGE, -(-ends[keep] // PAGE)
    if not len(first):
        return first, last
    begins = np.flatnonzero(np.concatenate(([True], first[1:] > last[:-1])))
    return first[begins] * PAGE, last[np.concatenate((begins[1:] - 1, [len(last) - 1]))] * PAGE


def _absent(file: MappedFile, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
    """Return the parts of ranges of pages that the page cache does not have."""
    if not len(starts):
        return starts, ends
    low, high = int(starts[0]), int(ends[-1])
    if is_in_page_cache(file.fileno(), low, (high - low) // PAGE):
        return starts[:0], ends[:0]
    there = np.zeros((high - low) // PAGE, np.uint8)
    address = int(file.buffer.address) + low
    length = min(high, -(-file.nbytes // PAGE) * PAGE) - low
    if _libc.mincore(address, length, there.ctypes.data):
        return starts, ends  # nobody knows
    wanted = np.zeros(len(there) + 1, np.int8)
    wanted[(starts - low) // PAGE] += 1  # each is there once
    wanted[(ends - low) // PAGE] -= 1
    missing = (np.cumsum(wanted[:-1]) > 0) & ((there & 1) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], missing.astype(np.int8), [0]))))
    return low + edges[::2] * PAGE, low + edges[1::2] * PAGE


def _begin(file: MappedFile, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Have the system begin to read ranges of pages into its page cache."""
    descriptor: Any = file.fileno() if len(starts) else None
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for at in range(start, end, COMMAND):
            os.posix_fadvise(descriptor, at, min(COMMAND, end - at), os.POSIX_FADV_WILLNEED)
