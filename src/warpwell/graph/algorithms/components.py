"""Connected components of a graph on storage: ``connected_components``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache import Statistics
from ...errors import ArgumentError
from ...targets import device, kernel, to_device, to_host, zeros
from ...targets.primitives import (
    activemask,
    any_sync,
    div,
    element_address,
    fetch_min_as,
    grid,
    i64,
    lane_id,
    load_relaxed_as,
    rem,
    store_relaxed_as,
    syncwarp,
    warp_size,
)
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, borrowed
from .run import Run
from .work_items import (
    ITEMS,
    N_COUNTERS,
    NO_PAGES,
    PIECE,
    append,
    contains,
    insert,
    insert_range,
    most_items,
    neighbour_at,
    page_at,
    page_of,
    page_start,
    start_of,
    vertex_at,
    vertex_dtype,
    vertex_from,
    vertex_of,
    words_of,
)

SAMPLED_NEIGHBOURS = 2
"""Neighbours of each vertex that are linked before the largest component is guessed, if edges are in memory."""
SAMPLED_RUNS = 4
"""From storage one in so many runs of edges is linked first: of a uniform graph of degree 32 that leaves 0.03 % of the
vertices outside of the largest component, whose edges lie in 1 % of the other pages."""
RUN = 16
"""Pages of a run."""
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


@kernel
def _mark_sample(offsets, vertices, pages, sweep, edges):
    """Mark the pages of every so manieth run of pages, but for those inside of one vertex's edges (thread a page).

    A vertex with so many neighbours is met on their pages.
    """
    page = grid(1)
    if page < sweep[0] and rem(div(page, RUN), SAMPLED_RUNS) == 0:
        at = page_start(sweep, page, edges)
        last = page_start(sweep, page + 1, edges) - 1
        vertex = vertex_at(offsets, at, vertices)
        if at <= last and (offsets[vertex] >= at or offsets[vertex + 1] <= last):
            insert(pages, page)


@kernel
def _link_pages(edges, offsets, parents, largest, pages, done, sweep, counters):
    """Link vertices outside of the component `largest` with their neighbours in marked pages that are not `done`.

    A warp takes a page, so that as many are on their way as warps run, and no two wait for one.
    """
    mask = activemask()
    index = div(grid(1), warp_size())
    at = i64(0)
    stop = i64(0)
    if index < sweep[0]:
        page = page_of(sweep, index)
        at = page_start(sweep, page, edges.size)
        if contains(pages, page) and not contains(done, page):
            stop = page_start(sweep, page + 1, edges.size)
    if at < stop:
        vertex = vertex_at(offsets, at, parents.size)
        at += lane_id()
        while any_sync(mask, at < stop):
            # a vertex that is in that tree by now has nothing to add: its other neighbours link themselves
            outside = False
            if at < stop:
                vertex = vertex_from(offsets, vertex, at, parents.size)
                outside = _parent(parents, vertex) != largest
            # the lanes meet here, and read their edges as one: alone, each would wait for the page by itself
            if any_sync(mask, outside) and at < stop:
                neighbour = neighbour_at(edges, at, parents.size, counters)
                if outside and neighbour >= 0:
                    _link(vertex, neighbour, parents)
            if warp_size() == 1 and not outside:
                at = offsets[vertex + 1] - 1
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
def _mark_rest(offsets, parents, largest, count, pages, sweep):
    """Mark the pages of those of `count` vertices that are outside of the component `largest` (thread a vertex)."""
    v = grid(1)
    if v < count and parents[v] != largest and offsets[v + 1] > offsets[v]:
        insert_range(pages, page_at(sweep, offsets[v]), page_at(sweep, offsets[v + 1] - 1))


@kernel
def _select(offsets, parents, largest, items, count, counters):
    """Append the items of those of `count` vertices outside of `largest` that have more than the first neighbours."""
    mask = activemask()
    v = grid(1)
    found = v < count and parents[v] != largest and offsets[v + 1] - offsets[v] > SAMPLED_NEIGHBOURS
    if any_sync(mask, found):
        append(mask, found, v, offsets, items, 0, counters)


@kernel
def _link_rest(edges, offsets, parents, items, count, counters):
    """Link vertices with their neighbours: a warp takes one item, its lanes neighbouring edges."""
    mask = activemask()
    index = div(grid(1), warp_size())
    if index < count:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex])
        stop = min(at + PIECE, offsets[vertex + 1])
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
    fourth run of 16 pages take the place of first neighbours. Much of a graph with one large component is never read.

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
        words = 0 if loaded.in_memory else words_of(loaded.pages_of(edges)[0])
        sets = [zeros(where, words, np.uint32) for _ in range(2)] if words else []
        report("compile", 0, 1)
        _compile(loaded, state, sets)
        report("compile", 1, 1)

        before, started = edges.stats, time.perf_counter()
        with Run(loaded, edges) as run:
            report("link", 0, 2)
            if sets:
                _link_sampled(run, state, sets)
            else:
                run.launch(_link_first, vertices, edges, loaded.offsets, state.parents, vertices, state.counters)
            run.launch(_compress, vertices, state.parents, vertices, reads=False)
            report("link", 1, 2)
            if not run.failed:
                _link_others(run, state, sets)
            run.launch(_compress, vertices, state.parents, vertices, reads=False)
            report("link", 2, 2)
        seconds = time.perf_counter() - started
        loaded.require_destinations(state.counters)
        roots = to_host(state.parents).astype(np.int64)
        smallest = np.full(vertices, vertices)
        np.minimum.at(smallest, roots, loaded.graph.stored_order())
        return CCResult(
            labels=loaded.graph.original(smallest[roots]),
            components=int(np.count_nonzero(smallest < vertices)),
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


def _compile(loaded: LoadedGraph, s: _State, sets: Sequence[Any]) -> None:
    """Compile what is launched, by launches that change nothing: every vertex is its own parent."""
    edges, offsets, where, one = loaded.edges, loaded.offsets, loaded.device, loaded.warp
    if not sets:
        _link_first[one](edges, offsets, s.parents, 0, s.counters)
        _link_rest[one](edges, offsets, s.parents, s.items, 0, s.counters)
        _select[one](offsets, s.parents, 0, s.items, 0, s.counters, device=where)
    else:
        _link_pages[one](edges, offsets, s.parents, -1, *sets, NO_PAGES, s.counters)
        _mark_sample[one](offsets, 0, sets[0], NO_PAGES, 0, device=where)
        _mark_rest[one](offsets, s.parents, 0, 0, sets[0], NO_PAGES, device=where)
    _compress[one](s.parents, 0, device=where)
    _sample[one](s.parents, 1, 0, s.picks, device=where)


def _link_marked(run: Run, s: _State, largest: int, pages: Any, done: Any) -> None:
    """Link vertices outside of a component with their neighbours in marked pages that are not done."""
    loaded = run.loaded
    sweep = loaded.sweep(loaded.edges)
    run.launch(
        _link_pages,
        sweep[0] * loaded.warp,
        loaded.edges,
        loaded.offsets,
        s.parents,
        largest,
        pages,
        done,
        sweep,
        s.counters,
    )


def _link_sampled(run: Run, s: _State, sets: Sequence[Any]) -> None:
    """Link the ends of all edges on the pages of every so manieth run; these pages are done, the first set."""
    loaded, graph = run.loaded, run.loaded.graph
    pages = loaded.pages_of(loaded.edges)
    run.launch(_mark_sample, pages[0], loaded.offsets, graph.vertices, sets[0], pages, graph.edges, reads=False)
    _link_marked(run, s, -1, *sets)


def _link_others(run: Run, s: _State, sets: Sequence[Any]) -> None:
    """Link the other neighbours of vertices outside of the largest component."""
    loaded, vertices = run.loaded, run.loaded.graph.vertices
    run.launch(_sample, s.picks.size, s.parents, vertices // s.picks.size, s.picks.size, s.picks, reads=False)
    largest = _most_frequent(run.read(s.picks))
    if sets:
        done, pages = sets
        run.launch(
            _mark_rest,
            vertices,
            loaded.offsets,
            s.parents,
            largest,
            vertices,
            pages,
            loaded.pages_of(loaded.edges),
            reads=False,
        )
        _link_marked(run, s, largest, pages, done)
        return
    run.launch(_select, vertices, loaded.offsets, s.parents, largest, s.items, vertices, s.counters)
    count = int(run.read(s.counters)[ITEMS])
    run.launch(_link_rest, count * loaded.warp, loaded.edges, loaded.offsets, s.parents, s.items, count, s.counters)


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
