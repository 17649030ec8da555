"""`open_source`: record batches of whatever pyarrow reads, or of an object with ``__arrow_c_stream__``."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, FormatError, MissingFileError
from .folder import is_table_folder
from .library import arrow
from .table import BATCH_ROWS, open_table

_MAGIC = {b"PAR1": "parquet", b"ARROW1": "ipc", b"ORC": "orc"}
_SUFFIXES = {
    "parquet": "parquet",
    "pq": "parquet",
    "feather": "ipc",
    "arrow": "ipc",
    "ipc": "ipc",
    "orc": "orc",
    "csv": "csv",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
}
_PACKED = {"gz", "bz2", "xz", "zst", "lz4"}
_CONTINUES = b"\xff\xff\xff\xff"


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
def open_source(source: Any, columns: Sequence[str] | None) -> Iterator[TableSource]:
    """Open a source of rows, and close it after the block.

    Parameters
    ----------
    source : path, sequence of paths, pyarrow.dataset.Dataset, or object with ``__arrow_c_stream__``
    columns : sequence of str, optional
        Those to take, in this order.

    Raises
    ------
    MissingFileError, FormatError, ArgumentError
        pyarrow's errors while batches are read become FormatError as well.
    """
    pa = arrow()
    with contextlib.ExitStack() as stack:
        name = str(source) if isinstance(source, str | os.PathLike) else type(source).__name__
        stack.enter_context(_as_format_errors(name))
        if isinstance(source, str | os.PathLike):
            found = _of_path(os.fspath(source), columns, stack)
        elif isinstance(source, list | tuple) and source and all(isinstance(p, str | os.PathLike) for p in source):
            found = _of_dataset(_dataset([os.fspath(path) for path in source]), columns)
        elif hasattr(source, "__arrow_c_stream__"):
            found = _of_stream(pa.RecordBatchReader.from_stream(source), columns, _length(source))
        elif hasattr(source, "__arrow_c_array__"):
            batch = pa.record_batch(source)
            found = _of_stream(pa.RecordBatchReader.from_batches(batch.schema, [batch]), columns, len(batch))
        elif hasattr(source, "to_batches") and hasattr(source, "count_rows"):
            found = _of_dataset(source, columns)
        else:
            raise ArgumentError(
                f"{name} is no source of rows: give a path, or an object with __arrow_c_stream__ (a frame of Polars or "
                "pandas, a relation of DuckDB, a pyarrow.Table)",
                name="source",
            )
        yield found


def _of_path(path: str, columns: Sequence[str] | None, stack: contextlib.ExitStack) -> TableSource:
    if not os.path.exists(path):
        raise MissingFileError(f"{path} does not exist: check the path", path=path)
    if is_table_folder(path):
        table = stack.enter_context(open_table(path))
        numbers: Any = None if columns is None else [_index(table.schema, name, path) for name in columns]
        schema = table.schema if numbers is None else arrow().schema([table.schema.field(k) for k in numbers])
        return TableSource(schema, table.rows, table.batches(columns=numbers))
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise FormatError(f"{path} is neither a file nor a folder: name one", path=path)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            head = file.read(8)
        if head.startswith(_CONTINUES):
            mapped = stack.enter_context(arrow().OSFile(path))
            return _of_stream(arrow().ipc.open_stream(mapped), columns, 0)
    return _of_dataset(_dataset(path), columns)


def _dataset(paths: str | list[str]) -> Any:
    """Return the `pyarrow.dataset.Dataset` of a file, a folder of files, or several files."""
    dataset = importlib.import_module("pyarrow.dataset")
    one = paths if isinstance(paths, str) else paths[0]
    if os.path.isdir(one):
        inside = sorted(
            os.path.join(folder, name)
            for folder, _, names in os.walk(one)
            for name in names
            if not name.startswith((".", "_"))
        )
        if not inside:
            raise FormatError(f"{one} has no files: give a folder of Parquet, CSV or Feather files", path=one)
        kind = _kind(inside[0])
        return dataset.dataset(one, format=kind, partitioning="hive", exclude_invalid_files=False)
    kind = _kind(one)
    if one.endswith(".tsv") or one.removesuffix(".gz").endswith(".tsv"):
        csv = importlib.import_module("pyarrow.csv")
        kind = dataset.CsvFileFormat(parse_options=csv.ParseOptions(delimiter="\t"))
    return dataset.dataset(paths, format=kind)


def _kind(path: str) -> Any:
    """Return the format of a file as pyarrow names it, by its first bytes or its name."""
    with open(path, "rb") as file:
        head = file.read(8)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    words = os.path.basename(path).lower().split(".")[1:]
    if words and words[-1] in _PACKED:
        words.pop()
    if words and words[-1] == "tsv":
        return "csv"
    if words and words[-1] in _SUFFIXES:
        return _SUFFIXES[words[-1]]
    raise FormatError(
        f"{path} has no known format: give Parquet, Feather, ORC, .csv, .tsv or .json, or read it with "
        "another library and give its frame",
        path=path,
    )


def _of_dataset(dataset: Any, columns: Sequence[str] | None) -> TableSource:
    schema = dataset.schema
    if columns is not None:
        schema = arrow().schema([schema.field(_index(schema, name, "the source")) for name in columns])
    rows = 0
    if getattr(getattr(dataset, "format", None), "default_extname", "") in ("parquet", "ipc", "feather"):
        rows = dataset.count_rows()  # of the metadata; of text everything would be read
    # few pieces ahead: a batch of wide rows is large
    batches = dataset.to_batches(columns=schema.names, batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1)
    return TableSource(schema, rows, batches)


def _of_stream(reader: Any, columns: Sequence[str] | None, rows: int) -> TableSource:
    schema = reader.schema
    if columns is None:
        return TableSource(schema, rows, iter(reader))
    numbers = [_index(schema, name, "the source") for name in columns]
    chosen = arrow().schema([schema.field(k) for k in numbers])
    return TableSource(chosen, rows, (batch.select(numbers) for batch in reader))


def _index(schema: Any, name: str, where: str) -> int:
    found = schema.get_all_field_indices(name) if isinstance(name, str) else []
    if len(found) != 1:
        what = f"{len(found)} columns" if found else "no column"
        names = ", ".join(map(repr, schema.names[:20])) + (", ..." if len(schema.names) > 20 else "")
        raise ArgumentError(f"{where} has {what} {name!r:.60}: it has {names}", name="columns")
    return int(found[0])


def _length(source: Any) -> int:
    """Return how many rows a frame has, or 0."""
    try:
        return len(source)
    except Exception:
        return 0


@contextlib.contextmanager
def _as_format_errors(name: str) -> Iterator[None]:
    """Turn pyarrow's complaints about a source into FormatError."""
    try:
        yield
    except arrow().ArrowException as error:
        reason = str(error).split("\n")[0][:300]
        raise FormatError(
            f"{name} cannot be read ({reason}): check it, or read it with another library and give its frame", path=name
        ) from error
