"""Write a graph on disk from chunks of edges: `build`."""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import checked_integer, checked_nbytes
from .._npy import npy_writer
from ..errors import ArgumentError, FormatError, MissingFileError
from ..replacing import replacing, storage_full, sync_names
from .external import VERTEX_LIMIT, Edges, ExternalSort, Vertices
from .graph import FORMAT, FORMAT_VERSION, IN_PART, META, ORDERS, OUT_PART, SMALL, WEIGHTS, Graph, Progress
from .names import write_names
from .order import sort_by_degree, stored_edges, write_heads

_MIN_MEMORY = 1 << 16
_FULL_DISK = (
    ". No partial file is left. Free some space or write to another disk. "
    "A graph larger than memory needs about three times its own size during conversion."
)
_Chunk = tuple[Vertices, Vertices, npt.NDArray[Any] | None]


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
    names: Collection[str] | Collection[int] | None = None,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write a graph in compressed sparse rows from edges in any order.

    The edges may exceed the memory: they are sorted externally. `out` is created atomically (docs/graph-format.md).

    Parameters
    ----------
    edges : iterable of (sources, destinations) or (sources, destinations, weights)
        Chunks of edges: two arrays of integers of equal length, vertices in 0 to 2**48 - 1, and an array of as many
        weights, integers or finite floats.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    vertices : int, optional
        Number of vertices; default: the largest vertex of an edge plus one.
    undirected : bool, default False
        Add the reverse of each edge, with the same weight, then keep each edge once, with the smallest of its weights.
        Otherwise all edges are kept, including repeated ones, which are in the order of their weights.
    symmetric : bool, default False
        The edges already contain both directions; this is only recorded.
    self_loops : bool, default True
        Keep edges from a vertex to itself.
    order : {"given", "degree"}, default "given"
        Order in which the vertices are stored. "degree" stores those with most neighbours first, so that traversals
        read less from storage, and sorts the edges twice; algorithms return results in the given numbers anyway.
    source : str
        Origin of the edges, recorded in the graph.
    weights : {"int32", "float32"} or False, optional
        The dtype of the weights, or False to drop them. By default, they are stored as int32 if all are integers that
        fit, else as float32, to which they are rounded.
    in_edges : bool, default False
        Also store for each vertex the sources of the edges that end in it, as a second part of about the same size. A
        graph whose edges are stored in both directions has them already.
    names : collection of str or of int, optional
        Names of the vertices by number, for `Graph.names`. It is read after the last edge, so it may grow until then.
    memory_bytes : int or str, optional
        Memory for sorting, at least "64KiB"; default: half of the free memory. Offsets need 8 more bytes a
        vertex, and the order of degree 16 more.
    progress : callable, optional
        Called as ``progress(stage, done, total)``: ``"read"`` with edges and a total of 0, which is not known, then
        ``"write"`` with edges, each as often as it is written.
    overwrite : bool, default False
        Replace an existing graph.

    Returns
    -------
    Graph
        The new graph, opened.

    Raises
    ------
    ArgumentError
        `out` already exists, an argument is out of range, or a chunk does not consist of arrays of integers.
    FormatError
        No edge and no `vertices`, a vertex that does not fit `vertices`, more vertices than memory can
        count, or a weight that is not finite or does not fit `weights`.
    StorageFullError
        No space is left; no file remains.
    """
    memory = _memory(memory_bytes)
    if vertices is not None:
        vertices = checked_integer(vertices, "vertices", minimum=0, maximum=VERTEX_LIMIT)
    if order not in ORDERS:
        raise ArgumentError(f"order is {order!r}. Known are {' and '.join(map(repr, ORDERS))}.", name="order")
    kind = None if weights is None or weights is False else checked_weights(weights)
    report = progress or (lambda stage, done, total: None)
    chunks = _chunks(edges, kind, source, drop=weights is False, self_loops=self_loops, vertices=vertices)
    both = undirected or symmetric
    graph = Graph(Path(out), vertices or 0, 0, both, source, kind, in_edges or both, order=order)
    with _new_folder(Path(os.path.abspath(out)), overwrite) as folder:
        with _sorting(chunks, folder, memory, kind, undirected, report) as sort:
            graph = _checked(graph, sort, vertices)
            _write(folder, graph, sort, memory, report)
            write_names(folder, names, graph.vertices)
    return Graph.open(out)


@contextlib.contextmanager
def _new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` at the end of the block, durably, and is removed if it raises."""

    def refuse() -> None:
        if not os.path.lexists(path):
            return
        if not overwrite:
            raise ArgumentError(
                f"{path} exists already. Choose another name, or replace it with overwrite=True (--overwrite)."
            )
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder or not ((path / META).is_file() or not any(path.iterdir())):
            raise ArgumentError(
                f"{path} exists and is not a graph, so it is not replaced. Choose another name or remove it yourself."
            )

    refuse()
    if not path.parent.is_dir():
        raise MissingFileError(
            f"{path.parent}: no such folder to write {path.name} into. Create it first.", path=path.parent
        )
    with replacing(path) as part:
        with storage_full(part, _FULL_DISK):
            part.mkdir()
            yield part
            sync_names(part)
        refuse()  # Another process may have been faster.
    sync_names(path.parent)


def _write(folder: Path, graph: Graph, sort: ExternalSort, memory: int, report: Progress) -> None:
    """Write all files of a graph whose edges are in a sort."""
    by_degree, transpose = graph.order == "degree", graph.in_edges and not graph.undirected
    total, written = sort.added * (1 + by_degree + transpose), 0

    def written_rows(rows: ExternalSort, part: tuple[str, str, str]) -> Graph:
        nonlocal written
        result = _write_rows(rows, folder, graph, part, lambda edges: report("write", written + edges, total))
        written += result.edges
        return result

    graph = written_rows(sort, OUT_PART)
    sort.close()
    if by_degree:
        with ExternalSort(folder, memory, weights=graph.weights) as sort:
            sort_by_degree(folder, graph, sort)
            for name in OUT_PART:
                (folder / name).unlink(missing_ok=True)
            written_rows(sort, OUT_PART)
    if transpose:
        with ExternalSort(folder, memory, weights=graph.weights) as sort:
            for sources, destinations, *weights in stored_edges(folder, graph):
                sort.add(destinations, sources, *weights)
            written_rows(sort, IN_PART)
    if graph.in_edges:
        write_heads(folder, graph, IN_PART if transpose else OUT_PART)
    with open(folder / META, "w", encoding="utf-8") as file:
        description = {key: value for key, value in asdict(graph).items() if key != "path"}
        json.dump({"format": FORMAT, "version": FORMAT_VERSION, **description}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _chunks(
    edges: Iterable[Edges], kind: str | None, source: str, *, drop: bool, self_loops: bool, vertices: int | None
) -> Iterator[_Chunk]:
    """Yield chunks of edges as int64 with their weights, of one dtype in a chunk, or None."""
    limit = VERTEX_LIMIT if vertices is None else vertices
    for sources, destinations, *weight_columns in edges:
        sources, destinations = (_vertices_of(side, limit, source) for side in (sources, destinations))
        weights = convert_weights(weight_columns[0], kind, source) if weight_columns and not drop else None
        if sources.size != destinations.size or (weights is not None and weights.shape != sources.shape):
            sizes = [sources.size, destinations.size, *([] if weights is None else [weights.size])]
            raise ArgumentError(f"a chunk of edges has columns of {sizes} items. Give equal numbers.", name="edges")
        if not self_loops:
            keep = sources != destinations
            sources, destinations = sources[keep], destinations[keep]
            weights = None if weights is None else weights[keep]
        yield sources, destinations, weights


def _vertices_of(values: npt.ArrayLike, limit: int, source: str) -> Vertices:
    """Return vertices as int64, or raise unless they are integers from 0 to ``limit - 1``."""
    vertices = np.asarray(values)
    if vertices.ndim != 1 or (vertices.dtype.kind not in "iu" and vertices.size):
        raise ArgumentError(
            f"vertices are one-dimensional arrays of integers, not {vertices.dtype} of shape {vertices.shape}. "
            "Convert them first.",
            name="edges",
        )
    if vertices.size and not 0 <= int(vertices.min()) <= int(vertices.max()) < limit:
        bad = int(vertices.min()) if vertices.min() < 0 else int(vertices.max())
        advice = "Raise vertices or leave it out." if 0 <= bad < VERTEX_LIMIT else "Renumber the vertices from 0."
        raise FormatError(f"{source or 'the input'}: vertex {bad} does not fit {limit} vertices. {advice}")
    return vertices.astype(np.int64, copy=False)


def _sorting(
    chunks: Iterable[_Chunk], folder: Path, memory: int, kind: str | None, undirected: bool, report: Progress
) -> ExternalSort:
    """Return a sort of all edges; of each edge and its reverse if `undirected`."""
    sort: ExternalSort | None = None
    try:
        for sources, destinations, weights in chunks:
            if sort is None:
                kind = None if weights is None else str(weights.dtype)
                sort = ExternalSort(folder, memory, unique=undirected, weights=kind)
            if (weights is None) != (sort.weights is None):
                raise ArgumentError(
                    "some chunks of edges have weights and some do not. Pass weights with every chunk or with none.",
                    name="edges",
                )
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


def _checked(graph: Graph, sort: ExternalSort, vertices: int | None) -> Graph:
    """Return the graph with the properties of the edges in `sort`, or raise if they contradict the arguments."""
    name = graph.source or "the input"
    if graph.weights is not None and sort.weights is None:
        raise ArgumentError(f"{name} has no weights: leave weights={graph.weights!r} out.", name="weights")
    if vertices is None and sort.largest < 0:
        raise FormatError(
            f"{name} holds no edge. Check that the file is complete; for a graph without edges give vertices=N."
        )
    count = sort.largest + 1 if vertices is None else vertices
    size = (24 if graph.order == "degree" else 8) * (count + 1)
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise FormatError(
            f"the offsets of {count} vertices take {size / 2**30:,.0f} GiB, more memory than there is. "
            "If most of the numbers are unused, convert the edges with renumber=True (--renumber)."
        )
    weights = None if sort.weights is None else str(sort.weights)
    return replace(graph, vertices=count, weights=weights, destinations="int32" if count <= SMALL else "int64")


def checked_weights(weights: object) -> str:
    """Return the name of a dtype that weights may have, or raise ArgumentError."""
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ArgumentError(f"weights is {weights!r}. Known are {' and '.join(map(repr, WEIGHTS))}.", name="weights")
    return weights


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
    low, high = -(2**31), 2**31 - 1
    is_integer = values.dtype.kind in "biu"
    fits = not values.size or (int(values.min()) >= low and int(values.max()) <= high) if is_integer else False
    dtype = np.dtype(kind or ("int32" if fits else "float32"))
    if dtype.kind == "i":
        bad = np.zeros(values.shape, bool) if fits else ~((values >= low) & (values <= high))
        if not is_integer:
            bad |= values != np.trunc(values)
        advice = 'An int32 is a whole number of at most 2**31 - 1: use weights="float32".'
    else:
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(values.astype(np.float32, copy=False))
        advice = "Remove such edges, or scale the weights."
    if bad.any():
        raise FormatError(f"{source or 'the input'}: the weight {values[bad][0]} does not fit {dtype}. {advice}")
    return values.astype(dtype, copy=False)


def _memory(memory_bytes: int | str | None) -> int:
    if memory_bytes is None:
        return default_memory_bytes()
    return checked_nbytes(memory_bytes, "memory_bytes", minimum=_MIN_MEMORY)


def default_memory_bytes() -> int:
    """Return half of the free memory in bytes, at least 256 MiB.

    The limit of a container (cgroup version 2) counts too.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        # Unlike free pages, this includes the reclaimable part of the page cache.
        meminfo = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return max(free // 2, 1 << 28)


def _write_rows(sort: ExternalSort, folder: Path, graph: Graph, part: tuple[str, str, str], report: Any) -> Graph:
    """Write offsets, edges and weights from a sort, and return the graph with the number of edges."""
    offsets = np.zeros(graph.vertices + 1, np.int64)
    edges = 0
    with contextlib.ExitStack() as stack:
        write_edges = stack.enter_context(npy_writer(folder / part[1], graph.destinations))
        if graph.weights is not None:
            write_weights = stack.enter_context(npy_writer(folder / part[2], graph.weights))
        for sources, destinations, *weights in sort.blocks():
            write_edges(destinations)
            if graph.weights is not None:
                write_weights(weights[0])
            starts = np.concatenate(([0], np.flatnonzero(sources[1:] != sources[:-1]) + 1))
            # Each source is in `starts` once; the rest of a row is counted with the next block.
            offsets[sources[starts] + 1] += np.diff(starts, append=sources.size)
            edges += sources.size
            report(edges)
    np.cumsum(offsets, out=offsets)
    with npy_writer(folder / part[0], np.int64) as write:
        write(offsets)
    return replace(graph, edges=edges)
