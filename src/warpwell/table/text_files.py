"""CSV files and newline-delimited JSON: the type of each column is inferred from all rows before rows are converted.

pyarrow infers types from the beginning of a file, turns integers above 2**63 into floats, and drops leading zeros.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from .._check import imported
from ..errors import FormatError, WarpwellError
from . import arrow as pa
from .library import line_of

BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at a time."""
_NULLS = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA"]
_NULLS += ["NULL", "NaN", "n/a", "nan", "null"]
_BOOLEANS = ["true", "True", "TRUE", "false", "False", "FALSE"]
_TIME = r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?$"


@contextlib.contextmanager
def format_errors(name: str) -> Iterator[None]:
    """Turn the errors of another library about a source into FormatError."""
    try:
        yield
    except WarpwellError:
        raise
    except Exception as error:
        text = line_of(error) or type(error).__name__
        raise FormatError(
            f"{name} cannot be read ({text}): correct it, or give its rows in another form", path=name
        ) from error


def open_text(path: str) -> Any:
    """Open a file for reading, decompressed according to the suffix of its name."""
    return pa.input_stream(path, compression="detect", buffer_size=1 << 20)


# -- CSV ---------------------------------------------------------------------------------------------------------------


class CsvTypes:
    """The type of each column, by name, that holds all values seen so far; columns of `text` are text."""

    def __init__(self, text: Collection[str] = ()) -> None:
        seconds, nanoseconds = (pa.timestamp(unit) for unit in ("s", "ns"))
        zoned = [pa.timestamp(unit, "UTC") for unit in ("s", "ns")]
        integers = [pa.int64(), pa.uint64(), pa.float64()]
        self._ladders = [integers, [pa.bool_()], [pa.date32(), seconds, nanoseconds], zoned, [pa.time32("s")]]
        self.found: dict[str, Any] = dict.fromkeys(text, pa.string())
        self._negative: set[str] = set()

    def add(self, name: str, values: Any) -> None:
        """Widen the type of a column so that it holds these strings."""
        current = self.found.setdefault(name, pa.null())
        values = values.filter(pa.compute.invert(pa.compute.is_in(values, pa.array(_NULLS))))
        if current == pa.string() or not len(values):
            return
        values = pa.compute.utf8_trim_whitespace(values)
        ladders = [ladder for ladder in self._ladders if current in ladder] or self._ladders * (current == pa.null())
        kinds = [kind for ladder in ladders for kind in ladder[ladder.index(current) if current in ladder else 0 :]]
        self.found[name] = next((kind for kind in kinds if self._holds(name, kind, values)), pa.string())

    def _holds(self, name: str, kind: Any, values: Any) -> bool:
        compute, types = pa.compute, pa.types
        if types.is_boolean(kind):
            return bool(compute.all(compute.is_in(values, pa.array(_BOOLEANS))).as_py())
        if types.is_time(kind):
            return bool(compute.all(compute.match_substring_regex(values, _TIME)).as_py())
        if types.is_uint64(kind) and name in self._negative:
            return False
        try:
            values.slice(0, 100).cast(kind)  # each value that fails takes a microsecond
            cast = values.cast(kind)
        except pa.ArrowInvalid:
            return False
        if not (types.is_integer(kind) or types.is_floating(kind)):
            return True
        if compute.any(compute.match_substring_regex(values, "^-?0[0-9xX]")).as_py():  # a code, not a number
            return False
        if types.is_int64(kind) and compute.any(compute.less(cast, 0)).as_py():
            self._negative.add(name)
        # Integers beyond all integer types stay text: as floats they would be rounded.
        is_integer = types.is_floating(kind) and compute.match_substring_regex(values, r"^[-+]?\d+$")
        return not types.is_floating(kind) or not compute.all(is_integer).as_py() or self.found[name] == kind


def csv_schemas(paths: Sequence[str], columns: Collection[Any] | None, text: Collection[str]) -> Iterator[Any]:
    """Yield the schema of each file, after all were read; with `columns`, only these columns have types.

    Columns of `text` are text.
    """
    types, headers = CsvTypes(text), []
    for path in paths:
        with format_errors(path):
            with open_text(path) as file:
                header = _open_csv(path, file, None, None).schema.names
            duplicates = sorted({name for name in header if header.count(name) > 1})
            if duplicates:
                raise FormatError(f"{path} has two columns {duplicates[0]!r}: rename one of them", path=path)
            headers.append(header)
            names = [name for name in header if columns is None or name in columns]
            for batch in _text_batches(path, names or header[:1], len(header)):
                for name in names:
                    types.add(name, batch.column(name))
    for header in headers:
        yield pa.schema([(name, types.found.get(name, pa.null())) for name in header])


def _text_batches(path: str, names: list[str], width: int) -> Iterator[Any]:
    """Yield some columns of a file of `width` columns as text, with a last row of nulls after its end.

    Raises
    ------
    FormatError
        A quote is not closed: the last row is in it, or it ends at the next quote, and the number of quotes is odd.
    """
    quotes, newlines, rows, last = 0, 0, 0, [""]
    last_row = f"\n{_delimiter(path).join(['NA'] * width)}\n".encode()

    def with_last_row(piece: Any) -> bytes:
        nonlocal quotes, newlines, last_row
        text, last_row = (bytes(piece), last_row) if piece else (last_row, b"")
        quotes += text.count(b'"')
        newlines += text.count(b"\n")
        return text

    with open_text(path) as file:
        types = dict.fromkeys(names, pa.string())
        for batch in _open_csv(path, pa.TransformInputStream(file, with_last_row), types, names):
            if batch.num_rows:
                rows += batch.num_rows
                last = [column[-1].as_py() for column in batch.columns]
                yield batch
    if last != ["NA"] * len(names) or (quotes % 2 and rows < newlines - 2):
        raise FormatError(f'{path} has a quote (") that is not closed: close it, or double it inside quotes', path=path)


def csv_batches(path: str, schema: Any, columns: list[str] | None) -> Iterator[Any]:
    """Yield the record batches of a file; of `columns` only, if given."""
    with open_text(path) as file:
        yield from _open_csv(path, file, dict(zip(schema.names, schema.types, strict=True)), columns)


def _open_csv(path: str, file: Any, types: dict[str, Any] | None, columns: list[str] | None) -> Any:
    csv = imported("pyarrow.csv", "table")
    return csv.open_csv(
        file,
        # One thread: errors name the row. Columns are parsed as fast.
        csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES if types else 1 << 20),
        csv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=True),
        csv.ConvertOptions(column_types=types, include_columns=columns, null_values=_NULLS),
    )


def _delimiter(path: str) -> str:
    """Return the delimiter of a file: of .tsv a tab, else the most frequent one in the header."""
    if re.search(r"\.tsv(\.\w+)?$", path.lower()):
        return "\t"
    with open_text(path) as file:
        text = file.read(1 << 20).decode("latin-1").removeprefix("\xef\xbb\xbf").lstrip("\r\n")
    text = re.sub(r'(?<![^,;\t\r\n])"(?:[^"]|"")*"', "", text)  # a quoted name may have line breaks
    return max(",;\t", key=re.split(r"[\r\n]", text, maxsplit=1)[0].count)


# -- JSON --------------------------------------------------------------------------------------------------------------


def json_schemas(paths: Sequence[str], text: Collection[str]) -> Iterator[Any]:
    """Yield the schema of all files for each file, after they were read: a key may first appear in their last line.

    Times in columns of `text` are text.
    """
    types: dict[str, Any] = {}
    for path in paths:
        with format_errors(path):
            for block in _json_blocks(path):
                table = _read_json(path, block)
                for field in table.schema:
                    kind = _exact_type(path, block, field.name, table[field.name])
                    types[field.name] = _common_type(path, field.name, types.get(field.name, kind), kind)
    if not types:
        raise FormatError(f"{paths[0]} is empty: there are no columns", path=paths[0])
    for name in types.keys() & text:
        types[name] = pa.string() if pa.types.is_timestamp(types[name]) else types[name]
    for _ in paths:
        yield pa.schema(list(types.items()))


def _exact_type(path: str, block: bytes, name: str, column: Any) -> Any:
    """Return the type of a column; a decimal if pyarrow has rounded integers that int64 does not have to floats.

    Raises
    ------
    FormatError
        Such an integer is in a list or an object.
    """
    floats = [leaf for chunk in column.chunks for leaf in leaves(chunk) if pa.types.is_float64(leaf.type)]
    if not any(pa.compute.any(pa.compute.greater_equal(pa.compute.abs(leaf), 2.0**63)).as_py() for leaf in floats):
        return column.type
    values = [json.loads(line).get(name) for line in block.splitlines() if line.strip()]
    if pa.types.is_float64(column.type):
        return column.type if any(isinstance(value, float) for value in values) else pa.decimal128(38, 0)
    if _has_large_integer(values):
        raise FormatError(f"{path}: {name!r} has integers beyond 64 bits in a list or an object: write them as text")
    return column.type


def _has_large_integer(value: Any) -> bool:
    """Return whether a value of JSON is, or contains, an integer beyond int64."""
    if isinstance(value, dict | list):
        return any(map(_has_large_integer, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not -(1 << 63) <= value < 1 << 63


def leaves(column: Any) -> list[Any]:
    """Return the arrays of values in an array of lists, maps and structs, or the array itself."""
    types = pa.types
    if types.is_struct(column.type):
        return [leaf for child in column.flatten() for leaf in leaves(child)]
    if types.is_map(column.type):
        return [*leaves(column.keys), *leaves(column.items)]
    return leaves(column.flatten()) if types.is_nested(column.type) and not types.is_union(column.type) else [column]


def _common_type(path: str, name: str, first: Any, second: Any) -> Any:
    """Return the type that holds values of both types."""
    try:
        fields = [pa.schema([(name, kind)]) for kind in (first, second)]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        if all(pa.types.is_timestamp(kind) or pa.types.is_string(kind) for kind in (first, second)):
            return pa.string()
        raise FormatError(
            f"{path}: {name!r} is {first} in one row and {second} in another: convert one", path=path
        ) from None


def json_batches(path: str, schema: Any) -> Iterator[Any]:
    """Yield the record batches of a file."""
    for block in _json_blocks(path):
        yield from _read_json(path, block, schema).select(schema.names).to_batches()


def _json_blocks(path: str) -> Iterator[bytes]:
    """Yield the file in blocks that end with a line."""
    with open_text(path) as file:
        pending = b""
        while data := file.read(BLOCK_BYTES):
            pending += data
            end = pending.rfind(b"\n") + 1
            if pending[:end].strip():
                yield pending[:end]
            pending = pending[end:]
        if pending.strip():
            yield pending


def _read_json(path: str, block: bytes, schema: Any = None) -> Any:
    module = imported("pyarrow.json", "table")
    read = module.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parse = module.ParseOptions(explicit_schema=schema)
    try:
        return module.read_json(pa.BufferReader(block), read, parse)
    except pa.ArrowInvalid as error:
        hint = "; write one object a line, not an array" if block.lstrip().startswith(b"[") else ""
        raise FormatError(f"{path} is not newline-delimited JSON ({error}){hint}", path=path) from None
