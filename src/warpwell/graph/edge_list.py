"""Edge lists as text: ``EdgeList``, of SNAP and of the GAP benchmark, and ``CsvEdgeList``, with named columns."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from warpwell.errors import ArgumentError, EdgeListError, FormatError
from warpwell.graph.compressed import ByteReader
from warpwell.graph.lines import Edges, LineRule, PairReader, WeightedEdges

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
        Lines have a third field, a weight (GAP ``.wel``).
    weights : {"int32", "float32"} or False, optional
        What the weights must be; False skips them.

    Raises
    ------
    ArgumentError
        `vertices` is not in 1 to 2**48.
    MissingFileError
        No such file.
    EdgeListError
        While iterating: a malformed line, a weight that does not fit, or a vertex that is negative, not an integer or
        too large, with file and line.
    """

    symmetric = False
    note = ""

    def __init__(
        self,
        path: str | Path,
        vertices: int | None = None,
        *,
        weighted: bool = False,
        weights: str | bool | None = None,
    ) -> None:
        self.vertices = _checked_vertices(vertices)
        self.path = Path(path)
        self._fields = 3 if weighted else 2
        self.weighted = weighted and weights is not False
        self._whole = weights == "int32"
        self._reader = ByteReader(self.path)
        self.size = self._reader.size

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
        """Yield chunks of edges in file order: two int64 arrays of one length, and their weights if there are any."""
        rule = LineRule(
            self._fields,
            *_vertex_rule(self.vertices),
            "'source destination weight'" if self._fields == 3 else "'source destination'",
            _vertex_advice(self.vertices),
            surplus="" if self._fields == 3 else "A list with weights is one whose name ends in .wel.",
            weight=2 if self.weighted else None,
            whole=self._whole,
        )
        with self._reader:
            yield from PairReader(self._reader, rule)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""
        return self._reader.position()


#: Names of columns that are recognized, in lower case.
SOURCES = ("src", "source", "from", "u")
DESTINATIONS = ("dst", "destination", "dest", "target", "to", "v")
WEIGHT_NAMES = ("weight", "w", "value", "cost", "distance")


class CsvEdgeList:
    """Reads an edge list whose first line names its columns, separated by commas or tabs.

    The columns may be in any order, and others are skipped. Fields may be quoted, but not go over the end of a line.
    Blank lines and lines that start with ``#`` are skipped; the file may be compressed.

    Parameters
    ----------
    path : path-like
        The file.
    vertices : int, optional
        As for `EdgeList`.
    columns : tuple of str, optional
        Names of the columns of source and destination, and of the weight if it is to be read. Default: the first
        column with one of the names in `SOURCES`, `DESTINATIONS` and `WEIGHT_NAMES`, in upper or lower case.
    weights : {"int32", "float32"} or False, optional
        As for `EdgeList`.

    Raises
    ------
    EdgeListError
        The header does not name the columns; otherwise as for `EdgeList`.
    ArgumentError, MissingFileError
        As for `EdgeList`.
    """

    symmetric = False
    note = ""

    def __init__(
        self,
        path: str | Path,
        vertices: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        weights: str | bool | None = None,
    ) -> None:
        self.vertices = _checked_vertices(vertices)
        if columns is not None and len(columns) not in (2, 3):
            raise ArgumentError(
                f"columns are {', '.join(columns)}. Give two names, source and destination, or three with the weight.",
                name="columns",
            )
        self.path = Path(path)
        self._whole = weights == "int32"
        self._reader = ByteReader(self.path)
        self.size = self._reader.size
        try:
            text = self._header()
            self._separator = "\t" if "\t" in text else ","
            self._names = [name.strip() for name in next(csv.reader([text], delimiter=self._separator), [])]
            self._places = self._choose(columns)
        except BaseException:
            self._reader.close()
            raise
        if weights is False:
            self._places = self._places[:2]
        self.weighted = len(self._places) == 3

    def _header(self) -> str:
        """Read up to the first line that is not blank and no comment, and return it."""
        self._ahead, self._line = self._reader.read(3).removeprefix(b"\xef\xbb\xbf"), 0
        while True:
            while b"\n" not in self._ahead and len(self._ahead) <= 1 << 20:
                data = self._reader.read(1 << 12)
                if not data:
                    break
                self._ahead += data
            line, end, self._ahead = self._ahead.partition(b"\n")
            self._line += 1
            if (line.strip() and not line.lstrip().startswith(b"#")) or not end:
                return line.decode("utf-8", "replace").strip("\r")

    def _choose(self, columns: Sequence[str] | None) -> list[int]:
        """Return the places of source, destination and, if it is to be read, weight."""
        if columns is not None:
            wanted: list[tuple[str, ...]] = [(name,) for name in columns]
            names = self._names
        else:
            wanted = [SOURCES, DESTINATIONS, WEIGHT_NAMES]
            names = [name.lower() for name in self._names]
        places = []
        for kind, known in zip(("source", "destination", "weight"), wanted, strict=False):
            place = next((k for k, name in enumerate(names) if name in known), None)
            if place is not None:
                places.append(place)
            elif columns is not None or kind != "weight":
                found = ", ".join(self._names)[:80] or "nothing"
                raise EdgeListError(
                    f"{self.path}, line {self._line}: no column for the {kind} ({' or '.join(known)}) in the header "
                    f"{found!r}. Put a line such as 'src,dst' in front, or name the columns: columns=('a', 'b') "
                    "(--columns a,b).",
                    path=self.path,
                    line=self._line,
                )
        return places

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
        """Yield chunks of edges in file order: two int64 arrays of one length, and their weights if there are any."""
        rule = LineRule(
            len(self._names),
            *_vertex_rule(self.vertices),
            f"{len(self._names)} fields, {self._separator.join(self._names)[:80]!r}",
            _vertex_advice(self.vertices),
            comments=b"#",
            columns=(self._places[0], self._places[1]),
            weight=self._places[2] if self.weighted else None,
            whole=self._whole,
            numbers=False,
            separator=self._separator,
        )
        with self._reader:
            yield from PairReader(self._reader, rule, self._line + 1, self._ahead)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""
        return self._reader.position()


def names_columns(head: bytes) -> bool:
    """Tell whether the first line of a file names the columns of an edge list."""
    for line in head.removeprefix(b"\xef\xbb\xbf").splitlines():
        if line.strip() and not line.lstrip().startswith((b"#", b"%")):
            text = line.decode("utf-8", "replace").lower()
            names = {name.strip(' "') for name in re.split("[,\t]", text)}
            return not names.isdisjoint(SOURCES) and not names.isdisjoint(DESTINATIONS)
    return False


def _checked_vertices(vertices: int | None) -> int | None:
    if vertices is not None and not 1 <= vertices <= VERTEX_LIMIT:
        raise ArgumentError(f"vertices is {vertices}. Give a number from 1 to {VERTEX_LIMIT} (2**48).")
    return vertices


def _vertex_rule(vertices: int | None) -> tuple[range, range]:
    limit = VERTEX_LIMIT if vertices is None else vertices
    return range(limit), range(limit)


def _vertex_advice(vertices: int | None) -> str:
    if vertices is None:
        return "Renumber the vertices from 0."
    return f"The graph was said to have {vertices} vertices: raise that number or leave it out."


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
