"""Irregular applications: a breadth-first search level by level, and sparse matrix-vector products. Memory-intensive.

How long a thread runs depends on the data: on the length of its row, and on whether its vertex is in the frontier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warpwell.scheduler import Kind
from warpwell.targets import kernel
from warpwell.targets.primitives import grid, i64

from .application import Built, Inputs, Step, Workload

ZERO = np.float32(0)
DEGREE = 12
ROW = 16


@kernel
def bfs_level(pointers, neighbours, levels, depth):
    """Give the unvisited neighbours of every vertex of a level the next level."""
    i = grid(1)
    if levels[i] == depth:
        for k in range(i64(pointers[i]), i64(pointers[i + 1])):
            neighbour = i64(neighbours[k])
            if levels[neighbour] < 0:
                levels[neighbour] = depth + 1  # several threads may; all write the same


@kernel
def spmv(pointers, columns, values, x, y):
    """Multiply a row of a sparse matrix by a vector: a row a thread."""
    i = grid(1)
    total = ZERO
    for k in range(i64(pointers[i]), i64(pointers[i + 1])):
        total += values[k] * x[i64(columns[k])]
    y[i] = total


def skewed_rows(make: Inputs, rows: int, mean: float) -> NDArray[np.int32]:
    """Return row pointers: lengths are log-normal, so a few rows are many times longer than the mean."""
    lengths = make.random.lognormal(np.log(mean) - 0.5, 1.0, rows).astype(np.int64)
    pointers = np.zeros(rows + 1, np.int32)
    np.cumsum(np.minimum(lengths, 64 * int(mean)), out=pointers[1:])
    return pointers


def reached(pointers: NDArray[np.int32], neighbours: NDArray[np.int32], source: int) -> NDArray[np.int32]:
    """Return the level of every vertex, -1 where the source does not lead."""
    levels = np.full(pointers.size - 1, -1, np.int32)
    levels[source] = 0
    frontier, depth = np.array([source]), 0
    while frontier.size:
        spans = [neighbours[pointers[v] : pointers[v + 1]] for v in frontier]
        found = np.unique(np.concatenate(spans)) if spans else frontier[:0]
        frontier = found[levels[found] < 0]
        depth += 1
        levels[frontier] = depth
    return levels


def _bfs(size: int, make: Inputs) -> Built:
    pointers = skewed_rows(make, size, DEGREE)
    neighbours = make.random.integers(0, size, int(pointers[-1]), dtype=np.int32)
    source = int(np.argmax(np.diff(pointers)))
    expected = reached(pointers, neighbours, source)
    levels = np.full(size, -1, np.int32)
    levels[source] = 0
    held, rows, edges = make.put(levels), make.put(pointers), make.put(neighbours)
    frontiers = np.bincount(expected[expected >= 0])
    steps = [
        # a search learns the size of a frontier before it launches the next level
        Step(
            bfs_level[size],
            (rows, edges, held, depth),
            {"vertices": size, "edges": int(pointers[-1]), "frontier": int(count)},
        )
        for depth, count in enumerate(frontiers)
    ]
    return Built(steps, {"levels": held}, lambda: {"levels": expected})


def _spmv(size: int, make: Inputs) -> Built:
    pointers = skewed_rows(make, size, ROW)
    columns = make.random.integers(0, size, int(pointers[-1]), dtype=np.int32)
    values, x = make.uniform(int(pointers[-1])), make.uniform(size)
    y = make.zeros(size)
    arguments = (make.put(pointers), make.put(columns), make.put(values), make.put(x), y)
    step = Step(spmv[size], arguments, {"rows": size, "nonzeros": int(pointers[-1])})

    def reference() -> dict[str, NDArray[np.float64]]:
        products = np.concatenate(([0.0], np.cumsum(values * x[columns].astype(np.float64))))
        return {"y": products[pointers[1:]] - products[pointers[:-1]]}

    return Built([step], {"y": y}, reference)


WORKLOADS = (
    Workload("bfs", {"bfs_level": Kind.MEMORY}, _bfs, small=900, large=1 << 22),
    Workload("spmv", {"spmv": Kind.MEMORY}, _spmv, small=700, large=1 << 22),
)
