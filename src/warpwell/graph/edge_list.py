"""Edge lists as text, of SNAP and of the GAP benchmark: ``EdgeList``."""

from collections.abc import Iterator
from pathlib import Path

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.compressed import ByteReader
from warpwell.graph.lines import Edges, LineRule, PairReader

#: No vertex has this number or a larger one.
VERTEX_LIMIT = 1 << 48


class EdgeList:
    """Reads an edge list: a line an edge, source and destination separated by spaces or tabs.

    Lines that start with ``#`` or ``%`` are comments; blank lines, CRLF line ends and compression (gzip,
    xz, bzip2, zstd) are supported. Vertices are numbered from 0. The node count that SNAP writes in a comment is
    not used: it counts the vertices that have edges, and their numbers may be larger.

    Parameters
    ----------
    path : path-like
        The file.
    vertices : int, optional
        Vertices of the graph, at most 2**48: a larger vertex is an error. Default: the largest vertex plus one.
    weighted : bool, default False
        Lines have a third field, a weight (GAP ``.wel``). It must be a number; it is skipped.

    Raises
    ------
    ArgumentError
        `vertices` is not in 1 to 2**48.
    MissingFileError
        No such file.
    EdgeListError
        While iterating: a malformed line, or a vertex that is negative, not an integer or too large, with file
        and line.
    """

    symmetric = False

    def __init__(self, path: str | Path, vertices: int | None = None, *, weighted: bool = False) -> None:
        if vertices is not None and not 1 <= vertices <= VERTEX_LIMIT:
            raise ArgumentError(f"vertices is {vertices}. Give a number from 1 to {VERTEX_LIMIT} (2**48).")
        self.path = Path(path)
        self.vertices = vertices
        self.weighted = weighted
        self._reader = ByteReader(self.path)
        self.size = self._reader.size

    def __iter__(self) -> Iterator[Edges]:
        """Yield chunks of edges: two int64 arrays of one length, sources and destinations, in file order."""
        limit = VERTEX_LIMIT if self.vertices is None else self.vertices
        advice = (
            "Renumber the vertices from 0."
            if self.vertices is None
            else f"The graph was said to have {limit} vertices: raise that number or leave it out."
        )
        shape = "'source destination weight'" if self.weighted else "'source destination'"
        rule = LineRule(
            3 if self.weighted else 2,
            range(limit),
            range(limit),
            shape,
            advice,
            surplus="" if self.weighted else "A list with weights is one whose name ends in .wel.",
        )
        with self._reader:
            yield from PairReader(self._reader, rule)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""
        return self._reader.position()


def matrix_vertices(path: Path, rows: int, columns: int, vertices: int | None) -> int:
    """Return how many vertices the graph of a matrix has, or raise FormatError."""
    side = max(rows, columns)
    if rows != columns and vertices is None:
        raise FormatError(
            f"{path} holds a matrix of {rows} x {columns}, and a graph needs a square one. "
            f"If its rows and columns are the same vertices, give their number: vertices={side}.",
            path=path,
        )
    if vertices is not None and not side <= vertices <= VERTEX_LIMIT:
        raise FormatError(
            f"{path} holds a matrix of {rows} x {columns}, which does not fit {vertices} vertices. "
            f"Give a number from {side} to 2**48 or leave it out.",
            path=path,
        )
    return side if vertices is None else vertices
