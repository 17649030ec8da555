"""Rows of arrays in memory: copied by native code, and read ahead if they are in a mapped file but not in memory.

A mapped file is memory whose pages may still be on storage, and a copy that meets such a page waits for it alone. So
each chunk of a gather first checks for a sample of its rows whether their pages are in memory. If all are, rows are
copied in the order of the list. Otherwise they are sorted, and their pages are merged to runs over gaps that are
cheaper to read than another command (`read_gap`). Each batch of runs is announced to the system before the rows of the
previous batch are copied. The system reads into its page cache, so that the next gather finds the pages there, and
stores of kernels are seen, since they share these pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._settings import settings
from ...cache import batches_of
from ...targets import device, native
from ...targets.primitives import (
    SYSTEM,
    call_foreign,
    copy_bytes,
    i64,
    load_relaxed,
    load_weak_as,
    prefetch,
    scratch,
    store_weak_as,
)
from ..mapping import Mapping

I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))

Integers = NDArray[np.int64]

BATCH_READS, BATCH_BYTES = 64, 4 << 20
"""Maximum reads and bytes of a batch. Each thread announces a batch before it copies the rows of the previous batch."""
MAX_COMMAND_BYTES = 128 << 10
"""Maximum bytes of a read: the system reads no more by one request on many devices."""
CHUNK_BYTES, CHUNK_ROWS = 1 << 20, 1 << 16
"""Minimum bytes, or rows, of a chunk in the background: to find a row takes as long as to copy some bytes of it."""
INLINE_BYTES, INLINE_ROWS = 4 << 20, 1 << 17
"""Maximum bytes and rows that `gather` copies before it returns, with the help of other threads, if all of them are in
memory: this takes about as long as a thread takes to start and to finish."""
INLINE_CHUNK_BYTES, INLINE_CHUNK_ROWS = 1 << 18, 1 << 13
"""Bytes, or rows, of a chunk of such a copy: about 0.1 ms, as long as a thread takes to start."""
MAX_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk; each chunk checks again whether its pages are in memory."""
READ_GAP_BYTES = 16 << 10
"""Longest gap that is read with the ranges around it. It costs less than a command if a drive with many commands in
flight needs t seconds for a command and reads this much in t: 100,000 commands/s at 1.6 GB/s, 400,000 at 6.5 GB/s."""
DIRECT_READ_GAP_BYTES = 1 << 10
"""Longest gap in reads past the page cache, in units of 512 bytes: such a read drops the gap, while the page cache
keeps it for later. A query for 0.05 % of taxi trips reads 1.2 times the bytes that it needs; with 16 KiB, 2.6 times."""
SAMPLE = 64
"""Maximum rows of a chunk whose pages are looked up."""
AHEAD = 8
"""Distance in rows at which the first cache lines of a row are prefetched."""
_PAGE = mmap.PAGESIZE
_WILL_NEED = int(mmap.MADV_WILLNEED)
DONE = -1

# -- state, in words ------------------------------------------------------------------------------------------------
W_ROWS = 0
"""Address of the row numbers."""
W_WIDTH = 1
"""Bytes of a row number: 4 or 8."""
W_OUT_ROWS = 2
"""Address of the row of the result for each row index, int64; 0 if row k is copied to row k."""
W_EXTENT = 3
"""Rows of the array."""
W_NBYTES = 4
"""Bytes of a row."""
W_STRIDE = 5
"""Bytes between rows."""
W_SOURCE = 6
"""Address of row 0."""
W_OUT = 7
W_STOP = 8
"""Address of a word that is not 0 if no further row shall be copied."""
W_MINCORE = 9
STATE_WORDS = 10

_libc = ctypes.CDLL(None, use_errno=True)
_MADVISE, _MINCORE = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (_libc.madvise, _libc.mincore))


@device
def word(state: int, index: int) -> int:
    """Load a word of the state (thread)."""
    return int(load_weak_as(state + 8 * index, I8))


@device
def row_at(rows: int, width: int, k: int) -> int:
    """Return row number `k` of the list (thread)."""
    if width == 4:
        return i64(load_weak_as(rows + 4 * k, I4))
    return i64(load_weak_as(rows + 8 * k, I8))


@device
def out_row_at(out_rows: int, k: int) -> int:
    """Return the row of the result for row `k` of the list (thread)."""
    if out_rows == 0:
        return k
    return i64(load_weak_as(out_rows + 8 * k, I8))


@device
def copy_small(to: int, source: int, nbytes: int) -> None:
    """Copy a row of any size, with a fast path for 1, 2, 4 and 8 bytes (thread)."""
    if nbytes == 8:
        store_weak_as(to, load_weak_as(source, I8), I8)
    elif nbytes == 4:
        store_weak_as(to, load_weak_as(source, I4), I4)
    elif nbytes == 2:
        store_weak_as(to, load_weak_as(source, I2), I2)
    elif nbytes == 1:
        store_weak_as(to, load_weak_as(source, I1), I1)
    else:
        copy_bytes(to, source, nbytes)


@device
def prefetch_row(address: int, nbytes: int) -> None:
    """Fetch the first 256 bytes of a row into the processor's cache (thread)."""
    for line in range(0, min(nbytes, 256), 64):
        prefetch(address + line)


@device
def copy_range(state: int, first: int, end: int, out: int) -> int:
    """Copy rows [first, end) of the list to a result at `out`; return the position of a row out of range, or `DONE`."""
    extent, nbytes, stride = word(state, W_EXTENT), word(state, W_NBYTES), word(state, W_STRIDE)
    rows, width, out_rows = word(state, W_ROWS), word(state, W_WIDTH), word(state, W_OUT_ROWS)
    source, stop = word(state, W_SOURCE), word(state, W_STOP)
    for k in range(first, end):
        row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            return k
        if k + AHEAD < end:
            prefetch_row(source + row_at(rows, width, k + AHEAD) * stride, nbytes)
        if k & 63 == 0 and load_relaxed(stop, SYSTEM) != 0:
            return DONE
        copy_small(out + out_row_at(out_rows, k) * nbytes, source + row * stride, nbytes)
    return DONE


@native
def copy_rows(state: int, first: int, end: int) -> int:
    """Do what `copy_range` does, to the result of the state."""
    return copy_range(state, first, end, word(state, W_OUT))


@native
def absent_rows(state: int, first: int, end: int, step: int) -> int:
    """Return the number of rows whose first page is not in memory, among every `step`-th row of [first, end)."""
    residency = scratch(16)
    rows, width = word(state, W_ROWS), word(state, W_WIDTH)
    found = 0
    for k in range(first, end, step):
        row = row_at(rows, width, k)
        if row >= 0 and row < word(state, W_EXTENT):
            page = (word(state, W_SOURCE) + row * word(state, W_STRIDE)) & -_PAGE
            store_weak_as(residency, 1, I1)
            call_foreign(word(state, W_MINCORE), page, _PAGE, residency, 0, 0, 0, 0)
            if load_weak_as(residency, I1) & 1 == 0:
                found += 1
    return found


@native
def announce(madvise: int, ranges: int, n: int) -> int:
    """Let the system read `n` ranges ahead, each an address and a size, by its function ``madvise``."""
    for range_ in range(ranges, ranges + 16 * n, 16):
        call_foreign(madvise, load_weak_as(range_, I8), load_weak_as(range_ + 8, I8), _WILL_NEED, 0, 0, 0, 0)
    return 0


def read_gap(direct: bool = False) -> int:
    """Return the bytes of the longest gap between two ranges that are read together.

    Raises
    ------
    ArgumentError
        The setting is not a size.
    """
    default = DIRECT_READ_GAP_BYTES if direct else READ_GAP_BYTES
    return default if settings.read_gap_bytes is None else settings.read_gap_bytes


def runs_of(starts: Integers, ends: Integers, unit: int, gap: int) -> tuple[Integers, Integers, Integers]:
    """Merge ascending ranges over gaps; return the run of each range, and starts and sizes of runs in whole units."""
    low, high = starts // unit * unit, -(-ends // unit) * unit
    if not len(low):
        return low, low, low
    reached = np.maximum.accumulate(high)
    new = np.concatenate(([True], low[1:] > reached[:-1] + gap))
    first = np.flatnonzero(new)
    last = np.concatenate((first[1:] - 1, [len(low) - 1]))
    return np.cumsum(new) - 1, low[first], reached[last] - low[first]


def expand(begins: Integers, counts: Integers) -> Integers:
    """Return the integers of ranges, one range after another, from their first integers and their lengths."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def commands_of(begins: Integers, lengths: Integers) -> tuple[Integers, Integers, Integers]:
    """Split runs into reads of at most `MAX_COMMAND_BYTES`; return the run of each read, its start and its size."""
    counts = -(-lengths // MAX_COMMAND_BYTES)
    run = np.repeat(np.arange(len(begins)), counts)
    offset = expand(np.zeros_like(counts), counts) * MAX_COMMAND_BYTES
    return run, begins[run] + offset, np.minimum(lengths[run] - offset, MAX_COMMAND_BYTES)


def require_in_range(array: Any, rows: NDArray[Any]) -> None:
    """Raise IndexRangeError for the first row of a list that an array does not have."""
    bad = np.flatnonzero((rows < 0) | (rows >= array.shape[0]))
    if bad.size:
        raise range_error(array, rows, int(bad[0]))


def range_error(array: Any, rows: NDArray[Any], position: int) -> errors.IndexRangeError:
    """Return the error for a row at a position of a list."""
    row, extent = int(rows[position]), array.shape[0]
    advice = "gather counts from 0 (a[rows] takes negative numbers)" if row < 0 else "compare the numbers with len(a)"
    return errors.IndexRangeError(
        f"row {row} at position {position} of the list is out of range for array {array.name!r} of {extent} rows: "
        f"{advice}",
        array=array.name,
        index=row,
        size=extent,
    )


def row_bytes(array: Any) -> int:
    """Return the bytes of a row of an array."""
    return int(math.prod(array.shape[1:]) * array.dtype.itemsize)


class RowCopy:
    """Copies rows of an array in memory; several threads may copy parts of the list at once.

    Parameters
    ----------
    array : Array
    rows : ndarray of int32 or int64
        Row indices, one dimension.
    source, out : int
        Address of row 0; address of the result.
    mapped : Mapping, optional
        The mapping of the rows; default: memory without a file.

    Attributes
    ----------
    address : int
        Address of the state, for native code.
    """

    def __init__(self, array: Any, rows: NDArray[Any], source: int, out: int, mapped: Mapping | None = None) -> None:
        self._rows = rows
        self._mapped = mapped is not None
        self._blind = mapped is not None and not mapped.reports_residency
        self._state = state = np.zeros(STATE_WORDS, np.int64)
        state[W_ROWS], state[W_WIDTH] = rows.ctypes.data, rows.itemsize
        state[W_EXTENT], state[W_NBYTES], state[W_STRIDE] = array.shape[0], row_bytes(array), array._strides[0]
        state[W_SOURCE], state[W_OUT] = source, out
        state[W_MINCORE] = _MINCORE
        self._stop = np.zeros(8, np.int64)
        state[W_STOP] = self._stop.ctypes.data
        self.address = int(state.ctypes.data)
        self._announced: list[int] = []

    def stop(self) -> None:
        """Let `copy` and `fetch` return soon."""
        self._stop[0] = 1

    def absent(self, first: int, end: int) -> bool:
        """Return whether rows [first, end) of the list should be read ahead, from a sample."""
        if not self._mapped or self._blind:
            return self._blind
        step = max(16, -(-(end - first) // SAMPLE))
        return absent_rows(self.address, first, end, step) > 0

    def copy(self, first: int, end: int) -> int:
        """Copy rows [first, end) of the list in its order; return the position of a row out of range, or `DONE`."""
        return copy_rows(self.address, first, end)

    def fetch(self, first: int, end: int, gap: int) -> int:
        """Copy rows like `copy`, but in ascending order, and read ahead, also over gaps of at most `gap` bytes."""
        rows, state = self._rows[first:end], self._state.copy()
        order = np.argsort(rows, kind="stable")
        ascending, out_rows = rows[order], order + first
        negative, in_range = np.searchsorted(ascending, (0, state[W_EXTENT]))
        if negative:
            return int(out_rows[0])
        state[W_ROWS], state[W_OUT_ROWS] = ascending.ctypes.data, out_rows.ctypes.data
        ends = state[W_SOURCE] + ascending[:in_range].astype(np.int64) * state[W_STRIDE] + state[W_NBYTES]
        _, begins, lengths = runs_of(ends - state[W_NBYTES], ends, _PAGE, gap)
        _, addresses, sizes = commands_of(begins, lengths)
        ranges = np.stack((addresses, sizes), axis=1)
        self._announced.append(int(lengths.sum()))
        copied = 0
        batches = [*batches_of(sizes, BATCH_BYTES, BATCH_READS), slice(0, 0)]
        copied = reached = 0
        for batch in batches:  # a batch is announced before the rows of the previous batch are copied
            announce(_MADVISE, int(ranges[batch].ctypes.data), batch.stop - batch.start)
            copy_rows(state.ctypes.data, copied, reached)
            if self._stop[0]:
                break
            copied, reached = reached, int(np.searchsorted(ends, ranges[batch].sum(axis=1).max(initial=0), "right"))
        return DONE if in_range == len(rows) else int(out_rows[in_range])

    @property
    def bytes_read(self) -> int:
        """Bytes of the runs of pages that were read ahead."""
        return sum(self._announced)


class MemoryRows(RowCopy):
    """Copies rows of an array in memory, chunk by chunk.

    Attributes
    ----------
    chunks : int
    inline : bool
        Whether the rows are copied before `gather` returns, because they are in memory and have at most `inline_bytes`.
    """

    def __init__(self, array: Any, rows: NDArray[Any], out: int, inline_bytes: int) -> None:
        super().__init__(array, rows, array._part.data + array._origin, out, array._part.mapping)
        self._array, self._gap, self._nbytes = array, read_gap(), row_bytes(array)
        n, nbytes = rows.size, rows.size * self._nbytes
        self.inline = nbytes <= inline_bytes and n <= INLINE_ROWS and not (nbytes and self.absent(0, n))
        if self.inline:
            shares = max(nbytes // INLINE_CHUNK_BYTES, n // INLINE_CHUNK_ROWS)
        else:
            shares = min(len(os.sched_getaffinity(0)), max(nbytes // CHUNK_BYTES, n // CHUNK_ROWS))
        max_rows = max(1, MAX_CHUNK_BYTES // max(self._nbytes, 1))
        self._chunk_rows = max(1, min(max_rows, -(-n // max(1, shares))))
        self.chunks = max(1, -(-n // self._chunk_rows))

    def run(self, chunk: int) -> None:
        """Copy the rows of a chunk."""
        first, end = chunk * self._chunk_rows, min((chunk + 1) * self._chunk_rows, len(self._rows))
        if self._nbytes and not self.inline and self.absent(first, end):
            position = self.fetch(first, end, self._gap)
        else:
            position = self.copy(first, end)
        if position != DONE:
            raise range_error(self._array, self._rows, position)
        self._array._part.require_sound()
