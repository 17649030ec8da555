"""`open_source`: record batches of Parquet, Arrow, ORC, CSV and JSON files, of folders of them, and of frames."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import numpy as np

from ..errors import ArgumentError, FormatError, MissingFileError
from .column import validate
from .library import arrow, line_of, readable_columns
from .table import BATCH_ROWS, is_table_folder, read_parts
from .text_files import csv_batches, csv_schemas, format_errors, json_batches, json_schemas, leaves
from .zones import SUFFIX as ZONES

_log = logging.getLogger(__package__)
_MAGIC = {b"PAR1": "parquet", b"PARE": "parquet", b"ARROW1": "ipc", b"\xff\xff\xff\xff": "ipc", b"ORC": "orc"}
_SUFFIXES = {
    "parquet": "parquet",
    "pq": "parquet",
    "feather": "ipc",
    "arrow": "ipc",
    "arrows": "ipc",
    "ipc": "ipc",
    "stream": "ipc",
}
_SUFFIXES |= {"orc": "orc", "csv": "csv", "tsv": "tsv", "json": "json", "jsonl": "json", "ndjson": "json"}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_UNITS = ("ns", "us", "ms")
"""Units of timestamps, the finest first."""
_COMPRESSED = {"gz", "bz2", "zst", "lz4"}


@dataclass(frozen=True)
class TableSource:
    """A source of rows.

    Attributes
    ----------
    schema : pyarrow.Schema
    rows : int
        0 if it is known only at the end.
    batches : iterator of pyarrow.RecordBatch
        In the order of the source, in bounded memory.
    """

    schema: Any
    rows: int
    batches: Iterator[Any]


@contextlib.contextmanager
def open_source(source: Any, columns: Sequence[str] | None = None, text: Collection[str] = ()) -> Iterator[TableSource]:
    """Open a source of rows, and close it after the block.

    Parameters
    ----------
    source : path, sequence of paths, pyarrow.dataset.Dataset, or object with ``__arrow_c_stream__``
    columns : sequence of str, optional
        Those to take, in this order.
    text : collection of str
        Columns of CSV and JSON files that are text, whatever their values look like.

    Raises
    ------
    MissingFileError, FormatError, ArgumentError
        pyarrow's errors while batches are read become FormatError as well.
    """
    pa = arrow()
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        yield select_columns(_of_files([os.fspath(path) for path in paths], columns, text), columns)
        return
    name = type(source).__name__
    if hasattr(source, "to_frame"):
        raise ArgumentError(f"{name} is one column, not a frame: give source.to_frame()", name="source")
    with format_errors(name):
        names = list(map(str, getattr(source, "columns", ())))
        if type(source).__module__.startswith("pandas") and len(set(names)) < len(names):
            duplicate = next(column for column in names if names.count(column) > 1)
            raise FormatError(f"{name} has two columns {duplicate!r}: rename one of them")
        if hasattr(source, "__arrow_c_stream__"):
            # In this order: a connection of DuckDB runs no query while a result is read.
            rows = len(source) if hasattr(source, "__len__") else 0
            reader: Any = pa.RecordBatchReader.from_stream(source)
        elif hasattr(source, "__arrow_c_array__"):
            batch = pa.record_batch(source)
            reader, rows = pa.RecordBatchReader.from_batches(batch.schema, [batch]), len(batch)
        elif hasattr(source, "to_batches") and hasattr(source, "count_rows"):
            reader, rows = source.scanner(batch_size=BATCH_ROWS, batch_readahead=2).to_reader(), 0
        else:
            raise ArgumentError(
                f"{name} is not a source of rows; give a path, or an object with __arrow_c_stream__ (a frame of Polars "
                "or pandas, a relation of DuckDB, a pyarrow.Table)",
                name="source",
            )
        readable_columns(reader.schema, name)
    yield select_columns(TableSource(reader.schema, rows, _checked(name, reader)), columns)


def _checked(name: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches after a check of their offsets, dictionary indices and text."""
    batches = iter(batches)
    while True:
        with format_errors(name):
            batch = next(batches, None)
            for column in () if batch is None else batch.columns:
                validate(column)
        if batch is None:
            return
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(first, BATCH_ROWS)


def select_columns(source: TableSource, columns: Sequence[str] | None) -> TableSource:
    """Return a source with some of its columns, in this order; all by default.

    Raises
    ------
    ArgumentError
        It does not have a column, or has it twice.
    """
    if columns is None:
        return source
    schema = source.schema
    numbers = []
    for name in columns:
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            count = f"{len(indices)} columns" if indices else "no column"
            names = ", ".join(map(repr, schema.names[:20])) + (", ..." if len(schema.names) > 20 else "")
            raise ArgumentError(f"the source has {count} {name!r:.60}: it has {names}", name="columns")
        numbers += indices
    selected = arrow().schema([schema.field(number) for number in numbers], schema.metadata)
    return TableSource(selected, source.rows, (batch.select(numbers) for batch in source.batches))


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """A file of a source.

    Attributes
    ----------
    path : str
    format : {"parquet", "ipc", "orc", "csv", "tsv", "json"}
    keys : dict
        The keys of its path and their values: ``year=2024/month=03/``.
    schema : pyarrow.Schema
    rows : int
        0 if unknown.
    int96_unit : {"ns", "us", "ms"}
        The unit in which timestamps of type INT96 are read.
    columns : list of str or None
        The columns to read.
    numbers : list of int
        Of an Arrow file, the columns that pyarrow reads.
    """

    path: str
    format: str
    keys: dict[str, str]
    schema: Any = None
    rows: int = 0
    int96_unit: str = "ns"
    columns: list[str] | None = None
    numbers: list[int] = field(default_factory=list)


def _of_files(paths: Sequence[str], columns: Sequence[str] | None, text: Collection[str]) -> TableSource:
    """Return the rows of files one after another; a column that some of them lack is null there."""
    pa = arrow()
    files = [file for path in paths for file in _files(path)]
    for kind in {file.format for file in files}:
        _read_schemas(kind, [file for file in files if file.format == kind], columns, text)
    schemas = [file.schema for file in files]
    schema = schemas[0]
    if any(file.schema != schema for file in files):
        try:
            schema = pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schema.metadata)
        except pa.ArrowException as error:
            raise FormatError(f"{files[0].path} and other files differ in their columns: {line_of(error)}") from None
    if columns is not None and set(columns) <= set(schema.names):
        for file in files:
            file.columns = [name for name in file.schema.names if name in columns]
        schema = pa.schema([field for field in schema if field.name in columns], schema.metadata)
    for name in {name: None for file in files for name in file.keys if name not in schema.names}:
        schema = schema.append(pa.field(name, _key_type([file.keys.get(name) for file in files])))
    return TableSource(schema, sum(file.rows for file in files), _rows_of(files, schema))


def _files(path: str) -> Iterator[_File]:
    """Yield the files of a path, in order; files in a folder have the keys of its subfolders.

    Files of no known format in a folder are left out, and the log names them.
    """
    if not os.path.exists(path):
        raise MissingFileError(f"{path} does not exist: check the path", path=path)
    if os.path.isfile(path):
        yield _File(path, _format(path), {})
        return
    if not os.path.isdir(path):
        raise FormatError(f"{path} is not a file or folder", path=path)

    def fail(error: OSError) -> None:
        raise error

    count, left_out = 0, []
    for folder, subfolders, names in os.walk(path, onerror=fail):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "_")))
        parts = [part.split("=", 1) for part in os.path.relpath(folder, path).split(os.sep) if "=" in part]
        keys = {name: unquote(value) for name, value in parts if value != "__HIVE_DEFAULT_PARTITION__"}
        if is_table_folder(folder):
            names = [part["file"] for part in read_parts(folder)]
        else:
            names = sorted(name for name in names if not name.startswith((".", "_")) and not name.endswith(ZONES))
        for name in names:
            try:
                kind = _format(os.path.join(folder, name))
            except FormatError:
                left_out.append(name)
                continue
            count += 1
            yield _File(os.path.join(folder, name), kind, keys)
    if not count:
        raise FormatError(f"{path} has no files: give a folder of Parquet, CSV or Feather files", path=path)
    if left_out:
        _log.warning("%s: files of no known format are left out: %s", path, ", ".join(left_out))


def _format(path: str) -> str:
    """Return the format of a file, by its first bytes or its name."""
    with open(path, "rb") as file:
        head = file.read(8)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    suffixes = os.path.basename(path).lower().split(".")[1:]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    raise FormatError(
        f"{path} has no known format: give Parquet, Feather, ORC, .csv, .tsv or .json, or read it with "
        "another library and give its frame",
        path=path,
    )


def _key_type(values: Sequence[str | None]) -> Any:
    """Return the type of a key in paths: an integer, or text, also if a value has a leading zero."""
    present = [value for value in values if value is not None]
    is_integer = all(re.fullmatch("0|-?[1-9][0-9]{0,17}", value) for value in present)
    return arrow().int64() if is_integer else arrow().string()


def _rows_of(files: Sequence[_File], schema: Any) -> Iterator[Any]:
    """Yield the batches of files, with the columns of a schema."""
    pa = arrow()
    for file in files:
        for batch in _checked(file.path, _batches(file)):
            if batch.schema.names == schema.names:  # two columns may have one name
                columns = batch.columns
            else:
                numbers = [batch.schema.get_field_index(name) for name in schema.names]
                columns = [None if number < 0 else batch.column(number) for number in numbers]
            with format_errors(file.path):
                arrays = [_column(*pair, file.keys, batch.num_rows) for pair in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(column: Any, field: Any, keys: dict[str, str], rows: int) -> Any:
    """Return a column of a file in the type of all files: the file's own, the value of a key, or nulls."""
    pa = arrow()
    if column is None:
        value = pa.scalar(keys.get(field.name)).cast(field.type) if field.name in keys else pa.scalar(None, field.type)
        return pa.repeat(value, rows)
    return column if column.type == field.type else column.cast(field.type)


# -- formats -----------------------------------------------------------------------------------------------------------


def _read_schemas(kind: str, files: Sequence[_File], columns: Sequence[str] | None, text: Collection[str]) -> None:
    """Set the schema of each file, and its rows if they are known; text is read whole."""
    if kind in ("csv", "tsv", "json"):
        paths = [file.path for file in files]
        schemas = json_schemas(paths, text) if kind == "json" else csv_schemas(paths, _DELIMITERS[kind], columns, text)
        for file, schema in zip(files, schemas, strict=True):
            file.schema = schema
        return
    unit = _int96_unit(files) if kind == "parquet" else "ns"
    for file in files:
        file.int96_unit = unit
        with format_errors(file.path), _opened(file) as opened:
            if kind == "parquet":
                file.schema, file.rows = opened.schema_arrow, opened.metadata.num_rows
            elif kind == "orc":
                file.schema, file.rows = opened.schema, opened.nrows
            else:
                file.numbers = readable_columns(opened.schema, file.path)
                file.schema = arrow().schema([opened.schema.field(k) for k in file.numbers], opened.schema.metadata)


@contextlib.contextmanager
def _opened(file: _File) -> Iterator[Any]:
    """Yield pyarrow's reader of a file that is not text."""
    if file.format == "parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(file.path, coerce_int96_timestamp_unit=file.int96_unit) as reader:
            yield reader
    elif file.format == "orc":
        yield importlib.import_module("pyarrow.orc").ORCFile(file.path)
    else:
        ipc = arrow().ipc
        with arrow().OSFile(file.path) as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            yield ipc.open_file(opened) if is_file else ipc.open_stream(opened)


def _batches(file: _File) -> Iterator[Any]:
    """Yield the record batches of a file."""
    if file.format == "json":
        yield from json_batches(file.path, file.schema)
    elif file.format in _DELIMITERS:
        yield from csv_batches(file.path, _DELIMITERS[file.format], file.schema, file.columns)
    else:
        with _opened(file) as opened:
            if file.format == "parquet":
                yield from opened.iter_batches(BATCH_ROWS, columns=file.columns)
            elif file.format == "orc":
                yield from (opened.read_stripe(k) for k in range(opened.nstripes))
            else:
                is_file = hasattr(opened, "get_batch")
                batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
                yield from (batch.select(file.numbers) for batch in batches)


def _int96_unit(files: Sequence[_File]) -> str:
    """Return the finest unit in which the timestamps of type INT96 of all Parquet files are exact.

    pyarrow reads them in nanoseconds and wraps around outside of the years 1677 to 2262. Each unit is compared with
    milliseconds, which reach far enough for all.

    Raises
    ------
    FormatError
        No unit holds all of them.
    """
    units = set(_UNITS)
    for file in files:
        with format_errors(file.path), contextlib.ExitStack() as stack:
            readers = [stack.enter_context(_opened(replace(file, int96_unit=unit))) for unit in _UNITS]
            fields = [readers[0].schema.column(k) for k in range(len(readers[0].schema))]
            columns = list({field.path.split(".")[0]: None for field in fields if field.physical_type == "INT96"})
            if not columns:
                continue
            for batches in zip(*(reader.iter_batches(BATCH_ROWS, columns=columns) for reader in readers), strict=True):
                batch_leaves = [
                    [_integers(leaf) for column in batch.columns for leaf in leaves(column)] for batch in batches
                ]
                for nanoseconds, microseconds, milliseconds in zip(*batch_leaves, strict=True):
                    is_in_range = (microseconds // 1000 == milliseconds).all()
                    is_exact = {
                        "ns": (nanoseconds // 1_000_000 == milliseconds).all(),
                        "us": (nanoseconds == microseconds * 1000).all() and is_in_range,  # modulo 2**64
                        "ms": (nanoseconds == milliseconds * 1_000_000).all(),
                    }
                    units -= {unit for unit, exact in is_exact.items() if not exact}
        if not units:
            raise FormatError(
                f"{file.path}: no unit holds the INT96 timestamps of {columns[0]!r} exactly; convert them"
            )
    return min(units, key=_UNITS.index)


def _integers(leaf: Any) -> Any:
    """Return timestamps as integers, and nothing of other types."""
    is_timestamp = arrow().types.is_timestamp(leaf.type)
    return np.asarray(leaf.drop_null().cast(arrow().int64())) if is_timestamp else np.zeros(0, np.int64)
