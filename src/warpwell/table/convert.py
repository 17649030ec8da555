"""`convert` and `append`: rows of other formats into a table's folder, in bounded memory, whole or not at all.

An append writes the files of a new part into a hidden folder, makes them durable, gives the folder its name, and then
replaces ``table.json``: that commits. A crash before leaves a folder that ``table.json`` does not name, which the next
append removes. One process appends at a time: it holds a lock on ``schema.arrow``, which never changes. Who waits for
that holds the lock of the folder: the next one, whom nobody who comes later overtakes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._check import checked_callable, checked_flag, checked_path, checked_seconds
from .._os import clock, lock_descriptor, open_for_lock, unlock_descriptor
from ..errors import ArgumentError, FormatError, MissingFileError, SchemaError, SharingError
from ..graph.folder import new_folder, sync_names
from ..kv import crc32c
from ..replacing import remove, replacing, storage_full
from .column_files import FULL_ADVICE, ColumnWriter, stored_type
from .folder import DESCRIPTION, FORMAT, SCHEMA, VERSION, is_table_folder, read_description, read_schema
from .library import arrow
from .table import BATCH_ROWS, Table, open_table

Progress = Callable[[str, int, int], None]

AUTO = "auto"

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


def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    codes: str | Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Table:
    """Write a table's folder, in bounded memory; the same rows give the same bytes.

    Parameters
    ----------
    source : path, sequence of paths, or object
        A file or folder that ``pyarrow.dataset`` opens (Parquet, Feather, CSV, ORC, JSON), a stream of Arrow IPC, a
        table's folder, or an object with ``__arrow_c_stream__``: a frame of Polars or pandas, a `pyarrow.Table`, a
        relation of DuckDB.
    path : path
        The new folder, by custom ``NAME.ww``. It appears whole, or not at all.
    columns : sequence of str, optional
        Those to take, in this order; default: all.
    codes : "auto" or sequence of str
        Columns whose values are replaced by codes of one or two bytes, with a sorted dictionary: numbers, dates, times,
        strings and binary of at most 65,536 values. "auto": each column that gets smaller. Columns that are
        dictionaries in the source get codes if that makes them smaller.
    overwrite : bool
        Replace a table that is there.
    progress : callable, optional
        Called as ``progress("convert", rows, total)``; a total of 0 is unknown.

    Returns
    -------
    Table
        The new table, open.

    Raises
    ------
    ArgumentError
        The path is taken, a column does not exist, or has more values than codes.
    DTypeError
        A column is nested, other than in fixed-size lists of numbers.
    MissingFileError, FormatError, StorageFullError
        Nothing is left.
    """
    name = checked_path(path)
    checked_callable(progress, "progress")
    replace = checked_flag(overwrite, "overwrite")
    arrow()
    with open_source(source, _names(columns, "columns")) as opened:
        schema = stored_schema(opened.schema)
        modes = _modes(opened.schema, codes)
        with (
            new_folder(name, overwrite=replace, kind="table", advice=FULL_ADVICE) as part,
            storage_full(Path(name), FULL_ADVICE),
        ):
            raw = _schema_bytes(schema)
            _write(part / SCHEMA, raw)
            written = _write_part(part / "0", 0, opened, schema, modes, progress)
            description = {
                "format": FORMAT,
                "version": VERSION,
                "rows": written["rows"],
                "columns": len(schema),
                "schema_crc32c": crc32c(raw),
                "parts": [written],
            }
            _write(part / DESCRIPTION, _json(description))
    return open_table(name)


def append(
    path: str | os.PathLike[str], source: Any, *, progress: Progress | None = None, timeout: float = 60.0
) -> int:
    """Add rows to a table's folder; return how many. Tables that are open do not see them.

    Each append makes a run: a table of very many of them becomes one run by ``convert(table, path)``.

    Parameters
    ----------
    path : path
        A folder that `convert` wrote.
    source, progress
        As for `convert`. The source has the table's columns, in any order, of the same types; others are not taken.
    timeout : float
        Seconds to wait while other processes append; 0 for none.

    Raises
    ------
    SchemaError
        A column has another type.
    SharingError
        Other processes append to the table for `timeout` seconds, or another table has taken its place.
    ArgumentError, MissingFileError, FormatError, StorageFullError
        The table is as it was.
    """
    name = checked_path(path)
    checked_callable(progress, "progress")
    seconds = checked_seconds(timeout, "timeout", zero=True)
    arrow()
    folder = Path(os.path.abspath(name))
    if not is_table_folder(folder):
        raise FormatError(f"{name} is not a table's folder: make one with ww.table.convert", path=name)
    with _locked(folder, seconds) as still_ours, storage_full(folder, FULL_ADVICE):
        description = read_description(name)
        schema = read_schema(name, description)
        if len(set(schema.names)) != len(schema.names):
            raise ArgumentError(
                f"{name} has two columns of one name, so rows cannot be added by names: convert both "
                "sources into a new table"
            )
        _remove_leftovers(folder, description)
        number = max((part["folder"] for part in description["parts"]), default=-1) + 1
        modes = [_mode_of(description, k) for k in range(len(schema))]
        with open_source(source, schema.names) as opened:
            _require_types(opened.schema, schema, name)
            target = folder / str(number)
            try:
                with replacing(target) as part:
                    written = _write_part(part, number, opened, schema, modes, progress)
                sync_names(folder)
                description["parts"].append(written)
                description["rows"] += written["rows"]
                still_ours()
                with replacing(folder / DESCRIPTION) as part:
                    _write(part, _json(description))
            except BaseException:
                # an interrupt may come behind the commit: then its files stay
                if number not in {part["folder"] for part in read_description(name)["parts"]}:
                    remove(target)
                raise
            sync_names(folder)
    return int(written["rows"])


def stored_schema(schema: Any) -> Any:
    """Return the schema that a source's columns have in a folder."""
    pa = arrow()
    return pa.schema([pa.field(field.name, stored_type(field.type)) for field in schema])


def _write_part(
    folder: Path, number: int, source: TableSource, schema: Any, modes: list[str], progress: Progress | None
) -> dict[str, Any]:
    """Write the files of a part, durable; return its description."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        writers = []
        for k, field in enumerate(schema):
            writers.append(ColumnWriter(folder, k, field.name, field.type, modes[k]))
            stack.callback(writers[-1].close)
            writers[-1].begin()
        rows = 0
        for batch in source.batches:
            for writer, column in zip(writers, batch.columns, strict=True):
                writer.append(column)
            rows += batch.num_rows
            if progress is not None:
                progress("convert", rows, source.rows)
        columns = [writer.finish() for writer in writers]
    sync_names(folder)
    return {"folder": number, "rows": rows, "columns": columns}


def _modes(schema: Any, codes: Any) -> list[str]:
    """Return for each column whether it gets codes: "no", "auto" or "must"."""
    types = arrow().types
    if isinstance(codes, str) and codes == AUTO:
        return [AUTO] * len(schema)
    if isinstance(codes, str):
        raise ArgumentError(f'codes is {codes!r:.60}: give "auto", or a list of names of columns', name="codes")
    wanted = set(_names(codes, "codes") or ())
    missing = sorted(wanted - set(schema.names))
    if missing:
        raise ArgumentError(f"codes names {missing[0]!r}, which is not a column that is taken", name="codes")
    return ["must" if field.name in wanted else AUTO if types.is_dictionary(field.type) else "no" for field in schema]


def _mode_of(description: dict[str, Any], number: int) -> str:
    """Return whether rows that are added get codes in a column: where others have them."""
    return AUTO if any("codes" in part["columns"][number]["files"] for part in description["parts"]) else "no"


def _names(names: Any, option: str) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{option} is {names!r:.60}: give a list of names of columns", name=option)
    return list(names)


def _require_types(given: Any, schema: Any, name: str) -> None:
    for field, there in zip(stored_schema(given), schema, strict=True):
        if field.type != there.type:
            raise SchemaError(
                f"column {field.name!r} of the source is {field.type}, and of {name} {there.type}: cast it first",
                field=field.name,
            )


def _schema_bytes(schema: Any) -> bytes:
    pa = arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema):
        pass
    return bytes(sink.getvalue().to_pybytes())


def _json(description: dict[str, Any]) -> bytes:
    return (json.dumps(description, indent=1) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(folder: Path, description: dict[str, Any]) -> None:
    """Remove what appends left that did not end."""
    named = {str(part["folder"]) for part in description["parts"]}
    for one in folder.iterdir():
        unfinished = one.name.startswith(".") and one.name.endswith((".part", ".old"))
        if unfinished or (re.fullmatch("[0-9]+", one.name) and one.name not in named):
            remove(one)


@contextlib.contextmanager
def _locked(folder: Path, seconds: float) -> Iterator[Callable[[], None]]:
    """Hold the lock of who appends; yield a function that raises if another table has taken the place."""
    deadline = clock.monotonic() + seconds
    turn = os.open(folder, os.O_RDONLY)
    try:
        file = open_for_lock(folder / SCHEMA)
        try:
            next_one = True
            with contextlib.suppress(OSError):  # of NFS, where folders have no locks: whoever comes first is next
                next_one = lock_descriptor(turn, deadline)
            if not (next_one and lock_descriptor(file, deadline)):
                raise SharingError(f"somebody else appends to {folder} just now: try again later", path=folder)
        except BaseException:
            os.close(file)
            raise
    finally:
        with contextlib.suppress(OSError):
            unlock_descriptor(turn)
        os.close(turn)
    try:

        def still_ours() -> None:
            mine, there = os.fstat(file), os.stat(folder / SCHEMA)
            if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
                raise SharingError(f"{folder} was replaced while rows were added to it: add them again", path=folder)

        still_ours()
        yield still_ours
    finally:
        unlock_descriptor(file)
        os.close(file)


# -- sources ----------------------------------------------------------------------------------------------------


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
        raise FormatError(f"{path} is not a file or folder", path=path)
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
    first_path = paths if isinstance(paths, str) else paths[0]
    if os.path.isdir(first_path):
        inside = sorted(
            os.path.join(folder, name)
            for folder, _, names in os.walk(first_path)
            for name in names
            if not name.startswith((".", "_"))
        )
        if not inside:
            raise FormatError(
                f"{first_path} has no files: give a folder of Parquet, CSV or Feather files", path=first_path
            )
        kind = _kind(inside[0])
        return dataset.dataset(first_path, format=kind, partitioning="hive", exclude_invalid_files=False)
    kind = _kind(first_path)
    if first_path.endswith(".tsv") or first_path.removesuffix(".gz").endswith(".tsv"):
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
    suffixes = os.path.basename(path).lower().split(".")[1:]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    if suffixes and suffixes[-1] == "tsv":
        return "csv"
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
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
        count = f"{len(found)} columns" if found else "no column"
        names = ", ".join(map(repr, schema.names[:20])) + (", ..." if len(schema.names) > 20 else "")
        raise ArgumentError(f"{where} has {count} {name!r:.60}: it has {names}", name="columns")
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
