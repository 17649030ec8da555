"""The order in which vertices are stored: by degree, and the first neighbors of each vertex.

In descending order of degree, the neighbors that a vertex most likely shares with a search have the smallest numbers:
its list of neighbors begins with them, and their own edges are on the first pages of the file. So most vertices need
only their first `HEAD` neighbors, which are stored again in a file of their own.
"""

from pathlib import Path

import numpy as np

from .._npy import npy_writer
from .external import Vertices
from .graph import HEAD, HEADS, ORDER, Graph

_BLOCK = 1 << 18
"""Vertices that are read at a time."""


def write_order(folder: Path, degrees: Vertices) -> Vertices:
    """Write the vertices in descending order of degree, equal ones by number, and return the position of each."""
    order = np.argsort(-degrees, kind="stable")
    with npy_writer(folder / ORDER, np.int64) as write:
        write(order)
    positions = np.empty_like(order)
    positions[order] = np.arange(order.size)
    return positions


def write_heads(folder: Path, graph: Graph, part: tuple[str, str, str]) -> None:
    """Write the first neighbors that have an edge to each vertex, padded with -1."""
    offsets, edges = np.load(folder / part[0]), graph.map(folder / part[1])
    with npy_writer(folder / HEADS, graph.destinations) as write:
        for first in range(0, graph.vertices, _BLOCK):
            starts = offsets[first : first + _BLOCK + 1]
            positions = starts[:-1, None] + np.arange(HEAD)
            present = positions < starts[1:, None]
            heads = np.full(positions.shape, -1, np.int64)
            heads[present] = edges[positions[present]]
            write(heads)
