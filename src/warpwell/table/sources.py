"""`open_source`: record batches of Parquet, Arrow, ORC, CSV and JSON files, of folders of them, and of frames."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np

from .._check import imported
from ..errors import ArgumentError, FormatError, MissingFileError
from . import arrow as pa
from .extent import validate
from .library import line_of, readable_columns
from .table import BATCH_ROWS, is_table_folder, read_parts
from .text_files import csv_batches, csv_schemas, format_errors, json_batches, json_schemas, leaves
from .zones import SUFFIX as ZONES

FORMATS = {
    **dict.fromkeys(("parquet", "pq"), "parquet"),
    **dict.fromkeys(("feather", "arrow", "arrows", "ipc", "stream"), "ipc"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("json", "jsonl", "ndjson"), "json"),
    "orc": "orc",
}
"""The formats of files, by the endings of their names."""
_log = logging.getLogger(__package__)
_MAGIC = {b"PAR1": "parquet", b"PARE": "parquet", b"ARROW1": "ipc", b"\xff\xff\xff\xff": "ipc", b"ORC": "orc"}


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


def open_source(source: Any, columns: Collection[Any] | None = None, text: Collection[str] = ()) -> TableSource:
    """Open a source of rows.

    Parameters
    ----------
    source : path, sequence of paths, pyarrow.dataset.Dataset, or object with ``__arrow_c_stream__``
    columns : collection of str, optional
        Columns to use. Other columns are not read from files that store columns one by one.
    text : collection of str
        Columns of CSV and JSON files that are text, also if their values look like numbers.

    Raises
    ------
    MissingFileError, FormatError, ArgumentError
        pyarrow's errors while batches are read become FormatError as well.
    """
    imported("pyarrow", "table")
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        return _of_files([os.fspath(path) for path in paths], columns, text)
    name = type(source).__name__
    if hasattr(source, "to_frame"):
        raise ArgumentError(f"{name} is one column, not a frame: pass source.to_frame()", name="source")
    with format_errors(name):
        if hasattr(source, "scanner"):
            source = source.scanner(batch_size=BATCH_ROWS, batch_readahead=2).to_reader()
        if not hasattr(source, "__arrow_c_stream__"):
            raise ArgumentError(
                f"{name} is not a source of rows; pass a path, or an object with __arrow_c_stream__ (a frame of Polars "
                "or pandas, a relation of DuckDB, a pyarrow.Table; of a LazyFrame, collect() it)",
                name="source",
            )
        # The length first, because a connection of DuckDB cannot run a query while a result is being read.
        rows = len(source) if hasattr(source, "__len__") else 0
        reader = pa.RecordBatchReader.from_stream(source)
        readable_columns(reader.schema, name)
    return TableSource(reader.schema, rows, _checked(name, reader))


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


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """A file of a source.

    Attributes
    ----------
    path : str
    format : {"parquet", "ipc", "orc", "csv", "json"}
    keys : dict
        The keys of its path and their values: ``year=2024/month=03/``.
    schema : pyarrow.Schema
    columns : list of str or None
        The columns to read.
    int96_unit : {"ns", "us", "ms"}
        The unit in which timestamps of type INT96 are read.
    numbers : list of int
        Of an Arrow file, the columns that pyarrow reads.
    """

    path: str
    format: str
    keys: dict[str, str]
    schema: Any = None
    columns: list[str] | None = None
    int96_unit: str = "ns"
    numbers: list[int] = field(default_factory=list)


def _of_files(paths: Sequence[str], columns: Collection[Any] | None, text: Collection[str]) -> TableSource:
    """Return the rows of files one after another; a column that some of them lack is null there."""
    files = [file for path in paths for file in _files(path)]
    rows = sum(
        _read_schemas(kind, [file for file in files if file.format == kind], columns, text)
        for kind in {file.format for file in files}
    )
    schema = files[0].schema
    if any(file.schema != schema for file in files):  # two columns of one file may have one name
        try:
            schema = pa.unify_schemas([file.schema for file in files], promote_options="permissive").with_metadata(
                schema.metadata
            )
        except pa.ArrowException as error:
            raise FormatError(f"{files[0].path} and other files differ in their columns: {line_of(error)}") from None
    if columns is not None and set(columns) <= set(schema.names):
        for file in files:
            file.columns = [name for name in file.schema.names if name in columns]
        schema = pa.schema([field for field in schema if field.name in columns], schema.metadata)
    for name in {name: None for file in files for name in file.keys if name not in schema.names}:
        # Keys are integers, or text if any value is not an integer or has a leading zero.
        is_integer = all(re.fullmatch("0|-?[1-9][0-9]{0,17}", file.keys.get(name, "0")) for file in files)
        schema = schema.append(pa.field(name, pa.int64() if is_integer else pa.string()))
    return TableSource(schema, rows, _rows_of(files, schema))


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

    paths, left_out = [], []
    for folder, subfolders, names in os.walk(path, onerror=fail):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "_")))
        if is_table_folder(folder):
            names = [part["file"] for part in read_parts(folder)]
        else:
            names = sorted(name for name in names if not name.startswith((".", "_")) and not name.endswith(ZONES))
        paths += [os.path.join(folder, name) for name in names]
    for file in paths:
        keys = re.findall("([^/]*?)=([^/]*)/", os.path.relpath(file, path))
        try:
            kind = _format(file)
        except FormatError:
            left_out.append(os.path.basename(file))
        else:
            yield _File(
                file, kind, {key: unquote(value) for key, value in keys if value != "__HIVE_DEFAULT_PARTITION__"}
            )
    if len(left_out) == len(paths):
        raise FormatError(f"{path} has no files: pass a folder of Parquet, CSV or Feather files", path=path)
    if left_out:
        _log.warning("%s: files of no known format are left out: %s", path, ", ".join(left_out))


def _format(path: str) -> str:
    """Return the format of a file, by its first bytes or its name."""
    with open(path, "rb") as file:
        head = file.read(8)
    suffix = re.search(r"\.(\w+)(\.(gz|bz2|zst|lz4))?$", os.path.basename(path).lower())
    by_magic = [kind for magic, kind in _MAGIC.items() if head.startswith(magic)]
    kind = by_magic[0] if by_magic else FORMATS.get(suffix[1] if suffix else "")
    if kind is None:
        raise FormatError(
            f"{path} has no known format: pass Parquet, Feather, ORC, .csv, .tsv or .json, or read it with another "
            "library and pass the data frame",
            path=path,
        )
    return kind


def _rows_of(files: Sequence[_File], schema: Any) -> Iterator[Any]:
    """Yield the batches of files, with the columns and types of a schema; columns that a file lacks are null."""
    for file in files:
        for batch in _checked(file.path, _batches(file)):
            table = pa.Table.from_batches([batch])
            with format_errors(file.path):
                for name in [name for name in file.keys if name in schema.names and name not in file.schema.names]:
                    values = pa.repeat(file.keys[name], len(table)).cast(schema.field(name).type)
                    table = table.append_column(schema.field(name), values)
                if table.schema != schema:
                    table = table.select([name for name in schema.names if name in table.column_names])
                    table = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            yield from table.to_batches()


# -- formats -----------------------------------------------------------------------------------------------------------


def _read_schemas(kind: str, files: Sequence[_File], columns: Collection[Any] | None, text: Collection[str]) -> int:
    """Set the schema of each file, and return their rows, or 0 if they are not known; text is read whole."""
    if kind in ("csv", "json"):
        paths = [file.path for file in files]
        schemas = json_schemas(paths, text) if kind == "json" else csv_schemas(paths, columns, text)
        for file, schema in zip(files, schemas, strict=True):
            file.schema = schema
        return 0
    rows, unit = 0, _int96_unit(files) if kind == "parquet" else "ns"
    for file in files:
        file.int96_unit = unit
        with format_errors(file.path), _opened(file) as opened:
            file.schema = opened.schema
            rows += opened.rows
    return rows


@contextlib.contextmanager
def _opened(file: _File) -> Iterator[TableSource]:
    """Yield the rows of a file; the schema of text must be known."""
    if file.format == "json":
        yield TableSource(file.schema, 0, json_batches(file.path, file.schema))
    elif file.format == "csv":
        yield TableSource(file.schema, 0, csv_batches(file.path, file.schema, file.columns))
    elif file.format == "parquet":
        parquet = imported("pyarrow.parquet", "table")
        with parquet.ParquetFile(file.path, coerce_int96_timestamp_unit=file.int96_unit) as reader:
            batches = reader.iter_batches(BATCH_ROWS, columns=file.columns)
            yield TableSource(reader.schema_arrow, reader.metadata.num_rows, batches)
    elif file.format == "orc":
        reader = imported("pyarrow.orc", "table").ORCFile(file.path)
        yield TableSource(reader.schema, reader.nrows, map(reader.read_stripe, range(reader.nstripes)))
    else:
        with pa.OSFile(file.path) as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            reader = pa.ipc.open_file(opened) if is_file else pa.ipc.open_stream(opened)
            numbers = file.numbers = file.numbers or readable_columns(reader.schema, file.path)
            schema = pa.schema([reader.schema.field(number) for number in numbers], reader.schema.metadata)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield TableSource(schema, 0, (batch.select(numbers) for batch in batches))


def _batches(file: _File) -> Iterator[Any]:
    """Yield the record batches of a file."""
    with _opened(file) as opened:
        yield from opened.batches


def _int96_unit(files: Sequence[_File]) -> str:
    """Return the finest unit in which the timestamps of type INT96 of all Parquet files are exact.

    64 bits of nanoseconds reach from 1677 to 2262; pyarrow wraps around outside of these years. Milliseconds represent
    all INT96 timestamps.

    Raises
    ------
    FormatError
        No unit represents all timestamps exactly.
    """
    units = {"ns": True, "us": True, "ms": True}
    for file in files:
        with format_errors(file.path), contextlib.ExitStack() as stack:
            open_parquet = imported("pyarrow.parquet", "table").ParquetFile
            readers = [stack.enter_context(open_parquet(file.path, coerce_int96_timestamp_unit=unit)) for unit in units]
            leaf_columns = map(readers[0].schema.column, range(len(readers[0].schema)))
            int96_columns = [column for column in leaf_columns if column.physical_type == "INT96"]
            names = [column.path for column in int96_columns]  # the name of a column may have dots
            streams = [reader.iter_batches(BATCH_ROWS, columns=names) for reader in readers if names]
            for batches in zip(*streams, strict=True):
                for nanoseconds, microseconds, milliseconds in zip(*map(_timestamps, batches), strict=True):
                    is_in_range = (microseconds // 1000 == milliseconds).all()
                    units["ns"] &= (nanoseconds // 1_000_000 == milliseconds).all()
                    units["us"] &= (microseconds * 1000 == nanoseconds).all() and is_in_range  # modulo 2**64
                    units["ms"] &= (milliseconds * 1_000_000 == nanoseconds).all()
            if not any(units.values()):
                raise FormatError(
                    f"{file.path}: no unit holds the INT96 timestamps of {names[0]!r} exactly; convert them"
                )
    return next(unit for unit, is_exact in units.items() if is_exact)


def _timestamps(batch: Any) -> list[Any]:
    """Return the timestamps in each column of a batch, also in nested ones, as integers."""
    arrays = [leaf for column in batch.columns for leaf in leaves(column) if pa.types.is_timestamp(leaf.type)]
    return [np.asarray(array.drop_null().cast(pa.int64())) for array in arrays]
