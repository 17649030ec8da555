"""What the converter reads: ``EdgeSource``, and the choice of a reader for a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from warpwell.errors import FormatError
from warpwell.graph.compressed import ByteReader, plain_name
from warpwell.graph.edge_list import EdgeList
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
        Vertices of the graph where the file or the user says so; None where only the largest vertex tells.
    symmetric : bool
        The file declares that each edge stands for both directions; both are given.
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
