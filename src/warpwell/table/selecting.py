"""`select`: the kernel of filters: the rows of a column whose order key is in a set, as bits. `select_whole`: by spans.

They read 64-bit words of files, whatever these hold, so that they are compiled once and no query compiles anything;
`predicate` defines keys and sets, `where` makes the arguments. `select` reads the values of rows that are wanted;
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
"""As many bytes in each row."""

UNIT = 32
"""Words of the bitmap, of 64 rows each, that one index (on a GPU a warp) writes."""

# Fields of the record of a run.
FIRST_UNIT = 0
FIRST_WORD = 1
"""Where its rows begin in the bitmap."""
ROWS = 2
VALUES = 3
VALID = 4
"""-1 if no row is null."""
DATA = 5
"""Where values, validity and bytes begin: words of their arrays."""
NBYTES = 6
FIRST_EDGE = 7
EDGES = 8
RUN_WORDS = 9

I8 = np.dtype(np.int64)
ALL_LANES = 0xFFFFFFFF
LEAST = -(1 << 63)
GREATEST = (1 << 63) - 1


@device
def word_at(words, i, tail):
    """Return a word of an array; behind its end, the file's last, incomplete word (any thread)."""
    if i < words.size:
        return i64(words[i])
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

    `edges` is the address of `count` edges; `low` and `last` are the least and the greatest key there may be. Who calls
    this for each item of a span passes no array on, each of which would be counted on `cpu`.
    """
    word ^= pattern
    bits = 1 << shift
    found = i64(0)
    for j in range(64 >> shift):
        key = i64(word << (64 - bits * (j + 1))) >> (64 - bits)
        key ^= (key >> 63) & order
        inside = 0
        if key >= low and key <= last:
            inside = 1
            if count > 2:
                inside = is_in_set(edges, count, key)
        found |= i64(i64(inside) << j)
    return found


@device
def bounds(edges, count):
    """Return the least and the greatest key that a set may have (any thread)."""
    if count & 1 == 0:
        return load_weak_as(edges, I8), load_weak_as(i64(edges + 8 * (count - 1)), I8) - 1
    return load_weak_as(edges, I8), i64(GREATEST)


@device
def mark_rows(nothing, word, i, base, bitmap, shift, pattern, order, edges, count, low, last):
    """Set the bits of the rows of word i of a column; row 0 is in word `base`, its bit at address `bitmap` (thread)."""
    key = word ^ pattern
    key ^= (key >> 63) & order
    # of 64-bit numbers most are seen to be outside here, by few instructions
    if shift != 6 or ((key >= low) & (key <= last)):
        place = i - base
        bits = i64(
            matching_items(word, shift, pattern, order, edges, count, low, last)
            << ((place & ((1 << shift) - 1)) << (6 - shift))
        )
        if bits != 0:
            address = i64(bitmap + 8 * (place >> shift))
            if warp_size() == 1:
                store_weak_as(address, load_weak_as(address, I8) | bits, I8)
            else:
                fetch_or_as(address, bits, I8)
    return nothing


@device
def numbers_in(values, tail, base, want, shift, pattern, order, edges, first, count, keys, lane, lanes):
    """Return the bits of the rows wanted of 64 whose numbers are in the set; each lane its own (any thread).

    Written out: with `matching_items` in the inner loop it takes a quarter longer on `cpu`.
    """
    per = 64 >> shift
    bits = 1 << shift
    low = edges[first]
    last = i64(GREATEST)
    if count == 2:
        last = edges[first + 1] - 1
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
                    inside = is_in_set(keys, count, key)
                elif key >= low and key <= last:
                    inside = 1
                found |= i64(i64(inside) << (at + j))
    return found & want


@device
def bits_in(values, tail, at, want, edges, count):
    """Return the bits of the rows wanted of 64 whose bool is in the set (any thread)."""
    word = word_at(values, at, tail)
    true = i64(0 - is_in_set(edges, count, 1))
    false = i64(0 - is_in_set(edges, count, 0))
    return ((word & true) | ((word ^ -1) & false)) & want


@device
def wide_in(values, tail, base, want, edges, first, count, lane, lanes):
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
                edge = edges[first + 2 * middle]
                if edge < high_word or (edge == high_word and edges[first + 2 * middle + 1] <= low_word):
                    low = middle + 1
                else:
                    high = middle
            found |= i64(i64(low & 1) << k)
    return found


@device
def is_not_below(data, tail, base, start, length, pool, begin, end):
    """Return 1 if a row's bytes are not less than a edge's (any thread)."""
    for j in range(min(length, end - begin)):
        at = start + j
        byte = (word_at(data, base + (at >> 3), tail) >> ((at & 7) << 3)) & 255
        other = i64(pool[begin + j])
        if byte != other:
            return 1 if byte > other else 0
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
    """Return where the record of the run begins in which a unit is: the last that begins there or before (thread)."""
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
    """Return the bits of the rows that there are, of 64, and that are not null; `base` is -1 if none is (thread)."""
    want = i64(-1)
    if rows - (group << 6) < 64:
        want = (i64(1) << (rows - (group << 6))) - 1
    if base >= 0:
        want &= word_at(valid, base + group, tail)
    return want


@kernel
def select_whole(values, valid, runs, edges, shift, pattern, order, joined, tails, before, bitmap, first_unit):
    """Do what `select` does, for NUMBERS of which nearly all rows are wanted: their words are read as spans.

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
    some = joined == 0
    for group in range(begin + lane, end, lanes):
        if joined != 0 and before[start + group] != 0:
            some = True
    first = runs[run + FIRST_EDGE]
    count = runs[run + EDGES]
    if ballot(ALL_LANES, some) != 0 and count != 0:
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
            want = valid_rows(rows, group, valid, runs[run + VALID], tails[1])
            if joined != 0:
                want &= before[start + group]
            if want != -1:
                bitmap[start + group] = load_relaxed(i64(at + 8 * group), DEVICE) & want


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
        want = i64(-1)
        if joined != 0:
            want = before[runs[run + FIRST_WORD] + group]
        if want != 0:
            want &= valid_rows(rows, group, valid, runs[run + VALID], tails[1])
        part = i64(0)
        base = runs[run + VALUES]
        if want == 0 or count == 0:
            pass
        elif kind == NUMBERS:
            at = base + (group << shift)
            part = numbers_in(values, tails[0], at, want, shift, pattern, order, edges, first, count, keys, lane, lanes)
        elif kind == WIDE:
            part = wide_in(values, tails[0], base + 2 * row, want, edges, first, count, lane, lanes)
        elif kind == BITS:
            if lane == 0:
                part = bits_in(values, tails[0], base + group, want, keys, count)
        else:
            for k in range(lane, 64, lanes):
                if (want >> k) & 1 != 0:
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
