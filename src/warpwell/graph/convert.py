"""Convert files of edges to graphs on disk: ``convert``, and the choice of a reader for a file."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.build import build, checked_weights
from warpwell.graph.compressed import ByteReader, plain_name
from warpwell.graph.edge_list import CsvEdgeList, EdgeList, names_columns
from warpwell.graph.graph import Graph, Progress
from warpwell.graph.lines import Edges, WeightedEdges
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
        Weights are yielded, too.
    note : str
        What the graph will lack, for a warning; empty if nothing.
    """

    path: Path
    size: int
    vertices: int | None
    symmetric: bool
    weighted: bool
    note: str

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
        """Yield chunks of edges in file order: two int64 arrays of one length, and weights if there are any."""

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
    order: str = "degree",
    weights: str | bool | None = None,
    in_edges: bool = False,
    columns: Sequence[str] | None = None,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Convert a file of edges to a graph on disk.

    Reads SNAP edge lists, GAP ``.el`` and ``.wel``, ``.csv`` and ``.tsv`` files with a header, MatrixMarket ``.mtx``,
    each also compressed with gzip, xz, bzip2 or zstd, and sparse matrices that SciPy saved as ``.npz``. The graph may
    exceed the memory, and `out` is created atomically. A graph that does not fit into `memory_bytes` needs about twice
    its own size on the disk of `out` meanwhile.

    Parameters
    ----------
    source : path-like
        The file of edges.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    undirected : bool, default False
        As for `build`: both directions of each edge, once. Otherwise the edges of the file, repeated ones included.
    vertices : int, optional
        Vertices of the graph, 1 to 2**48. Default: the size of a matrix, or the largest vertex of an edge list plus
        one.
    weights : {"int32", "float32"} or False, optional
        The dtype of the weights, or False to drop them. Default: those of the file, as int32 if all are integers that
        fit, else as float32. The values of an ``.npz`` file are weights by default unless all are 1.
    order, in_edges, memory_bytes
        As for `build`; the default of `order` is "degree".
    columns : sequence of str, optional
        Names of source, destination and weight in the header of a ``.csv`` or ``.tsv`` file; default: such as
        ``src``, ``from``, ``u``; ``dst``, ``to``, ``v``; ``weight``, ``w``, in upper or lower case.
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
    if weights is not None and weights is not False:
        weights = checked_weights(weights)
    with contextlib.closing(open_source(source, vertices, weights, columns)) as reader:
        if reader.note:
            warnings.warn(reader.note, UserWarning, stacklevel=2)
        return build(
            _reported(reader, progress),
            out,
            vertices=reader.vertices,
            undirected=undirected,
            symmetric=reader.symmetric,
            order=order,
            source=reader.path.name,
            weights=weights,
            in_edges=in_edges,
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


def _reported(reader: EdgeSource, progress: Progress | None) -> Iterator[Edges | WeightedEdges]:
    """Yield the edges of a file, and report how much of it has been read."""
    for edges in reader:
        yield edges
        if progress is not None:
            progress("read", reader.position(), reader.size)


def open_source(
    path: str | Path,
    vertices: int | None = None,
    weights: str | bool | None = None,
    columns: Sequence[str] | None = None,
) -> EdgeSource:
    """Return the reader for a file of edges.

    Parameters
    ----------
    path : path-like
        A SNAP edge list or GAP ``.el`` or ``.wel`` (`EdgeList`), a list with a header (`CsvEdgeList`), MatrixMarket
        ``.mtx`` (`MatrixMarket`), each also compressed with gzip, xz, bzip2 or zstd; or a sparse matrix
        that SciPy saved as ``.npz`` (`SparseNpz`).
    vertices : int, optional
        Vertices of the graph, where the file does not say so or has isolated vertices at its end.
    weights, columns
        As for `convert`.

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
    named = name.endswith((".csv", ".tsv")) or columns is not None
    if columns is not None and (head.startswith((b"PK\x03\x04", b"%%")) or name.endswith((".mtx", ".wel"))):
        raise ArgumentError(f"{path} has no header that names columns. Leave columns out.", name="columns")
    if head.startswith(b"PK\x03\x04"):
        return SparseNpz(path, vertices, weights=weights)
    if name.endswith(".mtx") or head[:14].lower() == b"%%matrixmarket":
        return MatrixMarket(path, vertices, weights=weights)
    if named or names_columns(head):
        return CsvEdgeList(path, vertices, columns=columns, weights=weights)
    return EdgeList(path, vertices, weighted=name.endswith(".wel"), weights=weights)
