"""Write a graph on disk from chunks of edges: ``build``."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell._check import checked_nbytes
from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.edge_list import VERTEX_LIMIT
from warpwell.graph.external import ExternalSort
from warpwell.graph.folder import new_folder
from warpwell.graph.graph import FORMAT, FORMAT_VERSION, IN_PART, META, OUT_PART, SMALL, WEIGHTS, Graph, Progress
from warpwell.graph.lines import Edges, WeightedEdges
from warpwell.graph.npy import NpyWriter, storage_full

_LEAST_MEMORY = 1 << 16
_Chunk = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any] | None]


def build(
    edges: Iterable[Edges | WeightedEdges],
    out: str | Path,
    *,
    vertices: int | None = None,
    undirected: bool = False,
    symmetric: bool = False,
    self_loops: bool = True,
    source: str = "",
    weights: str | bool | None = None,
    in_edges: bool = False,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write a graph in compressed sparse rows from edges in any order.

    The edges may exceed the memory: they are sorted externally. `out` is created atomically. The format is described
    in docs/graph-format.md.

    Parameters
    ----------
    edges : iterable of (sources, destinations) or (sources, destinations, weights)
        Chunks of edges: two int64 arrays of one length, vertices in 0 to 2**48 - 1, and an array of as many weights,
        integers or finite floats.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    vertices : int, optional
        Number of vertices; default: the largest vertex of an edge plus one.
    undirected : bool, default False
        Add the reverse of each edge, with the same weight, then keep each edge once, with the least of its weights.
        Otherwise all edges are kept, including repeated ones, which are in the order of their weights.
    symmetric : bool, default False
        The edges already contain both directions; this is only recorded.
    self_loops : bool, default True
        Keep edges from a vertex to itself.
    source : str
        Origin of the edges, recorded in the graph.
    weights : {"int32", "float32"} or False, optional
        The dtype of the weights, or False to drop them. Default: none if the chunks have none; int32 if all weights are
        integers that fit; else float32, to which they are rounded.
    in_edges : bool, default False
        Also store for each vertex the sources of the edges that end in it, as a second part of about the same size. A
        graph whose edges are stored in both directions has them already.
    memory_bytes : int or str, optional
        Memory for sorting, at least "64KiB"; default: half of the free memory. Offsets need 8 more bytes a
        vertex.
    progress : callable, optional
        Called from time to time as ``progress(stage, done, total)``: ``"read"`` with edges and a total of 0, as
        it is not known, then ``"write"`` with edges.
    overwrite : bool, default False
        Replace an existing graph.

    Returns
    -------
    Graph
        The new graph, opened.

    Raises
    ------
    ArgumentError
        `out` already exists, or an argument is out of range.
    FormatError
        No edge and no `vertices`, a vertex that does not fit `vertices`, more vertices than memory can
        count, or a weight that is not finite or does not fit `weights`.
    StorageFullError
        No space is left; no file remains.
    """
    memory = _memory(memory_bytes)
    if vertices is not None and not 0 <= vertices <= VERTEX_LIMIT:
        raise ArgumentError(f"vertices is {vertices}. Give a number from 1 to {VERTEX_LIMIT} (2**48).")
    kind = None if weights is None or weights is False else checked_weights(weights)
    report = progress or (lambda stage, done, total: None)
    chunks = _chunks(edges, kind, source, drop=weights is False, self_loops=self_loops)
    both = undirected or symmetric
    graph = Graph(Path(out), vertices or 0, 0, both, source, kind, in_edges or both)
    with new_folder(out, overwrite=overwrite) as folder:
        _write(folder, graph, chunks, memory, vertices, undirected, report)
    return Graph.open(out)


def _write(
    folder: Path,
    graph: Graph,
    chunks: Iterable[_Chunk],
    memory: int,
    vertices: int | None,
    undirected: bool,
    report: Progress,
) -> None:
    """Write all files of a graph; `graph` says what is wanted."""
    transpose = graph.in_edges and not graph.undirected
    memory = memory // 2 if transpose else memory
    with contextlib.ExitStack() as stack:
        sort = stack.enter_context(_sorting(chunks, folder, memory, graph.weights, undirected, report))
        if graph.weights is not None and sort.weights is None:
            name = graph.source or "the input"
            raise ArgumentError(f"{name} has no weights: leave weights={graph.weights!r} out.", name="weights")
        count = _vertices(sort, vertices, graph.source)
        weights = None if sort.weights is None else str(sort.weights)
        small = "int32" if count <= SMALL else "int64"
        graph = replace(graph, vertices=count, weights=weights, destinations=small)
        back = stack.enter_context(ExternalSort(folder, memory, weights=sort.weights)) if transpose else None
        graph = _write_rows(sort, folder, graph, report, back)
        sort.close()
        if back is not None:
            _write_rows(back, folder, graph, report, None, into=IN_PART)
        _write_meta(folder, graph)


def _chunks(
    edges: Iterable[Edges | WeightedEdges], kind: str | None, source: str, *, drop: bool, self_loops: bool
) -> Iterator[_Chunk]:
    """Yield chunks of edges with their weights, of one dtype in a chunk, or None."""
    for sources, destinations, *rest in edges:
        weights = weights_of(rest[0], kind, source) if rest and not drop else None
        if not self_loops:
            keep = sources != destinations
            sources, destinations = sources[keep], destinations[keep]
            weights = None if weights is None else weights[keep]
        yield sources, destinations, weights


def _sorting(
    chunks: Iterable[_Chunk],
    folder: Path,
    memory: int,
    kind: str | None,
    undirected: bool,
    report: Progress,
) -> ExternalSort:
    """Return a sort of all edges; of each edge and its reverse if `undirected`."""
    sort: ExternalSort | None = None
    try:
        for sources, destinations, weights in chunks:
            if sort is None:
                kind = None if weights is None else str(weights.dtype)
                sort = ExternalSort(folder, memory, unique=undirected, weights=kind)
            if (weights is None) != (sort.weights is None):
                raise ArgumentError("some chunks of edges have weights, others none. Give all or none.", name="edges")
            if weights is not None and weights.dtype != sort.weights:
                if weights.dtype.kind == "f":
                    sort.use_floats()
                weights = weights.astype(np.float32)
            sort.add(sources, destinations, weights)
            if undirected:
                sort.add(destinations, sources, weights)
            report("read", sort.added, 0)
    except BaseException:
        if sort is not None:
            sort.close()
        raise
    return sort or ExternalSort(folder, memory, unique=undirected, weights=kind)


def checked_weights(weights: object) -> str:
    """Return the name of a dtype that weights may have, or raise ArgumentError."""
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ArgumentError(f"weights is {weights!r}. Known are {' and '.join(map(repr, WEIGHTS))}.", name="weights")
    return weights


def weights_of(given: npt.ArrayLike, wanted: str | None, source: str) -> npt.NDArray[Any]:
    """Return weights as int32 or float32, as `wanted` says; without it integers that fit become int32.

    Raises
    ------
    FormatError
        A weight is not finite, or does not fit.
    """
    values: npt.NDArray[Any] = np.asarray(given)
    if values.dtype.kind not in "biuf":
        raise ArgumentError(f"weights are integers or floats, not {values.dtype}. Convert them first.", name="weights")
    whole = values.dtype.kind in "biu"
    dtype = np.dtype(wanted or ("int32" if whole and _fits(values) else "float32"))
    if values.dtype == dtype and dtype.kind == "i":
        return values
    if dtype.kind == "i":
        bad = values != np.clip(np.trunc(values), -(2**31), 2**31 - 1)
        advice = 'An int32 is a whole number of at most 2**31 - 1: use weights="float32".'
    else:
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(values.astype(np.float32, copy=False))
        advice = "Remove such edges, or scale the weights."
    if bad.any():
        raise FormatError(f"{source or 'the input'}: the weight {values[bad][0]} is no {dtype}. {advice}")
    return values.astype(dtype, copy=False)


def _fits(values: npt.NDArray[Any]) -> bool:
    return not values.size or (int(values.min()) >= -(2**31) and int(values.max()) < 2**31)


def _write_meta(folder: Path, graph: Graph) -> None:
    """Write the description of a graph, `graph.json`."""
    meta = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "vertices": graph.vertices,
        "edges": graph.edges,
        "undirected": graph.undirected,
        "source": graph.source,
        "destinations": graph.destinations,
        "weights": graph.weights,
        "in_edges": graph.in_edges,
    }
    with storage_full(folder), open(folder / META, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def default_memory_bytes() -> int:
    """Return half of the memory that is free now, in bytes, at least 256 MiB.

    The limit of a container (cgroup version 2) counts too.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        # Unlike free pages, this counts what the file system's cache would give back.
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return max(free // 2, 1 << 28)


def _memory(memory_bytes: int | str | None) -> int:
    if memory_bytes is None:
        return default_memory_bytes()
    return checked_nbytes(memory_bytes, "memory_bytes", minimum=_LEAST_MEMORY)


def _vertices(sort: ExternalSort, vertices: int | None, source: str) -> int:
    if vertices is None:
        if sort.largest < 0:
            raise FormatError(
                f"{source or 'the input'} holds no edge. Check that the file is complete; for a graph without "
                "edges give vertices=N."
            )
        return sort.largest + 1
    if sort.largest >= vertices:
        raise FormatError(f"vertex {sort.largest} does not fit {vertices} vertices. Raise vertices or leave it out.")
    return vertices


def _write_rows(
    sort: ExternalSort,
    folder: Path,
    graph: Graph,
    report: Progress,
    back: ExternalSort | None,
    into: tuple[str, str, str] = OUT_PART,
) -> Graph:
    """Write offsets, edges and weights, add the reversed edges to `back`, and return the graph with its edges."""
    offsets = _counters(graph.vertices)
    done = 0 if into == OUT_PART else graph.edges
    total = sort.added * (2 if graph.in_edges and not graph.undirected else 1)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(NpyWriter(folder / into[1], graph.destinations))
        values = None
        if sort.weights is not None:
            values = stack.enter_context(NpyWriter(folder / into[2], sort.weights))
        for sources, destinations, *weights in sort.blocks():
            file.append(destinations)
            if values is not None:
                values.append(weights[0])
            if back is not None:
                back.add(destinations, sources, *weights)
            starts = np.flatnonzero(sources[1:] != sources[:-1]) + 1
            starts = np.concatenate(([0], starts))
            # Each source stands once in `starts`; a row that goes on in the next block is counted on there.
            offsets[sources[starts] + 1] += np.diff(starts, append=sources.size)
            report("write", done + file.length, total)
        edges = file.length
    np.cumsum(offsets, out=offsets)
    with NpyWriter(folder / into[0]) as file:
        file.append(offsets)
    return replace(graph, edges=edges)


def _counters(vertices: int) -> npt.NDArray[np.int64]:
    """Return a zero for each vertex and one more."""
    size = 8 * (vertices + 1)
    try:
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError
        return np.zeros(vertices + 1, np.int64)
    except (MemoryError, ValueError):
        raise FormatError(
            f"the offsets of {vertices} vertices take {size / 2**30:,.0f} GiB, more memory than there is. "
            "If most of the numbers are unused, renumber the vertices from 0."
        ) from None
