"""Single-source shortest paths over a graph with weights: `sssp`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...errors import ArgumentError
from ...targets import device, kernel, to_device, to_host, zeros
from ...targets.primitives import (
    activemask,
    ballot,
    div,
    element_address,
    fetch_min_as,
    grid,
    i64,
    lane_id,
    load_relaxed_as,
    syncwarp,
    warp_size,
)
from ..graph import Graph, Progress
from ..loaded import LoadedGraph
from .run import Result, Run, Work, execute
from .search import require_vertex
from .work_items import (
    ITEMS,
    N_COUNTERS,
    SEGMENT,
    WARPS,
    WORD,
    append,
    count_words,
    insert,
    max_items,
    neighbor_at,
    segment_of,
    start_array,
)

STAGING_THREADS, STAGING_WARPS = 64, 1 << 13
"""Threads of a CPU, and warps of a GPU, that follow edges from storage: as many as run at a time."""
SAMPLED_WEIGHTS = 1 << 14
"""Weights that are sampled to choose delta."""
NEGATIVE = 2
"""Counter: weights below 0."""
TOO_LONG = 3
"""Counter: distances that do not fit the dtype."""
NEAREST = 0
"""Index in `nearest`, an array with one item: the smallest distance of a waiting vertex."""


@kernel
def _select(offsets, distances, waiting, limit, items, base, word, warps, nearest, counters):
    """Append the items of waiting vertices nearer than `limit`, and remove these from `waiting`; a warp takes words.

    `nearest` receives the smallest distance of the vertices that remain.
    """
    mask = activemask()
    lane = lane_id()
    word += div(grid(1), warp_size())
    while word < waiting.size:
        waiting_bits = i64(waiting[word])
        if waiting_bits != 0:
            selected_bits = 0
            k = lane
            while k < WORD:
                vertex = WORD * word + k
                found = False
                if (waiting_bits >> k) & 1 != 0:
                    distance = distances[vertex]
                    found = distance < limit
                    if not found:
                        address = element_address(nearest, NEAREST)
                        if distance < load_relaxed_as(address, nearest.dtype):
                            fetch_min_as(address, distance, nearest.dtype)
                found_mask = ballot(mask, found)
                if found_mask != 0:
                    append(mask, found, vertex, offsets, items, base, counters)
                selected_bits |= found_mask << (k - lane)
                k += warp_size()
            if lane == 0 and selected_bits != 0:
                waiting[word] = waiting_bits & ~selected_bits
        word += warps


@device
def _follow(to, weight, distance, distances, waiting, max_distance, counters):
    """Shorten the path to a vertex by an edge (thread)."""
    length = distance + weight
    if weight < 0:
        atomic_add(counters, NEGATIVE, 1)
    elif length >= max_distance:
        atomic_add(counters, TOO_LONG, 1)
    else:
        address = element_address(distances, to)
        if length < load_relaxed_as(address, distances.dtype) and length < fetch_min_as(
            address, length, distances.dtype
        ):
            insert(waiting, to)


@kernel
def _relax(
    edges, weights, offsets, distances, waiting, items, count, staged, warps, zero, max_distance, nearest, counters
):
    """Follow the edges of items, and reset `nearest`; a warp takes every `warps`-th item.

    If `staged` has more than one item, a warp copies the weights to it before it reads the edges. So it uses one page
    at a time, because the cache may not have room for two. `zero` has the type of sums.
    """
    if grid(1) == 0:
        nearest[NEAREST] = max_distance
    index = div(grid(1), warp_size())
    base = index * SEGMENT
    mask = activemask()
    while index < count:
        vertex, first, stop = segment_of(items[index], offsets)
        distance = zero + load_relaxed_as(element_address(distances, vertex), distances.dtype)
        at = first + lane_id()
        if staged.size > 1:
            while at < stop:
                staged[base + at - first] = weights[at]
                at += warp_size()
            syncwarp(mask)
            at = first + lane_id()
        while at < stop:
            weight = staged[base + at - first] if staged.size > 1 else weights[at]
            to = neighbor_at(edges, at, distances.size, counters)
            if to >= 0:
                _follow(to, weight, distance, distances, waiting, max_distance, counters)
            at += warp_size()
        syncwarp(mask)
        index += warps


def sssp(
    graph: Graph | LoadedGraph | str | Path,
    source: int,
    *,
    delta: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Find the shortest paths from a vertex over edges with weights, reading the edges on demand.

    Delta-stepping ("Delta-stepping: a parallelizable shortest path algorithm", Meyer, Sanders, 2003): a vertex whose
    distance became shorter waits. The waiting vertices in the nearest bucket, which is `delta` wide, follow all their
    edges, in launches with one warp per vertex, until no vertex of the bucket waits. A float distance is the smallest
    of the sums in float64, as in SciPy.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph with weights of at least 0; edges are followed in their direction.
    source : int
        The vertex to start from.
    delta : float, optional
        Width of a bucket, above 0. Default: 32 times the mean weight divided by the mean degree. Wide buckets follow
        more edges that shorten no path, and narrow ones need more launches.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0, 1 of 1) for each kernel; ``"search"`` with the
        round and a total of 0, because the number of rounds is unknown.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its values are the sums of the weights on a shortest path from the source: int64, or float64 if the weights are
        float32. Vertices without a path have the largest int64, or inf.

    Raises
    ------
    ArgumentError
        The graph has no weights or a negative weight, `source` is not a vertex, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """

    def check(found: Graph) -> None:
        require_weights(found)
        require_vertex(source, found.vertices)
        if delta is not None and not (math.isfinite(delta) and delta > 0):
            raise ArgumentError(f"delta is {delta!r}: pass a width above 0, or leave it out", name="delta")

    return execute(graph, options, check, lambda loaded: _Paths(loaded, source, delta), progress)


def require_weights(graph: Graph) -> None:
    """Raise ArgumentError if a graph has no weights."""
    if graph.weights is None:
        raise ArgumentError(
            f"{graph.path} has no weights: convert a file that has them (`warpwell graph convert EDGES OUT`), or "
            "generate a graph with weights='int32'"
        )


def default_delta(graph: Graph) -> float:
    """Return the default width of a bucket: 32 mean weights (of a sample), divided by the mean degree."""
    if not graph.edges:
        return 1.0
    weights = graph.map(graph.weights_path)
    runs = np.linspace(0, max(0, graph.edges - 1024), 16).astype(np.int64)
    mean = float(np.mean([np.mean(weights[run : run + SAMPLED_WEIGHTS // 16]) for run in runs]))
    return max(32 * mean * graph.vertices / graph.edges, 1.0 if graph.weights == "int32" else 1e-30)


class _Paths(Work):
    """One search for shortest paths."""

    def __init__(self, loaded: LoadedGraph, source: int, delta: float | None) -> None:
        graph, where, weights = loaded.graph, loaded.device, loaded.weights
        assert weights is not None
        super().__init__(loaded, loaded.edges, weights)
        self.source, self.weights = int(graph.positions[source]), weights
        self.delta = delta or default_delta(graph)
        self.items = zeros(where, max_items(graph.vertices, graph.edges))
        self.rounds = 0
        self.warps = int(self.items.size)
        if not loaded.in_memory:
            # With more warps than pages for all of them, they would evict each other's pages.
            frames = loaded.edges.cache.cache_bytes // loaded.edges.cache.page_size
            self.warps = max(1, min(STAGING_WARPS if loaded.warp > 1 else STAGING_THREADS, frames // 2))
        self.staged = zeros(where, 1 if loaded.in_memory else self.warps * SEGMENT, np.dtype(graph.weights))
        self._start(np.dtype(np.float64 if graph.weights == "float32" else np.int32))

    def _start(self, dtype: np.dtype[Any]) -> None:
        """Create distances of a dtype: 0 for the source, `no_path` for all other vertices."""
        where, vertices, source = self.loaded.device, self.loaded.graph.vertices, self.source
        self.zero = np.float64(0) if dtype.kind == "f" else np.int64(0)
        self.no_path = np.inf if dtype.kind == "f" else int(np.iinfo(dtype).max)
        self.distances = to_device(where, start_array(vertices, source, self.no_path, 0, dtype))
        self.nearest = to_device(where, np.full(1, self.no_path, dtype))
        bits = start_array(count_words(vertices), source // WORD, 0, 1 << source % WORD, np.uint32)
        self.waiting = to_device(where, bits)
        self.counters = zeros(where, N_COUNTERS)

    def run(self, run: Run, report: Progress) -> None:
        """Follow edges, bucket after bucket."""
        self._search(run, report)
        counts = run.read(self.counters)
        if counts[TOO_LONG] and self.distances.dtype == np.int32:
            self._start(np.dtype(np.int64))
            self._search(run, report)
            counts = run.read(self.counters)
        if counts[NEGATIVE]:
            raise ArgumentError(
                f"{self.loaded.graph.weights_path}: {counts[NEGATIVE]} weights are below 0, but delta-stepping needs "
                "weights of 0 or more: convert the edges again with other weights"
            )

    def _search(self, run: Run, report: Progress) -> None:
        loaded, done, limit = self.loaded, 0, self.delta
        warps = min(count_words(loaded.graph.vertices), WARPS)
        while not run.failed:
            state = loaded.offsets, self.distances, self.waiting, float(limit), self.items
            run.launch(_select, warps * loaded.warp, *state, -done, 0, warps, self.nearest, self.counters)
            counts = run.read(self.counters)
            count, done = int(counts[ITEMS]) - done, int(counts[ITEMS])
            if count == 0:
                nearest = run.read(self.nearest)[NEAREST]
                if nearest == self.no_path:
                    break
                limit = (math.floor(float(nearest) / self.delta) + 1) * self.delta
                limit = max(limit, math.nextafter(float(nearest), math.inf))
            else:
                self.rounds += 1
                report("search", self.rounds, 0)
            # Without items, the kernel only resets `nearest`.
            edges = loaded.edges, self.weights, loaded.offsets, self.distances, self.waiting, self.items
            limits = self.warps, self.zero, self.no_path, self.nearest, self.counters
            run.launch(_relax, max(1, min(count, self.warps)) * loaded.warp, *edges, count, self.staged, *limits)

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return the distances, the number of vertices with a path, and the rounds."""
        distances = to_host(self.distances)
        reached = distances < self.no_path
        if distances.dtype.kind == "i":
            distances = np.where(reached, distances.astype(np.int64), np.iinfo(np.int64).max)
        return distances, int(np.count_nonzero(reached)), self.rounds
