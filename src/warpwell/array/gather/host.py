"""Rows of arrays in memory: copied by native code, and of a mapped file read ahead where the system has not got them.

A mapped file is memory whose pages may still be on storage, and a copy that meets such a page waits for it alone. So
each piece of a gather first looks whether some of its pages are there, for a sample of its rows. Where all are, rows
are copied in the order of the list. Otherwise they are sorted; a cursor that runs ahead of the copy tells the system
which pages are wanted, `IN_FLIGHT` runs at a time, and merges pages over gaps that are cheaper to read than another
command (`read_gap`). The system reads into its page cache, so that the next gather finds the pages there, and what
kernels have stored is seen, since they share these pages.
"""

from __future__ import annotations

import ctypes
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
"""Runs of pages that are read ahead of the copy, for each thread."""
RUN_BYTES = 128 << 10
"""Most bytes of a run: the system reads no more at a request on many devices."""
AHEAD_BYTES = 8 << 20
"""Bytes read ahead, at most, if that is more than one run."""
READ_GAP_BYTES = 16 << 10
"""Longest gap that is read with the ranges around it. It costs less than a command if a drive with many commands in
flight needs t seconds for a command and reads this much in t: 100,000 commands/s at 1.6 GB/s, 400,000 at 6.5 GB/s."""
DIRECT_READ_GAP_BYTES = 1 << 10
"""The same past the page cache, where units are 512 bytes. There a gap is lost; in the page cache, a later
read finds them. A query for 0.05 % of taxi trips reads 1.2 times the bytes that it needs; with 16 KiB, 2.6 times."""
SAMPLE = 64
"""Most rows at which a piece looks whether their pages are there."""
AHEAD = 8
"""Rows between the one that is copied and the one whose first lines are fetched into the processor's cache."""
_PAGE = mmap.PAGESIZE
_WILL_NEED = int(mmap.MADV_WILLNEED)
DONE = -1

# -- state, in words ------------------------------------------------------------------------------------------------
W_ROWS = 0
"""Address of the row numbers."""
W_WIDTH = 1
"""Bytes of a row number: 4 or 8."""
W_PLACES = 2
"""Address of an int64 for each row number, its row of the result; 0 where row k goes to row k."""
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
"""Address of a word that is not 0 when no further row is to be copied."""
W_GAP = 9
"""Bytes of a gap over which runs are merged."""
W_MADVISE = 10
W_MINCORE = 11
W_END = 12
"""Address behind the mapping."""
W_RUNS = 13
"""Runs that were asked for; the words after it count only what this state was used for."""
W_RUN_BYTES = 14
WORDS = 16

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
def place_of(places: int, k: int) -> int:
    """Return which row of the result row number `k` of the list is (thread)."""
    if places == 0:
        return k
    return i64(load_weak_as(places + 8 * k, I8))


@device
def copy_small(to: int, source: int, nbytes: int) -> None:
    """Copy a row of 1, 2, 4 or 8 bytes, or of any other number of them (thread)."""
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


@native
def copy_rows(state: int, first: int, end: int) -> int:
    """Copy rows [first, end) of the list; return the place of a row number out of range, or `DONE`."""
    extent, nbytes, stride = word(state, W_EXTENT), word(state, W_NBYTES), word(state, W_STRIDE)
    rows, width, places = word(state, W_ROWS), word(state, W_WIDTH), word(state, W_PLACES)
    source, out, stop = word(state, W_SOURCE), word(state, W_OUT), word(state, W_STOP)
    for k in range(first, end):
        row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            return k
        if k + AHEAD < end:
            prefetch_row(source + row_at(rows, width, k + AHEAD) * stride, nbytes)
        if k & 63 == 0 and load_relaxed(stop, SYSTEM) != 0:
            return DONE
        copy_small(out + place_of(places, k) * nbytes, source + row * stride, nbytes)
    return DONE


@native
def absent_rows(state: int, first: int, end: int, step: int) -> int:
    """Return of how many of every `step`-th row of [first, end) the first page is not in memory (a moment ago)."""
    there = scratch(16)
    rows, width = word(state, W_ROWS), word(state, W_WIDTH)
    found = 0
    for k in range(first, end, step):
        row = row_at(rows, width, k)
        if row >= 0 and row < word(state, W_EXTENT):
            page = (word(state, W_SOURCE) + row * word(state, W_STRIDE)) & -_PAGE
            store_weak_as(there, 1, I1)
            call_foreign(word(state, W_MINCORE), page, _PAGE, there, 0, 0, 0, 0)
            if load_weak_as(there, I1) & 1 == 0:
                found += 1
    return found


@device
def ask(state: int, low: int, high: int) -> None:
    """Have the system read the pages [low, high), addresses, in requests that it does not cut (thread)."""
    at = low
    while at < high:
        nbytes = min(high - at, RUN_BYTES)
        call_foreign(word(state, W_MADVISE), at, nbytes, _WILL_NEED, 0, 0, 0, 0)
        at += nbytes


@native
def fetch_rows(state: int, first: int, end: int) -> int:
    """Do what `copy_rows` does of row numbers that ascend, and have their pages read ahead of the copy."""
    extent, nbytes, stride = word(state, W_EXTENT), word(state, W_NBYTES), word(state, W_STRIDE)
    rows, width, places = word(state, W_ROWS), word(state, W_WIDTH), word(state, W_PLACES)
    source, out, stop, gap = word(state, W_SOURCE), word(state, W_OUT), word(state, W_STOP), word(state, W_GAP)
    lasts = scratch(_RING_BYTES)
    sizes = scratch(_RING_BYTES)
    begun = 0
    over = 0
    flying = 0
    ahead = first
    asked = 0
    for k in range(first, end):
        while ahead < end and begun - over < IN_FLIGHT and (begun == over or flying < AHEAD_BYTES):
            row = row_at(rows, width, ahead)
            if row < 0 or row >= extent:
                break
            low = max((source + row * stride) & -_PAGE, asked)
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
                ask(state, low, min(high, word(state, W_END)))
                store_weak_as(state + 8 * W_RUNS, word(state, W_RUNS) + 1, I8)
                store_weak_as(state + 8 * W_RUN_BYTES, word(state, W_RUN_BYTES) + high - low, I8)
            asked = max(asked, high)
            store_weak_as(lasts + 8 * (begun & (IN_FLIGHT - 1)), ahead, I8)
            store_weak_as(sizes + 8 * (begun & (IN_FLIGHT - 1)), high - low, I8)
            flying += high - low
            begun += 1
        row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            return k
        if load_relaxed(stop, SYSTEM) != 0:
            return DONE
        copy_small(out + place_of(places, k) * nbytes, source + row * stride, nbytes)
        if over < begun and k + 1 == load_weak_as(lasts + 8 * (over & (IN_FLIGHT - 1)), I8):
            flying -= load_weak_as(sizes + 8 * (over & (IN_FLIGHT - 1)), I8)
            over += 1
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


class RowCopy:
    """Copies rows of an array in memory; pieces of one may be copied by several threads at once.

    Parameters
    ----------
    rows : ndarray of int32 or int64
        Row numbers, one dimension.
    source, extent, stride, nbytes : int
        Address of row 0; number of rows; bytes between them; bytes of each.
    out : int
        Address of the result.
    mapped : Mapping, optional
        The mapping in which the rows lie; default: memory that is all there.
    """

    def __init__(
        self,
        rows: NDArray[Any],
        *,
        source: int,
        extent: int,
        stride: int,
        nbytes: int,
        out: int,
        mapped: Mapping | None = None,
    ) -> None:
        self._rows = rows
        self._mapped = mapped is not None
        self._blind = mapped is not None and not mapped.tells
        self._state = state = np.zeros(WORDS, np.int64)
        state[W_ROWS], state[W_WIDTH] = rows.ctypes.data, rows.itemsize
        state[W_EXTENT], state[W_NBYTES], state[W_STRIDE] = extent, nbytes, stride
        state[W_SOURCE], state[W_OUT], state[W_END] = source, out, 0 if mapped is None else mapped.end
        state[W_MADVISE] = ctypes.cast(_libc.madvise, ctypes.c_void_p).value or 0
        state[W_MINCORE] = ctypes.cast(_libc.mincore, ctypes.c_void_p).value or 0
        self._stop = np.zeros(8, np.int64)
        state[W_STOP] = self._stop.ctypes.data
        self._fetched: list[NDArray[np.int64]] = []

    def stop(self) -> None:
        """Let pieces that are being copied end soon."""
        self._stop[0] = 1

    def absent(self, first: int, end: int) -> bool:
        """Return whether rows [first, end) of the list should be read ahead, by a look at some of them."""
        if not self._mapped or self._blind:
            return self._blind
        step = max(16, -(-(end - first) // SAMPLE))
        return absent_rows(self._state.ctypes.data, first, end, step) > 0

    def copy(self, first: int, end: int) -> int:
        """Copy rows [first, end) of the list in its order; return the place of a number out of range, or `DONE`."""
        return copy_rows(self._state.ctypes.data, first, end)

    def fetch(self, first: int, end: int, gap: int) -> int:
        """Do the same in ascending order, reading ahead, over gaps of at most `gap` bytes too."""
        rows = self._rows[first:end]
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        places = order + first
        own = self._state.copy()
        own[W_ROWS], own[W_PLACES], own[W_GAP] = ascending.ctypes.data, places.ctypes.data, gap
        own[W_RUNS] = own[W_RUN_BYTES] = 0
        at = fetch_rows(own.ctypes.data, 0, len(rows))
        self._fetched.append(own[W_RUNS : W_RUN_BYTES + 1])
        return at if at == DONE else first + int(order[at])

    @property
    def fetched(self) -> tuple[int, int]:
        """Runs of pages that were asked for, and their bytes."""
        return sum(int(one[0]) for one in self._fetched), sum(int(one[1]) for one in self._fetched)
