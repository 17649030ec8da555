"""`select`: the kernel of filters: the rows of a column of numbers whose order key is in a set, as bits.

For all types, the kernel reads 64-bit words of files, so that it is compiled once and no query needs a compilation.
`predicate` defines keys and sets; `where` creates the arguments.
"""

from __future__ import annotations

import numpy as np

from ..array import fold_indexed_warp
from ..targets import device, kernel
from ..targets.primitives import (
    element_address,
    fetch_or_as,
    grid,
    i64,
    lane_id,
    load_weak_as,
    store_weak_as,
    warp_size,
)

UNIT = 32
"""Words of the bitmap, of 64 rows each, that one index (on a GPU a warp) writes."""

# Fields of the record of a unit.
FIRST_BITS = 0
"""First word of the unit's rows in the bitmap."""
FIRST_WORD = 1
END_WORD = 2
"""Words of the file that hold the unit's numbers."""
UNIT_WORDS = 3

I8 = np.dtype(np.int64)
MAX_INT64 = (1 << 63) - 1


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

    `low` and `last` are the minimum and the maximum key of the set. `edges` is the address of `count` edges, because on
    "cpu" each array argument costs a count of references per item.
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


@kernel
def select(values, units, edges, shift, pattern, order, tail, bitmap):
    """Set the bits of the rows in `bitmap` whose numbers are in the set; a warp shares a unit.

    `values` is a file as an array of int64, and `tail` its last, incomplete word. `shift` is the logarithm of the bits
    of a number; `pattern` flips the bits that make keys of unsigned integers signed, and `order` those that make keys
    of negative floats ascend. `edges` is not empty. `bitmap` is zeros before; bits after the last row may be set.
    """
    unit = grid(1) // i64(warp_size()) * UNIT_WORDS
    count = i64(edges.size)
    keys = element_address(edges, 0)
    low, last = bounds(keys, count)
    at = element_address(bitmap, units[unit + FIRST_BITS])
    base = units[unit + FIRST_WORD]
    end = units[unit + END_WORD]
    stop = min(end, values.size)
    fold_indexed_warp(mark_rows, 0, values, base, stop, base, at, shift, pattern, order, keys, count, low, last)
    if stop < end and lane_id() == 0:
        mark_rows(0, i64(tail), stop, base, at, shift, pattern, order, keys, count, low, last)
