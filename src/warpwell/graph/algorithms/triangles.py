"""Triangles of a graph on storage: ``triangles``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...array import atomic_add
from ...cache import Statistics
from ...targets import device, empty, kernel, to_device, to_host, zeros
from ...targets.primitives import activemask, ballot, div, grid, lane_id, popc, warp_size
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, borrowed
from .components import require_undirected
from .run import Run, try_waves
from .work_items import N_COUNTERS, neighbour_at, sum_all, vertex_at, vertex_dtype, vertices_of

TRIANGLES = 0
"""Counter: triangles."""
BATCH = 8
"""Edges of which a warp looks for the triangles."""


@dataclass(frozen=True)
class TrianglesResult:
    """The triangles of a graph.

    Attributes
    ----------
    triangles : int
        Sets of three vertices of which each two are neighbours; edges from a vertex to itself, and those that are
        repeated, make none.
    seconds : float
        Time of the count, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache meanwhile.
    """

    triangles: int
    seconds: float
    stats: Statistics


@device
def _later(offsets, vertex, other):
    """Tell whether another vertex is behind a vertex in the order of degrees (thread)."""
    mine = offsets[vertex + 1] - offsets[vertex]
    its = offsets[other + 1] - offsets[other]
    return its > mine or (its == mine and other > vertex)


@kernel
def _orient(edges, offsets, vertex, end, window, writes, later, places, counters):
    """Count, or write to `later`, the neighbours in a window that are behind vertices; a warp takes a vertex.

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
    """Tell whether an ascending part of `later` holds a vertex (thread)."""
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
    """Count the triangles of edges to vertices that are behind; a warp takes several edges, one after the other."""
    mask = activemask()
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
            its = places[other]
            its_end = places[other + 1]
            # the shorter one is walked, the longer one searched
            if end - first < its_end - its:
                found += _common(later, first, end, its, its_end)
            else:
                found += _common(later, its, its_end, first, end)
        at += 1
    found = sum_all(mask, found)
    if lane_id() == 0 and found != 0:
        atomic_add(counters, TRIANGLES, found)


def triangles(
    graph: Graph | LoadedGraph | str | Path, *, progress: Progress | None = None, **options: Any
) -> TrianglesResult:
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
    TrianglesResult

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
    report = progress or (lambda stage, done, total: None)
    with borrowed(graph, options, lambda found: require_undirected(found, "triangles")) as loaded:
        pages = None if loaded.in_memory else loaded.edges.page_set()
        counters = zeros(loaded.device, N_COUNTERS)
        report("compile", 0, 1)
        _compile(loaded, pages, counters)
        report("compile", 1, 1)
        before, started = loaded.edges.stats, time.perf_counter()
        with Run(loaded, loaded.edges, *(() if pages is None else (pages,))) as run:
            _triangles(run, pages, counters, report)
        seconds = time.perf_counter() - started
        loaded.require_destinations(counters)
        return TrianglesResult(int(to_host(counters)[TRIANGLES]), seconds, loaded.edges.stats - before)


def _compile(loaded: LoadedGraph, pages: Any, counters: Any) -> None:
    """Compile what is launched, by launches that change nothing."""
    one, where = loaded.warp, loaded.device
    later = empty(where, 1, vertex_dtype(loaded.graph.vertices))
    places = zeros(where, 2)
    _orient[one](loaded.edges, loaded.offsets, 0, 0, (0, 0), 0, later, places, counters)
    _count[one](later, places, 0, counters, device=where)
    if pages is not None:
        try_waves(pages, loaded.edges)


def _triangles(run: Run, pages: Any, counters: Any, report: Progress) -> None:
    """Orient the edges in two passes, then count."""
    loaded, graph = run.loaded, run.loaded.graph
    where, dtype = loaded.device, vertex_dtype(graph.vertices)
    report("count", 0, 3)
    places = zeros(where, graph.vertices + 1)
    _pass(run, pages, 0, empty(where, 1, dtype), places, counters)
    counts = run.read(places)
    ends = np.zeros(graph.vertices + 1, np.int64)
    np.cumsum(counts[:-1], out=ends[1:])
    edges = int(ends[-1])
    if run.failed or not edges:
        return
    report("count", 1, 3)
    later = empty(where, edges, dtype)
    _pass(run, pages, 1, later, to_device(where, ends), counters)
    report("count", 2, 3)
    places = to_device(where, ends)
    run.launch(_count, -(-edges // BATCH) * loaded.warp, later, places, edges, counters)
    run.read(counters)
    report("count", 3, 3)


def _pass(run: Run, pages: Any, writes: int, later: Any, places: Any, counters: Any) -> None:
    """Go through all edges in order."""
    loaded, graph = run.loaded, run.loaded.graph
    offsets = graph.map(graph.offsets_path)
    for window in run.all_edges(pages):
        vertex, end = vertices_of(offsets, window)
        run.launch(
            _orient,
            (end - vertex) * loaded.warp,
            loaded.edges,
            loaded.offsets,
            vertex,
            end,
            window,
            writes,
            later,
            places,
            counters,
        )
    run.read(counters)  # what it was given stays until it is done
