"""Read the edges in files of other programs: `EdgeReader`."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._npy import read_header
from ..errors import ArgumentError, FormatError, MissingFileError, WarpwellError
from .build import default_memory_bytes
from .external import VERTEX_LIMIT, Edges
from .names import VertexNumbers, library

#: Names of columns that are recognized, in lower case.
SOURCES = ("src", "source", "from", "u", "fromnodeid", "source_id", "id1", "id_1", "node1", "node_1")
TARGETS = ("dst", "destination", "dest", "target", "to", "v", "tonodeid", "target_id", "id2", "id_2", "node2", "node_2")
WEIGHT_NAMES = ("weight", "w", "value", "cost", "distance")

_log = logging.getLogger(__package__)
_REAL_WEIGHTS = "weights are real numbers: keep only the edges with weights=False (--weights none)"
_ROLES = ["source", "target", "weight"]
_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
_SUFFIXES = (".gz", ".bz2", ".zst", ".lz4")
# Size in bytes of a block that pyarrow parses. No row may be longer.
_BLOCK = 1 << 20
# Members of an .npz file with indices.
_INDICES = ("indices.npy", "indptr.npy", "row.npy", "col.npy")
# Edges of a matrix in a batch.
_BATCH = 1 << 20
_BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")
_BANNER = re.compile(rb"(?:\xef\xbb\xbf)?\s*%{1,2}matrixmarket", re.IGNORECASE)
# A byte order mark, and the comments and blank lines in front of a header.
_PREAMBLE = re.compile(rb"(?:\xef\xbb\xbf)?(?:[ \t]*(?:#[^\r\n]*)?[\r\n]+)*")
_ARROW_ERROR = re.compile(r"(?:In CSV column #\d+: )?(?:CSV [a-z ]+: )?(?:Row #(\d+): )?(.*)", re.DOTALL)

Batches = Iterator[Edges]


class EdgeReader:
    """The edges in a file, which are read once: text in bounded memory, SciPy's ``.npz`` files in memory.

    Parameters
    ----------
    path : path-like
        A SNAP edge list, GAP ``.el`` or ``.wel``, a ``.csv`` or ``.tsv`` file with a header, MatrixMarket ``.mtx``,
        each also compressed with gzip, bzip2, zstd or lz4; or a sparse matrix that SciPy saved as ``.npz``.
    vertices : int, optional
        Number of vertices; a larger vertex is an error. Required for a matrix that is not square.
    weights : {"int32", "float32"} or False, optional
        The third field of an edge list is a weight, and so are the values in an ``.npz`` file, even if all are 1. False
        skips all weights.
    columns : sequence of str, optional
        Names of the columns of source, target and weight in a header. Default: those in `SOURCES`, `TARGETS` and
        `WEIGHT_NAMES`, in upper or lower case.
    numbers : VertexNumbers, optional
        Numbers for the vertices of a list or table; the ids in the file are then names.

    Attributes
    ----------
    batches : iterator of (sources, targets) or (sources, targets, weights)
        The edges in the order of the file.
    vertices : int or None
        Number of vertices, if the file or the caller states it.
    symmetric : bool
        The file is a symmetric matrix; each edge is yielded in both directions.
    size : int
        Bytes of the file on disk.

    Raises
    ------
    MissingFileError
        No such file.
    FormatError
        The file has an unknown format, is damaged, holds no graph, or has a malformed row or a vertex that is not in
        range (also while iterating).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vertices: int | None = None,
        weights: str | bool | None = None,
        columns: Sequence[str] | None = None,
        numbers: VertexNumbers | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(
                f"source must be the path of a file, got {type(path).__name__}; store edges in memory with "
                f"warpwell.graph.build([(sources, targets)], out)",
                name="source",
            )
        self.path, self.vertices, self._weights, self._numbers = Path(path), vertices, weights, numbers
        self.symmetric = False
        _require_file(self.path)
        self._arrow = library("pyarrow")
        self.size = self.path.stat().st_size
        with self._translated("copy it again"):
            head = self._stream().read(_BLOCK)
        self.batches = self._choose_format(head, columns)

    def position(self) -> int:
        """Return how many of the `size` bytes have been read."""
        return self.size if self._file.closed else int(self._file.tell())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _choose_format(self, head: bytes, columns: Sequence[str] | None) -> Batches:
        name = self.path.name.lower()
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        if name.endswith(".tar") or head[257:262] == b"ustar":
            raise self._format_error(f"is an archive; unpack it (tar xf {self.path}) and pass the file of edges inside")
        is_npz = head.startswith(b"PK\x03\x04")
        if not (is_npz or name.endswith(".mtx") or _BANNER.match(head)):
            return self._text(head, columns, name)
        if columns is not None or self._numbers is not None:
            raise ArgumentError(f"{self.path} is a matrix; leave columns, names and renumber out", name="columns")
        return self._npz() if is_npz else self._matrix_market(head)

    def _stream(self) -> Any:
        """Return the file from its start, decompressed."""
        self._file = self._arrow.OSFile(str(self.path))
        magic = self._file.read(6)
        self._file.seek(0)
        if magic == b"\xfd7zXZ\x00":
            raise self._format_error(f"is compressed with xz; unpack it first: xz -dk {self.path}")
        codec = next((codec for start, codec in _CODECS.items() if magic.startswith(start)), None)
        return self._file if codec is None else self._arrow.CompressedInputStream(self._file, codec)

    @contextlib.contextmanager
    def _translated(self, advice: str) -> Iterator[None]:
        """Turn errors of pyarrow, SciPy and NumPy into Warpwell's; `advice` ends their messages."""
        try:
            yield
        except (WarpwellError, MemoryError):
            raise
        except self._arrow.ArrowInvalid as error:
            row, problem = _ARROW_ERROR.fullmatch(str(error)).groups()  # type: ignore[union-attr]
            if "straddling object" in problem:
                problem = f"a row is longer than {_BLOCK:,} bytes"
            raise self._row_error(int(row) if row else None, f"{problem[:1].lower()}{problem[1:]}; {advice}") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise self._format_error(f"cannot be read ({error}); {advice}") from error

    def _format_error(self, problem: str) -> FormatError:
        return FormatError(f"{self.path} {problem}", path=self.path)

    def _row_error(self, row: int | None, problem: str) -> FormatError:
        where = "" if row is None else f", row {row}"
        return FormatError(f"{self.path}{where}: {problem}", path=self.path, row=row)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _text(self, head: bytes, columns: Sequence[str] | None, name: str) -> Batches:
        """Return the edges of a table with a header, or of a list."""
        if columns is not None and len(columns) not in (2, 3):
            problem = f"columns is {tuple(columns)}; expected the names of source, target and perhaps weight"
            raise ArgumentError(problem, name="columns")
        start = _PREAMBLE.match(head).end()  # type: ignore[union-attr]
        header = re.split(rb"[\r\n]", head[start:], maxsplit=1)[0].decode("utf-8", "replace")
        delimiter = max("\t,;", key=header.count)
        fields = next(csv.reader([header[: csv.field_size_limit()]], delimiter=delimiter), [])
        if columns is None and not name.endswith((".csv", ".tsv")) and not _names_ends(fields):
            return self._list(head, is_weighted=name.endswith(".wel") or isinstance(self._weights, str))
        if not fields:
            return iter(())
        chosen = self._choose_columns(fields, columns)
        if all(name.strip().isdecimal() for name in chosen):
            advice = "if it is an edge, put a header in front"
            _log.warning("%s, row 1: %s is read as a header; %s", self.path, fields, advice)
        stream = self._stream()
        stream.read(start)
        return self._rows(self._whole_lines(stream, self._quotes_check(delimiter), b"\n\r"), None, chosen, 0, delimiter)

    def _whole_lines(self, stream: Any, edit: Callable[[bytes], bytes], breaks: bytes = b"\n") -> Any:
        """Return a stream of the text that `edit` returns for whole lines."""
        unfinished = b""

        def edit_lines(piece: bytes) -> bytes:
            nonlocal unfinished
            # An empty piece is the end of the file.
            text = unfinished + (bytes(piece) or b"\n" * bool(unfinished))
            end = max(text.rfind(code) for code in breaks) + 1
            unfinished = text[end:]
            if len(unfinished) > _BLOCK:
                raise self._row_error(None, f"a row is longer than {_BLOCK:,} bytes; is this a text file?")
            return edit(text[:end])

        return self._arrow.TransformInputStream(stream, edit_lines)

    def _quotes_check(self, delimiter: str) -> Callable[[bytes], bytes]:
        """Return a function that raises if a quoted field does not end in its line: it would hide rows."""
        field = rb'(?:"[^"\r\n]*+(?:""[^"\r\n]*+)*+"|(?!"))[^%b\r\n]*+' % delimiter.encode()
        complete = re.compile(rb"(?:%b[%b\r\n])*+" % (field, delimiter.encode()))

        def check_quotes(text: bytes) -> bytes:
            end = complete.match(text).end() if b'"' in text else len(text)  # type: ignore[union-attr]
            if end < len(text):
                start = re.split(rb"[\r\n]", text[end:], maxsplit=1)[0].decode("utf-8", "replace")
                raise self._row_error(None, f"the field {start[:60]!r} does not end in its line; add or remove a quote")
            return text

        return check_quotes

    def _list(self, head: bytes, is_weighted: bool) -> Batches:
        """Return the edges of rows of two or three fields, with or without a header."""
        rows = self._without_comments(b"#%")(head + b"\n")
        first = rows.partition(b"\n")[0].split()
        fields = b" ".join(first).decode("utf-8-sig", "replace").split()
        if not fields:
            return iter(())
        stream = self._whole_lines(self._stream(), self._without_comments(b"#%"))
        if _names_ends(fields):
            return self._rows(stream, fields, self._choose_columns(fields, None), 1)
        if self._numbers is not None:
            line = next(line for line in head.split(b"\n") if line.split() == first)
            if b"\t" in line.strip() and len([*filter(bytes.strip, line.split(b"\t"))]) != len(fields):
                advice = "name the file .tsv, and put a header of 'src', a tab and 'dst' in front"
                raise self._row_error(1, f"{' '.join(fields)[:60]!r} has tabs and spaces between words; {advice}")
            if not {field.lower() for field in fields}.isdisjoint(SOURCES + TARGETS):
                advice = "if it is a header, name its columns 'src' and 'dst'"
                _log.warning("%s, row 1: %s is read as an edge; %s", self.path, fields, advice)
        width = 3 if is_weighted or (self._weights is False and len(fields) == 3) else 2
        names = _ROLES[:width]
        if len(fields) != width:
            advice = "a .csv file needs a header such as 'src,dst'"
            if len(fields) == 3:
                advice = "use weights='float32' or 'int32' to read the third field, or weights=False (--weights none)"
            raise self._row_error(1, f"expected {' '.join(names)!r}, got {' '.join(fields)[:60]!r}; {advice}")
        return self._rows(stream, names, names[: 2 if self._weights is False else width], 0)

    def _choose_columns(self, fields: list[str], columns: Sequence[str] | None) -> list[str]:
        """Return the fields of a header that name the source, the target and, if it is to be read, the weight."""
        name_sets: Any = [(name,) for name in columns or ()] or [SOURCES, TARGETS, WEIGHT_NAMES]
        chosen = []
        for role, names in zip(_ROLES[: 2 if self._weights is False else 3], name_sets, strict=False):
            matches = [name for name in fields if (name.lower() if columns is None else name).strip() in names]
            if len(matches) == 1:
                chosen += matches
            elif matches or columns is not None or role != "weight":
                problem = f"expected one column for the {role} ({', '.join(names[:5])}), got {len(matches)}"
                problem += f" in the header {', '.join(fields)[:80]!r}; choose columns of the header (columns=,"
                advice = "--columns SRC,DST), or put a header such as 'src,dst' in front of the first edge"
                raise self._row_error(1, f"{problem} {advice}")
        return chosen

    def _rows(
        self,
        stream: Any,
        names: list[str] | None,
        chosen: list[str],
        skip: int,
        delimiter: str = " ",
        ranges: Sequence[range] = (),
    ) -> Batches:
        """Yield the chosen columns of rows, with vertices in `ranges`. Without `names`, there is a header."""
        advice = f"a row is {delimiter.join(names)!r}" if names else f"columns {', '.join(chosen)} are read"
        parser, row, quote = library("pyarrow.csv"), skip + (names is None), False if delimiter == " " else '"'
        types = dict.fromkeys(chosen, self._arrow.string())
        options = (
            # One thread: errors name the row.
            parser.ReadOptions(use_threads=False, block_size=_BLOCK, skip_rows=skip, column_names=names),
            parser.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=bool(quote)),
            parser.ConvertOptions(include_columns=chosen, column_types=types, null_values=[]),
        )
        allowed = ranges or [range(VERTEX_LIMIT if self.vertices is None else self.vertices)] * 2
        with self._translated(advice):
            try:
                reader = parser.open_csv(stream, *options)
            except self._arrow.ArrowInvalid as error:
                if names is None or "Empty CSV file" not in str(error):
                    raise
                return
            for batch in reader:
                if batch.num_rows:
                    trim = library("pyarrow.compute").utf8_trim_whitespace if quote else lambda texts: texts
                    columns = [
                        self._parse(trim(texts), role, row, vertices)
                        for texts, role, vertices in zip(batch.columns, _ROLES, [*allowed, range(0)], strict=False)
                    ]
                    row += batch.num_rows
                    if self._numbers is not None:
                        columns[:2] = self._numbers.number(*columns[:2])
                    yield tuple(map(np.asarray, columns))  # type: ignore[misc]

    def _parse(self, texts: Any, role: str, row: int, allowed: range) -> Any:
        """Return a column of rows that follow `row`: ids or names, and weights as int64 if all are integers."""
        arrow, compute = self._arrow, library("pyarrow.compute")
        types = [arrow.int64()]
        if role == "weight":
            is_valid = compute.invert(compute.match_substring_regex(texts, "[xX]"))  # hexadecimal
            types, expected = [*types, arrow.float64()], "a number; correct or remove it"
        elif self._numbers is None:
            is_valid = compute.ascii_is_decimal(texts)
            expected = f"an integer from {allowed.start} to {allowed.stop - 1}"
            if not allowed.start:
                expected += "; number other ids with names=True or renumber=True (--names, --renumber)"
        elif self._numbers.kind == "string":
            is_valid, types, expected = compute.not_equal(texts, ""), [texts.type], "a name; correct or remove the row"
        else:
            is_valid = compute.match_substring_regex(texts, "^(0|-?[1-9][0-9]*)$")
            expected = "an integer of 64 bits without leading zeros; number other ids with names=True (--names)"
        if compute.all(is_valid).as_py():
            for dtype in types:
                with contextlib.suppress(arrow.ArrowInvalid):
                    values = texts.cast(dtype)
                    is_vertex = role != "weight" and self._numbers is None
                    if not is_vertex or all(bound.as_py() in allowed for bound in compute.min_max(values).values()):
                        return values
        if len(texts) > 1:  # Find the first bad row.
            middle = len(texts) // 2
            self._parse(texts[:middle], role, row, allowed)
            self._parse(texts[middle:], role, row + middle, allowed)
        raise self._row_error(row + 1, f"the {role} {texts[0].as_py()[:60]!r} is not {expected}")

    def _without_comments(self, marks: bytes) -> Callable[[bytes], bytes]:
        """Return a function of whole lines that removes comment lines and surplus spaces.

        A comment begins with one of `marks`; if vertices have names, a space follows, and names have no commas.
        """
        is_named = self._numbers is not None
        end, refused = (b"(?![^ \n])", marks + b",;") if is_named else (b"", marks)
        comment = re.compile(rb"(?m)^(?:\xef\xbb\xbf)?[%b]+%b.*\n?" % (marks, end))
        unclear = re.compile(rb"(?m)^[%b].*" % marks + rb"|^.*[,;].*" * is_named)

        def normalize(text: bytes) -> bytes:
            text = text.translate(_BLANKS)
            for pair in (b"  ", b"\n ", b" \n", b"\n\n"):
                while pair in text:
                    text = text.replace(pair, b"\n" if b"\n" in pair else b" ")
            text = text.lstrip(b" \n")
            if any(code in text for code in refused):
                text = comment.sub(b"", text)
                if match := unclear.search(text):
                    row = match[0].decode("utf-8", "replace")[:60]
                    problem, advice = "has commas or semicolons in its fields", ""
                    if row.encode()[0] in marks:
                        problem, advice = "is a comment or an edge", f"put a space after the {row[0]} of comments, or "
                    raise self._row_error(None, f"{row!r} {problem}; {advice}write a .csv file with a header")
            return text

        return normalize

    # -- matrices ------------------------------------------------------------------------------------------------------

    def _matrix_market(self, head: bytes) -> Batches:
        """Return the entries of a matrix: SciPy reads the header, and the rest is read like a list."""
        head = _BANNER.sub(b"%%MatrixMarket", head, count=1)
        with self._translated("a MatrixMarket file begins with '%%MatrixMarket matrix coordinate pattern general'"):
            rows, columns, entries, layout, values, symmetry = library("scipy.io").mminfo(io.BytesIO(head))
        if layout != "coordinate":
            advice = "write a sparse matrix ('coordinate')"
            raise self._format_error(f"is in {layout!r} format, which has all elements; {advice}")
        if (values == "complex" or symmetry == "hermitian") and self._weights is not False:
            raise self._format_error(f"is a {values} {symmetry} matrix; {_REAL_WEIGHTS}")
        self.symmetric = symmetry != "general"
        if self.symmetric and rows != columns:
            raise self._format_error(f"is {symmetry}, but has {rows} rows and {columns} columns; correct its header")
        self._set_vertices(rows, columns)
        names = ["row", "column", "value", "imaginary"][: {"pattern": 2, "complex": 4}.get(values, 3)]

        def entries_of_file() -> Batches:
            count = 0
            ranges = range(1, rows + 1), range(1, columns + 1)
            stream = self._whole_lines(self._stream(), self._without_comments(b"%"))
            for batch in self._rows(stream, names, names[: 2 if self._weights is False else 3], 1, ranges=ranges):
                sources, targets, count = batch[0] - 1, batch[1] - 1, count + batch[0].size
                weights: Any = batch[2:]
                if values in ("real", "double"):
                    weights = [weight.astype(np.float64) for weight in weights]
                yield sources, targets, *weights
                if self.symmetric:
                    off = sources != targets
                    sign = -1 if symmetry == "skew-symmetric" else 1
                    yield targets[off], sources[off], *[sign * weight[off] for weight in weights]
            if count != entries:
                raise self._format_error(f"states {entries} entries, but {count} follow; copy it again")

        return entries_of_file()

    def _npz(self) -> Batches:
        """Return the entries of a matrix, which is read into memory."""
        advice = "write it with scipy.sparse.save_npz"
        with self._translated(advice), open(self.path, "rb") as raw, np.load(raw) as archive:
            for member in archive.zip.infolist():
                with archive.zip.open(member) as file:
                    shape, dtype = read_header(file, f"{self.path}: {member.filename}", advice)
                if math.prod(shape) * dtype.itemsize > member.file_size:
                    problem = f"is damaged: {member.filename} has {member.file_size} bytes for shape {shape}"
                    raise self._format_error(f"{problem}; {advice}")
                if member.filename in _INDICES and dtype.kind not in "iu":
                    raise self._format_error("has indices that are not integers; save the matrix again")
            size = 3 * sum(member.file_size for member in archive.zip.infolist())
            if size > default_memory_bytes():
                raise self._format_error(
                    f"needs {size >> 20} MiB, more than half of the free memory; write a .mtx file"
                )
            matrix = library("scipy.sparse").load_npz(self.path)
            if matrix.format not in ("csr", "csc", "coo"):
                raise self._format_error(f"holds a matrix in the format {matrix.format!r}; save matrix.tocsr()")
            if matrix.dtype.kind not in "biuf" and self._weights is not False:
                raise self._format_error(f"has values of {matrix.dtype}; {_REAL_WEIGHTS}")
            if matrix.format != "coo":
                matrix.check_format(full_check=True)
            matrix = matrix.tocoo(copy=False)
            self._set_vertices(*matrix.shape)
        columns = [matrix.row, matrix.col]
        if self._weights or (self._weights is None and (matrix.data != 1).any()):
            columns.append(matrix.data)
        return (tuple(column[start : start + _BATCH] for column in columns) for start in range(0, matrix.nnz, _BATCH))

    def _set_vertices(self, rows: int, columns: int) -> None:
        """Set the number of vertices to the side of a matrix, or check the number that the caller gave."""
        side = max(rows, columns)
        if self.vertices is None and rows != columns:
            advice = f"if both are the same vertices, pass their number: vertices={side} (--vertices {side})"
            problem = f"has {rows} rows and {columns} columns, but a graph needs a square matrix"
            raise self._format_error(f"{problem}; {advice}")
        self.vertices = side if self.vertices is None else self.vertices
        if not side <= self.vertices <= VERTEX_LIMIT:
            problem = f"has {rows} rows and {columns} columns; vertices must be from {side} to 2**32"
            raise self._format_error(f"{problem}, got {self.vertices}")


def _require_file(path: Path) -> None:
    if not path.exists():
        raise MissingFileError(f"{path}: no such file; the working folder is {Path.cwd()}", path=path)
    if (path / "graph.json").exists():
        raise FormatError(f"{path} is already a graph; open it with Graph.open", path=path)
    if not path.is_file():
        raise FormatError(f"{path} is a folder or a pipe; pass the file with the edges", path=path)


def _names_ends(fields: Sequence[str]) -> bool:
    """Return True if the fields name the columns of an edge list."""
    names = {field.strip().lower() for field in fields}
    return not (names.isdisjoint(SOURCES) or names.isdisjoint(TARGETS))
