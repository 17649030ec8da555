"""Sparse matrices as text, in the coordinate format of the Matrix Market: ``MatrixMarket``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell.errors import EdgeListError, FormatError
from warpwell.graph.compressed import ByteReader
from warpwell.graph.edge_list import VERTEX_LIMIT, matrix_vertices
from warpwell.graph.lines import Edges, LineRule, PairReader, WeightedEdges

_VALUES = {"pattern": 0, "real": 1, "double": 1, "integer": 1, "complex": 2}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
_HEAD = "%%MatrixMarket matrix coordinate pattern general"


class MatrixMarket:
    """Reads a MatrixMarket file as edges: a stored entry (row, column) is an edge from row to column.

    The format is that of "The Matrix Market Exchange Formats" (Boisvert, Pozo, Remington, 1996). Values
    are weights: an entry that is stored with value 0 is an edge too. Of a symmetric, skew-symmetric or
    Hermitian matrix one triangle is stored, and both directions of each entry off the diagonal are yielded;
    in a skew-symmetric one the other direction has the negative weight. Complex values are skipped.

    Parameters
    ----------
    path : path-like
        The file, which may be compressed (gzip, xz, bzip2, zstd).
    vertices : int, optional
        Vertices of the graph. Required for a matrix that is not square: at least its larger side.
    weights : {"int32", "float32"} or False, optional
        What the values must be; False skips them.

    Raises
    ------
    MissingFileError
        No such file.
    FormatError
        Another MatrixMarket format than coordinate, or a matrix that makes no graph.
    EdgeListError
        A malformed head; while iterating: a malformed line, an index outside the matrix, or a number of
        entries other than announced. It names file and line.
    """

    note = ""

    def __init__(self, path: str | Path, vertices: int | None = None, *, weights: str | bool | None = None) -> None:
        self.path = Path(path)
        self._weights = weights
        self._reader = ByteReader(self.path)
        self.size = self._reader.size
        self._line = 0
        self._ahead = b""
        try:
            self._read_head()
            self._read_size()
            self.vertices: int | None = matrix_vertices(self.path, self._rows, self._columns, vertices)
        except BaseException:
            self._reader.close()
            raise

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
        """Yield chunks of edges, numbered from 0: two int64 arrays of one length, and their weights if any."""
        shape = "'row column" + " value" * self._values + "'"
        bounds = f"The matrix has {self._rows} rows and {self._columns} columns, counted from 1."
        rule = LineRule(
            2 + self._values,
            range(1, self._rows + 1),
            range(1, self._columns + 1),
            shape,
            bounds,
            comments=b"%",
            weight=2 if self.weighted else None,
            whole=self._weights == "int32",
        )
        found = 0
        with self._reader:
            pairs = PairReader(self._reader, rule, self._line + 1, self._ahead)
            for rows, columns, *values in pairs:
                rows -= 1
                columns -= 1
                found += rows.size
                if found > self._entries:
                    break
                yield self._edges(rows, columns, values)
                if self.symmetric:
                    off = rows != columns
                    yield self._edges(columns[off], rows[off], [self._sign * value[off] for value in values])
        if found != self._entries:
            count = "more" if found > self._entries else f"{found}"
            raise EdgeListError(
                f"{self.path}, line {pairs.line}: {self._entries} entries were announced, {count} found. "
                "The file was not copied whole or its size line is wrong.",
                path=self.path,
                line=pairs.line,
            )

    def _edges(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], values: list[npt.NDArray[Any]]
    ) -> Edges | WeightedEdges:
        if not values:
            return rows, columns
        return rows, columns, values[0] if self._integers else values[0].astype(np.float64)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""
        return self._reader.position()

    def _read_head(self) -> None:
        words = self._next_line().decode("ascii", "replace").lower().split()
        # One percent sign instead of two is seen in the wild.
        if len(words) != 5 or words[0].lstrip("%") != "matrixmarket" or words[1] != "matrix":
            raise self._error(f"not the head of a MatrixMarket file. It looks like this: {_HEAD}")
        if words[2] != "coordinate":
            raise FormatError(
                f"{self.path} is in MatrixMarket's {words[2]!r} format, which stores every element. "
                "Only 'coordinate' holds edges: write the matrix as a sparse one.",
                path=self.path,
            )
        if words[3] not in _VALUES or words[4] not in _SYMMETRIES:
            raise self._error(
                f"values {words[3]!r}, symmetry {words[4]!r}. Known are {', '.join(_VALUES)}; {', '.join(_SYMMETRIES)}."
            )
        self._values = _VALUES[words[3]]
        self.weighted = self._values == 1 and self._weights is not False
        self._integers = words[3] == "integer"
        if self._values == 2 and self._weights is not False:
            self.note = f"{self.path.name} has complex values, which weights cannot be; the graph keeps the edges"
        self.symmetric = words[4] != "general"
        self._sign = -1 if words[4] == "skew-symmetric" else 1

    def _read_size(self) -> None:
        while (line := self._next_line()).strip() == b"" or line.lstrip().startswith(b"%"):
            if not line:
                raise self._error("the file ends before the line 'rows columns entries'. Copy it again.")
        words = line.split()
        if len(words) != 3 or not all(word.isdigit() and len(word) <= 19 for word in words):
            text = line.strip()[:60].decode("ascii", "backslashreplace")
            raise self._error(f"expected 'rows columns entries', found {text!r}. Correct the line.")
        self._rows, self._columns, self._entries = (int(word) for word in words)
        if max(self._rows, self._columns) > VERTEX_LIMIT:
            raise self._error("a matrix larger than 2**48, and vertices are numbered below that. Renumber them.")
        if self.symmetric and self._rows != self._columns:
            raise self._error("a symmetric matrix that is not square. Correct the head or the size.")

    def _next_line(self) -> bytes:
        """Return a line with its line end; empty at the end of the file."""
        while b"\n" not in self._ahead:
            data = self._reader.read(1 << 12)
            if not data or len(self._ahead) > 1 << 20:
                break
            self._ahead += data
        line, end, self._ahead = self._ahead.partition(b"\n")
        self._line += 1
        return line + end

    def _error(self, problem: str) -> EdgeListError:
        return EdgeListError(f"{self.path}, line {self._line}: {problem}", path=self.path, line=self._line)
