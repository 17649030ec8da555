"""PageRank of a graph on storage: ``pagerank``."""

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
from ...targets.primitives import activemask, ballot, div, grid, i64, lane_id, warp_size
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, borrowed
from .run import Run, try_waves
from .work_items import (
    BAD,
    ITEMS,
    N_COUNTERS,
    PIECE,
    WARPS,
    append,
    most_items,
    start_of,
    sum_all,
    up_to_warps,
    vertex_of,
    vertices_of,
)


@dataclass(frozen=True)
class PageRankResult:
    """The PageRank of the vertices of a graph.

    Attributes
    ----------
    ranks : ndarray of float64, shape (vertices,)
        They add up to 1.
    iterations : int
        Iterations that ran.
    change : float
        Sum of the absolute changes of all ranks in the last one.
    converged : bool
        The change is below the tolerance.
    seconds : float
        Time of the iterations, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache meanwhile.
    """

    ranks: NDArray[np.float64]
    iterations: int
    change: float
    converged: bool
    seconds: float
    stats: Statistics


@kernel
def _list(offsets, vertex, end, items, base, counters):
    """Append the items of vertices [vertex, end), nearly in vertex order (thread a vertex)."""
    mask = activemask()
    v = vertex + grid(1)
    found = v < end and offsets[v + 1] > offsets[v]
    if ballot(mask, found) != 0:
        append(mask, found, v, offsets, items, base, counters)


@device
def _share_of(total, source, shares, counters):
    """Add what the vertex at the start of an edge gives (thread)."""
    u = i64(source)
    if u < 0 or u >= shares.size:
        atomic_add(counters, BAD, 1)
    else:
        total += shares[u]
    return total


@kernel
def _gather(edges, offsets, items, count, window, shares, sums, counters):
    """Add the shares that arrive over edges in a window; a warp takes one item."""
    mask = activemask()
    index = div(grid(1), warp_size())
    if index < count:
        item = items[index]
        vertex = vertex_of(item)
        at = start_of(item, offsets[vertex])
        stop = min(at + PIECE, offsets[vertex + 1], window[1])
        at = max(at, window[0])
        total = 0.0
        at += lane_id()
        while at < stop:
            total = _share_of(total, edges[at], shares, counters)
            at += warp_size()
        total = sum_all(mask, total)
        if lane_id() == 0:
            atomic_add(sums, vertex, total)


@kernel
def _step(offsets, ranks, shares, sums, base, damping, threads, change, dangling, totals):
    """Compute ranks of the sums, and what each vertex gives along each of its edges; forget the sums.

    The change of all ranks is added to item `change` of the totals, and the rank of vertices without edges to item
    `dangling`. A thread takes every so manieth vertex.
    """
    mask = activemask()
    v = grid(1)
    changed = 0.0
    lost = 0.0
    while v < ranks.size:
        rank = base + damping * sums[v]
        changed += abs(rank - ranks[v])
        degree = offsets[v + 1] - offsets[v]
        if degree > 0:
            shares[v] = rank / degree
        else:
            lost += rank
        ranks[v] = rank
        sums[v] = 0.0
        v += threads
    changed = sum_all(mask, changed)
    lost = sum_all(mask, lost)
    if lane_id() == 0:
        atomic_add(totals, change, changed)
        atomic_add(totals, dangling, lost)


def pagerank(
    graph: Graph | LoadedGraph | str | Path,
    *,
    damping: float = 0.85,
    tolerance: float = 1e-6,
    iterations: int = 100,
    progress: Progress | None = None,
    **options: Any,
) -> PageRankResult:
    """Compute PageRank, reading the edges once an iteration, in order.

    Power iteration ("The PageRank Citation Ranking", Page, Brin, Motwani, Winograd, 1998): each vertex pulls from the
    vertices whose edges arrive, a warp a vertex, and gives the same to each of its own edges; edges that are repeated
    count as often. The rank of vertices without edges is spread over all, as in NetworkX. Ranks and sums are float64,
    24 bytes a vertex in device memory.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        An undirected graph, or one with in-edges.
    damping : float, default 0.85
        Part of the rank that follows edges, 0 to 1.
    tolerance : float, default 1e-6
        Iterations end once the sum of the absolute changes of all ranks is below it. (NetworkX multiplies its own by
        the number of vertices.)
    iterations : int, default 100
        Iterations at most.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"iterate"`` with
        iterations.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    PageRankResult

    Raises
    ------
    ArgumentError
        The graph is directed and has no in-edges, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """
    report = progress or (lambda stage, done, total: None)

    def check(found: Graph) -> None:
        require_in_edges(found)
        _check_options(damping, tolerance, iterations)

    with borrowed(graph, options, check) as loaded:
        work = _PageRank(loaded, damping, iterations)
        report("compile", 0, 1)
        work.compile()
        report("compile", 1, 1)
        before, started = loaded.in_edges.stats, time.perf_counter()
        done, change = work.iterate(tolerance, iterations, report)
        seconds = time.perf_counter() - started
        loaded.require_destinations(work.counters)
        return PageRankResult(
            ranks=loaded.graph.original(to_host(work.ranks)),
            iterations=done,
            change=change,
            converged=change < tolerance,
            seconds=seconds,
            stats=loaded.in_edges.stats - before,
        )


def require_in_edges(graph: Graph) -> None:
    """Raise ArgumentError if the edges that end in a vertex cannot be read."""
    if not graph.in_edges:
        raise ArgumentError(
            f"{graph.path} is directed and has no in-edges, which PageRank pulls along: convert its edges again with "
            "in_edges=True (`warpwell graph convert EDGES OUT --in-edges`)"
        )


def _check_options(damping: float, tolerance: float, iterations: int) -> None:
    if not 0 <= damping <= 1:
        raise ArgumentError(f"damping is {damping!r}: give a number from 0 to 1", name="damping")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ArgumentError(f"tolerance is {tolerance!r}: give a number, 0 or more", name="tolerance")
    if isinstance(iterations, bool) or not isinstance(iterations, int | np.integer) or iterations < 1:
        raise ArgumentError(f"iterations is {iterations!r}: give a whole number, 1 or more", name="iterations")


class _PageRank:
    """The arrays of an iteration, in device memory."""

    def __init__(self, loaded: LoadedGraph, damping: float, iterations: int) -> None:
        graph, where = loaded.graph, loaded.device
        self.loaded, self.damping, n = loaded, float(damping), graph.vertices
        self.ranks = to_device(where, np.zeros(n))
        self.shares = zeros(where, n, np.float64)
        self.sums = zeros(where, n, np.float64)
        self.items = zeros(where, most_items(n, graph.edges))
        self.counters = zeros(where, N_COUNTERS)
        self.totals = zeros(where, 2 * (int(iterations) + 1), np.float64)
        self.pages = None if loaded.in_memory else loaded.in_edges.page_set()
        self.threads = min(up_to_warps(n, loaded.warp), WARPS * loaded.warp)

    def compile(self) -> None:
        """Compile what is launched, by launches that change nothing."""
        loaded, one = self.loaded, self.loaded.warp
        _list[one](loaded.in_offsets, 0, 0, self.items, 0, self.counters, device=loaded.device)
        _gather[one](loaded.in_edges, loaded.in_offsets, self.items, 0, (0, 0), self.shares, self.sums, self.counters)
        empty = zeros(loaded.device, 0, np.float64)
        _step[one](loaded.offsets, empty, empty, empty, 0.0, 0.0, one, 0, 1, self.totals, device=loaded.device)
        if self.pages is not None:
            try_waves(self.pages, loaded.in_edges)

    def iterate(self, tolerance: float, iterations: int, report: Progress) -> tuple[int, float]:
        """Iterate until the change is below the tolerance; return how often, and the change."""
        loaded, n = self.loaded, self.loaded.graph.vertices
        done, change = 0, 0.0
        if not n:
            return done, change
        with Run(loaded, loaded.in_edges, *(() if self.pages is None else (self.pages,))) as run:
            self._step(run, 1 / n, 0)  # from sums of 0
            lost = float(run.read(self.totals)[1])
            listed = self._list(run, 0, n) if self.pages is None else 0
            while done < iterations and not run.failed:
                report("iterate", done, iterations)
                if self.pages is None:
                    self._gather(run, listed, (0, loaded.graph.edges))
                else:
                    self._gather_pages(run, self.pages)
                done += 1
                self._step(run, (1 - self.damping) / n + self.damping * lost / n, done)
                change, lost = (float(x) for x in run.read(self.totals)[2 * done : 2 * done + 2])
                if change < tolerance:
                    break
        return done, change

    def _step(self, run: Run, base: float, iteration: int) -> None:
        run.launch(
            _step,
            self.threads,
            self.loaded.offsets,
            self.ranks,
            self.shares,
            self.sums,
            base,
            self.damping,
            self.threads,
            2 * iteration,
            2 * iteration + 1,
            self.totals,
        )

    def _list(self, run: Run, vertex: int, end: int) -> int:
        before = int(run.read(self.counters)[ITEMS])
        run.launch(_list, end - vertex, self.loaded.in_offsets, vertex, end, self.items, -before, self.counters)
        return int(run.read(self.counters)[ITEMS]) - before

    def _gather(self, run: Run, count: int, window: tuple[int, int]) -> None:
        loaded = self.loaded
        run.launch(
            _gather,
            count * loaded.warp,
            loaded.in_edges,
            loaded.in_offsets,
            self.items,
            count,
            window,
            self.shares,
            self.sums,
            self.counters,
        )

    def _gather_pages(self, run: Run, pages: Any) -> None:
        """Gather over all edges, whose pages are read ahead."""
        graph = self.loaded.graph
        offsets = graph.map(graph.in_offsets_path)
        for window in run.all_edges(pages):
            self._gather(run, self._list(run, *vertices_of(offsets, window)), window)
