"""Triangles of a graph on storage: `triangles`."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...targets import device, empty, kernel, to_device, to_host, zeros
from ...targets.primitives import activemask, ballot, div, grid, lane_id, popc, reduce_warp, warp_size
from ..graph import Graph, Progress
from ..loaded import LoadedGraph
from .components import require_undirected
from .run import Result, Run, execute
from .work_items import N_COUNTERS, neighbour_at, vertex_at, vertex_dtype, vertices_of

TRIANGLES = 0
"""Counter: triangles."""
BATCH = 8
"""Edges whose triangles a warp counts."""


@device
def _later(offsets, vertex, other):
    """Return True if `other` follows `vertex` in ascending order of degree (thread)."""
    degree = offsets[vertex + 1] - offsets[vertex]
    other_degree = offsets[other + 1] - offsets[other]
    return other_degree > degree or (other_degree == degree and other > vertex)


@kernel
def _orient(edges, offsets, vertex, end, window, writes, later, places, counters):
    """Count, or write to `later`, the neighbours in a window that follow vertices in order of degree, a warp a vertex.

    ``places[v]`` grows by their number: from 0, or from where the neighbours of v begin in `later`. They stay in their
    order, which ascends.
    """
    mask = activemask()
    v = vertex + div(grid(1), warp_size())
    if v < end:
        at = max(offsets[v], window[0])
        stop = min(offsets[v + 1], window[1])
        place = places[v]
        lane = lane_id()
        while at < stop:
            neighbour = -1
            if at + lane < stop:
                neighbour = neighbour_at(edges, at + lane, offsets.size - 1, counters)
            keep = ballot(mask, neighbour >= 0 and _later(offsets, v, neighbour))
            if writes and (keep >> lane) & 1 != 0:
                later[place + popc(keep & ((1 << lane) - 1))] = neighbour
            place += popc(keep)
            at += warp_size()
        if lane == 0:
            places[v] = place


@device
def _holds(later, first, end, vertex):
    """Return True if an ascending part of `later` has a vertex (thread)."""
    low = first
    high = end
    while low < high:
        middle = (low + high) >> 1
        if later[middle] < vertex:
            low = middle + 1
        else:
            high = middle
    return low < end and later[low] == vertex


@device
def _common(later, first, end, other, other_end):
    """Count the vertices in both of two ascending parts of `later` (all lanes of a warp; their sum is the count)."""
    at = first + lane_id()
    found = 0
    while at < end:
        vertex = later[at]
        if (at == first or later[at - 1] != vertex) and _holds(later, other, other_end, vertex):
            found += 1
        at += warp_size()
    return found


@kernel
def _count(later, places, edges, counters):
    """Count the triangles of edges to vertices of higher degree; a warp takes several edges, one after the other."""
    at = BATCH * div(grid(1), warp_size())
    stop = min(at + BATCH, edges)
    found = 0
    v = 0
    if at < stop:
        v = vertex_at(places, at, places.size - 1)
    while at < stop:
        while places[v + 1] <= at:
            v += 1
        first = places[v]
        end = places[v + 1]
        other = later[at]
        if at == first or later[at - 1] != other:
            other_first = places[other]
            other_end = places[other + 1]
            # The shorter list is walked, the longer one searched.
            if end - first < other_end - other_first:
                found += _common(later, first, end, other_first, other_end)
            else:
                found += _common(later, other_first, other_end, first, end)
        at += 1
    found = reduce_warp(operator.add, found)
    if lane_id() == 0 and found != 0:
        atomic_add(counters, TRIANGLES, found)


def triangles(graph: Graph | LoadedGraph | str | Path, *, progress: Progress | None = None, **options: Any) -> Result:
    """Count the triangles of an undirected graph, reading its edges twice, in order.

    Each edge is kept in the direction of the vertex of higher degree, so that no list is long, and the lists of the two
    ends of each are intersected ("Main-memory triangle computations for very large (sparse (power-law)) graphs",
    Latapy, 2008). These lists are in device memory: 4 bytes for every two edges, and 16 bytes a vertex.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph whose edges are stored in both directions.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"count"`` with passes.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its count is the number of triangles, which are sets of three vertices of which each two are neighbours; edges
        from a vertex to itself and repeated edges do not add any. Its values are empty.

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


class _Triangles:
    """One count of triangles; see `run.Work`."""

    def __init__(self, loaded: LoadedGraph) -> None:
        self.loaded, self.arrays = loaded, (loaded.edges,)
        self.counters = zeros(loaded.device, N_COUNTERS)
        self.dtype = vertex_dtype(loaded.graph.vertices)

    def compile(self) -> None:
        """Compile all kernels, by launches that change nothing."""
        loaded, one, where = self.loaded, self.loaded.warp, self.loaded.device
        later, places = empty(where, 1, self.dtype), zeros(where, 2)
        _orient[one](loaded.edges, loaded.offsets, 0, 0, (0, 0), 0, later, places, self.counters, device=where)
        _count[one](later, places, 0, self.counters, device=where)

    def run(self, run: Run, report: Progress) -> None:
        """Orient the edges in two passes, then count."""
        loaded, vertices, where = self.loaded, self.loaded.graph.vertices, self.loaded.device
        report("count", 0, 3)
        places = zeros(where, vertices + 1)
        self._orient(run, 0, empty(where, 1, self.dtype), places)
        counts = run.read(places)
        ends = np.zeros(vertices + 1, np.int64)
        np.cumsum(counts[:-1], out=ends[1:])
        edges = int(ends[-1])
        if run.failed or not edges:
            return
        report("count", 1, 3)
        later, places = empty(where, edges, self.dtype), to_device(where, ends)
        self._orient(run, 1, later, places)
        report("count", 2, 3)
        places = to_device(where, ends)
        run.launch(_count, -(-edges // BATCH) * loaded.warp, later, places, edges, self.counters, reads=False)
        run.read(self.counters)
        report("count", 3, 3)

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return no values, the number of triangles, and three passes."""
        return np.empty(0), int(to_host(self.counters)[TRIANGLES]), 3

    def _orient(self, run: Run, writes: int, later: Any, places: Any) -> None:
        """Visit all edges in order."""
        loaded, graph = self.loaded, self.loaded.graph
        offsets = graph.map(graph.offsets_path)
        for window in loaded.windows(loaded.edges):
            vertex, end = vertices_of(offsets, window)
            arguments = vertex, end, window, writes, later, places, self.counters
            run.launch(_orient, (end - vertex) * loaded.warp, loaded.edges, loaded.offsets, *arguments)
        run.read(self.counters)  # The arguments stay alive until the launches are done.
