"""`convert` and `append`: rows of other formats into a table's folder, in bounded memory, whole or not at all.

An append writes the files of a new part into a hidden folder, makes them durable, gives the folder its name, and then
replaces ``table.json``: that commits. A crash before leaves a folder that ``table.json`` does not name, which the next
append removes. One process appends at a time: it holds a lock on ``schema.arrow``, which never changes. Who waits for
that holds the lock of the folder: the next one, whom nobody who comes later overtakes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._check import checked_callable, checked_flag, checked_path, checked_seconds
from .._os import clock, lock_descriptor, open_for_lock, unlock_descriptor
from ..errors import ArgumentError, FormatError, SchemaError, SharingError
from ..graph.folder import new_folder, sync_names
from ..kv import crc32c
from ..replacing import remove, replacing, storage_full
from .column_files import FULL_ADVICE, ColumnWriter, stored_type
from .folder import DESCRIPTION, FORMAT, SCHEMA, VERSION, is_table_folder, read_description, read_schema
from .library import arrow
from .sources import TableSource, open_source
from .table import Table, open_table

Progress = Callable[[str, int, int], None]

AUTO = "auto"


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
