"""The order in which vertices are stored: by degree, and the first neighbours of each vertex.

In descending order of degree, the neighbours that a vertex most likely shares with a search have the smallest numbers:
its list of neighbours begins with them, and their own edges are on the first pages of the file. So most vertices need
only their first `HEAD` neighbours, which are stored again in a file of their own.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .._npy import npy_writer
from .external import Edges, ExternalSort
from .graph import HEAD, HEADS, ORDER, OUT_PART, Graph

_BLOCK = 1 << 18
"""Vertices or edges that are read at a time."""


def stored_edges(folder: Path, graph: Graph) -> Iterator[Edges]:
    """Yield the edges of a graph whose files are in a folder, in stored order, in blocks as `ExternalSort` yields."""
    offsets, edges = np.load(folder / OUT_PART[0]), graph.map(folder / OUT_PART[1])
    weights = None if graph.weights is None else graph.map(folder / OUT_PART[2])
    for start in range(0, graph.edges, _BLOCK):
        end = min(start + _BLOCK, graph.edges)
        first, last = np.searchsorted(offsets, (start, end - 1), "right") - 1
        bounds = np.clip(offsets[first : last + 2], start, end)
        sources = np.repeat(np.arange(first, last + 1), np.diff(bounds))
        block = sources, edges[start:end].astype(np.int64)
        yield block if weights is None else (*block, weights[start:end])


def sort_by_degree(folder: Path, graph: Graph, sort: ExternalSort) -> None:
    """Add the edges of a graph to a sort, numbered in descending order of degree, and write that order.

    The folder has the graph in the given numbers, which break ties.
    """
    order = np.argsort(-np.diff(np.load(folder / OUT_PART[0])), kind="stable")
    with npy_writer(folder / ORDER, np.int64) as write:
        write(order)
    positions = np.empty_like(order)
    positions[order] = np.arange(order.size)
    for sources, destinations, *weights in stored_edges(folder, graph):
        sort.add(positions[sources], positions[destinations], *weights)


def write_heads(folder: Path, graph: Graph, part: tuple[str, str, str]) -> None:
    """Write the first neighbours of each vertex, from which edges lead to it, padded with -1."""
    offsets, edges = np.load(folder / part[0]), graph.map(folder / part[1])
    with npy_writer(folder / HEADS, graph.destinations) as write:
        for first in range(0, graph.vertices, _BLOCK):
            starts = offsets[first : first + _BLOCK + 1]
            positions = starts[:-1, None] + np.arange(HEAD)
            present = positions < starts[1:, None]
            heads = np.full(positions.shape, -1, np.int64)
            heads[present] = edges[positions[present]]
            write(heads)
