"""Breadth-first search over a graph on storage: ``bfs``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array import atomic_add
from ..cache import Statistics
from ..errors import ArgumentError
from ..targets import (
    DEVICE,
    activemask,
    compare_exchange,
    device,
    div,
    element_address,
    grid,
    i64,
    kernel,
    lane_id,
    load_relaxed,
    syncwarp,
    warp_size,
)
from ..targets.arrays import to_device, to_host, zeros
from .graph import Graph, Progress
from .loaded import LoadedGraph, borrowed
from .work_items import BAD, ITEMS, N_COUNTERS, PIECE, append, most_items, start_of, vertex_of

LARGE_FRONTIER = 16
"""A frontier of more than one in so many vertices is put into vertex order before it is visited."""


@dataclass(frozen=True)
class BFSResult:
    """The result of a breadth-first search.

    Attributes
    ----------
    source : int
        The start vertex, of level 0.
    levels : ndarray of int64, shape (vertices,)
        Number of edges on a shortest path from the source; -1 if there is no path.
    reached : int
        Vertices with a level, the source included.
    depth : int
        The largest level.
    seconds : float
        Time of the search, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache during the search.
    """

    source: int
    levels: NDArray[np.int64]
    reached: int
    depth: int
    seconds: float
    stats: Statistics


@device
def _visit(vertex, level, offsets, levels, items, counters):
    """Set the level of a vertex and append its items, unless another thread has done so (thread)."""
    address = element_address(levels, vertex)
    if load_relaxed(address, DEVICE) == -1 and compare_exchange(address, -1, level, DEVICE) == -1:
        append(vertex, offsets[vertex], offsets[vertex + 1], items, counters)


@kernel
def _begin(source, offsets, levels, items, counters):
    _visit(source, 0, offsets, levels, items, counters)


@kernel
def _advance(edges, offsets, levels, items, begin, end, level, counters):
    """Visit the neighbours of items [begin, end); a warp takes one item, its lanes neighbouring edges."""
    index = begin + div(grid(1), warp_size())
    if index < end:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex])
        stop = min(at + PIECE, offsets[vertex + 1])
        mask = activemask()
        lane = lane_id()
        while at < stop:
            if at + lane < stop:
                neighbour = i64(edges[at + lane])
                if neighbour < 0 or neighbour >= levels.size:
                    atomic_add(counters, BAD, 1)
                else:
                    _visit(neighbour, level, offsets, levels, items, counters)
            # together again, so that the lanes' next edges are read as one
            syncwarp(mask)
            at += warp_size()


@kernel
def _rewind(counters, items):
    counters[ITEMS] = items


@kernel
def _collect(offsets, levels, level, items, counters):
    """Append the items of vertices on a level, nearly in vertex order (thread a vertex)."""
    v = grid(1)
    if levels[v] == level:
        append(v, offsets[v], offsets[v + 1], items, counters)


def bfs(
    graph: Graph | LoadedGraph | str | Path,
    source: int,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> BFSResult:
    """Search a graph breadth-first, reading its edges on demand.

    Each level is one kernel: a warp takes a vertex of the frontier (or a piece of a large one) and its lanes
    read neighbouring edges, so their pages are fetched together; a large frontier is visited in vertex order,
    so that its vertices share the pages. Levels, offsets and frontier are in device memory: about 24 bytes a
    vertex.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        The graph; edges are followed in their direction.
    source : int
        The vertex to start from.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"search"`` with the
        level that is being visited and a total of 0, as it is not known.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    BFSResult

    Raises
    ------
    ArgumentError
        `source` is not a vertex of the graph, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.

    Examples
    --------
    >>> result = bfs("cnr.ww", 10000, cache="2MiB")  # doctest: +SKIP
    >>> result.reached, result.depth  # doctest: +SKIP
    (325557, 37)
    """
    report = progress or (lambda stage, done, total: None)
    with borrowed(graph, options, lambda found: require_vertex(source, found.vertices)) as loaded:
        edges, offsets, where = loaded.edges, loaded.offsets, loaded.device
        vertices = loaded.graph.vertices
        levels = to_device(where, np.full(vertices, -1, np.int64))
        items = zeros(where, most_items(vertices, loaded.graph.edges))
        counters = zeros(where, N_COUNTERS)

        report("compile", 0, 1)
        _begin[1](source, offsets, levels, items, counters, device=where)
        _advance[loaded.warp](edges, offsets, levels, items, 0, 0, 0, counters)
        _collect[1](offsets, levels, -2, items, counters, device=where)
        _rewind[1](counters, int(to_host(counters)[ITEMS]), device=where)
        report("compile", 1, 1)

        before, started = edges.stats, time.perf_counter()
        _search(loaded, levels, items, counters, report)
        seconds = time.perf_counter() - started
        loaded.require_destinations(counters)
        found = to_host(levels)
        return BFSResult(
            source=int(source),
            levels=found,
            reached=int(np.count_nonzero(found >= 0)),
            depth=int(found.max()),
            seconds=seconds,
            stats=edges.stats - before,
        )


def _search(loaded: LoadedGraph, levels: Any, items: Any, counters: Any, report: Progress) -> None:
    """Visit level after level, until one has no items."""
    edges, offsets, where, vertices = loaded.edges, loaded.offsets, loaded.device, loaded.graph.vertices
    begin, end, level = 0, int(to_host(counters)[ITEMS]), 0
    # the work list is never reused: each vertex enters it once, so levels are consecutive parts of it
    while begin < end:
        level += 1
        report("search", level, 0)
        _advance[(end - begin) * loaded.warp](edges, offsets, levels, items, begin, end, level, counters)
        begin, end = end, int(to_host(counters)[ITEMS])
        if (end - begin) * LARGE_FRONTIER > vertices:
            # in vertex order, so that a page is read once for all the vertices whose edges it holds
            _rewind[1](counters, begin, device=where)
            _collect[vertices](offsets, levels, level, items, counters, device=where)


def require_vertex(source: int, vertices: int) -> None:
    """Raise ArgumentError unless `source` is a vertex number below `vertices`."""
    if isinstance(source, bool) or not isinstance(source, int | np.integer):
        raise ArgumentError(f"source {source!r} is not an integer: give the number of a vertex", name="source")
    if not 0 <= source < vertices:
        raise ArgumentError(
            f"source {source} is not a vertex of this graph: give a number from 0 to {vertices - 1}", name="source"
        )
