"""Single-source shortest paths over a graph with weights: ``sssp``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import atomic_add
from ...cache import Statistics
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
from ..loaded import LoadedGraph, borrowed
from .run import Run
from .search import require_vertex, start_array
from .work_items import (
    BAD,
    ITEMS,
    N_COUNTERS,
    PIECE,
    WARPS,
    WORD,
    append,
    insert,
    most_items,
    start_of,
    vertex_of,
    words_of,
)

STAGING_THREADS, STAGING_WARPS = 64, 1 << 13
"""Threads of a CPU, and warps of a GPU, that follow edges from storage: as many as run at a time."""
SAMPLED_WEIGHTS = 1 << 14
"""Weights that are looked at to choose delta."""
NEGATIVE = 2
"""Counter: weights below 0."""
TOO_LONG = 3
"""Counter: distances that do not fit the dtype."""
LEAST = 0
"""Item of the array of distances that a launch found: the least one that waits."""


@dataclass(frozen=True)
class SSSPResult:
    """The result of a search for shortest paths.

    Attributes
    ----------
    source : int
        The start vertex.
    distances : ndarray, shape (vertices,)
        Sum of the weights on a shortest path from the source: int64, or float64 if the weights are float32. Where there
        is no path, the largest int64, or inf.
    reached : int
        Vertices with a path, the source included.
    delta : float
        Width of a bucket.
    rounds : int
        Launches that followed edges.
    seconds : float
        Time of the search, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache during the search.
    """

    source: int
    distances: NDArray[Any]
    reached: int
    delta: float
    rounds: int
    seconds: float
    stats: Statistics


@kernel
def _select(offsets, distances, waiting, limit, items, base, word, warps, least, counters):
    """Append the items of waiting vertices nearer than `limit`, which wait no more; a warp takes whole words.

    `least` gets the least distance of those that wait on.
    """
    mask = activemask()
    lane = lane_id()
    word += div(grid(1), warp_size())
    while word < waiting.size:
        waits = i64(waiting[word])
        if waits != 0:
            taken = 0
            k = lane
            while k < WORD:
                vertex = WORD * word + k
                found = False
                if (waits >> k) & 1 != 0:
                    distance = distances[vertex]
                    found = distance < limit
                    if not found:
                        address = element_address(least, LEAST)
                        if distance < load_relaxed_as(address, least.dtype):
                            fetch_min_as(address, distance, least.dtype)
                some = ballot(mask, found)
                if some != 0:
                    append(mask, found, vertex, offsets, items, base, counters)
                taken |= some << (k - lane)
                k += warp_size()
            if lane == 0 and taken != 0:
                waiting[word] = waits & ~taken
        word += warps


@device
def _follow(relaxed, destination, weight, distance, distances, waiting, most, counters):
    """Shorten the path to a destination by an edge (thread)."""
    to = i64(destination)
    length = distance + weight
    if to < 0 or to >= distances.size:
        atomic_add(counters, BAD, 1)
    elif weight < 0:
        atomic_add(counters, NEGATIVE, 1)
    elif length >= most:
        atomic_add(counters, TOO_LONG, 1)
    else:
        address = element_address(distances, to)
        if length < load_relaxed_as(address, distances.dtype) and length < fetch_min_as(
            address, length, distances.dtype
        ):
            insert(waiting, to)
            relaxed += 1
    return relaxed


@kernel
def _relax(edges, weights, offsets, distances, waiting, items, count, zero, most, least, counters):
    """Follow the edges of items, a warp one item, and forget `least`; `zero` has the type of sums."""
    if grid(1) == 0:
        least[LEAST] = most
    index = div(grid(1), warp_size())
    if index < count:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex])
        stop = min(at + PIECE, offsets[vertex + 1])
        distance = zero + load_relaxed_as(element_address(distances, vertex), distances.dtype)
        at += lane_id()
        while at < stop:
            _follow(0, edges[at], weights[at], distance, distances, waiting, most, counters)
            at += warp_size()


@kernel
def _relax_staged(
    edges, weights, offsets, distances, waiting, items, count, staged, warps, zero, most, least, counters
):
    """As `_relax`, but a warp takes every so manieth item, and copies its weights before it reads its edges.

    So it uses one page after the other, where two at a time may be more than there are.
    """
    if grid(1) == 0:
        least[LEAST] = most
    index = div(grid(1), warp_size())
    base = index * PIECE
    mask = activemask()
    while index < count:
        item = items[index]
        vertex = vertex_of(item)
        first = start_of(item, offsets[vertex])
        stop = min(first + PIECE, offsets[vertex + 1])
        distance = zero + load_relaxed_as(element_address(distances, vertex), distances.dtype)
        at = first + lane_id()
        while at < stop:
            staged[base + at - first] = weights[at]
            at += warp_size()
        syncwarp(mask)
        at = first + lane_id()
        while at < stop:
            _follow(0, edges[at], staged[base + at - first], distance, distances, waiting, most, counters)
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
) -> SSSPResult:
    """Find the shortest paths from a vertex over edges with weights, reading the edges on demand.

    Delta-stepping ("Delta-stepping: a parallelizable shortest path algorithm", Meyer, Sanders, 2003): vertices whose
    distance became shorter wait; those in the nearest bucket, `delta` wide, follow all their edges, in launches of a
    warp a vertex, until none of the bucket waits. A float distance is the least of the sums in float64, as SciPy's.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        A graph with weights, none of them below 0; edges are followed in their direction.
    source : int
        The vertex to start from.
    delta : float, optional
        Width of a bucket, above 0. By default 32 mean weights divided by the mean degree: wide buckets follow edges in
        vain, narrow ones need more launches.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"search"`` with the
        round and a total of 0, as it is not known.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    SSSPResult

    Raises
    ------
    ArgumentError
        The graph has no weights, or one below 0; `source` is not a vertex, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """
    report = progress or (lambda stage, done, total: None)

    def check(found: Graph) -> None:
        require_weights(found)
        require_vertex(source, found.vertices)
        if delta is not None and not (math.isfinite(delta) and delta > 0):
            raise ArgumentError(f"delta is {delta!r}: give a width above 0, or leave it out", name="delta")

    with borrowed(graph, options, check) as loaded:
        width = delta or default_delta(loaded.graph)
        dtypes = [np.float64] if loaded.graph.weights == "float32" else [np.int32, np.int64]
        for dtype in dtypes:
            search = _Search(loaded, int(source), width, np.dtype(dtype))
            search.compile(report)
            before, started = loaded.edges.stats, time.perf_counter()
            search.search(report)
            seconds = time.perf_counter() - started
            counts = to_host(search.counters)
            loaded.require_destinations(counts)
            if counts[NEGATIVE]:
                raise ArgumentError(
                    f"{loaded.graph.weights_path}: {counts[NEGATIVE]} weights are below 0, and delta-stepping needs "
                    "weights of 0 and more: convert the edges again with other weights"
                )
            if not counts[TOO_LONG]:
                break  # otherwise once more, with 8 bytes a distance
        return search.result(width, seconds, loaded.edges.stats - before)


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


class _Search:
    """One search, with distances of a dtype."""

    def __init__(self, loaded: LoadedGraph, source: int, delta: float, dtype: np.dtype[Any]) -> None:
        self.loaded, self.source, self.delta, self.dtype = loaded, source, delta, dtype
        graph, where = loaded.graph, loaded.device
        stored = int(graph.places[source])
        self.zero = np.float64(0) if dtype.kind == "f" else np.int64(0)
        self.most = np.inf if dtype.kind == "f" else int(np.iinfo(dtype).max)
        """The distance of vertices without a path."""
        self.distances = to_device(where, start_array(graph.vertices, stored, self.most, 0, dtype))
        bits = start_array(words_of(graph.vertices), stored // WORD, 0, 1 << stored % WORD, np.uint32)
        self.waiting = to_device(where, bits)
        self.least = to_device(where, np.full(1, self.most, dtype))
        self.items = zeros(where, most_items(graph.vertices, graph.edges))
        self.counters = zeros(where, N_COUNTERS)
        self.rounds = 0
        self.warps = 0
        self.staged: Any = None
        if not loaded.in_memory:
            # more than pages for all of them would only take each other's
            frames = loaded.edges.cache.cache_bytes // loaded.edges.cache.page_size
            self.warps = max(1, min(STAGING_WARPS if loaded.warp > 1 else STAGING_THREADS, frames // 2))
            self.staged = zeros(where, self.warps * PIECE, np.dtype(loaded.graph.weights))

    def compile(self, report: Progress) -> None:
        """Compile what is launched, by launches that change nothing."""
        loaded, one = self.loaded, self.loaded.warp
        report("compile", 0, 1)
        relax, arguments = self._relax(0)
        relax[one](*arguments)
        _select[one](
            loaded.offsets,
            self.distances,
            self.waiting,
            0.0,
            self.items,
            0,
            words_of(loaded.graph.vertices),
            1,
            self.least,
            self.counters,
            device=loaded.device,
        )
        report("compile", 1, 1)

    def search(self, report: Progress) -> None:
        """Follow edges, bucket after bucket."""
        loaded, words, done = self.loaded, words_of(self.loaded.graph.vertices), 0
        limit, warps = self.delta, min(words, WARPS)
        weights = loaded.weights
        with Run(loaded, loaded.edges, weights) as run:  # type: ignore[arg-type]
            while not run.failed:
                run.launch(
                    _select,
                    warps * loaded.warp,
                    loaded.offsets,
                    self.distances,
                    self.waiting,
                    float(limit),
                    self.items,
                    -done,
                    0,
                    warps,
                    self.least,
                    self.counters,
                )
                counts = run.read(self.counters)
                count, done = int(counts[ITEMS]) - done, int(counts[ITEMS])
                if count == 0:
                    least = run.read(self.least)[LEAST]
                    if least == self.most:
                        break
                    limit = (math.floor(float(least) / self.delta) + 1) * self.delta
                    limit = max(limit, math.nextafter(float(least), math.inf))
                else:
                    self.rounds += 1
                    report("search", self.rounds, 0)
                # without items it only forgets `least`
                relax, arguments = self._relax(count)
                wanted = min(count, self.warps) if self.warps else count
                run.launch(relax, max(1, wanted) * loaded.warp, *arguments)

    def _relax(self, count: int) -> tuple[Any, tuple[Any, ...]]:
        """Return the kernel that follows the edges of items, and its arguments."""
        loaded = self.loaded
        first = (
            loaded.edges,
            loaded.weights,
            loaded.offsets,
            self.distances,
            self.waiting,
            self.items,
            count,
        )
        last = self.zero, self.most, self.least, self.counters
        return (_relax_staged, (*first, self.staged, self.warps, *last)) if self.warps else (_relax, (*first, *last))

    def result(self, delta: float, seconds: float, stats: Statistics) -> SSSPResult:
        """Return the result."""
        found = to_host(self.distances)
        reached = found < self.most
        if self.dtype.kind == "i":
            found = np.where(reached, found.astype(np.int64), np.iinfo(np.int64).max)
        return SSSPResult(
            source=self.source,
            distances=self.loaded.graph.original(found),
            reached=int(np.count_nonzero(reached)),
            delta=delta,
            rounds=self.rounds,
            seconds=seconds,
            stats=stats,
        )
