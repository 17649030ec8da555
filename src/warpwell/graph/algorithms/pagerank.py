"""PageRank of a graph on storage: `pagerank`."""

from __future__ import annotations

import logging
import math
import operator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._check import checked_integer
from ...array import atomic_add
from ...errors import ArgumentError
from ...targets import kernel, to_host, zeros
from ...targets.primitives import div, grid, lane_id, reduce_warp, warp_size
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, require_in_edges
from .run import Result, Run, Work, execute
from .work_items import (
    ITEMS,
    WARPS,
    list_items,
    max_items,
    neighbor_at,
    segment_of,
    up_to_warps,
    vertices_of,
)


@kernel
def _gather(edges, offsets, items, count, window, shares, sums, counters):
    """Add the shares that arrive over edges in a window; a warp takes one item."""
    index = div(grid(1), warp_size())
    if index < count:
        vertex, first, end = segment_of(items[index], offsets)
        at = max(first, window[0])
        stop = min(end, window[1])
        total = 0.0
        at += lane_id()
        while at < stop:
            source = neighbor_at(edges, at, shares.size, counters)
            if source >= 0:
                total += shares[source]
            at += warp_size()
        total = reduce_warp(operator.add, total)
        if lane_id() == 0:
            atomic_add(sums, vertex, total)


@kernel
def _step(offsets, ranks, shares, sums, base, damping, threads, change, dangling, totals):
    """Compute ranks from the sums, and the share of each vertex's rank per edge; reset the sums.

    The kernel adds the change of all ranks to item `change` of the totals, and the rank of vertices without outgoing
    edges to item `dangling`. A thread takes every `threads`-th vertex.
    """
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
    changed = reduce_warp(operator.add, changed)
    lost = reduce_warp(operator.add, lost)
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
) -> Result:
    """Compute PageRank, reading the edges in order, once per iteration.

    Power iteration ("The PageRank Citation Ranking", Page, Brin, Motwani, Winograd, 1998): each vertex, handled by one
    warp, sums the shares of the vertices that have an edge to it, and gives an equal share of its own rank to each of
    its edges. A repeated edge counts each time. The rank of vertices without outgoing edges is spread over all
    vertices, as in NetworkX. Ranks and sums are float64, and take 24 bytes per vertex in device memory.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        An undirected graph, or one with in-edges.
    damping : float, default 0.85
        Fraction of the rank that follows edges, 0 to 1.
    tolerance : float, default 1e-6
        Iterations end when the sum of the absolute changes of all ranks is below this value. (NetworkX multiplies its
        tolerance by the number of vertices.)
    iterations : int, default 100
        Maximum number of iterations.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0, 1 of 1) for each kernel; ``"iterate"`` with
        iterations.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its values are the ranks, float64, with a sum of 1. `rounds` is the number of iterations; the ranks have
        converged if `change` is below the tolerance.

    Raises
    ------
    ArgumentError
        The graph is directed and has no in-edges, or an option is out of range.
    FormatError
        The files of the graph contradict each other.
    KernelError
        The medium failed.
    """

    def check(found: Graph) -> None:
        require_in_edges(found)
        if not 0 <= damping <= 1:
            raise ArgumentError(f"damping is {damping!r}: give a number from 0 to 1", name="damping")
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ArgumentError(f"tolerance is {tolerance!r}: give a number, 0 or more", name="tolerance")
        checked_integer(iterations, "iterations")

    def start(loaded: LoadedGraph) -> _PageRank:
        return _PageRank(loaded, float(damping), float(tolerance), int(iterations))

    return execute(graph, options, check, start, progress)


class _PageRank(Work):
    """One computation of ranks."""

    def __init__(self, loaded: LoadedGraph, damping: float, tolerance: float, iterations: int) -> None:
        super().__init__(loaded, loaded.in_edges)
        self.damping, self.tolerance, self.iterations, self.rounds = damping, tolerance, iterations, 0
        where, n = self.device, self.graph.vertices
        self.ranks, self.shares, self.sums = (zeros(where, n, np.float64) for _ in range(3))
        self.items = zeros(where, max_items(n, self.graph.edges))
        self.totals = zeros(where, 2 * (iterations + 1), np.float64)
        self.threads = min(up_to_warps(n, loaded.warp), WARPS * loaded.warp)

    def run(self, run: Run, report: Progress) -> None:
        """Iterate until the change is below the tolerance."""
        loaded, n = self.loaded, self.graph.vertices
        if not n:
            return
        offsets = self.graph.map(self.graph.in_offsets_path)
        self._step(run, 1 / n)  # from sums of 0
        lost = float(run.read(self.totals)[1])
        listed = window = None
        while self.rounds < self.iterations and not run.failed:
            report("iterate", self.rounds, self.iterations)
            for window in loaded.windows(loaded.in_edges):
                if listed is None or window != (0, self.graph.edges):
                    listed = self._list(run, *vertices_of(offsets, window))
                edges = loaded.in_edges, loaded.in_offsets, self.items, listed, window
                run.launch(_gather, listed * loaded.warp, *edges, self.shares, self.sums, self.counters)
            self.rounds += 1
            self._step(run, (1 - self.damping) / n + self.damping * lost / n)
            self.change, lost = (float(x) for x in run.read(self.totals)[2 * self.rounds : 2 * self.rounds + 2])
            if self.change < self.tolerance:
                break
        else:
            if self.tolerance and not run.failed:
                logging.getLogger(__package__).warning(
                    "the ranks changed by %.3g in the last of %d iterations, but the tolerance is %g: allow more "
                    "iterations",
                    self.change,
                    self.rounds,
                    self.tolerance,
                )

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return the ranks, their number, and the iterations."""
        return to_host(self.ranks), self.graph.vertices, self.rounds

    def _step(self, run: Run, base: float) -> None:
        arrays = self.loaded.offsets, self.ranks, self.shares, self.sums
        totals = 2 * self.rounds, 2 * self.rounds + 1, self.totals
        run.launch(_step, self.threads, *arrays, base, self.damping, self.threads, *totals)

    def _list(self, run: Run, vertex: int, end: int) -> int:
        """List the items of vertices [vertex, end), and return their number."""
        before = int(run.read(self.counters)[ITEMS])
        offsets = self.loaded.in_offsets  # offsets also serve as labels, because none is -1
        arguments = offsets, offsets, -1, 0, vertex, end, 1, self.items, -before, self.counters
        run.launch(list_items, end - vertex, *arguments)
        return int(run.read(self.counters)[ITEMS]) - before
