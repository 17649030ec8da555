"""Breadth-first search over a graph on storage: ``bfs``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._trace import traced
from ...array import atomic_add
from ...cache import Statistics
from ...errors import ArgumentError
from ...targets import device, kernel, to_device, to_host, zeros
from ...targets.primitives import (
    activemask,
    any_sync,
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
    store_relaxed_as,
    thread_index,
    warp_size,
)
from ..graph import Graph, Progress
from ..loaded import LoadedGraph, borrowed
from .run import Run
from .work_items import (
    BEGIN,
    DEGREES,
    FOUND,
    FRONTIER,
    ITEMS,
    KEPT,
    LEVEL,
    N_COUNTERS,
    NO_PAGES,
    PIECE,
    PULLED,
    PUSHED,
    STOP,
    WARPS,
    WORD,
    add_all,
    append,
    contains,
    insert,
    insert_range,
    most_items,
    neighbour_at,
    page_at,
    page_of,
    page_start,
    start_array,
    start_of,
    up_to_warps,
    vertex_at,
    vertex_dtype,
    vertex_from,
    vertex_of,
    words_of,
)

TO_PULL = 15
"""Pull once the frontier has more than one in so many of the edges of vertices that are not found (alpha of GAP)."""
TO_PUSH = 18
"""Push again once the frontier has fewer than one in so many vertices (beta of GAP)."""
FEW_PAGES = 64
"""A level with fewer pages pushes from storage without asking which pages it needs."""
NEAR = 8
"""Neighbours that a thread looks at by itself when it pulls, before its warp helps: most vertices need fewer."""
LEAST_KEPT = 1 << 10
"""Edges that are kept at least where there is room; else as many as there are vertices."""
SMALL = 1 << 14
"""Edges of a frontier that one block visits: several levels in one launch."""


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
def _visit(edges, offsets, levels, visited, items, index, base, level, mask, counters):
    """Set the level of an item's neighbours and append theirs (a whole warp, all lanes of mask with one index)."""
    item = items[index]
    vertex = vertex_of(item)
    at = start_of(item, offsets[vertex])
    stop = min(at + PIECE, offsets[vertex + 1])
    lane = lane_id()
    while at < stop:
        neighbour = -1
        if at + lane < stop:
            neighbour = neighbour_at(edges, at + lane, levels.size, counters)
        found = False
        if neighbour >= 0 and insert(visited, neighbour):
            found = True
            levels[neighbour] = level
        # the lanes meet here, so their next edges are read as one
        some = ballot(mask, found)
        if some != 0:
            degrees = append(mask, found, neighbour, offsets, items, base, counters)
            if lane == warp_size() - 1:
                atomic_add(counters, DEGREES, degrees)
                atomic_add(counters, FOUND, popc(some))
        at += warp_size()


@kernel
def _push(edges, offsets, levels, visited, items, begin, end, base, level, counters):
    """Visit the neighbours of items [begin, end); a warp takes one item, its lanes neighbouring edges."""
    mask = activemask()
    index = begin + div(grid(1), warp_size())
    if index < end:
        _visit(edges, offsets, levels, visited, items, index, base, level, mask, counters)


@kernel(block=1024)
def _push_levels(edges, offsets, levels, visited, items, begin, end, base, level, most, counters):
    """Visit level after level while the frontier has at most `most` edges (one block; its warps take items)."""
    mask = activemask()
    degrees = load_relaxed_as(element_address(counters, DEGREES), counters.dtype)
    first = begin
    last = end
    now = level - 1
    count = 0
    going = True
    while going:
        now += 1
        index = first + div(thread_index(), warp_size())
        while index < last:
            _visit(edges, offsets, levels, visited, items, index, base, now, mask, counters)
            index += div(block_threads(), warp_size())
        if thread_index() == 0:
            counters[STOP] = failed()
        barrier()
        first = last
        last = base + load_relaxed_as(element_address(counters, ITEMS), counters.dtype)
        before = degrees
        degrees = load_relaxed_as(element_address(counters, DEGREES), counters.dtype)
        count = degrees - before
        going = first < last and count <= most and counters[STOP] == 0
        # nobody appends before all have read
        barrier()
    if thread_index() == 0:
        counters[BEGIN] = first
        counters[LEVEL] = now
        counters[FRONTIER] = count


@device
def _look(edges, visited, at, stop, mask, vertices, counters):
    """Tell whether one of the caller's edges [at, stop) leads into a set that nobody changes (all lanes of mask).

    Each lane looks at `NEAR` of its own edges; then the whole warp looks at those of one lane after the other.
    """
    lane = lane_id()
    near = NEAR
    hit = False
    one = -1
    low = 0
    high = 0
    while True:
        # one place for both that reads an edge: the compiled read is large
        alone = near > 0
        edge = -1
        if alone:
            near -= 1
            if at < stop and not hit:
                edge = at
                at += 1
            if ballot(mask, edge >= 0) == 0:
                near = 0
        else:
            if low >= high:
                left = ballot(mask, at < stop and not hit)
                if left == 0:
                    return hit
                one = ffs(left) - 1
                low = shfl(mask, at, one)
                high = shfl(mask, stop, one)
            if low + lane < high:
                edge = low + lane
            low += warp_size()
        met = False
        if edge >= 0:
            neighbour = neighbour_at(edges, edge, vertices, counters)
            met = neighbour >= 0 and contains(visited, neighbour)
        if alone:
            hit = hit or met
        else:
            if ballot(mask, met) != 0:
                low = high
                if lane == one:
                    hit = True
            if low >= high and lane == one:
                at = stop


@kernel
def _pull(edges, offsets, levels, visited, after, level, words, warps, counters):
    """Put vertices with a neighbour in `visited` into `after`; a warp takes every so manieth of `words` words.

    A vertex outside of `visited` with such a neighbour has one on the level before. Nobody changes `visited`.
    """
    mask = activemask()
    lane = lane_id()
    word = div(grid(1), warp_size())
    found = 0
    degrees = 0
    while word < words:
        seen = i64(visited[word])
        fresh = 0
        k = lane
        while k < WORD:
            vertex = WORD * word + k
            at = 0
            stop = 0
            if vertex < levels.size and (seen >> k) & 1 == 0:
                at = offsets[vertex]
                stop = offsets[vertex + 1]
            hit = _look(edges, visited, at, stop, mask, levels.size, counters)
            if hit:
                levels[vertex] = level
                found += 1
                degrees += stop - at
            fresh |= ballot(mask, hit) << (k - lane)
            k += warp_size()
        if lane == 0:
            after[word] = seen | fresh
        word += warps
    add_all(mask, counters, FOUND, found)
    add_all(mask, counters, DEGREES, degrees)


@device
def _visit_page(edges, offsets, levels, visited, after, at, stop, pull, level, mask, counters):
    """Follow the edges [at, stop) of a page in one direction; see `_push_pages` and `_pull_pages` (all lanes of mask).

    A warp has a page of its own, so that as many pages are on their way as warps run, and no two wait for one.
    """
    found = 0
    degrees = 0
    vertex = vertex_at(offsets, at, levels.size)
    at += lane_id()
    while any_sync(mask, at < stop):
        follows = False
        if at < stop:
            vertex = vertex_from(offsets, vertex, at, levels.size)
            if pull:
                follows = not contains(after, vertex)
            else:
                follows = load_relaxed_as(element_address(levels, vertex), levels.dtype) == level - 1
        fresh = -1
        # the lanes meet here, and read their edges as one: alone, each would wait for the page by itself
        if any_sync(mask, follows) and at < stop:
            neighbour = neighbour_at(edges, at, levels.size, counters)
            if follows and neighbour >= 0:
                if pull:
                    if contains(visited, neighbour) and insert(after, vertex):
                        fresh = vertex
                elif insert(visited, neighbour):
                    fresh = neighbour
        if fresh >= 0:
            store_relaxed_as(element_address(levels, fresh), level, levels.dtype)
            found += 1
            degrees += offsets[fresh + 1] - offsets[fresh]
        if warp_size() == 1 and (not follows or (pull and fresh >= 0)):
            at = offsets[vertex + 1] - 1  # nothing else is wanted of this vertex
        at += warp_size()
    add_all(mask, counters, FOUND, found)
    add_all(mask, counters, DEGREES, degrees)


@device
def _keep(edges, offsets, after, at, stop, kept, base, vertices, mask, counters):
    """Keep the edges [at, stop) of a page that leave vertices outside of a set (all lanes of mask).

    Number `base` of the counter comes first; what finds no room is only counted.
    """
    vertex = vertex_at(offsets, at, vertices)
    lane = lane_id()
    at += lane
    while any_sync(mask, at < stop):
        outside = False
        if at < stop:
            vertex = vertex_from(offsets, vertex, at, vertices)
            outside = not contains(after, vertex)
        some = ballot(mask, outside)
        if some != 0:
            first = 0
            if lane == 0:
                first = atomic_add(counters, KEPT, popc(some))
            place = 2 * (shfl(mask, first, 0) - base + popc(some & ((1 << lane) - 1)))
            if at < stop:
                neighbour = neighbour_at(edges, at, vertices, counters)
                if outside and place < kept.size:
                    kept[place] = vertex
                    kept[place + 1] = neighbour
        if warp_size() == 1 and not outside:
            at = offsets[vertex + 1] - 1
        at += warp_size()


@device
def _marked_page(edges, pages, sweep):
    """Return the first edge of the warp's page of a sweep, and that of the next one; no edges if it is not marked."""
    index = div(grid(1), warp_size())
    if index < sweep[0]:
        page = page_of(sweep, index)
        if contains(pages, page):
            return page_start(sweep, page, edges.size), page_start(sweep, page + 1, edges.size)
    return 0, 0


@kernel
def _push_pages(edges, offsets, levels, visited, pages, sweep, level, counters):
    """Put the neighbours of the level before `level` into `visited`; a warp takes a page, if it is marked."""
    mask = activemask()
    at, stop = _marked_page(edges, pages, sweep)
    if at < stop:
        _visit_page(edges, offsets, levels, visited, visited, at, stop, False, level, mask, counters)


@kernel
def _pull_pages(edges, offsets, levels, visited, after, pages, sweep, kept, base, level, counters):
    """Put vertices with a neighbour in `visited` into `after`, which holds `visited`; a warp takes a marked page.

    The edges of vertices that are not found are kept: later levels need no page.
    """
    mask = activemask()
    at, stop = _marked_page(edges, pages, sweep)
    if at < stop:
        _visit_page(edges, offsets, levels, visited, after, at, stop, True, level, mask, counters)
        _keep(edges, offsets, after, at, stop, kept, base, levels.size, mask, counters)


@kernel
def _pull_kept(offsets, levels, visited, after, kept, count, threads, level, counters):
    """As `_pull_pages`, from `count` edges that were kept; a thread takes every so manieth."""
    mask = activemask()
    index = grid(1)
    found = 0
    degrees = 0
    while index < count:
        vertex = i64(kept[2 * index])
        neighbour = i64(kept[2 * index + 1])
        if neighbour >= 0 and not contains(after, vertex) and contains(visited, neighbour) and insert(after, vertex):
            store_relaxed_as(element_address(levels, vertex), level, levels.dtype)
            found += 1
            degrees += offsets[vertex + 1] - offsets[vertex]
        index += threads
    add_all(mask, counters, FOUND, found)
    add_all(mask, counters, DEGREES, degrees)


@kernel
def _copy(bitmap, to):
    """Copy a set of vertices (thread a word)."""
    word = grid(1)
    if word < bitmap.size:
        to[word] = bitmap[word]


@kernel
def _clear(one, other):
    """Empty two sets of pages (thread a word)."""
    word = grid(1)
    if word < one.size:
        one[word] = 0
    if word < other.size:
        other[word] = 0


@kernel
def _collect(offsets, levels, level, items, count, base, counters):
    """Append the items of those of `count` vertices on a level, nearly in vertex order (thread a vertex)."""
    mask = activemask()
    v = grid(1)
    found = v < count and levels[v] == level
    if ballot(mask, found) != 0:
        append(mask, found, v, offsets, items, base, counters)


@kernel
def _mark(offsets, in_offsets, levels, level, count, pushed, pulled, out, into, threads, counters):
    """Mark the pages of the edges of a level, and of the in-edges of vertices without a level, and count them.

    `out` and `into` are their `LoadedGraph.pages_of`; a thread takes every so manieth of `count` vertices.
    """
    mask = activemask()
    v = grid(1)
    pushes = 0
    pulls = 0
    while v < count:
        now = i64(levels[v])
        if now == level and offsets[v + 1] > offsets[v]:
            pushes += insert_range(pushed, page_at(out, offsets[v]), page_at(out, offsets[v + 1] - 1))
        elif now < 0 and in_offsets[v + 1] > in_offsets[v]:
            pulls += insert_range(pulled, page_at(into, in_offsets[v]), page_at(into, in_offsets[v + 1] - 1))
        v += threads
    add_all(mask, counters, PUSHED, pushes)
    add_all(mask, counters, PULLED, pulls)


def bfs(
    graph: Graph | LoadedGraph | str | Path,
    source: int,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> BFSResult:
    """Search a graph breadth-first, reading its edges on demand.

    A level is one launch, which pushes or pulls ("Direction-Optimizing Breadth-First Search", Beamer, Asanovic,
    Patterson, 2012). Pushing, a warp takes a vertex of the frontier (or a piece of a large one) and its lanes read
    neighbouring edges, so their pages are fetched together. Pulling, which needs edges in both directions, vertices
    that are not found yet look for a neighbour that is. Small frontiers of edges in memory are visited by one block,
    level after level in one launch. Levels, offsets and frontier are in device memory: about 20 bytes a
    vertex, and 8 more for edges that are kept from storage.

    Parameters
    ----------
    graph : Graph, LoadedGraph or path-like
        The graph; edges are followed in their direction.
    source : int
        The vertex to start from.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"compile"`` (0 and 1 of 1), then ``"search"`` with the
        level that is being visited and a total of 0, as it is not known. In memory, levels of few edges that follow
        one another are visited in one launch, and only the first of them is reported.
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
        edges = loaded.edges
        offsets = loaded.graph.map(loaded.graph.offsets_path)
        stored = int(loaded.graph.places[source])
        state = _state_of(loaded, stored)
        report("compile", 0, 1)
        _compile(loaded, state)
        report("compile", 1, 1)

        before, started = edges.stats, time.perf_counter()
        with Run(loaded, *loaded.arrays) as run:
            _Search(run, state, int(offsets[stored + 1] - offsets[stored])).search(report)
        seconds = time.perf_counter() - started
        loaded.require_destinations(state.counters)
        found = to_host(state.levels).astype(np.int64)
        return BFSResult(
            source=int(source),
            levels=loaded.graph.original(found),
            reached=int(np.count_nonzero(found >= 0)),
            depth=int(found.max()),
            seconds=seconds,
            stats=edges.stats - before,
        )


@dataclass
class _State:
    """The vertex arrays of a search, in device memory."""

    levels: Any
    visited: Any
    after: Any
    items: Any
    counters: Any
    pushed: Any = None
    pulled: Any = None
    """Pages that the next level reads if it pushes, or pulls (edges on storage)."""
    kept: Any = None
    """Vertex and neighbour of edges that were kept (edges on storage)."""


def _state_of(loaded: LoadedGraph, source: int) -> _State:
    """Return the vertex arrays before a search."""
    where, graph = loaded.device, loaded.graph
    vertices, words = graph.vertices, words_of(graph.vertices)
    state = _State(
        levels=to_device(where, start_array(vertices, source, -1, 0, vertex_dtype(vertices))),
        visited=to_device(where, start_array(words, source // WORD, 0, 1 << source % WORD, np.uint32)),
        after=zeros(where, words, np.uint32),
        items=zeros(where, most_items(vertices, graph.edges)),
        counters=zeros(where, N_COUNTERS),
    )
    if not loaded.in_memory:
        read = loaded.in_edges if graph.in_edges else loaded.edges
        state.pushed, state.pulled = (
            zeros(where, words_of(loaded.pages_of(array)[0]), np.uint32) for array in (loaded.edges, read)
        )
        state.kept = zeros(where, 2 * max(vertices, LEAST_KEPT), vertex_dtype(vertices))
    return state


def _compile(loaded: LoadedGraph, s: _State) -> None:
    """Compile what a search of the graph launches, by launches that change nothing."""
    edges, offsets, where = loaded.edges, loaded.offsets, loaded.device
    _push[loaded.warp](edges, offsets, s.levels, s.visited, s.items, 0, 0, 0, 0, s.counters)
    _collect[loaded.warp](offsets, s.levels, 0, s.items, 0, 0, s.counters, device=where)
    if loaded.in_memory:
        _push_levels[1](edges, offsets, s.levels, s.visited, s.items, 0, 0, 0, 0, 0, s.counters)
        if loaded.graph.in_edges:
            _pull[loaded.warp](loaded.in_edges, loaded.in_offsets, s.levels, s.visited, s.after, 0, 0, 1, s.counters)
        return
    _push_pages[loaded.warp](edges, offsets, s.levels, s.visited, s.pushed, NO_PAGES, 0, s.counters)
    if loaded.graph.in_edges:
        _pull_pages[loaded.warp](
            loaded.in_edges,
            loaded.in_offsets,
            s.levels,
            s.visited,
            s.after,
            s.pulled,
            NO_PAGES,
            s.kept,
            0,
            0,
            s.counters,
        )
        _pull_kept[loaded.warp](offsets, s.levels, s.visited, s.after, s.kept, 0, 1, 0, s.counters, device=where)
        _copy[loaded.warp](s.visited, s.visited, device=where)
    _mark[loaded.warp](
        offsets, offsets, s.levels, 0, 0, s.pushed, s.pulled, NO_PAGES, NO_PAGES, 1, s.counters, device=where
    )
    _clear[loaded.warp](s.pushed, s.pulled, device=where)


class _Search:
    """The levels of a search. Counters only grow: the host compares two readings."""

    def __init__(self, run: Run, state: _State, degree: int) -> None:
        self.run, self.state = run, state
        self.loaded, self.graph = run.loaded, run.loaded.graph
        self.counts = np.zeros(N_COUNTERS, np.int64)
        self.level = 0
        self.listed: tuple[int, int] | None = None
        """Where the items of the frontier are listed, if they are; behind it is room for all that is not found."""
        self.found, self.edges = 1, degree
        """Vertices of the frontier and their edges."""
        self.left = self.graph.edges - degree
        """Edges of the vertices that are not found."""
        self.kept = -1
        """Edges that were kept; -1 if they are not all edges of the vertices that are not found."""

    def search(self, report: Progress) -> None:
        """Visit level after level, until one finds nothing."""
        pulling, before = False, 0
        while self.found > 0 and not self.run.failed:
            report("search", self.level + 1, 0)
            if self.graph.undirected and self.left == 0:
                return  # what is not found has no edges
            if not self.loaded.in_memory:
                self._from_storage()
                continue
            if pulling:
                pulling = self.found >= before or self.found * TO_PUSH > self.graph.vertices
            else:
                pulling = self.loaded.graph.in_edges and self.edges * TO_PULL > self.left
            before = self.found
            if pulling:
                self._pull()
            elif self.edges <= SMALL:
                self._push_small()
            else:
                self._push()

    def _read(self) -> NDArray[np.int64]:
        """Return what was counted since the last reading."""
        before, self.counts = self.counts, self.run.read(self.state.counters)
        return self.counts - before

    def _next(self, counts: NDArray[np.int64]) -> None:
        """Go to the level of which kernels counted the vertices and their edges."""
        self.level += 1
        self.found, self.edges = int(counts[FOUND]), int(counts[DEGREES])
        self.left -= self.edges

    def _list(self) -> tuple[int, int]:
        """List the items of the frontier."""
        s, vertices = self.state, self.graph.vertices
        self.run.launch(
            _collect,
            vertices,
            self.loaded.offsets,
            s.levels,
            self.level,
            s.items,
            vertices,
            -int(self.counts[ITEMS]),
            s.counters,
        )
        return 0, int(self._read()[ITEMS])

    @traced("breadth-first level")
    def _push(self) -> None:
        """Follow the edges of the frontier."""
        begin, end = self.listed or self._list()
        if begin == end:
            self.found = 0  # nothing leads on
            return
        s, loaded = self.state, self.loaded
        base = end - int(self.counts[ITEMS])
        self.run.launch(
            _push,
            (end - begin) * loaded.warp,
            loaded.edges,
            loaded.offsets,
            s.levels,
            s.visited,
            s.items,
            begin,
            end,
            base,
            self.level + 1,
            s.counters,
        )
        self._next(self._read())
        self.listed = end, base + int(self.counts[ITEMS])

    @traced("breadth-first level")
    def _push_small(self) -> None:
        """Follow the edges of the frontier, and of those after it while they are small."""
        begin, end = self.listed or self._list()
        s, loaded = self.state, self.loaded
        base = end - int(self.counts[ITEMS])
        self.run.launch(
            _push_levels,
            1,
            loaded.edges,
            loaded.offsets,
            s.levels,
            s.visited,
            s.items,
            begin,
            end,
            base,
            self.level + 1,
            SMALL,
            s.counters,
        )
        self.left -= int(self._read()[DEGREES])
        self.listed = int(self.counts[BEGIN]), base + int(self.counts[ITEMS])
        self.level, self.edges = int(self.counts[LEVEL]), int(self.counts[FRONTIER])
        self.found = self.listed[1] - self.listed[0]

    @traced("breadth-first level")
    def _pull(self) -> None:
        """Look from all vertices that are not found for one that is."""
        s, loaded, words = self.state, self.loaded, words_of(self.graph.vertices)
        warps = min(words, WARPS)
        self.run.launch(
            _pull,
            warps * loaded.warp,
            loaded.in_edges,
            loaded.in_offsets,
            s.levels,
            s.visited,
            s.after,
            self.level + 1,
            words,
            warps,
            s.counters,
        )
        s.visited, s.after = s.after, s.visited
        self._next(self._read())
        self.listed = None

    @traced("breadth-first level")
    def _from_storage(self) -> None:
        """Visit one level: from edges that were kept, or in the direction that reads fewer pages."""
        s, loaded, run, warp = self.state, self.loaded, self.run, self.loaded.warp
        if self.kept >= 0:
            threads = min(up_to_warps(max(1, self.kept), warp), WARPS * warp)
            run.launch(_copy, s.visited.size, s.visited, s.after, reads=False)
            run.launch(
                _pull_kept,
                threads,
                loaded.in_offsets,
                s.levels,
                s.visited,
                s.after,
                s.kept,
                self.kept,
                threads,
                self.level + 1,
                s.counters,
                reads=False,
            )
            s.visited, s.after = s.after, s.visited
            self._next(self._read())
            return
        if self.edges // loaded.page_items + 2 * self.found <= FEW_PAGES:
            self._push()
            return
        pull = loaded.graph.in_edges
        read, offsets = (loaded.in_edges, loaded.in_offsets) if pull else (loaded.edges, loaded.offsets)
        threads = min(up_to_warps(self.graph.vertices, warp), WARPS * warp)
        run.launch(_clear, max(s.pushed.size, s.pulled.size), s.pushed, s.pulled, reads=False)
        run.launch(
            _mark,
            threads,
            loaded.offsets,
            offsets,
            s.levels,
            self.level,
            self.graph.vertices,
            s.pushed,
            s.pulled,
            loaded.pages_of(loaded.edges),
            loaded.pages_of(read),
            threads,
            s.counters,
            reads=False,
        )
        pages = self._read()
        if pull and pages[PULLED] < pages[PUSHED]:
            self._pull_pages()
        else:
            sweep = loaded.sweep(loaded.edges)
            run.launch(
                _push_pages,
                sweep[0] * warp,
                loaded.edges,
                loaded.offsets,
                s.levels,
                s.visited,
                s.pushed,
                sweep,
                self.level + 1,
                s.counters,
            )
            self._next(self._read())
        self.listed = None

    def _pull_pages(self) -> None:
        """Look from the vertices that are not found, on their pages, and keep the edges of those that stay so."""
        s, loaded, run = self.state, self.loaded, self.run
        sweep = loaded.sweep(loaded.in_edges)
        run.launch(_copy, s.visited.size, s.visited, s.after, reads=False)
        run.launch(
            _pull_pages,
            sweep[0] * loaded.warp,
            loaded.in_edges,
            loaded.in_offsets,
            s.levels,
            s.visited,
            s.after,
            s.pulled,
            sweep,
            s.kept,
            int(self.counts[KEPT]),
            self.level + 1,
            s.counters,
        )
        s.visited, s.after = s.after, s.visited
        counts = self._read()
        self.kept = int(counts[KEPT]) if 2 * counts[KEPT] <= s.kept.size else -1
        self._next(counts)


def require_vertex(source: int, vertices: int) -> None:
    """Raise ArgumentError unless `source` is a vertex number below `vertices`."""
    if isinstance(source, bool) or not isinstance(source, int | np.integer):
        raise ArgumentError(f"source {source!r} is not an integer: give the number of a vertex", name="source")
    if not 0 <= source < vertices:
        raise ArgumentError(
            f"source {source} is not a vertex of this graph: give a number from 0 to {vertices - 1}", name="source"
        )
