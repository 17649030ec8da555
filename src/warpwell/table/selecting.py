"""`select`: the kernel of filters: the rows of a column whose order key is in a set, as bits. `select_whole`: by spans.

They read 64-bit words of files for all types, so that they are compiled once and no query compiles anything;
`predicate` defines keys and sets, `where` makes the arguments. `select` reads the values of candidate rows;
`select_whole` reads all words of numbers, as fast as a span is read.
"""

from __future__ import annotations

import operator

import numpy as np

from ..array import atomic_add, fold_indexed_warp
from ..targets import device, kernel
from ..targets.primitives import (
    DEVICE,
    ballot,
    element_address,
    fetch_or_as,
    ffs,
    grid,
    i64,
    lane_id,
    load_relaxed,
    load_weak_as,
    popc,
    reduce_warp,
    store_weak_as,
    syncwarp,
    warp_size,
)

NUMBERS = 0
"""Items of 8 to 64 bits."""
BITS = 1
"""One bit a row."""
WIDE = 2
"""Items of 128 bits, the low word first."""
TEXT = 3
"""Offsets, of 32 or 64 bits, into bytes."""
BYTES = 4
"""Rows of a fixed number of bytes."""

UNIT = 32
"""Words of the bitmap, of 64 rows each, that one index (on a GPU a warp) writes."""

# Fields of the record of a run.
FIRST_UNIT = 0
FIRST_WORD = 1
"""First word of the run's rows in the bitmap."""
ROWS = 2
VALUES = 3
VALID = 4
"""-1 if no row is null."""
DATA = 5
"""First words of values, validity and bytes in their arrays."""
NBYTES = 6
FIRST_EDGE = 7
EDGES = 8
RUN_WORDS = 9

I8 = np.dtype(np.int64)
ALL_LANES = 0xFFFFFFFF
MIN_INT64 = -(1 << 63)
MAX_INT64 = (1 << 63) - 1


@device
def word_at(array, i, tail):
    """Return a word of an array; behind its end, the file's last, incomplete word (any thread)."""
    if i < array.size:
        return i64(array[i])
    return i64(tail)


@device
def is_in_set(edges, count, key):
    """Return 1 if an odd number of the edges at an address is not greater than the key (any thread)."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        if load_weak_as(i64(edges + 8 * middle), I8) <= key:
            low = middle + 1
        else:
            high = middle
    return low & 1


@device
def matching_items(word, shift, pattern, order, edges, count, low, last):
    """Return the bits of the numbers of a word, of 2**`shift` bits each, that are in the set (any thread).

    `low` and `last` are the minimum and the maximum key of the set. `edges` is the address of `count` edges, because
    `cpu` counts each array that is passed for an item of a span.
    """
    word ^= pattern
    bits = 1 << shift
    matches = i64(0)
    for j in range(64 >> shift):
        key = i64(word << (64 - bits * (j + 1))) >> (64 - bits)
        key ^= (key >> 63) & order
        inside = 0
        if key >= low and key <= last:
            inside = 1
            if count > 2:
                inside = is_in_set(edges, count, key)
        matches |= i64(i64(inside) << j)
    return matches


@device
def bounds(edges, count):
    """Return the minimum and the maximum key of a set (any thread)."""
    if count & 1 == 0:
        return load_weak_as(edges, I8), load_weak_as(i64(edges + 8 * (count - 1)), I8) - 1
    return load_weak_as(edges, I8), i64(MAX_INT64)


@device
def mark_rows(nothing, word, i, base, bitmap, shift, pattern, order, edges, count, low, last):
    """Set the bits of the rows of word i of a column; row 0 is in word `base`, its bit at address `bitmap` (thread)."""
    key = word ^ pattern
    key ^= (key >> 63) & order
    # this test excludes most 64-bit numbers in few instructions
    if shift != 6 or ((key >= low) & (key <= last)):
        item = i - base
        bits = i64(
            matching_items(word, shift, pattern, order, edges, count, low, last)
            << ((item & ((1 << shift) - 1)) << (6 - shift))
        )
        if bits != 0:
            address = i64(bitmap + 8 * (item >> shift))
            if warp_size() == 1:
                store_weak_as(address, load_weak_as(address, I8) | bits, I8)
            else:
                fetch_or_as(address, bits, I8)
    return nothing


@device
def numbers_in(values, tail, base, mask, shift, pattern, order, edges, first, count, keys, lane, lanes):
    """Return the bits of rows in `mask`, of 64, with numbers in the set; each lane reads other words (any thread).

    Written out: with `matching_items` in the inner loop it takes a quarter longer on `cpu`.
    """
    per = 64 >> shift
    bits = 1 << shift
    low = edges[first]
    last = i64(MAX_INT64)
    if count == 2:
        last = edges[first + 1] - 1
    matches = i64(0)
    for k in range(lane, bits, lanes):
        at = k * per
        if (mask >> at) & ((1 << per) - 1) != 0:
            word = word_at(values, base + k, tail) ^ pattern
            for j in range(per):
                key = i64(word << (64 - bits * (j + 1))) >> (64 - bits)
                key ^= (key >> 63) & order
                inside = 0
                if count > 2:
                    inside = is_in_set(keys, count, key)
                elif key >= low and key <= last:
                    inside = 1
                matches |= i64(i64(inside) << (at + j))
    return matches & mask


@device
def bits_in(values, tail, at, mask, edges, count):
    """Return the bits of rows in `mask`, of 64, with a bool in the set (any thread)."""
    word = word_at(values, at, tail)
    true = i64(0 - is_in_set(edges, count, 1))
    false = i64(0 - is_in_set(edges, count, 0))
    return ((word & true) | ((word ^ -1) & false)) & mask


@device
def wide_in(values, tail, base, mask, edges, first, count, lane, lanes):
    """Return the bits of rows in `mask`, of 64, with a number of 128 bits in the set (any thread)."""
    matches = i64(0)
    for k in range(lane, 64, lanes):
        if (mask >> k) & 1 != 0:
            low_word = word_at(values, base + 2 * k, tail) ^ i64(MIN_INT64)
            high_word = word_at(values, base + 2 * k + 1, tail)
            low = 0
            high = count
            while low < high:
                middle = (low + high) >> 1
                edge = edges[first + 2 * middle]
                if edge < high_word or (edge == high_word and edges[first + 2 * middle + 1] <= low_word):
                    low = middle + 1
                else:
                    high = middle
            matches |= i64(i64(low & 1) << k)
    return matches


@device
def is_not_below(data, tail, base, start, length, pool, begin, end):
    """Return 1 if a row's bytes are not less than an edge's (any thread)."""
    for j in range(min(length, end - begin)):
        at = start + j
        byte = (word_at(data, base + (at >> 3), tail) >> ((at & 7) << 3)) & 255
        edge_byte = i64(pool[begin + j])
        if byte != edge_byte:
            return 1 if byte > edge_byte else 0
    return 1 if length >= end - begin else 0


@device
def bytes_in(data, tail, base, start, length, edges, first, count, pool):
    """Return 1 if a row's bytes are in the set (any thread)."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        begin = edges[first + 2 * middle]
        if is_not_below(data, tail, base, start, length, pool, begin, edges[first + 2 * middle + 1]) == 1:
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


@device
def run_of(runs, unit):
    """Return the offset of the record of a unit's run: the last run that begins at or before the unit (thread)."""
    low = 0
    high = runs.size // RUN_WORDS
    while high - low > 1:
        middle = (low + high) >> 1
        if runs[middle * RUN_WORDS + FIRST_UNIT] <= unit:
            low = middle
        else:
            high = middle
    return low * RUN_WORDS


@device
def valid_rows(rows, group, valid, base, tail):
    """Return the bits of the existing rows, of 64, that are not null; `base` is -1 if no row is null (thread)."""
    mask = i64(-1)
    if rows - (group << 6) < 64:
        mask = (i64(1) << (rows - (group << 6))) - 1
    if base >= 0:
        mask &= word_at(valid, base + group, tail)
    return mask


@kernel
def select_whole(values, valid, runs, edges, shift, pattern, order, joined, tails, before, bitmap, first_unit):
    """Do what `select` does, for NUMBERS of which nearly all rows are candidates: their words are read as spans.

    `bitmap` is zeros before. Units are counted from `first_unit`.
    """
    lanes = i64(warp_size())
    lane = i64(lane_id())
    unit = grid(1) // lanes + first_unit
    run = run_of(runs, unit)
    rows = runs[run + ROWS]
    start = runs[run + FIRST_WORD]
    begin = (unit - runs[run + FIRST_UNIT]) * UNIT
    end = min(begin + UNIT, (rows + 63) >> 6)
    has_rows = joined == 0
    for group in range(begin + lane, end, lanes):
        if joined != 0 and before[start + group] != 0:
            has_rows = True
    first = runs[run + FIRST_EDGE]
    count = runs[run + EDGES]
    if ballot(ALL_LANES, has_rows) != 0 and count != 0:
        keys = element_address(edges, first)
        low, last = bounds(keys, count)
        at = element_address(bitmap, start)
        base = runs[run + VALUES]
        to = base + ((min(rows, end << 6) << shift) + 63 >> 6)
        stop = min(to, values.size)
        fold_indexed_warp(
            mark_rows, 0, values, base + (begin << shift), stop, base, at, shift, pattern, order, keys, count, low, last
        )
        if stop < to and lane == 0:
            mark_rows(0, i64(tails[0]), stop, base, at, shift, pattern, order, keys, count, low, last)
        syncwarp(ALL_LANES)
        for group in range(begin + lane, end, lanes):
            mask = valid_rows(rows, group, valid, runs[run + VALID], tails[1])
            if joined != 0:
                mask &= before[start + group]
            if mask != -1:
                bitmap[start + group] = load_relaxed(i64(at + 8 * group), DEVICE) & mask


@kernel
def select(values, valid, data, runs, edges, pool, kind, shift, pattern, order, joined, tails, before, bitmap, corrupt):
    """Set the bits of rows in `bitmap`, with `joined` of those of `before`; all threads of a warp share a unit.

    `values`, `valid` and `data` are files as arrays of int64, `tails` their last, incomplete words. `shift` is the
    logarithm of an item's bits, or the bytes of a row of BYTES; `pattern` flips the bits that make keys of unsigned
    integers signed, and `order` those that make keys of negative floats ascend. `corrupt` gets 1 plus the bit
    of a row whose offsets lead out of its bytes.
    """
    lanes = i64(warp_size())
    unit = grid(1) // lanes
    lane = i64(lane_id())
    run = run_of(runs, unit)
    rows = runs[run + ROWS]
    first = runs[run + FIRST_EDGE]
    count = runs[run + EDGES]
    keys = element_address(edges, first)
    begin = (unit - runs[run + FIRST_UNIT]) * UNIT
    for group in range(begin, min(begin + UNIT, (rows + 63) >> 6)):
        row = group << 6
        mask = i64(-1)
        if joined != 0:
            mask = before[runs[run + FIRST_WORD] + group]
        if mask != 0:
            mask &= valid_rows(rows, group, valid, runs[run + VALID], tails[1])
        part = i64(0)
        base = runs[run + VALUES]
        if mask == 0 or count == 0:
            pass
        elif kind == NUMBERS:
            at = base + (group << shift)
            part = numbers_in(values, tails[0], at, mask, shift, pattern, order, edges, first, count, keys, lane, lanes)
        elif kind == WIDE:
            part = wide_in(values, tails[0], base + 2 * row, mask, edges, first, count, lane, lanes)
        elif kind == BITS:
            if lane == 0:
                part = bits_in(values, tails[0], base + group, mask, keys, count)
        else:
            for k in range(lane, 64, lanes):
                if (mask >> k) & 1 != 0:
                    start = (row + k) * shift
                    end = start + shift
                    if kind == TEXT:
                        start = offset_at(values, tails[0], base, row + k, shift)
                        end = offset_at(values, tails[0], base, row + k + 1, shift)
                    if start < 0 or end < start or end > runs[run + NBYTES]:
                        corrupt[0] = (runs[run + FIRST_WORD] << 6) + row + k + 1
                    else:
                        at = runs[run + DATA]
                        inside = bytes_in(data, tails[2], at, start, end - start, edges, first, count, pool)
                        part |= i64(i64(inside) << k)
        part = reduce_warp(operator.add, part)
        if lane == 0:
            bitmap[runs[run + FIRST_WORD] + group] = part


@kernel
def count_bits(bitmap, count):
    """Add up the bits that are set in a bitmap (one thread a word)."""
    n = popc(i64(bitmap[grid(1)]))
    if n != 0:
        atomic_add(count, 0, n)


@kernel
def list_bits(bitmap, bits, count):
    """List the bits of a bitmap that are set, in any order (one thread a word); `count` is 0 before."""
    i = grid(1)
    word = i64(bitmap[i])
    if word != 0:
        at = atomic_add(count, 0, popc(word))
        while word != 0:
            bits[at] = (i << 6) + ffs(word) - 1
            word = i64(word & (word - 1))
            at += 1
