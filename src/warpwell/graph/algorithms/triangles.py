"""Triangles of a graph on storage: `triangles`."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...targets import device, empty, kernel, to_device, to_host, zeros
from ...targets.primitives import activemask, ballot, div, grid, i64, lane_id, popc, reduce_warp, warp_size
from ..graph import Graph, Progress
from ..loaded import LoadedGraph
from .components import require_undirected
from .run import Result, Run, Work, execute
from .work_items import neighbor_at, vertex_dtype, vertices_of

TRIANGLES = 0
"""Counter: triangles."""
BATCH = 8
"""Edges whose triangles a warp counts."""


@device
def _precedes(offsets, vertex, neighbor):
    """Return True if `vertex` precedes `neighbor` in ascending order of degree (thread)."""
    degree = offsets[vertex + 1] - offsets[vertex]
    neighbor_degree = offsets[neighbor + 1] - offsets[neighbor]
    return neighbor_degree > degree or (neighbor_degree == degree and neighbor > vertex)


@kernel
def _orient(edges, offsets, vertex, end, window, writes, successors, cursors, counters):
    """Count, or write to `successors`, the neighbors in a window that follow a vertex in order of degree.

    A warp takes a vertex. ``cursors[v]`` grows by the number of neighbors: from 0, or from the start of the successors
    of v in `successors`, which stay in ascending order.
    """
    mask = activemask()
    v = vertex + div(grid(1), warp_size())
    if v < end:
        edge = max(offsets[v], window[0])
        stop = min(offsets[v + 1], window[1])
        cursor = cursors[v]
        lane = lane_id()
        while edge < stop:
            neighbor = -1
            if edge + lane < stop:
                neighbor = neighbor_at(edges, edge + lane, offsets.size - 1, counters)
            keep = ballot(mask, neighbor >= 0 and _precedes(offsets, v, neighbor))
            if writes and (keep >> lane) & 1 != 0:
                successors[cursor + popc(keep & ((1 << lane) - 1))] = neighbor
            cursor += popc(keep)
            edge += warp_size()
        if lane == 0:
            cursors[v] = cursor


@device
def _upper_bound(values, low, high, key):
    """Return the first index in [low, high) of ascending values with a value above a key, or `high` (thread)."""
    first = i64(low)
    end = i64(high)
    while first < end:
        middle = (first + end) >> 1
        if values[middle] <= key:
            first = middle + 1
        else:
            end = middle
    return first


@device
def _common(successors, first, end, second, second_end):
    """Count the vertices in both of two ascending parts of `successors` (a warp: the sum over its lanes)."""
    at = first + lane_id()
    found = 0
    while at < end:
        vertex = successors[at]
        if at == first or successors[at - 1] != vertex:
            bound = _upper_bound(successors, second, second_end, vertex)
            if bound > second and successors[bound - 1] == vertex:
                found += 1
        at += warp_size()
    return found


@kernel
def _count(successors, starts, edges, counters):
    """Count the triangles of edges to vertices of higher degree; a warp takes `BATCH` edges in turn."""
    at = BATCH * div(grid(1), warp_size())
    stop = min(at + BATCH, edges)
    found = 0
    v = 0
    if at < stop:
        v = _upper_bound(starts, 0, starts.size, at) - 1
    while at < stop:
        while starts[v + 1] <= at:
            v += 1
        first = starts[v]
        end = starts[v + 1]
        neighbor = successors[at]
        if at == first or successors[at - 1] != neighbor:
            second = starts[neighbor]
            second_end = starts[neighbor + 1]
            # Iterate over the shorter list, and search the longer list.
            if end - first < second_end - second:
                found += _common(successors, first, end, second, second_end)
            else:
                found += _common(successors, second, second_end, first, end)
        at += 1
    found = reduce_warp(operator.add, found)
    if lane_id() == 0 and found != 0:
        atomic_add(counters, TRIANGLES, found)


def triangles(graph: Graph | LoadedGraph | str | Path, *, progress: Progress | None = None, **options: Any) -> Result:
    """Count the triangles of an undirected graph, reading its edges twice, in order.

    Each edge is kept only in the direction to the vertex of higher degree, so that no list of neighbors is long. Then,
    for each edge, the lists of its two ends are intersected ("Main-memory triangle computations for very large (sparse
    (power-law)) graphs", Latapy, 2008). The lists are in device memory: 4 bytes for every two edges, and 16 bytes per
    vertex.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph whose edges are stored in both directions.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0, 1 of 1) for each kernel; ``"count"`` with passes.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its count is the number of triangles: sets of three vertices that are all neighbors of each other. Edges from a
        vertex to itself and repeated edges add no triangles. Its values are empty.

    Raises
    ------
    ArgumentError
        The graph is directed, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    MemoryError
        The device has no room for the lists.
    """
    return execute(graph, options, lambda found: require_undirected(found, "triangles"), _Triangles, progress)


class _Triangles(Work):
    """One count of triangles."""

    def __init__(self, loaded: LoadedGraph) -> None:
        super().__init__(loaded, loaded.edges)
        self.dtype = vertex_dtype(self.graph.vertices)

    def run(self, run: Run, report: Progress) -> None:
        """Orient the edges in two passes, then count."""
        vertices, where = self.graph.vertices, self.device
        report("count", 0, 3)
        cursors = zeros(where, vertices + 1)
        self._orient(run, 0, empty(where, 1, self.dtype), cursors)
        counts = run.read(cursors)
        starts = np.zeros(vertices + 1, np.int64)
        np.cumsum(counts[:-1], out=starts[1:])
        edges = int(starts[-1])
        if run.failed or not edges:
            return
        report("count", 1, 3)
        successors, cursors = empty(where, edges, self.dtype), to_device(where, starts)
        self._orient(run, 1, successors, cursors)
        report("count", 2, 3)
        cursors = to_device(where, starts)
        run.launch(_count, -(-edges // BATCH) * self.loaded.warp, successors, cursors, edges, self.counters)
        run.read(self.counters)
        report("count", 3, 3)

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return no values, the number of triangles, and three passes."""
        return np.empty(0), int(to_host(self.counters)[TRIANGLES]), 3

    def _orient(self, run: Run, writes: int, successors: Any, cursors: Any) -> None:
        """Visit all edges in order."""
        loaded, offsets = self.loaded, self.graph.map(self.graph.offsets_path)
        for window in loaded.windows(loaded.edges):
            vertex, end = vertices_of(offsets, window)
            arguments = vertex, end, window, writes, successors, cursors, self.counters
            run.launch(_orient, (end - vertex) * loaded.warp, loaded.edges, loaded.offsets, *arguments)
        run.read(self.counters)  # The arguments stay alive until the launches are done.
