"""Connected components of a graph on storage: ``connected_components``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache import Statistics
from ...errors import ArgumentError
from ...targets import (
    activemask,
    any_sync,
    device,
    div,
    element_address,
    fetch_min_as,
    grid,
    i64,
    kernel,
    lane_id,
    load_relaxed_as,
    rem,
    store_relaxed_as,
    syncwarp,
    warp_size,
)
from ...targets.arrays import to_device, to_host, zeros
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, borrowed
from .run import Run, try_waves
from .work_items import (
    ITEMS,
    N_COUNTERS,
    PIECE,
    append,
    most_items,
    neighbour_at,
    start_of,
    vertex_at,
    vertex_dtype,
    vertex_of,
    vertices_of,
)

SAMPLED_NEIGHBOURS = 2
"""Neighbours of each vertex that are linked before the largest component is guessed, if edges are in memory."""
SAMPLED_RUNS = 4
"""From storage one in so many runs of edges is linked first: of a uniform graph of degree 32 that leaves 0.03 % of the
vertices outside of the largest component, whose edges lie in 1 % of the other pages."""
RUN = 16
"""Pieces of neighbouring edges in a run: long commands."""
SAMPLES = 1024


@dataclass(frozen=True)
class CCResult:
    """The connected components of a graph.

    Attributes
    ----------
    labels : ndarray of int64, shape (vertices,)
        The smallest vertex of each vertex's component.
    components : int
        Number of components; a vertex without edges is one.
    seconds : float
        Time of the search, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache during the search.
    """

    labels: NDArray[np.int64]
    components: int
    seconds: float
    stats: Statistics


@device
def _parent(parents, vertex):
    return i64(load_relaxed_as(element_address(parents, vertex), parents.dtype))


@device
def _link(u, v, parents):
    """Join the trees of two vertices (thread). The larger root becomes a child of the smaller vertex.

    Parents only ever become smaller, so a stale one is still an ancestor in the same tree.
    """
    p = _parent(parents, u)
    q = _parent(parents, v)
    while p != q:
        high = max(p, q)
        low = min(p, q)
        above = _parent(parents, high)
        if above == low:
            return
        if above == high:
            above = i64(fetch_min_as(element_address(parents, high), low, parents.dtype))
            if above == high or above == low:
                return
            # another thread was first: its parent and ours are of one tree, too
            p = above
            q = low
        else:
            p = _parent(parents, above)
            q = _parent(parents, low)


@kernel
def _link_first(edges, offsets, parents, count, counters):
    """Link each of `count` vertices with its first neighbours (thread a vertex)."""
    v = grid(1)
    if v < count:
        at = offsets[v]
        stop = min(at + SAMPLED_NEIGHBOURS, offsets[v + 1])
        while at < stop:
            neighbour = neighbour_at(edges, at, parents.size, counters)
            if neighbour >= 0:
                _link(v, neighbour, parents)
            at += 1


@device
def _sampled(index):
    """Return the first edge of a sampled piece (thread)."""
    return (div(index, RUN) * RUN * SAMPLED_RUNS + rem(index, RUN)) * PIECE


@kernel
def _mark_runs(pages, pieces, edges):
    """Mark the pages of sampled pieces (thread a piece)."""
    index = grid(1)
    if index < pieces:
        at = _sampled(index)
        pages.add_range(at, min(at + PIECE, edges))


@kernel
def _link_runs(edges, offsets, parents, piece, end, counters):
    """Link the ends of all edges of sampled pieces [piece, end); a warp takes a piece."""
    mask = activemask()
    index = piece + div(grid(1), warp_size())
    if index < end:
        at = _sampled(index) + lane_id()
        stop = min(_sampled(index) + PIECE, edges.size)
        vertex = 0
        if at < stop:
            vertex = vertex_at(offsets, at, parents.size)
        while any_sync(mask, at < stop):
            if at < stop:
                neighbour = neighbour_at(edges, at, parents.size, counters)
                while offsets[vertex + 1] <= at:
                    vertex += 1
                if neighbour >= 0:
                    _link(vertex, neighbour, parents)
            syncwarp(mask)
            at += warp_size()


@kernel
def _compress(parents, count):
    """Point each of `count` vertices at the root of its tree (thread a vertex)."""
    v = grid(1)
    if v < count:
        root = _parent(parents, v)
        above = _parent(parents, root)
        while above != root:
            root = above
            above = _parent(parents, root)
        store_relaxed_as(element_address(parents, v), root, parents.dtype)


@kernel
def _sample(parents, stride, count, out):
    k = grid(1)
    if k < count:
        out[k] = parents[k * stride]


@kernel
def _mark_rest(offsets, parents, largest, pages):
    """Mark the pages of vertices outside of the component `largest` (thread a vertex)."""
    v = grid(1)
    if v < parents.size and parents[v] != largest:
        pages.add_range(offsets[v], offsets[v + 1])


@kernel
def _select(offsets, parents, largest, done, vertex, end, items, base, counters):
    """Append the items of those of vertices [vertex, end) outside of the component `largest` (thread a vertex)."""
    mask = activemask()
    v = vertex + grid(1)
    found = v < end and parents[v] != largest and offsets[v + 1] - offsets[v] > done
    if any_sync(mask, found):
        append(mask, found, v, offsets, items, base, counters)


@kernel
def _link_rest(edges, offsets, parents, items, count, window, counters):
    """Link vertices with their neighbours in a window: a warp takes one item, its lanes neighbouring edges."""
    mask = activemask()
    index = div(grid(1), warp_size())
    if index < count:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex])
        stop = min(at + PIECE, offsets[vertex + 1], window[1])
        at = max(at, window[0])
        lane = lane_id()
        while at < stop:
            if at + lane < stop:
                neighbour = neighbour_at(edges, at + lane, parents.size, counters)
                if neighbour >= 0:
                    _link(vertex, neighbour, parents)
            # together again, so that the lanes' next edges are read as one
            syncwarp(mask)
            at += warp_size()


def connected_components(
    graph: Graph | LoadedGraph | str | Path, *, progress: Progress | None = None, **options: Any
) -> CCResult:
    """Find the connected components of an undirected graph, reading its edges on demand.

    The algorithm is Afforest ("Optimizing Parallel Graph Connectivity Computation via Subgraph Sampling",
    Sutton, Ben-Nun, Barak, 2018), which the GAP benchmark uses too: every vertex is linked with its first two
    neighbours, then the largest component is guessed from a sample, and the other neighbours are read for
    vertices outside of it only. From storage, where a page costs the same whatever of it is used, all edges of every
    fourth run of 64 KiB take the place of first neighbours. Much of a graph with one large component is never read.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph whose edges are stored in both directions.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"link"`` with passes.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    CCResult

    Raises
    ------
    ArgumentError
        The graph is directed, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """
    report = progress or (lambda stage, done, total: None)
    with borrowed(graph, options, require_undirected) as loaded:
        edges, where, vertices = loaded.edges, loaded.device, loaded.graph.vertices
        state = _State(
            parents=to_device(where, np.arange(vertices, dtype=vertex_dtype(vertices))),
            items=zeros(where, most_items(vertices, loaded.graph.edges)),
            counters=zeros(where, N_COUNTERS),
            picks=zeros(where, min(SAMPLES, vertices)),
        )
        pages = None if loaded.in_memory else edges.page_set()
        report("compile", 0, 1)
        _compile(loaded, state, pages)
        report("compile", 1, 1)

        before, started = edges.stats, time.perf_counter()
        with Run(loaded, edges, *(() if pages is None else (pages,))) as run:
            report("link", 0, 2)
            if pages is None:
                run.launch(_link_first, vertices, edges, loaded.offsets, state.parents, vertices, state.counters)
            else:
                _link_sampled(run, state, pages)
            run.launch(_compress, vertices, state.parents, vertices)
            report("link", 1, 2)
            if not run.failed:
                _link_others(run, state, pages)
            run.launch(_compress, vertices, state.parents, vertices)
            report("link", 2, 2)
        seconds = time.perf_counter() - started
        loaded.require_destinations(state.counters)
        labels = to_host(state.parents).astype(np.int64)
        return CCResult(
            labels=labels,
            components=int(np.count_nonzero(labels == np.arange(vertices))),
            seconds=seconds,
            stats=edges.stats - before,
        )


@dataclass
class _State:
    """The arrays of a search for components, in device memory."""

    parents: Any
    items: Any
    counters: Any
    picks: Any


def _compile(loaded: LoadedGraph, s: _State, pages: Any) -> None:
    """Compile what is launched, by launches that change nothing: every vertex is its own parent."""
    edges, offsets, where, one = loaded.edges, loaded.offsets, loaded.device, loaded.warp
    if pages is None:
        _link_first[one](edges, offsets, s.parents, 0, s.counters)
    else:
        _link_runs[one](edges, offsets, s.parents, 0, 0, s.counters)
        _mark_runs[one](pages, 0, 0)
        _mark_rest[one](offsets, s.parents, 0, pages)
        try_waves(pages, edges)
    _link_rest[one](edges, offsets, s.parents, s.items, 0, (0, 0), s.counters)
    _compress[one](s.parents, 0, device=where)
    _sample[one](s.parents, 1, 0, s.picks, device=where)
    _select[one](offsets, s.parents, 0, 0, 0, 0, s.items, 0, s.counters, device=where)


def _link_sampled(run: Run, s: _State, pages: Any) -> None:
    """Link the ends of every so manieth run of edges, which are read once, in order."""
    loaded, edges = run.loaded, run.loaded.graph.edges
    runs, rest = divmod(-(-edges // PIECE), RUN * SAMPLED_RUNS)
    pieces = runs * RUN + min(rest, RUN)
    index = np.arange(pieces, dtype=np.int64)
    starts = (index // RUN * RUN * SAMPLED_RUNS + index % RUN) * PIECE
    run.launch(_mark_runs, pieces, pages, pieces, edges)
    for window in loaded.waves(pages, pages.count()):
        piece, end = (int(k) for k in np.searchsorted(starts, window))
        run.launch(
            _link_runs, (end - piece) * loaded.warp, loaded.edges, loaded.offsets, s.parents, piece, end, s.counters
        )


def _link_others(run: Run, s: _State, pages: Any) -> None:
    """Link the other neighbours of vertices outside of the largest component."""
    loaded, graph = run.loaded, run.loaded.graph
    run.launch(_sample, s.picks.size, s.parents, graph.vertices // s.picks.size, s.picks.size, s.picks)
    largest = _most_frequent(run.read(s.picks))
    done, windows = SAMPLED_NEIGHBOURS, iter([(0, graph.edges)])
    if pages is not None:
        run.launch(_mark_rest, graph.vertices, loaded.offsets, s.parents, largest, pages)
        count = pages.count()
        done, windows = 0, loaded.waves(pages, count) if count else iter(())
    offsets, before = graph.map(graph.offsets_path), 0
    for window in windows:
        vertex, end = vertices_of(offsets, window)
        run.launch(
            _select, end - vertex, loaded.offsets, s.parents, largest, done, vertex, end, s.items, -before, s.counters
        )
        total = int(run.read(s.counters)[ITEMS])
        count, before = total - before, total
        run.launch(
            _link_rest, count * loaded.warp, loaded.edges, loaded.offsets, s.parents, s.items, count, window, s.counters
        )


def _most_frequent(labels: NDArray[Any]) -> int:
    values, counts = np.unique(labels, return_counts=True)
    return int(values[np.argmax(counts)])


def require_undirected(graph: Graph, what: str = "components") -> None:
    """Raise ArgumentError if the edges of a graph are stored in one direction only."""
    if not graph.undirected:
        raise ArgumentError(
            f"{graph.path} is directed, and {what} are those of an undirected graph: convert its edges "
            "again with undirected=True (`warpwell graph convert EDGES OUT --undirected`)"
        )
