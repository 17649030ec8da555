"""Copy rows of memory, and rows behind a cache, to memory of a GPU.

A row is a sequence of *units* of 16, 8, 4, 2 or 1 bytes: its address, its size and its address in the result are
multiples of the unit. So a unit is in one page, and one load reads it. Each thread copies two units, of one row or of
two, and neighboring lanes copy neighboring units.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...cache import (
    READABLE,
    count_read,
    fault_in,
    frame_address,
    frame_of,
    load_word,
    mark_referenced,
    read_pinned,
    validate_read,
    word_address,
)
from ...cache import layout as at
from ...queues import field
from ...targets import device, kernel
from ...targets.primitives import (
    DEVICE,
    SYSTEM,
    activemask,
    as_bits,
    bits_as,
    div,
    fence,
    fetch_add_as,
    fetch_or_as,
    ffs,
    grid,
    lane_id,
    load_pair,
    load_relaxed,
    load_relaxed_as,
    shfl,
    store_pair,
    store_relaxed,
    store_weak_as,
)
from .host import out_row_at, row_at

I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))
WARP_UNITS = 64
"""Units of a warp, two for each lane. An H200 copies rows of 256 B to 4 KiB behind a cache at 1,700 to 1,820 GB/s; with
four units for each lane, at 720 GB/s."""
COUNT, BITS = 8, 16
"""Offsets in a record of missing rows. It begins with a word that is not 0 if a row number is out of range; then the
number of missing rows, a bit for each row in words of `ROWS_PER_WORD`, and the missing rows in any order."""
ROWS_PER_WORD = 32


def record_words(n: int) -> tuple[int, int]:
    """Return the words of a record of missing rows in front of its list, and all of them."""
    list_at = BITS // 8 + -(-n // ROWS_PER_WORD)
    return list_at, list_at + n


class Copy(NamedTuple):
    """Arguments of a copy, in the order of all kernels."""

    n: int
    """Rows to copy."""
    units: int
    """Units of a row."""
    unit: int
    """Bytes of a unit: 16, 8, 4, 2 or 1."""
    begin: int
    """Address of row 0, or its byte in the array's file."""
    stride: int
    """Bytes between rows."""
    out: int
    """Address of the result."""

    @classmethod
    def of(cls, n: int, nbytes: int, begin: int, stride: int, out: int) -> Copy:
        """Return the copy of `n` rows of N bytes, with the widest unit that divides all these numbers."""
        unit = math.gcd(16, nbytes, begin, stride, out)
        return cls(n, nbytes // unit, unit, begin, stride, out)

    @property
    def threads(self) -> int:
        """Number of threads of a launch: whole warps."""
        return -(-self.n * self.units // WARP_UNITS) * 32


@device
def unit_of(t, second, units, n):
    """Return the row of the list that has the first or second unit of thread `t`, and the unit in this row (thread)."""
    i = min((t >> 5) * WARP_UNITS + (t & 31) + second * 32, n * units - 1)
    k = div(i, units)
    return k, i - k * units


@device
def checked_row(rows, width, k, extent, out_of_range):
    """Return row number `k` of the list; if it is out of range, store 1 in `out_of_range` and return 0 (thread)."""
    row = row_at(rows, width, k)
    if row < 0 or row >= extent:
        store_relaxed(out_of_range, 1, SYSTEM)
        row = 0
    return row


@device
def load_units(first, second, unit):
    """Return the units at two addresses, each as two words (thread; relaxed, as other threads may store to a frame)."""
    if unit == 16:
        a, b = load_pair(first)
        c, d = load_pair(second)
        return a, b, c, d
    return load_part(first, unit), 0, load_part(second, unit), 0


@device
def load_part(address, unit):
    """Return a unit of at most 8 bytes as a word (thread; relaxed)."""
    if unit == 8:
        return load_relaxed_as(address, I8)
    if unit == 4:
        return as_bits(load_relaxed_as(address, I4), I4)
    if unit == 2:
        return as_bits(load_relaxed_as(address, I2), I2)
    return as_bits(load_relaxed_as(address, I1), I1)


@device
def store_unit(address, first, second, unit):
    """Store the words of a unit (thread)."""
    if unit == 16:
        store_pair(address, first, second)
    elif unit == 8:
        store_weak_as(address, first, I8)
    elif unit == 4:
        store_weak_as(address, bits_as(first, I4), I4)
    elif unit == 2:
        store_weak_as(address, bits_as(first, I2), I2)
    else:
        store_weak_as(address, bits_as(first, I1), I1)


@kernel
def copy_from_memory(rows, width, out_rows, extent, n, units, unit, source, stride, out, out_of_range):
    """Copy row ``rows[k]`` of memory to row ``out_rows[k]`` of `out`.

    Parameters
    ----------
    rows, width, out_rows : int
        Addresses of row numbers of `width` bytes, and of int64; 0 for row k.
    extent : int
        Rows of the memory, at least 1.
    n, units, unit, source, stride, out : int
        See `Copy`.
    out_of_range : int
        Address of a word that is set to 1 if a row number is out of range. Row 0 is copied in its place.
    """
    k, first = unit_of(grid(1), 0, units, n)
    m, second = unit_of(grid(1), 1, units, n)
    row, second_row = k, m
    if rows != 0:
        row = checked_row(rows, width, k, extent, out_of_range)
        second_row = checked_row(rows, width, m, extent, out_of_range)
    a, b, c, d = load_units(source + row * stride + first * unit, source + second_row * stride + second * unit, unit)
    store_unit(out + (out_row_at(out_rows, k) * units + first) * unit, a, b, unit)
    store_unit(out + (out_row_at(out_rows, m) * units + second) * unit, c, d, unit)


@device
def read_units(core, space, first, second, unit, no_reuse):
    """Read the units at two offsets of an array behind a cache; return their words, and whether each is valid (thread).

    This is a validated read of two pages (`warpwell.cache.hit`): the thread acquires both page words, loads the units,
    executes one fence for both, and loads both words again. An invalid unit must not be used.
    """
    shift = field(core, at.C_PAGE_SHIFT)
    inside = (1 << shift) - 1
    frames = frame_address(core, 0)
    table = word_address(core, field(space, at.S_BASE))
    address, second_address = table + 8 * (first >> shift), table + 8 * (second >> shift)
    word = load_word(address)
    second_word = load_word(second_address)
    # otherwise all threads would load the same lines of frame 0, one after another
    if (word | second_word) & READABLE == 0:
        return 0, 0, 0, 0, False, False
    source = frames + (frame_of(word) << shift) + (first & inside)
    second_source = frames + (frame_of(second_word) << shift) + (second & inside)
    a, b, c, d = load_units(source, second_source, unit)
    fence(DEVICE)
    is_valid = validate_read(address, word)
    if is_valid:
        mark_referenced(address, word, no_reuse)
    second_is_valid = validate_read(second_address, second_word)
    if second_is_valid:
        mark_referenced(second_address, second_word, no_reuse)
    return a, b, c, d, is_valid, second_is_valid


@device
def list_missing(core, missing, n, k, row_items):
    """Add row `k` of the list to the record of missing rows, once (all converged lanes; relaxed)."""
    mask = activemask()
    leader = ffs(mask) - 1
    if k == shfl(mask, k, leader) and lane_id() != leader:
        return  # one lane for most rows: atomics of all lanes on one word would be serialized
    word = missing + BITS + 8 * (k >> 5)
    bit = 1 << (k & (ROWS_PER_WORD - 1))
    if load_relaxed(word, DEVICE) & bit == 0 and fetch_or_as(word, bit, I8) & bit == 0:
        i = fetch_add_as(missing + COUNT, 1, I8)
        store_relaxed(missing + BITS + 8 * (((n + ROWS_PER_WORD - 1) >> 5) + i), k, DEVICE)
        if row_items != 0:
            count_read(core, -row_items, 0, True)


@kernel
def copy_cached(core, space, rows, width, extent, n, units, unit, origin, stride, out, no_reuse, row_items, missing):
    """Copy row ``rows[k]`` of an array behind a cache to row k of `out`; list the rows that are not all in the cache.

    Parameters
    ----------
    core, space : int
    rows, width, extent, n, units, unit, origin, stride, out : int
        As for `copy_from_memory`.
    no_reuse, row_items : int
        1 if pages are read once, else 0; items of a row to count reads in the statistics, or 0.
    missing : int
        Address of a record of missing rows. Its words in front of the list are 0.
    """
    t = grid(1)
    k, first = unit_of(t, 0, units, n)
    m, second = unit_of(t, 1, units, n)
    offset = origin + checked_row(rows, width, k, extent, missing) * stride + first * unit
    second_offset = origin + checked_row(rows, width, m, extent, missing) * stride + second * unit
    a, b, c, d, is_valid, second_is_valid = read_units(core, space, offset, second_offset, unit, no_reuse)
    if is_valid:
        store_unit(out + (k * units + first) * unit, a, b, unit)
    else:
        list_missing(core, missing, n, k, row_items)
    if second_is_valid:
        store_unit(out + (m * units + second) * unit, c, d, unit)
    else:
        list_missing(core, missing, n, m, row_items)
    if t == 0 and row_items != 0:
        count_read(core, n * row_items, n * units * unit, True)  # `list_missing` subtracts the missing rows


@kernel
def copy_loaded(core, space, rows, out_rows, n, units, unit, origin, stride, out, no_reuse):
    """Copy row ``rows[k]``, in range and with its pages read ahead, to row ``out_rows[k]`` of `out`.

    A page that is not in the cache is read. After an error is latched, rows are left as they are.
    """
    t = grid(1)
    k, first = unit_of(t, 0, units, n)
    m, second = unit_of(t, 1, units, n)
    begin, second_begin = origin + row_at(rows, 8, k) * stride, origin + row_at(rows, 8, m) * stride
    offset, second_offset = begin + first * unit, second_begin + second * unit
    a, b, c, d, is_valid, second_is_valid = read_units(core, space, offset, second_offset, unit, no_reuse)
    shift = field(core, at.C_PAGE_SHIFT)
    to = out + (out_row_at(out_rows, k) * units + first) * unit
    store_loaded(space, shift, offset, begin + units * unit - 1, is_valid, a, b, to, unit)
    to = out + (out_row_at(out_rows, m) * units + second) * unit
    store_loaded(space, shift, second_offset, second_begin + units * unit - 1, second_is_valid, c, d, to, unit)


@device
def store_loaded(space, shift, offset, last, is_valid, a, b, to, unit):
    """Store a unit; if it is not valid, fault its page in, and read it under a pin (all converged lanes)."""
    if not is_valid:
        page = offset >> shift
        inside = offset - (page << shift)
        if fault_in(space, page, last >> shift) == 0:
            return
        a = read_pinned(space, page, inside, min(unit, 8))
        if unit == 16:
            b = read_pinned(space, page, inside + 8, 8)
    store_unit(to, a, b, unit)
