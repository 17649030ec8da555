"""Work items of graph kernels, one warp an item, and sets of vertices.

An item is a vertex and a segment of its neighbors: a vertex with many neighbors has several items, so that a warp
reads at most `SEGMENT` of them. It is one word: the vertex, then the number of the segment. Sets of vertices are
bitmaps of 32-bit words, so that a warp has the vertices of one word.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...targets import device, kernel
from ...targets.primitives import (
    activemask,
    ballot,
    element_address,
    fetch_or_as,
    grid,
    i64,
    lane_id,
    load_relaxed_as,
    reduce_warp,
    shfl,
    warp_size,
)

SEGMENT = 1024
"""Neighbors of an item: a page of 4 KiB."""
SEGMENT_BITS = 23
SEGMENT_MASK = (1 << SEGMENT_BITS) - 1
WORD = 32
"""Vertices of a word of a bitmap."""
WARPS = 1 << 14
"""Warps of kernels that visit all words of a bitmap; each takes the words whose number is its own modulo `WARPS`."""
_DEGREE_BITS = 36
"""Bits of a sum of degrees in a warp."""

# Counters that kernels only add to; the host subtracts two readings.
ITEMS = 0
"""Items that were appended."""
BAD = 1
"""Destinations that are not vertices."""
FOUND = 2
"""Vertices that were found."""
DEGREES = 3
"""Edges of the vertices that were found."""
UNDECIDED_EDGES = 4
"""Edges, without the first ones, of vertices whose first neighbors do not decide whether they are found."""
UNDECIDED_PAGES = 5
"""Pages of these edges."""
N_COUNTERS = 10
"""The last 4 items belong to a kernel that visits several levels."""


def max_items(vertices: int, edges: int) -> int:
    """Return the maximum number of items of all vertices together."""
    return vertices + edges // SEGMENT + 1


def start_array(length: int, index: int, value: Any, at_index: Any, dtype: Any) -> NDArray[Any]:
    """Return an array filled with `value`, with `at_index` at an index."""
    array = np.full(length, value, dtype)
    array[index] = at_index
    return array


def count_words(vertices: int) -> int:
    """Return the number of words of a bitmap of vertices."""
    return -(-vertices // WORD)


def vertices_of(offsets: Any, window: tuple[int, int]) -> tuple[int, int]:
    """Return the vertices [first, end) that have all edges of a window, by offsets on the host.

    Windows that cover all edges also cover all vertices, including those without edges.
    """
    first = int(np.searchsorted(offsets, window[0], "right")) - 1 if window[0] > 0 else 0
    return first, min(int(np.searchsorted(offsets, window[1], "right")), len(offsets) - 1)


def up_to_warps(threads: int, warp: int) -> int:
    """Return the number of threads of whole warps, because kernels whose warps vote need all lanes."""
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
def add_all(counters, which, value):
    """Add the sum of `value` over a whole warp to a counter (all lanes)."""
    total = reduce_warp(operator.add, value)
    if lane_id() == 0 and total != 0:
        atomic_add(counters, which, total)


@device
def append(mask, found, vertex, offsets, items, base, counters):
    """Append the items of the vertices of those lanes that found one (all lanes of mask, which is a whole warp).

    Item number k of the counter is put at ``items[base + k]``. Returns the vertices' edges in the lanes up to the
    calling one.
    """
    segments = 0
    degree = 0
    if found:
        degree = offsets[vertex + 1] - offsets[vertex]
        segments = (degree + SEGMENT - 1) // SEGMENT
    sums = sum_below(mask, (segments << _DEGREE_BITS) | degree)
    last = warp_size() - 1
    at = 0
    if lane_id() == last and sums >> _DEGREE_BITS > 0:
        at = atomic_add(counters, ITEMS, sums >> _DEGREE_BITS)
    at = base + shfl(mask, at, last) + (sums >> _DEGREE_BITS) - segments
    for k in range(segments):
        items[at + k] = (vertex << SEGMENT_BITS) | k
    return sums & ((1 << _DEGREE_BITS) - 1)


@kernel
def list_items(offsets, labels, label, matches, vertex, end, min_degree, items, base, counters):
    """Append the items of vertices [vertex, end), nearly in their order (thread a vertex).

    Vertices with fewer than `min_degree` edges are left out. So are vertices whose label in `labels` differs from
    `label` if `matches` is 1, or is equal to `label` if `matches` is 0.
    """
    mask = activemask()
    v = vertex + grid(1)
    found = False
    if v < end:
        found = (labels[v] == label) == (matches == 1) and offsets[v + 1] - offsets[v] >= min_degree
    if ballot(mask, found) != 0:
        append(mask, found, v, offsets, items, base, counters)


@device
def segment_of(item, offsets):
    """Return the vertex of an item, and the first edge and the end of its segment (thread)."""
    vertex = item >> SEGMENT_BITS
    first = offsets[vertex] + (item & SEGMENT_MASK) * SEGMENT
    return vertex, first, min(first + SEGMENT, offsets[vertex + 1])


@device
def neighbor_at(edges, at, vertices, counters):
    """Return the vertex at the other end of an edge, or -1, which is counted, if it is not a vertex (thread)."""
    neighbor = i64(edges[at])
    if neighbor < 0 or neighbor >= vertices:
        atomic_add(counters, BAD, 1)
        return -1
    return neighbor


@device
def contains(bitmap, vertex):
    """Return True if a vertex is in a set that may grow concurrently (thread). Relaxed."""
    return (i64(load_relaxed_as(element_address(bitmap, vertex >> 5), bitmap.dtype)) >> (vertex & 31)) & 1 != 0


@device
def insert(bitmap, vertex):
    """Add a vertex to a set; return True if the calling thread added it (thread). Relaxed."""
    if contains(bitmap, vertex):
        return False
    bit = 1 << (vertex & 31)
    return i64(fetch_or_as(element_address(bitmap, vertex >> 5), bit, bitmap.dtype)) & bit == 0
