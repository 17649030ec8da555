"""`Column`: one column of a table. `ColumnRun`: its rows in one record batch."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, Protocol

from ..array import Array
from ..errors import ArgumentError, FormatError
from . import arrow as pa
from .extent import Extent, MappedFile, validate
from .layout import Layout
from .library import line_of
from .zones import PartZones


@dataclass(frozen=True, eq=False)
class ColumnRun:
    """Rows of a column whose buffers are contiguous: one record batch of an Arrow file.

    An extent is None if the run has no such buffer: for example, `valid` if no row is null, and `values` if the column
    has codes.

    Attributes
    ----------
    file : MappedFile
    first, rows : int
        The rows are ``[first, first + rows)`` of the table.
    nulls : int
        Number of null rows, including rows with a code whose value in `dictionary` is null.
    type : pyarrow.DataType
        The type of the array that `arrow` returns.
    layout : Layout
    values : Extent or None
        Numbers, shape (rows,); bits of a bool, uint8, (rows + 7) // 8 of them; a fixed-size list, decimal128 or
        fixed-size binary, shape (rows, k).
    valid : Extent or None
        Validity bits, uint8, lowest bit first, 1 where a row is not null; see `is_valid`.
    offsets, bytes : Extent or None
        For strings and binary: row i has the bytes ``[offsets[i], offsets[i + 1])`` of `bytes`; offsets are int32 or
        int64. Opening a table does not check offsets: check that they are within `bytes` before you follow them.
    views : Extent or None
        For ``string_view`` and ``binary_view``: the views, shape (rows, 16).
    data : tuple of Extent
        The buffers that `views` point into; for a nested type, all its buffers.
    codes : Extent or None
        Unsigned or signed integers, the indices of the values in `dictionary`; a null row has any code.
    dictionary : pyarrow.Array or None
        The values of the codes, in memory.
    array : pyarrow.Array or None
        All rows as an unchecked array over the mapping of the file.
    """

    file: MappedFile
    first: int
    rows: int
    nulls: int
    type: Any
    layout: Layout
    values: Extent | None = None
    valid: Extent | None = None
    offsets: Extent | None = None
    bytes: Extent | None = None
    views: Extent | None = None
    data: tuple[Extent, ...] = ()
    codes: Extent | None = None
    dictionary: Any = None
    array: Any = None

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All extents of the run that have bytes."""
        extents = (self.valid, self.values, self.offsets, self.bytes, self.views, self.codes, *self.data)
        return tuple(extent for extent in extents if extent is not None and extent.nbytes)

    @functools.cached_property
    def checked_nested(self) -> Any:
        """`array` of a nested type, after one check of the offsets, codes and text of all rows.

        Raises
        ------
        FormatError
        """
        with self.file.checking(self._description):
            validate(self.array)
        return self.array

    def take_nested(self, rows: Any) -> Any:
        """Return rows of a nested type by their numbers."""
        values = self.checked_nested
        try:
            array = values.take(rows)
        except pa.ArrowNotImplementedError:  # of views
            array = pa.concat_arrays([values.slice(0, 0), *(values.slice(row, 1) for row in rows.tolist())])
        self.file.require()
        return array

    @property
    def _description(self) -> str:
        return f"rows from {self.first} of a {self.type}"

    def arrow(self, first: int = 0, rows: int | None = None) -> Any:
        """Return rows [first, first + rows) of the run as a `pyarrow.Array`, without a copy.

        Strings, binary and codes are checked: an offset or a code that points outside, or text that is not UTF-8,
        raises FormatError. Offsets are copied.

        Raises
        ------
        FormatError
        MediumError
            The file was truncated, or cannot be read.
        """
        count = self.rows - first if rows is None else rows
        if self.layout.kind == "nested":
            array = self.checked_nested.slice(first, count)
            self.file.require()
            return array
        array = self.array.slice(first, count)
        is_extension = isinstance(array, pa.ExtensionArray)
        array = array.storage if is_extension else array
        with self.file.checking(self._description):
            if self.layout.kind == "codes":
                array = pa.DictionaryArray.from_arrays(
                    array.indices, self.dictionary, ordered=array.type.ordered, safe=False
                )
            elif self.layout.kind == "text" and self.offsets is not None:
                # A copy of the offsets, which stay as they were checked if the file is truncated later.
                start = first - first % 8
                valid = None if self.valid is None else self.valid.buffer.slice(start // 8)
                offsets = pa.py_buffer(self.offsets.numpy()[start : first + count + 1].tobytes())
                array = pa.Array.from_buffers(
                    array.type, count, [valid, offsets, array.buffers()[2]], offset=first - start
                )
            if self.layout.kind in ("text", "views", "codes"):
                validate(array)
        self.file.require()
        return pa.ExtensionArray.from_storage(self.type, array) if is_extension else array


class TableParts(Protocol):
    """The parts of a table that its columns and queries use."""

    path: str
    rows: int
    schema: Any

    @property
    def names(self) -> list[str]:
        """The names of the columns."""

    def __getitem__(self, name: str | int) -> Column:
        """Return a column."""

    def require_open(self) -> None:
        """Raise ClosedError if it is closed."""

    def array_of(self, extent: Extent) -> Array:
        """Return the array of an extent for kernels; open it at the first call."""

    def runs(self, number: int) -> tuple[ColumnRun, ...]:
        """Return the runs of a column."""

    def zones(self, number: int) -> tuple[PartZones, ...]:
        """Return the zone maps of a column."""


class Column:
    """A column of a table.

    Attributes
    ----------
    name : str
    type : pyarrow.DataType
    rows : int
        Number of rows of the table.
    """

    def __init__(self, home: TableParts, field: Any, number: int) -> None:
        self.name: str = field.name
        self.type = field.type
        self.rows = home.rows
        self._home = home
        self._number = number
        self._runs: tuple[ColumnRun, ...] | None = None

    def __repr__(self) -> str:
        return f"<warpwell.table.Column {self.name!r} of {self.rows:,} rows of {self.type}>"

    def __len__(self) -> int:
        return self.rows

    @property
    def path(self) -> str:
        """The path of the column's table."""
        return self._home.path

    @property
    def runs(self) -> tuple[ColumnRun, ...]:
        """The runs that hold the column's rows, in order. They are checked against the file, but not read."""
        self._home.require_open()
        if self._runs is None:
            try:
                runs = self._home.runs(self._number)
            finally:
                self._home.require_open()  # after a close in another thread, the descriptor may be another file's
            self._runs = runs
        return self._runs

    @property
    def zones(self) -> tuple[PartZones, ...]:
        """The zone maps of its parts (files), in order; see `ZoneMap`."""
        self._home.require_open()
        return self._home.zones(self._number)

    @property
    def nulls(self) -> int:
        """Number of null rows."""
        return sum(run.nulls for run in self.runs)

    @property
    def values(self) -> Array:
        """The values for kernels: an array over the extent of the only run.

        The table opens the array with the options of `open_table`, and closes it. A column of several runs has one
        array per run: launch a kernel once for each run, over ``run.values.array()``.

        Raises
        ------
        ArgumentError
            The column has several runs or none, has codes, or its values have several sizes (strings).
        """
        run = self._only()
        if run.values is None:
            raise ArgumentError(
                f"column {self.name!r} of {self.type} has no values of one size: kernels take "
                + ("its codes" if run.codes else "run.offsets.array() and run.bytes.array(), and no nested type")
            )
        return self._home.array_of(run.values)

    @property
    def codes(self) -> Array:
        """The codes for kernels: indices of the values in ``runs[0].dictionary``; see `values`.

        Raises
        ------
        ArgumentError
            The column has several runs or none, or no codes.
        """
        run = self._only()
        if run.codes is None:
            raise ArgumentError(f"column {self.name!r} of {self.type} has no codes: kernels take its values")
        return self._home.array_of(run.codes)

    @property
    def valid(self) -> Array | None:
        """The validity bits for kernels (see `is_valid`); None if no row is null.

        Raises
        ------
        ArgumentError
            The column has several runs or none.
        """
        run = self._only()
        return None if run.valid is None else self._home.array_of(run.valid)

    def _only(self) -> ColumnRun:
        if len(self.runs) != 1:
            raise ArgumentError(
                f"column {self.name!r} has {len(self.runs)} record batches: launch a kernel for each of its runs, over "
                "values.array()"
            )
        return self.runs[0]

    def arrow(self, first: int = 0, rows: int | None = None) -> Any:
        """Return rows [first, first + rows) as a `pyarrow.Array`; by default all from `first` on.

        Rows within one run are not copied, but strings and codes are read to check them. Rows of several runs are
        copied into one array.

        Raises
        ------
        ArgumentError
            The rows are outside of the table.
        FormatError, MediumError
            See `ColumnRun.arrow`.
        """
        chunks = self.chunks(*bounds(first, rows, self.rows)).chunks
        if len(chunks) < 2:
            return chunks[0] if chunks else pa.nulls(0, self.type)
        try:
            return pa.concat_arrays(chunks)
        except pa.ArrowException as error:
            raise ArgumentError(
                f"rows of {self.name!r} do not fit into one array ({line_of(error)}): take fewer rows, or all from "
                "Table.arrow"
            ) from None

    def chunks(self, start: int, end: int) -> Any:
        """Return rows [start, end) as a `pyarrow.ChunkedArray` with a chunk a run, without a copy."""
        parts = [
            run.arrow(max(start - run.first, 0), min(end, run.first + run.rows) - max(start, run.first))
            for run in self.runs
            if run.first < end and start < run.first + run.rows
        ]
        return pa.chunked_array(parts, self.type)


def bounds(first: Any, rows: Any, total: int) -> tuple[int, int]:
    """Return the rows [start, end) that `first` and `rows` name, of `total` rows.

    Raises
    ------
    ArgumentError
    """
    try:
        start = operator.index(first)
        count = total - start if rows is None else operator.index(rows)
    except TypeError:
        raise ArgumentError(f"first is {first!r:.40} and rows is {rows!r:.40}: pass integers") from None
    if start < 0 or count < 0 or start + count > total:
        raise ArgumentError(f"rows {start} to {start + count} of a table of {total}: pass rows in this range")
    return start, start + count


def checked_extent(
    file: MappedFile, buffer: Any, layout: Layout, shape: tuple[int, ...], description: str
) -> Extent | None:
    """Return the extent of a buffer that pyarrow found in a file, if it holds items of that shape.

    Raises
    ------
    FormatError
        The buffer is too short, or is not in the file as such, because the file is compressed or has the other byte
        order.
    """
    assert layout.dtype is not None
    extent = Extent(file, 0, layout.dtype, shape)
    size = 0 if buffer is None else int(buffer.size)
    if extent.nbytes > size:
        raise file.damaged(f"{description} has {size} bytes, but its rows take {extent.nbytes}")
    if not extent.nbytes:
        return None
    at = file.offset_of(buffer)
    if at is None:
        raise in_place_error(file.path)
    return Extent(file, at, extent.dtype, shape)


def in_place_error(path: str) -> FormatError:
    """Return the error for a file that cannot be read in place."""
    return FormatError(
        f"{path} is compressed, or big-endian, and cannot be read in place: convert it with "
        f"ww.table.convert({path!r}, 'NAME.ww') and open NAME.ww, or write the file without compression",
        path=path,
    )
