"""`select`: the one kernel of filters: which rows of a column have their key in a set, as bits.

It reads 64-bit words of files, whatever they hold, so that it is compiled once and no query compiles anything;
`key_sets` says what keys and sets are, `where` makes its arguments.
"""

from __future__ import annotations

from ..array import atomic_add
from ..array.spans import add
from ..targets import device, grid, i64, kernel, lane_id, reduce_warp, warp_size

NUMBERS = 0
"""Items of 8 to 64 bits."""
BITS = 1
"""One bit a row."""
WIDE = 2
"""Items of 128 bits, the low word first."""
TEXT = 3
"""Offsets, of 32 or 64 bits, into bytes."""
BYTES = 4
"""As many bytes in each row."""

UNIT = 16
"""Words of the mask, of 64 rows each, that one index (on a GPU a warp) writes."""

# Words of the record of a run.
FIRST_UNIT = 0
FIRST_WORD = 1
"""Where its rows begin in the mask."""
ROWS = 2
VALUES = 3
VALID = 4
"""-1 if no row is null."""
DATA = 5
"""Where values, validity and bytes begin: words of their arrays."""
NBYTES = 6
FIRST_FLIP = 7
FLIPS = 8
RUN_WORDS = 9

LEAST = -(1 << 63)
GREATEST = (1 << 63) - 1


@device
def word_at(words, i, tail):
    """Return a word of an array; behind its end, the file's last, incomplete word (any thread)."""
    if i < words.size:
        return i64(words[i])
    return i64(tail)


@device
def searched(flips, first, count, key):
    """Return 1 if an odd number of flips is not greater than the key (any thread)."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        if flips[first + middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low & 1


@device
def numbers_in(values, tail, base, want, shift, pattern, order, flips, first, count, lane, lanes):
    """Return the bits of the rows wanted of 64 whose numbers are in the set; each lane its own (any thread)."""
    per = 64 >> shift
    bits = 1 << shift
    low = flips[first]
    last = i64(GREATEST)
    if count == 2:
        last = flips[first + 1] - 1
    found = i64(0)
    for k in range(lane, bits, lanes):
        at = k * per
        if (want >> at) & ((1 << per) - 1) != 0:
            word = word_at(values, base + k, tail) ^ pattern
            for j in range(per):
                key = i64(word << (64 - bits * (j + 1))) >> (64 - bits)
                key ^= (key >> 63) & order
                inside = 0
                if count > 2:
                    inside = searched(flips, first, count, key)
                elif key >= low and key <= last:
                    inside = 1
                found |= i64(i64(inside) << (at + j))
    return found & want


@device
def bits_in(values, tail, at, want, flips, first, count):
    """Return the bits of the rows wanted of 64 whose bool is in the set (any thread)."""
    word = word_at(values, at, tail)
    true = i64(0 - searched(flips, first, count, 1))
    false = i64(0 - searched(flips, first, count, 0))
    return ((word & true) | ((word ^ -1) & false)) & want


@device
def wide_in(values, tail, base, want, flips, first, count, lane, lanes):
    """Return the bits of the rows wanted of 64 whose number of 128 bits is in the set (any thread)."""
    found = i64(0)
    for k in range(lane, 64, lanes):
        if (want >> k) & 1 != 0:
            low_word = word_at(values, base + 2 * k, tail) ^ i64(LEAST)
            high_word = word_at(values, base + 2 * k + 1, tail)
            low = 0
            high = count
            while low < high:
                middle = (low + high) >> 1
                flip = flips[first + 2 * middle]
                if flip < high_word or (flip == high_word and flips[first + 2 * middle + 1] <= low_word):
                    low = middle + 1
                else:
                    high = middle
            found |= i64(i64(low & 1) << k)
    return found


@device
def reaches(data, tail, base, start, length, pool, begin, end):
    """Return 1 if a row's bytes are not less than a flip's (any thread)."""
    for j in range(min(length, end - begin)):
        at = start + j
        byte = (word_at(data, base + (at >> 3), tail) >> ((at & 7) << 3)) & 255
        other = i64(pool[begin + j])
        if byte != other:
            return 1 if byte > other else 0
    return 1 if length >= end - begin else 0


@device
def bytes_in(data, tail, base, start, length, flips, first, count, pool):
    """Return 1 if a row's bytes are in the set (any thread)."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        begin = flips[first + 2 * middle]
        if reaches(data, tail, base, start, length, pool, begin, flips[first + 2 * middle + 1]) == 1:
            low = middle + 1
        else:
            high = middle
    return low & 1


@device
def offset_at(values, tail, base, row, shift):
    """Return an offset of 32 or 64 bits (any thread)."""
    if shift == 6:
        return word_at(values, base + row, tail)
    word = word_at(values, base + (row >> 1), tail)
    return i64(word << (32 - ((row & 1) << 5))) >> 32


@kernel
def select(values, valid, data, runs, flips, pool, kind, shift, pattern, order, joined, tails, mask, bad):
    """Set the bits of rows in `mask`, or with `joined` clear those of the others; all threads of a warp share a unit.

    `values`, `valid` and `data` are files as arrays of int64, `tails` their last, incomplete words. `shift` is the
    logarithm of an item's bits, or the bytes of a row of BYTES; `pattern` flips the bits that make keys of unsigned
    integers signed, and `order` those that make keys of negative floats ascend. `bad` counts rows whose offsets lead
    out of their bytes.
    """
    lanes = i64(warp_size())
    unit = grid(1) // lanes
    lane = i64(lane_id())
    low = 0
    high = runs.size // RUN_WORDS
    while high - low > 1:  # the last run that begins at this unit or before it
        middle = (low + high) >> 1
        if runs[middle * RUN_WORDS + FIRST_UNIT] <= unit:
            low = middle
        else:
            high = middle
    run = low * RUN_WORDS
    rows = runs[run + ROWS]
    first = runs[run + FIRST_FLIP]
    count = runs[run + FLIPS]
    begin = (unit - runs[run + FIRST_UNIT]) * UNIT
    for group in range(begin, min(begin + UNIT, (rows + 63) >> 6)):
        row = group << 6
        want = i64(-1)
        if rows - row < 64:
            want = (i64(1) << (rows - row)) - 1
        if joined != 0:
            want &= mask[runs[run + FIRST_WORD] + group]
        if runs[run + VALID] >= 0 and want != 0:
            want &= word_at(valid, runs[run + VALID] + group, tails[1])
        part = i64(0)
        base = runs[run + VALUES]
        if want == 0 or count == 0:
            pass
        elif kind == NUMBERS:
            part = numbers_in(
                values, tails[0], base + (group << shift), want, shift, pattern, order, flips, first, count, lane, lanes
            )
        elif kind == WIDE:
            part = wide_in(values, tails[0], base + 2 * row, want, flips, first, count, lane, lanes)
        elif kind == BITS:
            if lane == 0:
                part = bits_in(values, tails[0], base + group, want, flips, first, count)
        else:
            for k in range(lane, 64, lanes):
                if (want >> k) & 1 != 0:
                    start = (row + k) * shift
                    end = start + shift
                    if kind == TEXT:
                        start = offset_at(values, tails[0], base, row + k, shift)
                        end = offset_at(values, tails[0], base, row + k + 1, shift)
                    if start < 0 or end < start or end > runs[run + NBYTES]:
                        atomic_add(bad, 0, 1)
                    else:
                        inside = bytes_in(
                            data, tails[2], runs[run + DATA], start, end - start, flips, first, count, pool
                        )
                        part |= i64(i64(inside) << k)
        part = reduce_warp(add, part)
        if lane == 0:
            mask[runs[run + FIRST_WORD] + group] = part
