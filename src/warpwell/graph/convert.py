"""Convert files of edges to graphs on disk: ``convert``, and the choice of a reader for a file."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from warpwell.errors import FormatError
from warpwell.graph.build import build
from warpwell.graph.compressed import ByteReader, plain_name
from warpwell.graph.edge_list import EdgeList
from warpwell.graph.graph import Graph, Progress
from warpwell.graph.lines import Edges
from warpwell.graph.matrix_market import MatrixMarket
from warpwell.graph.sparse_npz import SparseNpz


class EdgeSource(Protocol):
    """A file of edges that can be read once, in bounded memory.

    Attributes
    ----------
    path : Path
        The file.
    size : int
        Bytes of the file on disk.
    vertices : int or None
        Number of vertices, if the file or the user states it; None to use the largest vertex.
    symmetric : bool
        Whether the file declares edges undirected; both directions are then yielded.
    weighted : bool
        The file has a weight or value beside each edge, which readers skip.
    """

    path: Path
    size: int
    vertices: int | None
    symmetric: bool
    weighted: bool

    def __iter__(self) -> Iterator[Edges]:
        """Yield chunks of edges: two int64 arrays of one length, sources and destinations, in file order."""

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""

    def close(self) -> None:
        """Close the file."""


def convert(
    source: str | Path,
    out: str | Path,
    *,
    undirected: bool = False,
    vertices: int | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Convert a file of edges to a graph on disk.

    Reads SNAP edge lists, GAP ``.el`` and ``.wel``, MatrixMarket ``.mtx``, each also compressed with gzip,
    xz, bzip2 or zstd, and sparse matrices that SciPy saved as ``.npz``. A graph keeps no weights or values: a
    warning says so where a ``.wel`` or ``.mtx`` file has them; those of ``.npz`` are skipped. The
    graph may exceed the memory, and `out` is created atomically. A graph that does not fit into
    `memory_bytes` needs about twice its own size on the disk of `out` meanwhile.

    Parameters
    ----------
    source : path-like
        The file of edges.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    undirected : bool, default False
        Add the reverse of each edge, then keep each edge once; self-loops stay. Otherwise the edges are
        those of the file, repeated ones included.
    vertices : int, optional
        Vertices of the graph, 1 to 2**48. Default: the size of a matrix, or the largest vertex of an edge list plus
        one.
    memory_bytes : int, optional
        Memory for sorting, in bytes, at least 64 KiB; default: half of the free memory. Offsets need 8 more bytes a
        vertex.
    progress : callable, optional
        Called from time to time as ``progress(stage, done, total)``: ``"read"`` with bytes of `source`, then
        ``"write"`` with edges. At the end of "write", done is less than total where equal edges were
        merged.
    overwrite : bool, default False
        Replace a graph that is at `out`.

    Returns
    -------
    Graph
        The new graph, opened.

    Raises
    ------
    MissingFileError
        No such file, or no folder to write into.
    ArgumentError
        `out` already exists, or an argument is out of range.
    EdgeListError
        A malformed line, or a vertex that is negative, not an integer or too large; names file and line.
    FormatError
        The file has an unknown format, is damaged, or holds no graph.
    StorageFullError
        No space is left; no file remains.

    Examples
    --------
    >>> graph = convert("cnr-2000.txt.gz", "cnr.ww")  # doctest: +SKIP
    >>> graph.vertices, graph.edges  # doctest: +SKIP
    (325557, 3216152)
    """
    with contextlib.closing(open_source(source, vertices)) as reader:
        if reader.weighted:
            text = f"{reader.path.name} has a weight beside each edge; the graph keeps the edges and drops the weights"
            warnings.warn(text, UserWarning, stacklevel=2)
        return build(
            _reported(reader, progress),
            out,
            vertices=reader.vertices,
            undirected=undirected,
            symmetric=reader.symmetric,
            source=reader.path.name,
            memory_bytes=memory_bytes,
            progress=_writing(progress),
            overwrite=overwrite,
        )


def _writing(progress: Progress | None) -> Progress:
    """Return a callback that reports only the stage "write"; `_reported` reports reading, in bytes."""

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None and stage == "write":
            progress(stage, done, total)

    return report


def _reported(reader: EdgeSource, progress: Progress | None) -> Iterator[Edges]:
    """Yield the edges of a file, and report how much of it has been read."""
    for edges in reader:
        yield edges
        if progress is not None:
            progress("read", reader.position(), reader.size)


def open_source(path: str | Path, vertices: int | None = None) -> EdgeSource:
    """Return the reader for a file of edges.

    Parameters
    ----------
    path : path-like
        A SNAP edge list or GAP ``.el`` (`EdgeList`), GAP ``.wel`` (weights are skipped), MatrixMarket
        ``.mtx`` (`MatrixMarket`), each also compressed with gzip, xz, bzip2 or zstd; or a sparse matrix
        that SciPy saved as ``.npz`` (`SparseNpz`).
    vertices : int, optional
        Vertices of the graph, where the file does not say so or has isolated vertices at its end.

    Returns
    -------
    EdgeSource
        The reader; only the head of the file has been read.

    Raises
    ------
    MissingFileError
        No such file.
    FormatError
        Not a file of edges.
    """
    path = Path(path)
    if path.is_dir() and (path / "graph.json").exists():
        raise FormatError(
            f"{path} is already a graph. Open it with Graph.open, or give the edges it came from.",
            path=path,
        )
    name = plain_name(path)
    with ByteReader(path) as reader:
        head = reader.read(1 << 9)
    if name.endswith(".tar") or head[257:262] == b"ustar":
        raise FormatError(
            f"{path} is an archive. Unpack it (tar xf {path}) and give the file of edges inside.", path=path
        )
    if head.startswith(b"PK\x03\x04"):
        return SparseNpz(path, vertices)
    if name.endswith(".mtx") or head[:14].lower() == b"%%matrixmarket":
        return MatrixMarket(path, vertices)
    return EdgeList(path, vertices, weighted=name.endswith(".wel"))
