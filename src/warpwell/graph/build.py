"""Write a graph on disk from chunks of edges: ``build``."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.edge_list import VERTEX_LIMIT
from warpwell.graph.external import ExternalSort
from warpwell.graph.folder import new_folder
from warpwell.graph.graph import EDGES, FORMAT, FORMAT_VERSION, META, OFFSETS, Graph, Progress
from warpwell.graph.lines import Edges
from warpwell.graph.npy import NpyWriter, storage_full

_LEAST_MEMORY = 1 << 16


def build(
    edges: Iterable[Edges],
    out: str | Path,
    *,
    vertices: int | None = None,
    undirected: bool = False,
    symmetric: bool = False,
    self_loops: bool = True,
    source: str = "",
    memory_bytes: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write a graph in compressed sparse rows from edges in any order.

    The edges may exceed the memory: they are sorted externally. `out` is created atomically.

    Parameters
    ----------
    edges : iterable of (sources, destinations)
        Chunks of edges: two int64 arrays of one length, vertices in 0 to 2**48 - 1.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    vertices : int, optional
        Number of vertices; default: the largest vertex of an edge plus one.
    undirected : bool, default False
        Add the reverse of each edge, then keep each edge once. Otherwise all edges are kept, including repeated ones.
    symmetric : bool, default False
        The edges already contain both directions; this is only recorded.
    self_loops : bool, default True
        Keep edges from a vertex to itself.
    source : str
        Origin of the edges, recorded in the graph.
    memory_bytes : int, optional
        Memory for sorting, in bytes, at least 64 KiB; default: half of the free memory. Offsets need 8 more bytes a
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
        No edge and no `vertices`, a vertex that does not fit `vertices`, or more vertices than memory can
        count.
    StorageFullError
        No space is left; no file remains.
    """
    memory = _memory(memory_bytes)
    if vertices is not None and not 0 <= vertices <= VERTEX_LIMIT:
        raise ArgumentError(f"vertices is {vertices}. Give a number from 1 to {VERTEX_LIMIT} (2**48).")
    report = progress or (lambda stage, done, total: None)
    with (
        new_folder(out, overwrite=overwrite) as folder,
        ExternalSort(folder, memory, unique=undirected) as sort,
    ):
        for sources, destinations in edges:
            if not self_loops:
                keep = sources != destinations
                sources, destinations = sources[keep], destinations[keep]
            sort.add(sources, destinations)
            if undirected:
                sort.add(destinations, sources)
            report("read", sort.added, 0)
        count = _vertices(sort, vertices, source)
        written = _write_rows(sort, folder, count, report)
        _write_meta(folder, Graph(Path(out), count, written, undirected or symmetric, source))
    return Graph.open(out)


def _write_meta(folder: Path, graph: Graph) -> None:
    """Write the description of a graph, `graph.json`."""
    meta = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "vertices": graph.vertices,
        "edges": graph.edges,
        "undirected": graph.undirected,
        "source": graph.source,
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


def _memory(memory_bytes: int | None) -> int:
    if memory_bytes is None:
        return default_memory_bytes()
    if memory_bytes < _LEAST_MEMORY:
        raise ArgumentError(f"memory_bytes is {memory_bytes}. Give at least {_LEAST_MEMORY} (64 KiB).")
    return memory_bytes


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


def _write_rows(sort: ExternalSort, folder: Path, vertices: int, report: Progress) -> int:
    """Write edges and offsets, and return the number of edges."""
    offsets = _counters(vertices)
    with NpyWriter(folder / EDGES) as file:
        for sources, destinations in sort.blocks():
            file.append(destinations)
            starts = np.flatnonzero(sources[1:] != sources[:-1]) + 1
            starts = np.concatenate(([0], starts))
            # Each source stands once in `starts`; a row that goes on in the next block is counted on there.
            offsets[sources[starts] + 1] += np.diff(starts, append=sources.size)
            report("write", file.length, sort.added)
        edges = file.length
    np.cumsum(offsets, out=offsets)
    with NpyWriter(folder / OFFSETS) as file:
        file.append(offsets)
    return edges


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
