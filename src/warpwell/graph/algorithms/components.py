"""Connected components of a graph on storage: `connected_components`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError
from ...targets import device, kernel, to_device, to_host, zeros
from ...targets.primitives import (
    activemask,
    div,
    element_address,
    fetch_min_as,
    grid,
    i64,
    lane_id,
    load_relaxed_as,
    store_relaxed_as,
    syncwarp,
    warp_size,
)
from ..graph import HEAD, Graph, Progress
from ..loaded import LoadedGraph
from .run import Result, Run, Work, execute
from .work_items import (
    ITEMS,
    list_items,
    max_items,
    neighbor_at,
    segment_of,
    vertex_dtype,
)

SAMPLES = 1024
"""Vertices whose components are sampled to guess the largest one."""


@device
def _parent(parents, vertex):
    return i64(load_relaxed_as(element_address(parents, vertex), parents.dtype))


@device
def _link(u, v, parents):
    """Join the trees of two vertices (thread). The larger of the two roots becomes a child of a smaller vertex.

    Parents only become smaller, so a stale parent is still an ancestor in the same tree.
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
            # Another thread was first: its parent and the new parent are in the same tree.
            p = above
            q = low
        else:
            p = _parent(parents, above)
            q = _parent(parents, low)


@kernel
def _link_heads(heads, offsets, parents, count, counters):
    """Link each of `count` vertices with its first neighbors (thread a vertex)."""
    v = grid(1)
    if v < count:
        at = HEAD * v
        stop = at + min(offsets[v + 1] - offsets[v], HEAD)
        while at < stop:
            neighbor = neighbor_at(heads, at, parents.size, counters)
            if neighbor >= 0:
                _link(v, neighbor, parents)
            at += 1


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
def _link_neighbors(edges, offsets, parents, items, count, counters):
    """Link vertices with their neighbors: a warp takes one item, its lanes adjacent edges."""
    mask = activemask()
    index = div(grid(1), warp_size())
    if index < count:
        vertex, at, stop = segment_of(items[index], offsets)
        lane = lane_id()
        while at < stop:
            if at + lane < stop:
                neighbor = neighbor_at(edges, at + lane, parents.size, counters)
                if neighbor >= 0:
                    _link(vertex, neighbor, parents)
            # Synchronize the lanes, so that their next edges are read together.
            syncwarp(mask)
            at += warp_size()


def connected_components(
    graph: Graph | LoadedGraph | str | Path, *, progress: Progress | None = None, **options: Any
) -> Result:
    """Find the connected components of an undirected graph, reading its edges on demand.

    The algorithm is Afforest ("Optimizing Parallel Graph Connectivity Computation via Subgraph Sampling", Sutton,
    Ben-Nun, Barak, 2018), which the GAP benchmark uses too: every vertex is linked with its first four neighbors,
    which are in device memory, then the largest component is guessed from a sample, and the other neighbors are read
    only for vertices outside of that component. If a graph has one large component, few of its edges are read.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph whose edges are stored in both directions.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0, 1 of 1) for each kernel; ``"link"`` with passes.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its values are the smallest vertex number of each vertex's component, int64. Its count is the number of
        components; a vertex without edges is a component of its own.

    Raises
    ------
    ArgumentError
        The graph is directed, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """
    return execute(graph, options, require_undirected, _Components, progress)


class _Components(Work):
    """One search for components."""

    def __init__(self, loaded: LoadedGraph) -> None:
        super().__init__(loaded, *loaded.arrays)
        where, vertices = self.device, self.graph.vertices
        self.parents = to_device(where, np.arange(vertices, dtype=vertex_dtype(vertices)))
        self.items = zeros(where, max_items(vertices, self.graph.edges))
        self.picks = zeros(where, min(SAMPLES, vertices))

    def run(self, run: Run, report: Progress) -> None:
        """Link the first neighbors, then the other neighbors of vertices outside of the largest component."""
        loaded, vertices, parents = self.loaded, self.graph.vertices, self.parents
        report("link", 0, 2)
        run.launch(_link_heads, vertices, loaded.heads, loaded.offsets, parents, vertices, self.counters)
        run.launch(_compress, vertices, parents, vertices)
        report("link", 1, 2)
        if not run.failed and vertices:
            samples = self.picks.size
            run.launch(_sample, samples, parents, vertices // samples, samples, self.picks)
            labels, counts = np.unique(run.read(self.picks), return_counts=True)
            self._link_outside(run, int(labels[np.argmax(counts)]))
        report("link", 2, 2)

    def _link_outside(self, run: Run, label: int) -> None:
        """Link vertices that do not have a label with all their neighbors."""
        loaded, vertices, parents = self.loaded, self.graph.vertices, self.parents
        outside = label, 0, 0, vertices, HEAD + 1  # vertices with another label, and edges that are not in heads
        run.launch(list_items, vertices, loaded.offsets, parents, *outside, self.items, 0, self.counters)
        count = int(run.read(self.counters)[ITEMS])
        arguments = loaded.edges, loaded.offsets, parents, self.items, count, self.counters
        run.launch(_link_neighbors, count * loaded.warp, *arguments)
        run.launch(_compress, vertices, parents, vertices)

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return the smallest input number of each vertex's component, the number of components, and two passes."""
        roots, vertices = to_host(self.parents).astype(np.int64), self.graph.vertices
        smallest = np.full(vertices, vertices)
        np.minimum.at(smallest, roots, self.graph.stored_order())
        return smallest[roots], int(np.count_nonzero(smallest < vertices)), 2


def require_undirected(graph: Graph, results: str = "components") -> None:
    """Raise ArgumentError if the edges of a graph are stored in one direction only."""
    if not graph.undirected:
        raise ArgumentError(
            f"{graph.path} is directed, but {results} need an undirected graph: convert its edges "
            "again with undirected=True (`warpwell graph convert EDGES OUT --undirected`)"
        )
