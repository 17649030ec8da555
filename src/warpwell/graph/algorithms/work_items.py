"""Work items of graph kernels: a vertex and a piece of its neighbours, one warp an item; and sets of vertices.

A vertex with many neighbours gives several items, so that one warp never has more than `PIECE` of them to
read. An item is one word: the vertex, then the number of the piece. Sets of vertices are bitmaps of 32-bit words, so
that a warp has the vertices of one word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...targets import device
from ...targets.primitives import (
    div,
    element_address,
    fetch_or_as,
    i64,
    lane_id,
    load_relaxed_as,
    popc,
    shfl,
    shfl_as,
    warp_size,
)

PIECE = 1024
"""Neighbours of an item: a page of 4 KiB."""
PIECE_BITS = 23
PIECE_MASK = (1 << PIECE_BITS) - 1
WORD = 32
"""Vertices of a word of a bitmap."""
WARPS = 1 << 14
"""Warps of kernels that go through all words of a bitmap; each takes every so manieth of them."""
NO_PAGES = 0, 0, 0, 0, 0
"""A sweep of no pages."""
WALK = 64
"""Vertices without edges of a page that are passed one by one, before the next vertex is searched."""
_DEGREES = 36
"""Bits of a sum of degrees in a warp."""

# Counters that kernels only add to; the host compares two readings.
ITEMS = 0
"""Items that were appended."""
BAD = 1
"""Destinations that are no vertices."""
FOUND = 2
"""Vertices that were found."""
DEGREES = 3
"""Edges of the vertices that were found."""
LEVEL = 4
BEGIN = 5
FRONTIER = 6
STOP = 7
"""Where a kernel that runs several levels stands: level, first item, edges; and whether it was told to end."""
PUSHED = 8
PULLED = 9
"""Pages that were marked."""
KEPT = 10
"""Edges that were kept, or would have been where there was room."""
N_COUNTERS = 11


def most_items(vertices: int, edges: int) -> int:
    """Return the maximal number of items of all vertices together."""
    return vertices + edges // PIECE + 1


def start_array(length: int, index: int, value: Any, at_index: Any, dtype: Any) -> NDArray[Any]:
    """Return an array of one value with another at an index."""
    array = np.full(length, value, dtype)
    array[index] = at_index
    return array


def words_of(vertices: int) -> int:
    """Return the number of words of a bitmap of vertices."""
    return -(-vertices // WORD)


def vertices_of(offsets: Any, window: tuple[int, int]) -> tuple[int, int]:
    """Return the vertices [first, end) that have all edges of a window, by offsets on the host.

    Windows that cover all edges have all vertices, those without edges, too.
    """
    first = int(np.searchsorted(offsets, window[0], "right")) - 1 if window[0] > 0 else 0
    return first, min(int(np.searchsorted(offsets, window[1], "right")), len(offsets) - 1)


def up_to_warps(threads: int, warp: int) -> int:
    """Return the number of threads of whole warps: kernels whose warps vote want no lane missing."""
    return -(-threads // warp) * warp


def vertex_dtype(vertices: int) -> Any:
    """Return the smallest dtype of vertices and of -1."""
    return np.int32 if vertices <= 1 << 31 else np.int64


@device
def sum_below(mask, value):
    """Return the sum of `value` over the lanes up to the calling one (all lanes of mask, which is a whole warp)."""
    lane = lane_id()
    total = value
    step = 1
    while step < warp_size():
        below = shfl(mask, total, max(lane - step, 0))
        if lane >= step:
            total += below
        step *= 2
    return total


@device
def sum_all(mask, value):
    """Return the sum of `value` over a whole warp (all lanes of mask, which need not run converged)."""
    lane = lane_id()
    step = 1
    while step < warp_size():
        value += shfl_as(mask, value, lane ^ step)
        step *= 2
    return value


@device
def add_all(mask, counters, which, value):
    """Add the sum of `value` over a whole warp to a counter (all lanes of mask)."""
    total = sum_below(mask, value)
    if lane_id() == warp_size() - 1 and total != 0:
        atomic_add(counters, which, total)


@device
def append(mask, found, vertex, offsets, items, base, counters):
    """Append the items of the vertices of those lanes that found one (all lanes of mask, which is a whole warp).

    Item number k of the counter is put at ``items[base + k]``. Returns the vertices' edges in the lanes up to the
    calling one.
    """
    pieces = 0
    degree = 0
    if found:
        degree = offsets[vertex + 1] - offsets[vertex]
        pieces = (degree + PIECE - 1) // PIECE
    sums = sum_below(mask, (pieces << _DEGREES) | degree)
    last = warp_size() - 1
    at = 0
    if lane_id() == last and sums >> _DEGREES > 0:
        at = atomic_add(counters, ITEMS, sums >> _DEGREES)
    at = base + shfl(mask, at, last) + (sums >> _DEGREES) - pieces
    for k in range(pieces):
        items[at + k] = (vertex << PIECE_BITS) | k
    return sums & ((1 << _DEGREES) - 1)


@device
def vertex_at(offsets, edge, vertices):
    """Return the vertex that an edge leaves (thread)."""
    low = i64(0)
    high = i64(vertices)
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[middle] <= edge:
            low = middle
        else:
            high = middle
    return low


@device
def vertex_from(offsets, vertex, edge, vertices):
    """Return the vertex that an edge leaves, which is `vertex` or a later one, mostly a near one (thread)."""
    steps = 0
    while offsets[vertex + 1] <= edge:
        vertex += 1
        steps += 1
        if steps == WALK:
            return vertex_at(offsets, edge, vertices)
    return vertex


@device
def page_at(sweep, edge):
    """Return the page on which an edge begins (thread)."""
    if edge < sweep[3]:
        return i64(0)
    return 1 + div(i64(edge) - sweep[3], sweep[4])


@device
def page_of(sweep, index):
    """Return the page of edges that is number `index` of a sweep; see `LoadedGraph.sweep` (thread)."""
    return sweep[1] + sweep[2] * index


@device
def page_start(sweep, page, edges):
    """Return the first edge of a page of edges (thread)."""
    if page == 0:
        return i64(0)
    return min(i64(sweep[3]) + (page - 1) * sweep[4], i64(edges))


@device
def vertex_of(item):
    """Return the vertex of an item (thread)."""
    return item >> PIECE_BITS


@device
def start_of(item, first):
    """Return the first edge of an item; `first` is the first of its vertex (thread)."""
    return first + (item & PIECE_MASK) * PIECE


@device
def neighbour_at(edges, at, vertices, counters):
    """Return a destination, or -1, which is counted, if it is no vertex (thread)."""
    neighbour = i64(edges[at])
    if neighbour < 0 or neighbour >= vertices:
        atomic_add(counters, BAD, 1)
        return -1
    return neighbour


@device
def contains(bitmap, vertex):
    """Tell whether a vertex is in a set that may grow meanwhile (thread). Relaxed."""
    return (i64(load_relaxed_as(element_address(bitmap, vertex >> 5), bitmap.dtype)) >> (vertex & 31)) & 1 != 0


@device
def insert(bitmap, vertex):
    """Add a vertex to a set; tell whether it was not in it: one thread alone is told so (thread). Relaxed."""
    if contains(bitmap, vertex):
        return False
    bit = 1 << (vertex & 31)
    return i64(fetch_or_as(element_address(bitmap, vertex >> 5), bit, bitmap.dtype)) & bit == 0


@device
def insert_range(bitmap, first, last):
    """Add numbers first to last to a set; return how many were not in it (thread). Relaxed, 32 at a time."""
    fresh = 0
    while first <= last:
        wanted = (i64(0xFFFFFFFF) << (first & 31)) & 0xFFFFFFFF
        if last >> 5 == first >> 5:
            wanted &= (i64(2) << (last & 31)) - 1
        address = element_address(bitmap, first >> 5)
        if i64(load_relaxed_as(address, bitmap.dtype)) & wanted != wanted:
            fresh += popc(wanted & ~i64(fetch_or_as(address, wanted, bitmap.dtype)))
        first = ((first >> 5) + 1) << 5
    return fresh
