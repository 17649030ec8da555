"""`convert` and `append`: rows of other formats into Arrow files, in bounded memory, completely or not at all.

A table of one file appears by its rename. An append renames a new file into the table's folder and then replaces
``parts.json``, which commits; the next append removes a file that ``parts.json`` does not name. One process appends at
a time, under a lock of the first file, which never changes. The process that waits for this lock holds the lock of the
first file's zones, so that no later process overtakes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._check import checked_callable, checked_flag, checked_path, checked_seconds
from .._os import clock, file_lock
from ..errors import ArgumentError, DTypeError, FormatError, MissingFileError, SchemaError, SharingError
from ..replacing import (
    durable_file,
    new_folder,
    remove,
    replacing,
    require_replaceable,
    require_writable,
    storage_full,
    sync_names,
)
from . import arrow as pa
from .layout import storage_of
from .library import column_number, line_of
from .sources import FORMATS, TableSource, open_source
from .table import PARTS, SUFFIXES, Table, is_table_folder, open_table, read_parts, write_parts
from .zones import BLOCK_ROWS, FILE_ID, compute_zones, write_zones
from .zones import SUFFIX as ZONES

Progress = Callable[[str, int, int], None]

BATCH_BYTES = 256 << 20
"""Size of a record batch in bytes: large, so that kernels see few batches; a conversion has two in memory."""
MAX_CODES = 1 << 16
"""Maximum number of values of a column of ``codes=``: codes take two bytes."""
FULL_ADVICE = ". Nothing is left of it. Free some space, or write to another disk."
_log = logging.getLogger(__package__)


def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str | int] | None = None,
    codes: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Table:
    """Write a table, in bounded memory.

    Parameters
    ----------
    source : path, sequence of paths, or object
        Files of Parquet, Feather, CSV, ORC or JSON, or a folder of them; a stream of Arrow IPC; a table's folder; or an
        object with ``__arrow_c_stream__``: a frame of Polars or pandas, a `pyarrow.Table`, a relation of DuckDB. A
        column that some files lack is null there.
    path : path
        The new table. A name that ends in ``.arrow``, ``.feather`` or ``.ipc`` becomes one file; any other name, by
        custom ``NAME.ww``, a folder, to which `append` adds files. It appears completely or not at all.
    columns : sequence of str or int, optional
        Names or numbers of those to take, in this order; default: all. A column of a type that Arrow files do not hold
        is left out, and the log names it.
    codes : sequence of str
        Columns that become dictionaries with codes of two bytes: numbers, dates, times, strings and binary of at most
        65,536 values. Columns that are dictionaries in the source stay dictionaries.
    overwrite : bool
        Replace an existing table.
    progress : callable, optional
        Called as ``progress("convert", rows, total)``; a total of 0 is unknown.

    Returns
    -------
    Table
        The new table, open.

    Raises
    ------
    ArgumentError
        The path exists, a column does not, or has more values than codes.
    DTypeError
        No column has a type that Arrow files hold.
    MissingFileError, FormatError, StorageFullError
        Nothing is left.
    """
    name = checked_path(path)
    target = Path(os.path.abspath(name))
    checked_callable(progress, "progress")
    checked_flag(overwrite, "overwrite")

    if target.suffix[1:] in FORMATS and target.suffix not in SUFFIXES:
        raise ArgumentError(f"{path} cannot be the name of a table: choose NAME.arrow for a file, NAME.ww for a folder")
    require_free = functools.partial(require_replaceable, target, overwrite, _is_table, "a table")
    require_free()
    has_names = columns is not None and all(isinstance(column, str) for column in columns)
    opened = open_source(source, columns if has_names else None)
    with storage_full(target, FULL_ADVICE):
        stored = _with_stored_types(opened, columns, codes)
        if target.suffix in SUFFIXES:
            _write_file(target, stored, progress, require_free)
            sync_names(target.parent)
        else:
            with new_folder(target, require_free) as part:
                write_parts(part, [_write_file(part / "0.arrow", stored, progress)])
    return open_table(name)


def append(
    path: str | os.PathLike[str], source: Any, *, progress: Progress | None = None, timeout: float = 60.0
) -> int:
    """Add the rows of a source to a table's folder, as another file; return how many. Open tables do not see them.

    Parameters
    ----------
    path : path
        A folder that `convert` wrote.
    source, progress
        As for `convert`. The source has the table's columns, in any order. Numbers and times of another type are
        stored if that is exact, and columns of type null as nulls. Columns of CSV that are text in the table are text.
    timeout : float
        Seconds to wait while other processes append; 0 for none.

    Raises
    ------
    SchemaError
        The source has another column, or a column of a type that does not fit.
    SharingError
        Other processes append to the table for `timeout` seconds, or the table was replaced.
    ArgumentError, MissingFileError, FormatError, StorageFullError
        The table is as it was.
    """
    name = checked_path(path)
    checked_callable(progress, "progress")
    seconds = checked_seconds(timeout, "timeout", zero=True)
    folder = Path(os.path.abspath(name))
    if not os.path.exists(folder):
        raise MissingFileError(f"{name} does not exist: create it with ww.table.convert, without --append", path=name)
    if not is_table_folder(folder):
        raise FormatError(
            f"{name} is not a table's folder: convert it to a folder with ww.table.convert({name!r}, 'NAME.ww'), and "
            "append to NAME.ww",
            path=name,
        )
    require_writable(folder)
    with _locked(folder, seconds), storage_full(folder, FULL_ADVICE):
        parts = read_parts(name)
        with open_table(name) as table:
            schema = table.schema
        if len(set(schema.names)) != len(schema.names):
            raise ArgumentError(
                f"{name} has two columns of one name, so rows cannot be added by names: convert both "
                "sources into a new table"
            )
        _remove_leftovers(folder, parts)
        number = 1 + max(int(Path(part["file"]).stem) for part in parts)
        text = [field.name for field in schema if _plain_type(field.type) == pa.string()]
        opened = open_source(source, text=text)
        stored = _as_table(opened, schema, name)
        try:
            added = _write_file(folder / f"{number}.arrow", stored, progress)
            if read_parts(name) != parts:
                raise _replaced(folder)
            write_parts(folder, [*parts, added])
        except BaseException:
            # An interrupt may arrive after the commit: then the files are kept.
            _remove_leftovers(folder, read_parts(name))
            raise
        sync_names(folder)
    return int(added["rows"])


# -- files -------------------------------------------------------------------------------------------------------------


def _write_file(
    target: Path, source: TableSource, progress: Progress | None, require_free: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write an Arrow file and its zones, durably; return its description for ``parts.json``.

    `require_free` is called before the file appears, and may raise.
    """
    file_id = os.urandom(12).hex()
    with replacing(f"{target}{ZONES}") as zones, replacing(target) as part:
        with _new_file(part, source.schema, file_id) as out:
            zone_maps = compute_zones(source.schema, _written(source, out, progress))
        if out.stats.num_dictionary_deltas:  # Polars reads no file in which a later batch adds to a dictionary
            with pa.memory_map(str(part)) as file, replacing(part) as whole:
                with _new_file(whole, source.schema, file_id) as out:
                    reader = pa.ipc.open_file(file)  # the batches of the file that was read have complete dictionaries
                    for number in range(reader.num_record_batches):
                        out.write_batch(reader.get_batch(number))
        write_zones(str(part), zones, file_id, zone_maps)
        require_free()
    return {"file": target.name, "rows": zone_maps.rows, "id": file_id}


@contextlib.contextmanager
def _new_file(path: Path, schema: Any, file_id: str) -> Iterator[Any]:
    """Yield a writer of record batches, and make the file durable."""
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with durable_file(path) as file:
        with pa.ipc.new_file(file, schema, options=options, metadata={FILE_ID: file_id}) as writer:
            yield writer


def _written(source: TableSource, out: Any, progress: Progress | None) -> Iterator[Any]:
    """Write the rows of a source in batches of about `BATCH_BYTES`, and yield each of them as a table.

    Batches are complete blocks of zones. The dictionary of a column begins with all values of earlier batches.
    """
    pending: list[Any] = []
    dictionaries: list[list[Any]] = [[] for _ in source.schema]
    nbytes = rows = 0
    for batch in source.batches:
        pending.append(batch)
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        if progress is not None:
            progress("convert", rows, source.rows)
        if nbytes >= BATCH_BYTES:
            table = pa.Table.from_batches(pending, source.schema)
            complete_rows = len(table) // BLOCK_ROWS * BLOCK_ROWS
            yield _write_rows(out, dictionaries, table.slice(0, complete_rows))
            table = table.slice(complete_rows)
            pending, nbytes = table.to_batches(), table.nbytes
    yield _write_rows(out, dictionaries, pa.Table.from_batches(pending, source.schema))


def _write_rows(out: Any, dictionaries: list[list[Any]], table: Any) -> Any:
    """Write rows and return them; add their values to `dictionaries`: per column, arrays without rows."""
    columns = []
    for number, field in enumerate(table.schema):
        chunks = [*dictionaries[number], *table.column(number).chunks]
        try:
            unified = pa.chunked_array(chunks, field.type).unify_dictionaries()
        except pa.ArrowInvalid:  # the codes are too short
            raise ArgumentError(
                f"column {field.name!r} has more than {MAX_CODES:,} values, too many for codes: leave it out of codes=",
                name="codes",
            ) from None
        if pa.types.is_dictionary(field.type) and chunks:
            dictionaries[number] = [unified.chunk(0).slice(0, 0)]
            if field.type.ordered and len({len(chunk.dictionary) for chunk in [*chunks, unified.chunk(0)]}) > 1:
                problem = f"column {field.name!r} is an ordered dictionary whose values change"
                raise FormatError(f"{problem}: cast it to its values")
        columns.append(unified)
    rows = pa.Table.from_arrays(columns, schema=table.schema).combine_chunks()
    out.write_table(rows)
    return rows


# -- types -------------------------------------------------------------------------------------------------------------


def stored_type(kind: Any, inside: bool = False) -> Any:
    """Return the type of a column in a table's file: the source's type, with views and run ends written out.

    Dictionaries have codes of 32 bits, because other batches may add values; `inside` of another type, the values
    replace a dictionary.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        stored = stored_type(kind.storage_type, inside)
        return kind if stored == kind.storage_type else stored
    if types.is_dictionary(kind):
        values = stored_type(kind.value_type, True)
        return values if inside or types.is_nested(values) else pa.dictionary(pa.int32(), values, kind.ordered)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.string() if types.is_string_view(kind) else pa.binary()
    if types.is_run_end_encoded(kind):
        return stored_type(kind.value_type, inside)
    if types.is_struct(kind):
        return pa.struct([field.with_type(stored_type(field.type, True)) for field in kind])
    if types.is_map(kind):
        return pa.map_(stored_type(kind.key_type, True), stored_type(kind.item_type, True), kind.keys_sorted)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(stored_type(kind.value_type, True))
        if types.is_large_list(kind):
            return pa.large_list(item)
        return pa.list_(item, kind.list_size if types.is_fixed_size_list(kind) else -1)
    if types.is_union(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        raise pa.ArrowNotImplementedError(str(kind))  # other libraries do not read such files
    return kind


def _stored(array: Any, kind: Any) -> Any:
    """Return an array converted to a stored type, without nulls among the values of a dictionary."""
    types = pa.types
    if isinstance(array, pa.ExtensionArray) and array.type != kind:
        array = array.storage
    if types.is_run_end_encoded(array.type):
        array = pa.compute.run_end_decode(array)
    if not types.is_dictionary(kind):
        if types.is_dictionary(array.type):
            return _stored(array.dictionary, kind).take(array.indices)
        return array if array.type == kind else array.cast(kind)
    if not types.is_dictionary(array.type):
        array = array.cast(kind.value_type).dictionary_encode()
    values, codes = _stored(array.dictionary, kind.value_type), array.indices
    if values.null_count:
        codes, values = pa.compute.index_in(values, values.drop_null()).take(codes), values.drop_null()
    return pa.DictionaryArray.from_arrays(codes.cast(kind.index_type), values, ordered=kind.ordered)


def _with_stored_types(source: TableSource, columns: Sequence[str | int] | None, codes: Sequence[str]) -> TableSource:
    """Return some columns of a source with the types of a table's file; others are left out and named in the log."""
    schema = source.schema
    chosen = [
        column_number(schema, name, "the source") for name in (range(len(schema)) if columns is None else columns)
    ]
    for name in codes:
        if name not in [schema.names[number] for number in chosen]:
            raise ArgumentError(f"codes names {name!r}, which is not a column of the new table", name="codes")
    numbers, fields, left_out = [], [], []
    for number in chosen:
        field = schema.field(number)
        try:
            kind = stored_type(field.type)
            _stored(pa.nulls(0, field.type), kind)
        except pa.ArrowException:
            left_out.append(f"{field.name!r} ({field.type})")
            continue
        if field.name in codes:
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if pa.types.is_nested(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
                raise DTypeError(
                    f"column {field.name!r} of {kind} cannot have codes, which are for numbers, dates, times, "
                    "strings and binary: leave it out of codes="
                )
            kind = pa.dictionary(pa.uint16(), kind)
        numbers.append(number)
        fields.append(field.with_type(kind))
    if left_out:
        _log.warning("columns are left out because tables do not have their types: %s", ", ".join(left_out))
    if left_out and not fields:
        raise DTypeError(f"tables do not have the types of the columns {', '.join(left_out)}: cast them")
    return _in_schema(source, numbers, pa.schema(fields, schema.metadata))


def _in_schema(source: TableSource, numbers: Sequence[int], schema: Any) -> TableSource:
    """Return a source with some of its columns, in the types of a schema."""

    def batches() -> Iterator[Any]:
        for batch in source.batches:
            columns = []
            for number, field in zip(numbers, schema, strict=True):
                try:
                    columns.append(_stored(batch.column(number), field.type))
                except pa.ArrowException as error:
                    raise FormatError(
                        f"column {field.name!r} cannot be stored as {field.type}: {line_of(error)}"
                    ) from None
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return TableSource(schema, source.rows, batches())


def _as_table(source: TableSource, schema: Any, name: str) -> TableSource:
    """Return the rows of a source in the schema of a table.

    Raises
    ------
    SchemaError
        The source has another column, or one of a type that does not fit.
    """
    extra = [column for column in source.schema.names if column not in schema.names]
    if extra:
        raise SchemaError(f"{name} has no column {extra[0]!r} of the source: leave it out", field=extra[0])
    numbers = [column_number(source.schema, column, "the source") for column in schema.names]
    for number, stored in zip(numbers, schema, strict=True):
        kind = source.schema.field(number).type
        if not _fits(_plain_type(kind), _plain_type(stored.type)):
            raise SchemaError(
                f"column {stored.name!r} of the source is {kind}, but of {name} {stored.type}: cast the column "
                "in the source, or convert all sources into a new table at once",
                field=stored.name,
            )
    return _in_schema(source, numbers, schema)


def _fits(kind: Any, stored: Any) -> bool:
    """Return whether a safe cast from one type to another keeps or refuses each value."""
    types = pa.types
    if kind == stored or types.is_null(kind):
        return True
    if types.is_floating(kind) and types.is_floating(stored):
        return bool(kind.bit_width < stored.bit_width)
    if types.is_timestamp(stored):
        return bool(stored.tz == (None if types.is_date32(kind) else getattr(kind, "tz", "")))
    # Casts to float16 are not checked.
    return all(types.is_integer(each) or types.is_float32(each) or types.is_float64(each) for each in (kind, stored))


def _plain_type(kind: Any) -> Any:
    """Return the type of the values of a column, with short offsets."""
    kind = storage_of(stored_type(storage_of(kind), True))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


# -- folders -----------------------------------------------------------------------------------------------------------


def _is_table(path: Path) -> bool:
    """Return whether a path is a table."""
    if path.is_dir():
        return is_table_folder(path)
    with open(path, "rb") as file:
        return file.read(6) == b"ARROW1"


def _remove_leftovers(folder: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Remove files of appends that did not finish."""
    files = {PARTS, *(part["file"] + suffix for part in parts for suffix in ("", ZONES))}
    for path in folder.iterdir():
        if path.name not in files:
            remove(path)


@contextlib.contextmanager
def _locked(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the lock for appending; wait in the order of arrival."""
    part, deadline = read_parts(str(folder))[0], clock.monotonic() + seconds
    first = folder / part["file"]
    with contextlib.ExitStack() as stack:
        with file_lock(Path(f"{first}{ZONES}"), seconds) as is_next:
            is_locked = is_next and stack.enter_context(file_lock(first, deadline - clock.monotonic()))
        if not is_locked:
            raise SharingError(f"another process is appending to {folder}; retry later", path=folder)
        if read_parts(str(folder))[0] != part:
            raise _replaced(folder)
        yield


def _replaced(folder: Path) -> SharingError:
    return SharingError(f"{folder} was replaced while rows were added to it: add them again", path=folder)
