"""`ListRing`: lists of rows that threads copy from memory into slots of staging, one after another.

A thread copies one list at a time, by native code and without the interpreter lock. Several lists fill a slot. The
reader of the slots returns each, in order, when its bytes have been copied; then it is filled again. No two threads
take the same list, because its number is drawn from a counter. A thread waits until the slot of its list is free. All
earlier lists have been drawn by then, so slots fill in order, and no thread waits for a list that is not being copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import (
    DEVICE,
    backoff,
    clock_ns,
    div,
    fetch_add,
    load_acquire,
    load_relaxed,
    native,
    rem,
)
from .host import AHEAD, copy_small, prefetch_row, row_at, word

LONGEST_NS = 60 * 10**9
"""Longest wait for a slot."""

R_NEXT = 0
"""The next list."""
R_FREED = 1
"""Slots that were given back."""
R_STOP = 2
R_LISTS = 3
R_PER_SLOT = 4
R_SLOTS = 5
R_EACH = 6
"""Rows of a list."""
R_ROWS = 7
"""Number of rows."""
R_LIST = 8
"""Address of the row numbers."""
R_WIDTH = 9
R_SOURCE = 10
R_STRIDE = 11
R_NBYTES = 12
R_DONE = 16
"""From here on, for each slot that is filled, how many of its lists are copied."""


@native
def fill_slots(ring: int, staging: int) -> int:
    """Copy lists until there are no more (any number of threads); return 1 if no slot was given back for long."""
    per_slot, slots, each = word(ring, R_PER_SLOT), word(ring, R_SLOTS), word(ring, R_EACH)
    rows, width = word(ring, R_LIST), word(ring, R_WIDTH)
    source, stride, nbytes = word(ring, R_SOURCE), word(ring, R_STRIDE), word(ring, R_NBYTES)
    while True:
        mine = fetch_add(ring + 8 * R_NEXT, 1, DEVICE)
        if mine >= word(ring, R_LISTS):
            return 0
        slot = div(mine, per_slot)
        attempt = 0
        since = clock_ns()
        while slot >= load_acquire(ring + 8 * R_FREED, DEVICE) + slots:
            if load_relaxed(ring + 8 * R_STOP, DEVICE) != 0:
                return 0
            if attempt & 255 == 255 and clock_ns() - since > LONGEST_NS:
                return 1
            backoff(min(attempt, 16))
            attempt += 1
        if load_relaxed(ring + 8 * R_STOP, DEVICE) != 0:
            return 0
        to = staging + (rem(slot, slots) * per_slot + mine - slot * per_slot) * each * nbytes
        end = min((mine + 1) * each, word(ring, R_ROWS))
        for k in range(mine * each, end):
            if k + AHEAD < end:
                prefetch_row(source + row_at(rows, width, k + AHEAD) * stride, nbytes)
            copy_small(to, source + row_at(rows, width, k) * stride, nbytes)
            to += nbytes
        fetch_add(ring + 8 * (R_DONE + slot), 1, DEVICE)


class ListRing:
    """Copies rows whose numbers are in range.

    Parameters
    ----------
    rows : ndarray of int32 or int64
    each, lists, slots : int
        Rows of a list; lists of a slot; slots of staging. A few rows have one slot.
    nbytes, stride, source : int
        Bytes of a row; bytes between rows; address of row 0.

    Attributes
    ----------
    pieces, filled_slots : int
        Lists, and slots to be filled, in all.
    slot_bytes, staging_bytes : int
    """

    def __init__(
        self, rows: NDArray[Any], *, each: int, lists: int, slots: int, nbytes: int, stride: int, source: int
    ) -> None:
        self._rows = rows
        self._each, self._per_slot = each, lists
        self.pieces = -(-len(rows) // each)
        self.filled_slots = -(-self.pieces // lists)
        self.slot_bytes = min(lists, self.pieces) * each * nbytes
        self.staging_bytes = lists * each * nbytes * slots if self.filled_slots > 1 else self.slot_bytes
        self._words = words = np.zeros(R_DONE + self.filled_slots, np.int64)
        words[R_LISTS], words[R_PER_SLOT], words[R_SLOTS], words[R_EACH] = self.pieces, lists, slots, each
        words[R_ROWS], words[R_LIST], words[R_WIDTH] = len(rows), rows.ctypes.data, rows.itemsize
        words[R_SOURCE], words[R_STRIDE], words[R_NBYTES] = source, stride, nbytes

    def fill(self, staging: int) -> None:
        """Copy lists into staging at an address, until none is left or `stop`: what each thread does."""
        if fill_slots(int(self._words.ctypes.data), staging):
            self.stop()
            seconds = LONGEST_NS // 10**9
            raise errors.StallError(
                f"no slot of staging was free for {seconds} s: the GPU does not answer", array="", seconds=seconds
            )

    def full(self, slot: int) -> bool:
        """Return whether all lists of a slot are copied."""
        return bool(self._words[R_DONE + slot] == min(self._per_slot, self.pieces - slot * self._per_slot))

    def rows_of(self, slot: int) -> tuple[int, int]:
        """Return the first row of a slot, and how many it has."""
        first = slot * self._per_slot * self._each
        return first, min(self._per_slot * self._each, len(self._rows) - first)

    def give_back(self) -> None:
        """Let the oldest slot that was not given back be filled again."""
        self._words[R_FREED] += 1

    def stop(self) -> None:
        """Let `fill` return soon."""
        self._words[R_STOP] = 1
