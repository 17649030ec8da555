"""Breadth-first search over a graph on storage: `bfs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._trace import traced
from ...array import atomic_add
from ...errors import ArgumentError
from ...targets import device, kernel, to_device, to_host, zeros
from ...targets.primitives import (
    activemask,
    ballot,
    barrier,
    block_threads,
    div,
    element_address,
    failed,
    ffs,
    grid,
    i64,
    lane_id,
    load_relaxed_as,
    popc,
    shfl,
    thread_index,
    warp_size,
)
from ..graph import HEAD, Graph, Progress
from ..loaded import LoadedGraph
from .run import Result, Run, Work, execute
from .work_items import (
    DEGREES,
    FOUND,
    ITEMS,
    N_COUNTERS,
    UNDECIDED_EDGES,
    UNDECIDED_PAGES,
    WARPS,
    WORD,
    add_all,
    append,
    contains,
    count_words,
    insert,
    list_items,
    max_items,
    neighbor_at,
    segment_of,
    start_array,
    vertex_dtype,
)

LEVEL, BEGIN, FRONTIER, STOP = 6, 7, 8, 9
"""Counters of `_push_levels`: its last level, that level's first item and edges, and whether the launch failed."""
ALPHA = 15
"""In memory, pull if the frontier has more than one in ALPHA of the edges to pull along (alpha of GAP)."""
FEW_PAGES = 64
"""From storage, a frontier on fewer pages is pushed without reading the first neighbors of all vertices."""
OWN_STEPS = 8
"""Neighbors that a pulling thread reads by itself, before its warp helps: most vertices need fewer."""
SMALL = 1 << 14
"""Edges of a frontier in memory that one block visits: several levels in one launch."""


@device
def _visit(edges, offsets, levels, visited, items, index, base, level, mask, counters):
    """Set the level of an item's neighbors and append theirs (a whole warp, all lanes of mask with one index)."""
    _, at, stop = segment_of(items[index], offsets)
    lane = lane_id()
    while at < stop:
        neighbor = -1
        if at + lane < stop:
            neighbor = neighbor_at(edges, at + lane, levels.size, counters)
        found = False
        if neighbor >= 0 and insert(visited, neighbor):
            found = True
            levels[neighbor] = level
        # Synchronize the lanes, so that their next edges are read together.
        found_mask = ballot(mask, found)
        if found_mask != 0:
            degrees = append(mask, found, neighbor, offsets, items, base, counters)
            if lane == warp_size() - 1:
                atomic_add(counters, DEGREES, degrees)
                atomic_add(counters, FOUND, popc(found_mask))
        at += warp_size()


@kernel
def _push(edges, offsets, levels, visited, items, begin, end, base, level, counters):
    """Visit the neighbors of items [begin, end); a warp takes one item, its lanes adjacent edges."""
    mask = activemask()
    index = begin + div(grid(1), warp_size())
    if index < end:
        _visit(edges, offsets, levels, visited, items, index, base, level, mask, counters)


@kernel(block=1024)
def _push_levels(edges, offsets, levels, visited, items, begin, end, base, level, max_edges, counters):
    """Visit level after level while the frontier has at most `max_edges` edges (one block; its warps take items)."""
    mask = activemask()
    degrees = load_relaxed_as(element_address(counters, DEGREES), counters.dtype)
    first = begin
    last = end
    current_level = level - 1
    count = 0
    should_continue = True
    while should_continue:
        current_level += 1
        index = first + div(thread_index(), warp_size())
        while index < last:
            _visit(edges, offsets, levels, visited, items, index, base, current_level, mask, counters)
            index += div(block_threads(), warp_size())
        if thread_index() == 0:
            counters[STOP] = failed()
        barrier()
        first = last
        last = base + load_relaxed_as(element_address(counters, ITEMS), counters.dtype)
        before = degrees
        degrees = load_relaxed_as(element_address(counters, DEGREES), counters.dtype)
        count = degrees - before
        should_continue = first < last and count <= max_edges and counters[STOP] == 0
        # No thread appends before all have read.
        barrier()
    if thread_index() == 0:
        counters[BEGIN] = first
        counters[LEVEL] = current_level
        counters[FRONTIER] = count


@device
def _leads_to(edges, visited, at, stop, mask, vertices, counters):
    """Return True if one of the caller's edges [at, stop) leads to a set that does not change (all lanes of mask).

    Each lane reads `OWN_STEPS` of its own edges; then the whole warp reads the other edges of each lane in turn.
    """
    lane = lane_id()
    own = OWN_STEPS
    hit = False
    owner = -1
    low = 0
    high = 0
    while True:
        # Read edges for both cases in one place, because the compiled read is large.
        alone = own > 0
        edge = -1
        if alone:
            own -= 1
            if at < stop and not hit:
                edge = at
                at += 1
            if ballot(mask, edge >= 0) == 0:
                own = 0
        else:
            if low >= high:
                left = ballot(mask, at < stop and not hit)
                if left == 0:
                    return hit
                owner = ffs(left) - 1
                low = shfl(mask, at, owner)
                high = shfl(mask, stop, owner)
            if low + lane < high:
                edge = low + lane
            low += warp_size()
        met = False
        if edge >= 0:
            neighbor = neighbor_at(edges, edge, vertices, counters)
            met = neighbor >= 0 and contains(visited, neighbor)
        if alone:
            hit = hit or met
        else:
            if ballot(mask, met) != 0:
                low = high
                if lane == owner:
                    hit = True
            if low >= high and lane == owner:
                at = stop


@device
def _head_in(heads, visited, vertex, degree, vertices, counters):
    """Return True if one of a vertex's first neighbors is in a set that does not change (thread)."""
    at = HEAD * vertex
    stop = at + min(degree, HEAD)
    while at < stop:
        neighbor = neighbor_at(heads, at, vertices, counters)
        if neighbor >= 0 and contains(visited, neighbor):
            return True
        at += 1
    return False


@kernel
def _pull_heads(heads, in_offsets, offsets, levels, visited, after, level, word_count, warps, counters):
    """Put vertices with a first neighbor in `visited` into `after`, and count the other edges of those without one.

    A warp takes every `warps`-th of `word_count` words. Such a neighbor of a vertex outside of `visited` is on the
    previous level. `visited` does not change.
    """
    mask = activemask()
    lane = lane_id()
    word = div(grid(1), warp_size())
    found = 0
    degrees = 0
    undecided_edges = 0
    while word < word_count:
        visited_bits = i64(visited[word])
        fresh = 0
        k = lane
        while k < WORD:
            vertex = WORD * word + k
            hit = False
            if vertex < levels.size and (visited_bits >> k) & 1 == 0:
                degree = in_offsets[vertex + 1] - in_offsets[vertex]
                hit = _head_in(heads, visited, vertex, degree, levels.size, counters)
                if hit:
                    levels[vertex] = level
                    found += 1
                    degrees += offsets[vertex + 1] - offsets[vertex]
                else:
                    undecided_edges += max(0, degree - HEAD)
            fresh |= ballot(mask, hit) << (k - lane)
            k += warp_size()
        if lane == 0:
            after[word] = visited_bits | fresh
        word += warps
    add_all(counters, FOUND, found)
    add_all(counters, DEGREES, degrees)
    add_all(counters, UNDECIDED_EDGES, undecided_edges)


@kernel
def _list_undecided(in_offsets, after, items, count, base, pages, page_bits, counters):
    """Append the items of those of `count` vertices outside of `after` that have more than the first neighbors.

    `pages` receives the pages of ``2**page_bits`` edges that their other edges are on (thread a vertex).
    """
    mask = activemask()
    v = grid(1)
    at = 0
    stop = 0
    if v < count and not contains(after, v):
        at = in_offsets[v] + HEAD
        stop = in_offsets[v + 1]
    found = at < stop
    if ballot(mask, found) != 0:
        append(mask, found, v, in_offsets, items, base, counters)
        fresh = 0
        page = at >> page_bits
        while page << page_bits < stop:
            if insert(pages, page):
                fresh += 1
            page += 1
        add_all(counters, UNDECIDED_PAGES, fresh)


@kernel
def _pull_items(edges, in_offsets, offsets, levels, visited, after, items, count, level, counters):
    """Put vertices of `count` items with a neighbor in `visited` into `after` (thread an item).

    The first neighbors are skipped: `_pull_heads` has read them. All lanes have edges, so that a GPU waits for the
    pages of as many vertices at once as it can.
    """
    mask = activemask()
    index = grid(1)
    vertex = 0
    at = 0
    stop = 0
    if index < count:
        vertex, first, stop = segment_of(items[index], in_offsets)
        at = max(first, in_offsets[vertex] + HEAD)
    found = 0
    degrees = 0
    if _leads_to(edges, visited, at, stop, mask, levels.size, counters) and insert(after, vertex):
        levels[vertex] = level
        found = 1
        degrees = offsets[vertex + 1] - offsets[vertex]
    add_all(counters, FOUND, found)
    add_all(counters, DEGREES, degrees)


@kernel
def _pull(edges, in_offsets, offsets, levels, visited, reached, after, skip, level, word_count, warps, counters):
    """Put `reached`, and vertices with a neighbor in `visited`, into `after`, word by word as `_pull_heads`.

    The first `skip` neighbors are skipped: `_pull_heads` has read them, and added their vertices to `reached`.
    """
    mask = activemask()
    lane = lane_id()
    word = div(grid(1), warp_size())
    found = 0
    degrees = 0
    while word < word_count:
        reached_bits = i64(reached[word])
        fresh = 0
        k = lane
        while k < WORD:
            vertex = WORD * word + k
            at = 0
            stop = 0
            if vertex < levels.size and (reached_bits >> k) & 1 == 0:
                at = in_offsets[vertex] + skip
                stop = in_offsets[vertex + 1]
            hit = _leads_to(edges, visited, at, stop, mask, levels.size, counters)
            if hit:
                levels[vertex] = level
                found += 1
                degrees += offsets[vertex + 1] - offsets[vertex]
            fresh |= ballot(mask, hit) << (k - lane)
            k += warp_size()
        if lane == 0:
            after[word] = reached_bits | fresh
        word += warps
    add_all(counters, FOUND, found)
    add_all(counters, DEGREES, degrees)


def bfs(
    graph: Graph | LoadedGraph | str | Path,
    source: int,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Search a graph breadth-first, reading its edges on demand.

    A large level is first pulled ("Direction-Optimizing Breadth-First Search", Beamer, Asanovic, Patterson, 2012) along
    the first neighbors of each vertex, which are in device memory: each vertex that is not found yet looks for a
    neighbor that is found. For the vertices that remain, the search either reads their other edges, or pushes along
    the edges of the frontier, whichever reads less. If all edges are in device memory, it pulls along all of them at
    once. In a push, a warp takes a vertex of the frontier (or a segment of a large one) and its lanes read adjacent
    edges, so their pages are fetched together. If edges are in memory and the frontier is small, one block visits
    several levels in one launch. Graphs without in-edges are only pushed. Levels, offsets, first neighbors and
    frontier are in device memory, about 36 bytes per vertex.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        The graph; edges are followed in their direction.
    source : int
        The vertex to start from.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0, 1 of 1) for each kernel; ``"search"`` with the
        current level and a total of 0, because the number of levels is unknown. If edges are in memory, one launch
        visits several consecutive levels that have few edges, and only the first of them is reported.
    **options
        ``device``, ``tier``, ``cache``, ``page_size``, ``stats`` and more, as for `LoadedGraph`; not allowed if `graph`
        is a `LoadedGraph`.

    Returns
    -------
    Result
        Its values are levels, the numbers of edges on a shortest path from the source: int64; -1 if there is no path.

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
    >>> result.count, result.rounds  # doctest: +SKIP
    (325557, 37)
    """
    return execute(
        graph,
        options,
        lambda found: require_vertex(source, found.vertices),
        lambda loaded: _Search(loaded, int(loaded.graph.positions[source])),
        progress,
    )


class _Search(Work):
    """The levels of a search from a stored vertex. Counters only grow: the host subtracts two readings."""

    def __init__(self, loaded: LoadedGraph, source: int) -> None:
        super().__init__(loaded, *loaded.arrays)
        where, vertices, self.word_count = self.device, self.graph.vertices, count_words(self.graph.vertices)
        self.levels = to_device(where, start_array(vertices, source, -1, 0, vertex_dtype(vertices)))
        self.visited = to_device(where, start_array(self.word_count, source // WORD, 0, 1 << source % WORD, np.uint32))
        self.after = zeros(where, self.word_count, np.uint32)
        self.items = zeros(where, max_items(vertices, self.graph.edges))
        self.counts = np.zeros(N_COUNTERS, np.int64)
        self.level = 0
        self.listed: tuple[int, int] | None = None
        """First and last item of the frontier, if its items are listed; the items after the last are free."""
        degree = int(np.diff(self.graph.map(self.graph.offsets_path)[source : source + 2])[0])
        self.found, self.edges = 1, degree
        """Vertices of the frontier and their edges."""
        self.left = self.graph.edges - degree
        """Edges of the vertices that are not found."""

    def run(self, run: Run, report: Progress) -> None:
        """Visit level after level, until a level is empty."""
        self._run = run
        while self.found > 0 and not run.failed:
            report("search", self.level + 1, 0)
            if self.graph.undirected and self.left == 0:
                return  # The other vertices have no edges.
            self._visit_level()

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return the levels, the number of vertices with a level, and the largest level."""
        levels = to_host(self.levels).astype(np.int64)
        return levels, int(np.count_nonzero(levels >= 0)), int(levels.max())

    def _read(self) -> NDArray[np.int64]:
        """Return the counters' increase since the last reading."""
        before, self.counts = self.counts, self._run.read(self.counters)
        return self.counts - before

    def _pages(self, vertices: int, edges: int) -> int:
        """Estimate the number of pages that have the edges of a number of vertices."""
        return min(vertices + edges // self.loaded.page_items, self.graph.edges // self.loaded.page_items)

    @traced("breadth-first level")
    def _visit_level(self) -> None:
        """Visit one level, or several small ones in memory."""
        loaded = self.loaded
        if loaded.in_memory and self.edges <= SMALL:
            self._push_small()
            return
        if loaded.in_memory:
            pushes = self.edges * ALPHA <= self.left
        else:
            pushes = self._pages(self.found, self.edges) <= FEW_PAGES
            if not pushes:
                self.listed = None  # A list in the order of vertices reads each page once.
        if pushes or not self.graph.in_edges:
            counts = self._push(self.visited)
        else:
            counts = self._pull_all(self.visited, 0) if loaded.on_device else self._pull_heads_first()
            self.listed = None
            self.visited, self.after = self.after, self.visited
        self.level += 1
        self.found, self.edges = int(counts[FOUND]), int(counts[DEGREES])
        self.left -= self.edges

    def _pull_heads_first(self) -> NDArray[np.int64]:
        """Look at the first neighbors of all vertices, then follow the fewer edges; return the counters of both."""
        counts = self._pull_words(_pull_heads, self.loaded.heads, self.after)
        undecided_edges = int(counts[UNDECIDED_EDGES])
        if not undecided_edges:
            return counts
        if not self.loaded.in_memory:
            return counts + self._read_fewer_pages(undecided_edges)
        pulls = undecided_edges < ALPHA * self.edges
        return counts + (self._pull_all(self.after, HEAD) if pulls else self._push(self.after))

    def _read_fewer_pages(self, undecided_edges: int) -> NDArray[np.int64]:
        """Read the other edges of undecided vertices, or those of the frontier, whichever are on fewer pages."""
        loaded, vertices, pages = self.loaded, self.graph.vertices, self._pages(self.found, self.edges)
        if undecided_edges // self.loaded.page_items > pages:
            return self._push(self.after)
        # Vertices of one degree have neighboring edges, so they can have far fewer pages than there are vertices.
        page_bits = loaded.page_items.bit_length() - 1
        page_set = zeros(self.device, count_words((self.graph.edges >> page_bits) + 1), np.uint32)
        state = loaded.in_offsets, self.after, self.items, vertices, -int(self.counts[ITEMS])
        self._run.launch(_list_undecided, vertices, *state, page_set, page_bits, self.counters)
        listed = self._read()
        if listed[UNDECIDED_PAGES] > pages:
            return self._push(self.after)
        count = int(listed[ITEMS])
        graph = loaded.in_edges, loaded.in_offsets, loaded.offsets
        sets = self.levels, self.visited, self.after, self.items
        self._run.launch(_pull_items, count, *graph, *sets, count, self.level + 1, self.counters)
        return self._read()

    def _pull_all(self, reached: Any, skip: int) -> NDArray[np.int64]:
        """Look at all neighbors, except for the first `skip`, of vertices outside of a set."""
        return self._pull_words(_pull, self.loaded.in_edges, reached, self.after, skip)

    def _pull_words(self, pull: Any, neighbors: Any, *sets: Any) -> NDArray[np.int64]:
        """Launch a kernel over all words of `visited`, and return its counters."""
        loaded, warps = self.loaded, min(self.word_count, WARPS)
        graph = neighbors, loaded.in_offsets, loaded.offsets, self.levels, self.visited
        self._run.launch(
            pull, warps * loaded.warp, *graph, *sets, self.level + 1, self.word_count, warps, self.counters
        )
        return self._read()

    def _list(self) -> tuple[int, int]:
        """Return the first and last item of the frontier, and list them if they are not."""
        if self.listed is not None:
            return self.listed
        vertices, labels = self.graph.vertices, (self.loaded.offsets, self.levels, self.level)
        base = -int(self.counts[ITEMS])
        self._run.launch(list_items, vertices, *labels, 1, 0, vertices, 1, self.items, base, self.counters)
        return 0, int(self._read()[ITEMS])

    def _push(self, visited: Any, several: bool = False) -> NDArray[np.int64]:
        """Follow the edges of the frontier to vertices outside of a set, which receives them.

        With `several`, also follow the edges of later levels while these are small.
        """
        begin, end = self._list()
        base, loaded = end - int(self.counts[ITEMS]), self.loaded
        state = loaded.edges, loaded.offsets, self.levels, visited, self.items, begin, end, base, self.level + 1
        if several:
            self._run.launch(_push_levels, 1, *state, SMALL, self.counters)
        else:
            self._run.launch(_push, (end - begin) * loaded.warp, *state, self.counters)
        counts = self._read()
        self.listed = end, base + int(self.counts[ITEMS])
        return counts

    def _push_small(self) -> None:
        """Follow the edges of the frontier, and of later levels while these are small."""
        self.left -= int(self._push(self.visited, several=True)[DEGREES])
        assert self.listed is not None
        self.listed = int(self.counts[BEGIN]), self.listed[1]
        self.level, self.edges = int(self.counts[LEVEL]), int(self.counts[FRONTIER])
        self.found = self.listed[1] - self.listed[0]


def require_vertex(source: int, vertices: int) -> None:
    """Raise ArgumentError unless `source` is a vertex number below `vertices`."""
    if isinstance(source, bool) or not isinstance(source, int | np.integer):
        advice = "pass the number of a vertex; graph.vertex(name) returns it"
        raise ArgumentError(f"source {source!r} is not an integer: {advice}", name="source")
    if not 0 <= source < vertices:
        raise ArgumentError(
            f"source {source} is not a vertex of this graph: pass a number from 0 to {vertices - 1}", name="source"
        )
