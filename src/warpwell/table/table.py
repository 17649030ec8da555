"""`open_table`, and `Table`: columns of an Arrow file, or of a folder of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from .._check import checked_integer, checked_path, imported
from ..array import Array
from ..errors import ClosedError, FormatError, MissingFileError, SharingError, StoreVersionError
from ..json_file import read_json
from ..replacing import durable_file, replacing, storage_full
from . import arrow as pa
from .arrow_file import ArrowFile
from .column import Column, ColumnRun, bounds
from .extent import Extent
from .library import column_number, line_of
from .where import Selection, where
from .zones import BLOCK_ROWS, SUFFIX, PartZones, compute_zones, write_zones

BATCH_ROWS = 8 * BLOCK_ROWS

PARTS = "parts.json"
"""Name of the file in a table's folder that lists the folder's Arrow files, in order."""
SUFFIXES = (".arrow", ".feather", ".ipc")
"""File name endings of tables that are a single file."""
_FORMAT = {"format": "warpwell table", "version": 2}


class Table:
    """Columns on storage; opening loads none of them. See `open_table`.

    ``table["name"]`` and ``table[3]`` are columns (`Column`), and ``len(table)`` is the number of rows. Pickling stores
    the table's path, and unpickling opens the table again.

    Attributes
    ----------
    path : str
    schema : pyarrow.Schema
    rows : int
    """

    def __init__(
        self, path: str, files: Sequence[ArrowFile], options: dict[str, Any], direct: bool | None = None
    ) -> None:
        self.path = path
        self.schema = _without_ranges(files[0].schema)
        self._starts = [0, *accumulate(file.rows for file in files)]
        self.rows = self._starts[-1]
        self._files = files
        self._options = options
        self._direct = direct
        self._columns: dict[int, Column] = {}
        self._arrays: dict[tuple[str, int, int], Array] = {}
        self._closed = False
        self._finalizer = weakref.finalize(self, _drop, files, self._arrays)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        return f"<{state}warpwell.table.Table {self.path!r} of {self.rows:,} rows and {len(self.names):,} columns>"

    def __len__(self) -> int:
        return self.rows

    def __bool__(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema.names)

    def __contains__(self, name: object) -> bool:
        return name in self.schema.names

    def __getitem__(self, name: str | int) -> Column:
        self.require_open()
        number = column_number(self.schema, name, self.path)
        if number not in self._columns:
            field = self.schema.field(number)
            self._columns[number] = Column(self, field, number)
        return self._columns[number]

    def arrow(self, first: int = 0, rows: int | None = None, columns: list[str | int] | None = None) -> Any:
        """Return rows [first, first + rows) of some columns, or all, as a `pyarrow.Table`; see `Column.arrow`."""
        self.require_open()
        start, end = bounds(first, rows, self.rows)
        numbers = (
            range(len(self.names))
            if columns is None
            else [column_number(self.schema, name, self.path) for name in columns]
        )
        chunks = [self[number].chunks(start, end) for number in numbers]
        fields = [self.schema.field(number) for number in numbers]
        return pa.Table.from_arrays(chunks, schema=pa.schema(fields, self.schema.metadata))

    def head(self, rows: int = 5) -> Any:
        """Return the first rows, at most `rows`, as a `pyarrow.Table`."""
        return self.arrow(0, min(checked_integer(rows, "rows", minimum=0), self.rows))

    def to_pandas(self) -> Any:
        """Return all rows as a `pandas.DataFrame`, with the index of the data frame that was converted.

        Rows of a ``RangeIndex`` are numbered from 0.

        Raises
        ------
        FormatError
            The file describes the index incorrectly, or pandas does not have a column's type.
        """
        imported("pandas")
        rows = self.arrow()
        try:
            return rows.to_pandas()
        except (pa.ArrowException, ValueError, LookupError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{self.path} cannot become a data frame of pandas ({line_of(error)}): use Table.arrow, or write the "
                "file without the metadata b'pandas'",
                path=self.path,
            ) from None

    def batches(self, rows: int = BATCH_ROWS, columns: list[str | int] | None = None) -> Iterator[Any]:
        """Yield the rows as `pyarrow.RecordBatch` of at most `rows` rows each."""
        checked_integer(rows, "rows")
        for part in slices(self, rows, columns):
            yield from part.to_batches()

    def where(self, filters: Any) -> Selection:
        """Return the rows that match. Only columns that the filters name are read, and no query needs a compilation.

        Of columns in a conjunction, the first one is read in all blocks that may match, and each later one only at rows
        that still match.

        Parameters
        ----------
        filters : list or polars.Expr
            Filters as in pyarrow: ``[("a", ">", 3), ("b", "in", [1, 2])]``, a list of conditions that must all be true,
            or a list of such lists, of which one must be true. The operators are =, ==, !=, <, >, <=, >=, in, not in,
            and without a value is null and is not null. Or a Polars expression that is computed row by row: Warpwell
            evaluates comparisons of a column with values, and then Polars evaluates the rest of the expression on the
            rows that still match.

        Returns
        -------
        Selection

        Raises
        ------
        ArgumentError
            There is no such column or operator, or the column's type cannot represent a value exactly.
        DTypeError
            Columns of this type are not compared.
        FormatError, MediumError
            The file is damaged, was truncated, or cannot be read.

        Notes
        -----
        In filters, a null matches no comparison, not even ``!=`` and ``not in`` (in pyarrow, a null matches ``not
        in``). Floats compare as in IEEE 754: NaN is equal to nothing, not even to a NaN in a list, and zeros of both
        signs are equal. For a float32 column, pass ``numpy.float32(0.1)``, because the column's type cannot represent
        0.1 exactly. Compare timestamps that have a time zone with a `datetime.datetime` that has one, decimals with a
        `decimal.Decimal`, and dictionary columns with their values. Strings compare by code points. Polars expressions
        compare as Polars does: NaN is equal to itself and greater than all numbers.
        """
        self.require_open()
        return where(self, filters)

    def runs(self, number: int) -> tuple[ColumnRun, ...]:
        """Return the runs of a column by its number."""
        return tuple(
            replace(run, first=run.first + first) if first else run
            for first, file in zip(self._starts, self._files, strict=False)
            for run in file.runs(number)
        )

    def zones(self, number: int) -> tuple[PartZones, ...]:
        """Return the zone maps of a column by its number, one for each file that has rows."""
        return tuple(
            PartZones(first, file.rows, file.zones(number))
            for first, file in zip(self._starts, self._files, strict=False)
            if file.rows
        )

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def array_of(self, extent: Extent) -> Array:
        """Return an extent's array for kernels. The first call opens it with the table's options; `close` closes it."""
        self.require_open()
        key = extent.path, extent.offset, extent.nbytes
        array = self._arrays.get(key)
        if array is None:
            opened = extent.array(**self._options)
            array = self._arrays.setdefault(key, opened)
            if array is not opened:  # another thread was faster
                opened.close()
            if self._closed:  # another thread closed the table, and may not have seen this array
                with contextlib.suppress(SharingError):  # a launch uses the array, and closes it at its end
                    array.close()
                self.require_open()
        return array

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(open_table, self.path, direct=self._direct, **self._options), ()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.close()

    @property
    def closed(self) -> bool:
        """Whether the table is closed."""
        return self._closed

    def require_open(self) -> None:
        """Raise ClosedError if the table is closed."""
        if self._closed:
            raise ClosedError(f"table {self.path} is closed: open it again")

    def close(self) -> None:
        """Close the files and the arrays of kernels (idempotent). Views of NumPy and Arrow stay valid.

        Raises
        ------
        MediumError
            A file was truncated while it was open, or could not be read: values may be zeros.
        """
        if self._closed:
            return
        for key in list(self._arrays):
            self._arrays[key].close()
            del self._arrays[key]
        self._closed = True
        self._finalizer.detach()
        try:
            for file in self._files:
                file.require()
        finally:
            for file in self._files:
                file.close()


def slices(table: Table, rows: int = BATCH_ROWS, columns: list[str | int] | None = None) -> Iterator[Any]:
    """Yield the rows of a table as `pyarrow.Table` of `rows` rows each; the last one may have fewer."""
    for first in range(0, table.rows, rows):
        yield table.arrow(first, min(rows, table.rows - first), columns)


def open_table(path: str | os.PathLike[str], *, direct: bool | None = None, **options: Any) -> Table:
    """Open a table without loading its columns.

    Parameters
    ----------
    path : path
        An uncompressed Arrow IPC file or stream (Feather; ``.arrow`` files of Hugging Face's data sets), which is read
        in place, or a folder that `convert` wrote.
    direct : bool, optional
        Whether `Table.where` and `scan` read rows past the page cache, in units of the drive's block size, 512 bytes or
        4 KiB. Fewer bytes are read then, but the next query does not find them in the page cache. Default: rows of a
        column are read in this way if they fill less than a quarter of the 4 KiB pages that contain them.
    **options
        Options of `warpwell.open` for the arrays of `Column.values` and `Column.valid`, such as ``device``, ``tier``
        and ``cache``.

    Returns
    -------
    Table

    Raises
    ------
    MissingFileError, FormatError
        Nothing is left open.
    ArgumentError
        pyarrow is not installed.
    """
    name = checked_path(path)
    imported("pyarrow", "table")
    parts = table_parts(name)
    files: list[ArrowFile] = []
    try:
        for part in parts:
            files.append(file := ArrowFile(part["path"], direct))
            if file.rows != part.get("rows", file.rows) or file.id != part.get("id", file.id):
                raise FormatError(f"{file.path} is not the file that {PARTS} names: open the table again", path=name)
            if not file.schema.equals(files[0].schema):
                raise FormatError(f"{file.path} has other columns than {files[0].path}: convert them again", path=name)
        return Table(name, files, options, direct)
    except BaseException:
        for file in files:
            file.close()
        raise


# -- folders -----------------------------------------------------------------------------------------------------------


def is_table_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a table's folder; raise PermissionError if it is a folder that cannot be read."""
    try:
        return stat.S_ISREG(os.stat(os.path.join(path, PARTS)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_parts(path: str) -> list[dict[str, Any]]:
    """Return the descriptions of the files of a table's folder: ``file``, ``rows`` and ``id``, checked.

    Raises
    ------
    MissingFileError, FormatError, StoreVersionError
    """
    if not is_table_folder(path):
        raise FormatError(
            f"{path} is a folder, but not a table: convert the files in it with ww.table.convert({path!r}, 'NAME.ww'), "
            "and open NAME.ww",
            path=path,
        )
    description = read_json(os.path.join(path, PARTS), "a folder of ww.table.convert")
    version = description.get("version") if description.get("format") == _FORMAT["format"] else None
    if version != _FORMAT["version"]:
        raise StoreVersionError(
            f"{path} has version {version!r:.40}, but this Warpwell reads tables of version {_FORMAT['version']}: "
            "install a newer Warpwell, or convert the source again",
            path=path,
        )
    parts = description.get("parts")
    if not isinstance(parts, list) or not parts or not all(_is_part(part) for part in parts):
        raise FormatError(f"{path}: {PARTS} is damaged: convert the source again", path=path)
    return parts


def table_parts(name: str) -> list[dict[str, Any]]:
    """Return the ``path`` of each Arrow file of a table, with its description if the table is a folder.

    Raises
    ------
    MissingFileError, FormatError, StoreVersionError
    """
    if not os.path.exists(name):
        raise MissingFileError(
            f"{name} does not exist: pass an Arrow IPC file, or a folder of ww.table.convert", path=name
        )
    if not os.path.isdir(name):
        return [{"path": os.path.abspath(name)}]
    return [{**part, "path": os.path.join(os.path.abspath(name), part["file"])} for part in read_parts(name)]


def _is_part(part: Any) -> bool:
    """Return whether a description of a file is complete."""
    if not isinstance(part, dict) or type(part.get("rows")) is not int or not isinstance(part.get("id"), str):
        return False
    return isinstance(part.get("file"), str) and bool(re.fullmatch(r"[0-9]{1,9}\.arrow", part["file"]))


def write_parts(path: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Replace ``parts.json`` of a folder, atomically and durably."""
    with replacing(path / PARTS) as part, durable_file(part) as file:
        file.write(json.dumps({**_FORMAT, "parts": list(parts)}, indent=1).encode() + b"\n")


# -- indexes -----------------------------------------------------------------------------------------------------------


def index(path: str | os.PathLike[str]) -> None:
    """Write the zone maps and checksums of an Arrow file to ``<path>.zones``; replace an earlier index.

    Queries skip blocks of rows by the zone maps, and `check` compares the file with the checksums. A file that changes
    later needs another index, because an index that does not match its file is ignored.

    Parameters
    ----------
    path : path
        An uncompressed Arrow IPC file or stream.

    Raises
    ------
    MissingFileError, FormatError, MediumError, StorageFullError
        No part of the index is left.
    """
    name = checked_path(path)
    if os.path.isdir(name):
        raise FormatError(f"{name} is a folder: its Arrow files are indexed when they are written", path=name)
    zones = Path(name + SUFFIX)
    with storage_full(zones), open_table(name) as table, replacing(zones) as part:
        write_zones(name, part, table._files[0].id, compute_zones(table.schema, slices(table)))


def _without_ranges(schema: Any) -> Any:
    """Return a schema without a pandas ``RangeIndex``, which pyarrow would apply to any rows of the same number."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        description = json.loads(schema.metadata[b"pandas"])
        description["index_columns"] = [name for name in description["index_columns"] if isinstance(name, str)]
        return schema.with_metadata({**schema.metadata, b"pandas": json.dumps(description)})
    return schema


def _drop(files: Sequence[ArrowFile], arrays: dict[Any, Array]) -> None:
    """Close the files and arrays of a dropped table."""
    for array in arrays.values():
        with contextlib.suppress(Exception):
            array.close()
    for file in files:
        file.close()
