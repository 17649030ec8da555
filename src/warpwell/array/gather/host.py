"""Rows of arrays in memory: copied by native code, and read ahead if they are in a mapped file but not in memory.

A mapped file is memory whose pages may still be on storage, and a copy that meets such a page waits for it alone. So
each chunk of a gather first checks for a sample of its rows whether their pages are in memory. If all are, rows are
copied in the order of the list. Otherwise they are sorted; a cursor that runs ahead of the copy announces pages to the
system, `IN_FLIGHT` runs at a time, and merges pages over gaps that are cheaper to read than another command
(`read_gap`). The system reads into its page cache, so that the next gather finds the pages there, and stores of kernels
are seen, since they share these pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._settings import settings
from ...targets import (
    SYSTEM,
    call_foreign,
    copy_bytes,
    device,
    i64,
    load_relaxed,
    load_weak_as,
    native,
    prefetch,
    scratch,
    store_weak_as,
)
from ..mapping import Mapping

I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))

IN_FLIGHT = 64
"""Number of runs of pages that each thread reads ahead of its copy."""
RUN_BYTES = 128 << 10
"""Maximum bytes of a run: the system reads no more by one request on many devices."""
AHEAD_BYTES = 8 << 20
"""Maximum bytes read ahead, if that is more than one run."""
READ_GAP_BYTES = 16 << 10
"""Longest gap that is read with the ranges around it. It costs less than a command if a drive with many commands in
flight needs t seconds for a command and reads this much in t: 100,000 commands/s at 1.6 GB/s, 400,000 at 6.5 GB/s."""
DIRECT_READ_GAP_BYTES = 1 << 10
"""The same past the page cache, in units of 512 bytes: there a gap is lost, while the page cache keeps it for
later. A query for 0.05 % of taxi trips reads 1.2 times the bytes that it needs; with 16 KiB, 2.6 times."""
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
W_GAP = 9
"""Bytes of a gap over which runs are merged."""
W_MADVISE = 10
W_MINCORE = 11
W_END = 12
"""End address of the mapping."""
W_RUN_BYTES = 13
"""Bytes of the runs that were announced."""
STATE_WORDS = 16

_RING_BYTES = 8 * IN_FLIGHT
_libc = ctypes.CDLL(None, use_errno=True)


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


@device
def announce_pages(state: int, low: int, high: int) -> None:
    """Let the system read the pages of addresses [low, high), by requests that it does not split (thread)."""
    at = low
    while at < high:
        nbytes = min(high - at, RUN_BYTES)
        call_foreign(word(state, W_MADVISE), at, nbytes, _WILL_NEED, 0, 0, 0, 0)
        at += nbytes


@native
def fetch_rows(state: int, first: int, end: int) -> int:
    """Copy rows as `copy_rows`, and read ahead of the copy; the row indices ascend."""
    extent, nbytes, stride = word(state, W_EXTENT), word(state, W_NBYTES), word(state, W_STRIDE)
    rows, width, out_rows = word(state, W_ROWS), word(state, W_WIDTH), word(state, W_OUT_ROWS)
    source, out, stop, gap = word(state, W_SOURCE), word(state, W_OUT), word(state, W_STOP), word(state, W_GAP)
    lasts = scratch(_RING_BYTES)
    sizes = scratch(_RING_BYTES)
    started = 0
    finished = 0
    bytes_in_flight = 0
    ahead = first
    announced = 0
    for k in range(first, end):
        while ahead < end and started - finished < IN_FLIGHT and (started == finished or bytes_in_flight < AHEAD_BYTES):
            row = row_at(rows, width, ahead)
            if row < 0 or row >= extent:
                break
            low = max((source + row * stride) & -_PAGE, announced)
            high = max(low, (source + row * stride + nbytes + _PAGE - 1) & -_PAGE)
            ahead += 1
            while ahead < end:
                row = row_at(rows, width, ahead)
                if row >= extent:
                    break
                begin = (source + row * stride) & -_PAGE
                until = (source + row * stride + nbytes + _PAGE - 1) & -_PAGE
                if begin > high + gap or until > max(high, low + RUN_BYTES):
                    break
                high = max(high, until)
                ahead += 1
            if high > low:
                announce_pages(state, low, min(high, word(state, W_END)))
                store_weak_as(state + 8 * W_RUN_BYTES, word(state, W_RUN_BYTES) + high - low, I8)
            announced = max(announced, high)
            store_weak_as(lasts + 8 * (started & (IN_FLIGHT - 1)), ahead, I8)
            store_weak_as(sizes + 8 * (started & (IN_FLIGHT - 1)), high - low, I8)
            bytes_in_flight += high - low
            started += 1
        row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            return k
        if load_relaxed(stop, SYSTEM) != 0:
            return DONE
        copy_small(out + out_row_at(out_rows, k) * nbytes, source + row * stride, nbytes)
        if finished < started and k + 1 == load_weak_as(lasts + 8 * (finished & (IN_FLIGHT - 1)), I8):
            bytes_in_flight -= load_weak_as(sizes + 8 * (finished & (IN_FLIGHT - 1)), I8)
            finished += 1
    return DONE


def read_gap(direct: bool = False) -> int:
    """Return the bytes of the longest gap between two ranges that are read together.

    Raises
    ------
    ArgumentError
        The setting is not a size.
    """
    default = DIRECT_READ_GAP_BYTES if direct else READ_GAP_BYTES
    return default if settings.read_gap_bytes is None else settings.read_gap_bytes


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
        self._blind = mapped is not None and not mapped.tells
        self._state = state = np.zeros(STATE_WORDS, np.int64)
        state[W_ROWS], state[W_WIDTH] = rows.ctypes.data, rows.itemsize
        state[W_EXTENT], state[W_NBYTES], state[W_STRIDE] = array.shape[0], row_bytes(array), array._strides[0]
        state[W_SOURCE], state[W_OUT], state[W_END] = source, out, 0 if mapped is None else mapped.end
        state[W_MADVISE] = ctypes.cast(_libc.madvise, ctypes.c_void_p).value or 0
        state[W_MINCORE] = ctypes.cast(_libc.mincore, ctypes.c_void_p).value or 0
        self._stop = np.zeros(8, np.int64)
        state[W_STOP] = self._stop.ctypes.data
        self.address = int(state.ctypes.data)
        self._announced: list[NDArray[np.int64]] = []

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
        """Copy rows as `copy`, in ascending order, and read ahead, over gaps of at most `gap` bytes too."""
        rows = self._rows[first:end]
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        out_rows = order + first
        own = self._state.copy()
        own[W_ROWS], own[W_OUT_ROWS], own[W_GAP] = ascending.ctypes.data, out_rows.ctypes.data, gap
        own[W_RUN_BYTES] = 0
        at = fetch_rows(own.ctypes.data, 0, len(rows))
        self._announced.append(own)
        return at if at == DONE else first + int(order[at])

    @property
    def bytes_read(self) -> int:
        """Bytes of the runs of pages that were read ahead."""
        return sum(int(state[W_RUN_BYTES]) for state in self._announced)
