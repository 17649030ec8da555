"""Write a graph on disk from chunks of edges: `build`."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import checked_integer, checked_nbytes
from .._npy import npy_writer
from ..errors import ArgumentError, FormatError
from ..replacing import durable_file, new_folder, require_replaceable, storage_full
from .external import VERTEX_LIMIT, Edges, ExternalSort, Vertices, Weights
from .graph import FORMAT, FORMAT_VERSION, IN_PART, META, ORDERS, OUT_PART, SMALL, WEIGHTS, Graph, Progress
from .names import Names, write_names
from .order import write_heads, write_order

_MIN_MEMORY = 1 << 16
_MIN_FREE = 1 << 28
"""Memory in bytes that always counts as free, because the system reclaims caches that it does not report as free."""
_FULL_DISK = (
    ". No partial file is left. Free some space or write to another disk. "
    "A graph larger than memory needs about three times its own size during conversion."
)
_Chunk = tuple[Vertices, Vertices, Weights | None]


def build(
    edges: Iterable[Edges],
    out: str | Path,
    *,
    vertices: int | None = None,
    undirected: bool = False,
    symmetric: bool = False,
    self_loops: bool = True,
    order: str = "given",
    source: str = "",
    weights: str | bool | None = None,
    in_edges: bool = False,
    names: Names | None = None,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write a graph in compressed sparse rows, from edges in any order. The edges may exceed the memory.

    Parameters
    ----------
    edges : iterable of (sources, destinations) or (sources, destinations, weights)
        Chunks of edges, each of arrays of equal length. Vertices are integers below 2**32; weights are integers or
        finite floats.
    out : path-like
        Folder of the graph, usually ``NAME.ww``; it is created atomically (docs/graph-format.md).
    vertices : int, optional
        Number of vertices. Default: the largest vertex number of all edges plus one.
    undirected : bool, default False
        Add the reverse of each edge, with the same weight, then keep each edge once, with the smallest of its weights.
        Otherwise all edges are kept; repeated edges are sorted by weight.
    symmetric : bool, default False
        State that the edges already contain both directions. The graph only records this, as it records `source`, the
        origin of the edges.
    self_loops : bool, default True
        Keep edges from a vertex to itself.
    order : {"given", "degree"}, default "given"
        Order in which vertices are stored. "degree" stores vertices with the most neighbors first, so that traversals
        read less from storage, but the edges are sorted twice. Algorithms return results by the vertex numbers of the
        input in either case.
    weights : {"int32", "float32"} or False, optional
        The dtype of the weights, or False to drop them. By default, they are stored as int32 if all are integers that
        fit, otherwise rounded to float32.
    in_edges : bool, default False
        Also store for each vertex the sources of the edges that end in it, as a second part of about the same size. A
        graph whose edges are stored in both directions has them already.
    names : collection of str or of int, optional
        Names of the vertices by number, for `Graph.names`. It is read after the last edge, so it may grow until then.
    memory_bytes : int or str, optional
        Memory for sorting, at least "64KiB". Default: half of the free memory. In addition, each vertex needs 8 bytes,
        or 24 if `order` is "degree".
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"read"`` with edges and an unknown total (0), then ``"write"``
        with edges, each as often as it is counted, sorted again or written.
    overwrite : bool, default False
        Replace an existing graph.

    Raises
    ------
    ArgumentError
        `out` already exists, an argument is out of range, or a chunk does not consist of arrays of integers.
    FormatError
        There is no edge and `vertices` is not given, a vertex or a weight does not fit, or there are too many vertices
        for the memory.
    StorageFullError
        No space is left; no file remains.
    """
    memory, report = _memory(memory_bytes), progress or (lambda stage, done, total: None)
    if vertices is not None:
        vertices = checked_integer(vertices, "vertices", minimum=0, maximum=VERTEX_LIMIT)
    if order not in ORDERS:
        raise ArgumentError(f"order is {order!r}. Known are {' and '.join(map(repr, ORDERS))}.", name="order")
    both = undirected or symmetric
    graph = Graph(Path(out), vertices or 0, 0, both, source, checked_weights(weights), in_edges or both, order=order)
    drop_weights = weights is False
    chunks = (_convert_chunk(c, graph, vertices, drop_weights=drop_weights, self_loops=self_loops) for c in edges)
    with _new_graph_folder(out, overwrite) as folder, ExternalSort(folder, memory, unique=undirected) as sort:
        _sort_edges(chunks, sort, report, add_reverse=undirected)
        _write(folder, _describe(graph, sort, vertices), sort, names, memory, report)
    return Graph.open(out)


@contextlib.contextmanager
def _new_graph_folder(out: str | Path, overwrite: bool) -> Iterator[Path]:
    path = Path(os.path.abspath(out))
    require_free = partial(require_replaceable, path, overwrite, lambda path: (path / META).is_file(), "a graph")
    with storage_full(path, _FULL_DISK), new_folder(path, require_free) as folder:
        yield folder


def _sort_edges(chunks: Iterable[_Chunk], sort: ExternalSort, report: Progress, *, add_reverse: bool) -> None:
    for columns in chunks:
        sort.add(*columns)
        if add_reverse:
            sort.add(columns[1], columns[0], *columns[2:])
        report("read", sort.added, 0)


def _write(folder: Path, graph: Graph, sort: ExternalSort, names: Names | None, memory: int, report: Progress) -> None:
    """Write all files of a graph whose edges are in a sort."""
    by_degree, transpose = graph.order == "degree", graph.in_edges and not graph.undirected
    total, done = sort.added * (1 + 2 * by_degree + 2 * transpose), 0

    def blocks(sort: ExternalSort) -> Iterator[Edges]:
        nonlocal done
        for block in sort.blocks():
            done += block[0].size
            report("write", done, total)
            yield block

    with contextlib.ExitStack() as stack:

        def sorted_again(sort: ExternalSort, renumber: Callable[[Vertices, Vertices], Edges]) -> ExternalSort:
            again = stack.enter_context(ExternalSort(folder, memory))
            for sources, destinations, *weights in blocks(sort):
                again.add(*renumber(sources, destinations), *weights)
            sort.close()
            return again

        if by_degree:
            degrees = np.zeros(graph.vertices, np.int64)
            for sources, *_ in blocks(sort):
                _count(degrees, sources)
            positions = write_order(folder, degrees)
            sort = sorted_again(sort, lambda sources, destinations: (positions[sources], positions[destinations]))
        graph = _write_part(folder, graph, OUT_PART, blocks(sort))
        if transpose:
            sort = sorted_again(sort, lambda sources, destinations: (destinations, sources))
            _write_part(folder, graph, IN_PART, blocks(sort))
    if graph.in_edges:
        write_heads(folder, graph, IN_PART if transpose else OUT_PART)
    if names is not None:
        write_names(folder, names, graph.vertices)
    description = {key: value for key, value in asdict(graph).items() if key != "path"}
    text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **description}, indent=2)
    with durable_file(folder / META) as file:
        file.write(f"{text}\n".encode())


def _write_part(folder: Path, graph: Graph, part: tuple[str, str, str], blocks: Iterator[Edges]) -> Graph:
    """Write offsets, edges and weights in order, and return the graph with the number of edges."""
    offsets = np.zeros(graph.vertices + 1, np.int64)
    with contextlib.ExitStack() as stack:
        files = zip(part[1:], (graph.destinations, graph.weights), strict=True)
        writers = [stack.enter_context(npy_writer(folder / name, dtype)) for name, dtype in files if dtype]
        for sources, *columns in blocks:
            for write, column in zip(writers, columns, strict=True):
                write(column)
            _count(offsets[1:], sources)
    np.cumsum(offsets, out=offsets)
    with npy_writer(folder / part[0], np.int64) as write:
        write(offsets)
    return replace(graph, edges=int(offsets[-1]))


def _count(counts: Vertices, sources: Vertices) -> None:
    """Add the number of edges of each source in a block of edges in order."""
    starts = np.concatenate(([0], np.flatnonzero(sources[1:] != sources[:-1]) + 1))
    # Each source is in `starts` once; the rest of its edges is counted with the next block.
    counts[sources[starts]] += np.diff(starts, append=sources.size)


def _convert_chunk(chunk: Edges, graph: Graph, vertices: int | None, *, drop_weights: bool, self_loops: bool) -> _Chunk:
    """Return the columns of a chunk: vertices as int64, and weights as int32 or float32, or None."""
    columns = len(chunk) if hasattr(chunk, "__len__") else 0
    if columns not in (2, 3):
        problem = f"a chunk of edges has {columns} columns; pass (sources, destinations) or (..., weights)"
        raise ArgumentError(problem, name="edges")
    limit, (*ends, given) = VERTEX_LIMIT if vertices is None else vertices, (*chunk, None)[:3]
    sources, destinations = (_vertices_of(side, limit, graph.source) for side in ends)
    weights = None if given is None or drop_weights else convert_weights(given, graph.weights, graph.source)
    if sources.size != destinations.size or (weights is not None and weights.shape != sources.shape):
        sizes = [sources.size, destinations.size, *([] if weights is None else [weights.size])]
        raise ArgumentError(
            f"the columns of a chunk of edges have {sizes} items: pass columns of equal length", name="edges"
        )
    if not self_loops:
        is_kept = sources != destinations
        sources, destinations = sources[is_kept], destinations[is_kept]
        weights = None if weights is None else weights[is_kept]
    return sources, destinations, weights


def _vertices_of(values: npt.ArrayLike, limit: int, source: str) -> Vertices:
    """Return vertices as int64, or raise unless they are integers from 0 to ``limit - 1``."""
    vertices = np.asarray(values)
    if vertices.ndim != 1 or (vertices.dtype.kind not in "iu" and vertices.size):
        problem = f"not {vertices.dtype} of shape {vertices.shape}; convert them first"
        raise ArgumentError(f"vertices are one-dimensional arrays of integers, {problem}", name="edges")
    if vertices.size and not 0 <= int(vertices.min()) <= int(vertices.max()) < limit:
        bad = int(vertices.min()) if vertices.min() < 0 else int(vertices.max())
        advice = "Pass more vertices or leave it out." if 0 <= bad < VERTEX_LIMIT else "Renumber the vertices from 0."
        raise FormatError(f"{source or 'the input'}: vertex {bad} does not fit {limit} vertices. {advice}")
    return vertices.astype(np.int64, copy=False)


def _describe(graph: Graph, sort: ExternalSort, vertices: int | None) -> Graph:
    """Return the graph with the properties of the edges in `sort`, or raise if they contradict the arguments."""
    name = graph.source or "the input"
    weights = sort.weights if sort.added else graph.weights
    if graph.weights is not None and weights is None:
        raise ArgumentError(f"{name} has no weights: leave weights={graph.weights!r} out.", name="weights")
    if vertices is None and sort.largest < 0:
        raise FormatError(f"{name} holds no edge; for a graph without edges, pass vertices=N (--vertices N)")
    count = sort.largest + 1 if vertices is None else vertices
    size = (24 if graph.order == "degree" else 8) * (count + 1)
    if size > max(_free_memory(), _MIN_FREE):
        problem = f"the offsets of {count} vertices take {size >> 30} GiB, more memory than is free"
        raise FormatError(f"{problem}; if most numbers are unused, convert with renumber=True (--renumber)")
    return replace(graph, vertices=count, weights=weights, destinations="int32" if count <= SMALL else "int64")


def checked_weights(weights: str | bool | None) -> str | None:
    """Return the dtype in which to store weights, or None to drop them; raise ArgumentError for another value."""
    if weights is None or weights is False:
        return None
    if weights not in WEIGHTS:
        raise ArgumentError(f"weights is {weights!r}. Known are {' and '.join(map(repr, WEIGHTS))}.", name="weights")
    return str(weights)


def convert_weights(weights: npt.ArrayLike, kind: str | None, source: str) -> npt.NDArray[Any]:
    """Return weights in the dtype `kind`; by default as int32 if all are integers that fit, else as float32.

    Raises
    ------
    FormatError
        A weight is not finite, or does not fit.
    """
    values: npt.NDArray[Any] = np.asarray(weights)
    if values.dtype.kind not in "biuf":
        raise ArgumentError(f"weights are integers or floats, not {values.dtype}. Convert them first.", name="weights")
    for dtype in [kind] if kind else ["int32", "float32"] if values.dtype.kind in "biu" else ["float32"]:
        with np.errstate(all="ignore"):
            converted = values.astype(dtype)
        is_bad = converted != values if dtype == "int32" else ~np.isfinite(converted)
        if not is_bad.any():
            return converted
    advice = "Remove such edges, or scale the weights."
    if dtype == "int32":
        advice = 'An int32 is a whole number of at most 2**31 - 1: use weights="float32".'
    raise FormatError(f"{source or 'the input'}: the weight {values[is_bad][0]} does not fit {dtype}. {advice}")


def _memory(memory_bytes: int | str | None) -> int:
    if memory_bytes is None:
        return default_memory_bytes()
    return checked_nbytes(memory_bytes, "memory_bytes", minimum=_MIN_MEMORY, maximum=_memory_of("MemTotal"))


def _memory_of(name: str) -> int:
    """Return a size in bytes that the system reports: MemTotal, or MemAvailable, which includes reclaimable pages."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def default_memory_bytes() -> int:
    """Return half of the free memory in bytes, at least 256 MiB."""
    return max(_free_memory() // 2, _MIN_FREE)


def _free_memory() -> int:
    """Return the free memory in bytes. The limit of a container (cgroup version 2) counts too."""
    free = _memory_of("MemAvailable")
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free
