"""Work items of graph kernels: a vertex and a piece of its neighbours, one warp an item.

A vertex with many neighbours gives several items, so that one warp never has more than `PIECE` of them to
read. An item is one word: the vertex, then the number of the piece.
"""

from __future__ import annotations

from ..array import atomic_add
from ..targets import device

PIECE = 1024
"""Neighbours of an item: two pages of 4 KiB."""
PIECE_BITS = 23
PIECE_MASK = (1 << PIECE_BITS) - 1

ITEMS = 0
"""Counter: items in the work list."""
BAD = 1
"""Counter: destinations that are no vertices."""
N_COUNTERS = 8


def most_items(vertices: int, edges: int) -> int:
    """Return the maximal number of items of all vertices together."""
    return vertices + edges // PIECE + 1


@device
def append(vertex, first, end, items, counters):
    """Append the items of a vertex whose neighbours are edges [first, end) (thread)."""
    pieces = (end - first + PIECE - 1) // PIECE
    if pieces > 0:
        at = atomic_add(counters, ITEMS, pieces)
        for k in range(pieces):
            items[at + k] = (vertex << PIECE_BITS) | k


@device
def vertex_of(item):
    """Return the vertex of an item (thread)."""
    return item >> PIECE_BITS


@device
def start_of(item, first):
    """Return the first edge of an item; `first` is the first of its vertex (thread)."""
    return first + (item & PIECE_MASK) * PIECE
