"""Connected components of a graph on storage: ``connected_components``."""

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
    store_relaxed,
    syncwarp,
    warp_size,
)
from ..targets.arrays import to_device, to_host, zeros
from .graph import Graph, Progress
from .loaded import LoadedGraph, borrowed
from .work_items import BAD, ITEMS, N_COUNTERS, PIECE, append, most_items, start_of, vertex_of

SAMPLED_NEIGHBOURS = 2
"""Neighbours of each vertex that are linked before the largest component is guessed."""
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
    return load_relaxed(element_address(parents, vertex), DEVICE)


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
        if above == high and compare_exchange(element_address(parents, high), high, low, DEVICE) == high:
            return
        p = _parent(parents, _parent(parents, high))
        q = _parent(parents, low)


@kernel
def _link_first(edges, offsets, parents, count, counters):
    """Link each of `count` vertices with its first neighbours (thread a vertex)."""
    v = grid(1)
    if v >= count:
        return
    at = offsets[v]
    stop = min(at + SAMPLED_NEIGHBOURS, offsets[v + 1])
    while at < stop:
        neighbour = i64(edges[at])
        if neighbour < 0 or neighbour >= parents.size:
            atomic_add(counters, BAD, 1)
        else:
            _link(v, neighbour, parents)
        at += 1


@kernel
def _compress(parents):
    """Point each vertex at the root of its tree (thread a vertex)."""
    v = grid(1)
    root = _parent(parents, v)
    above = _parent(parents, root)
    while above != root:
        root = above
        above = _parent(parents, root)
    store_relaxed(element_address(parents, v), root, DEVICE)


@kernel
def _sample(parents, stride, out):
    k = grid(1)
    out[k] = parents[k * stride]


@kernel
def _select(offsets, parents, largest, items, counters):
    """Append the items of vertices outside of the component `largest` (thread a vertex)."""
    v = grid(1)
    if parents[v] != largest and offsets[v + 1] - offsets[v] > SAMPLED_NEIGHBOURS:
        append(v, offsets[v] + SAMPLED_NEIGHBOURS, offsets[v + 1], items, counters)


@kernel
def _link_rest(edges, offsets, parents, items, count, counters):
    """Link vertices with their other neighbours: a warp takes one item, its lanes neighbouring edges."""
    index = div(grid(1), warp_size())
    if index < count:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex] + SAMPLED_NEIGHBOURS)
        stop = min(at + PIECE, offsets[vertex + 1])
        mask = activemask()
        lane = lane_id()
        while at < stop:
            if at + lane < stop:
                neighbour = i64(edges[at + lane])
                if neighbour < 0 or neighbour >= parents.size:
                    atomic_add(counters, BAD, 1)
                else:
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
    vertices outside of it only. Much of a graph with one large component is never read.

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
        edges, offsets, where = loaded.edges, loaded.offsets, loaded.device
        vertices = loaded.graph.vertices
        parents = to_device(where, np.arange(vertices, dtype=np.int64))
        items = zeros(where, most_items(vertices, loaded.graph.edges))
        counters = zeros(where, N_COUNTERS)
        picks = zeros(where, min(SAMPLES, vertices))

        report("compile", 0, 1)
        # none of these changes anything: every vertex is its own parent
        _link_first[1](edges, offsets, parents, 0, counters)
        _link_rest[loaded.warp](edges, offsets, parents, items, 0, counters)
        _compress[1](parents, device=where)
        _sample[1](parents, 1, picks, device=where)
        _select[1](offsets, parents, 0, items, counters, device=where)
        report("compile", 1, 1)

        before, started = edges.stats, time.perf_counter()
        report("link", 0, 2)
        _link_first[vertices](edges, offsets, parents, vertices, counters)
        _compress[vertices](parents, device=where)
        _sample[picks.size](parents, vertices // picks.size, picks, device=where)
        largest = _most_frequent(to_host(picks))
        _select[vertices](offsets, parents, largest, items, counters, device=where)
        report("link", 1, 2)
        count = int(to_host(counters)[ITEMS])
        _link_rest[count * loaded.warp](edges, offsets, parents, items, count, counters)
        _compress[vertices](parents, device=where)
        report("link", 2, 2)
        seconds = time.perf_counter() - started
        loaded.require_destinations(counters)
        labels = to_host(parents)
        return CCResult(
            labels=labels,
            components=int(np.count_nonzero(labels == np.arange(vertices))),
            seconds=seconds,
            stats=edges.stats - before,
        )


def _most_frequent(labels: NDArray[np.int64]) -> int:
    values, counts = np.unique(labels, return_counts=True)
    return int(values[np.argmax(counts)])


def require_undirected(graph: Graph) -> None:
    """Raise ArgumentError if the edges of a graph are stored in one direction only."""
    if not graph.undirected:
        raise ArgumentError(
            f"{graph.path} is directed, and components are those of an undirected graph: convert its edges "
            "again with undirected=True (`warpwell graph convert EDGES OUT --undirected`)"
        )
