"""`Column`: one column of a table. `ColumnRun`: rows of it whose buffers lie in one piece each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..array import Array
from ..errors import ArgumentError, FormatError
from .extent import Extent, MappedFile
from .layout import Layout, storage_of
from .library import arrow
from .zones import PartZones


@dataclass(frozen=True, eq=False)
class ColumnRun:
    """Rows of a column: a record batch of an Arrow file, or what one `convert` or `append` wrote.

    Extents are None where there is nothing: `valid` if no row is null, `values` if the column has codes.

    Attributes
    ----------
    first, rows : int
        The rows are ``[first, first + rows)`` of the table.
    nulls : int
        How many of them are null.
    type : pyarrow.DataType
        Of `arrow`.
    layout : Layout
    values : Extent or None
        Numbers, shape (rows,); bits of a bool, uint8, (rows + 7) // 8 of them; a fixed-size list, decimal128 or
        fixed-size binary, shape (rows, k).
    valid : Extent or None
        Validity bits, uint8, lowest bit first, 1 where a row is not null; see `is_valid`.
    offsets, bytes : Extent or None
        Of strings and binary: row i has the bytes ``[offsets[i], offsets[i + 1])``; int32 or int64. They are not
        checked when a table is opened: who follows them looks whether they are within `bytes`.
    views : Extent or None
        Of ``string_view`` and ``binary_view``, shape (rows, 16).
    data : tuple of Extent
        What `views` point into.
    codes : Extent or None
        Unsigned or signed integers, the places of the values in `dictionary`; a null row has any code.
    dictionary : pyarrow.Array or None
        The values of the codes, in memory. In a folder of ours they ascend, with NaN last.
    statistics : Extent or None
        Records of ``least``, ``greatest`` and ``flags``, one for each 8,192 rows of the run, of values or codes. Nulls
        and NaN do not count: if there is nothing else, least is above greatest. Flags are a sum: 1 if there is a
        null, 2 if there is a NaN (of codes, only 1).
    """

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
    statistics: Extent | None = None

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All extents of the run that have bytes."""
        found = (self.valid, self.values, self.offsets, self.bytes, self.views, self.codes, *self.data)
        return tuple(one for one in found if one is not None and one.nbytes)

    def arrow(self, first: int = 0, rows: int | None = None, *, codes: bool = False) -> Any:
        """Return rows [first, first + rows) of the run as a `pyarrow.Array`, without a copy.

        Where the values have codes, but `type` is that of the values, they are looked up, which is a copy; with `codes`
        the array is a `pyarrow.DictionaryArray`, without one. Strings, binary and codes are checked: an offset, a code
        or a byte that would lead outside, or is no UTF-8, raises. Offsets are copied.

        Raises
        ------
        FormatError
        MediumError
            The file was cut, or cannot be read.
        """
        pa = arrow()
        count = self.rows - first if rows is None else rows
        try:
            found = self._built(first, count)
            if self.layout.kind in ("text", "views", "codes"):
                validate(found)
        except pa.ArrowException as error:
            self._require()
            path = next((extent.path for extent in self.extents), "")
            raise FormatError(
                f"{path}: rows from {self.first} of a {self.type} are damaged ({line_of(error)}): write them again",
                path=path,
            ) from None
        if self.layout.kind == "codes" and not (codes or pa.types.is_dictionary(storage_of(self.type))):
            found = found.dictionary_decode()
        self._require()
        if isinstance(self.type, pa.BaseExtensionType):  # the folder has none
            return pa.ExtensionArray.from_storage(self.type, found)
        return found

    def _built(self, first: int, count: int) -> Any:
        """Return rows as an array over the mapping, not checked."""
        pa = arrow()
        kind = storage_of(self.type)
        valid = None if self.valid is None else self.valid.buffer
        if self.layout.kind == "null":
            return pa.nulls(count)
        if self.layout.kind == "codes":
            ordered = pa.types.is_dictionary(kind) and kind.ordered
            code = pa.from_numpy_dtype(self.layout.dtype)
            places = pa.Array.from_buffers(code, count, [valid, _buffer(self.codes)], offset=first)
            return pa.DictionaryArray.from_arrays(places, self.dictionary, ordered=ordered, safe=False)
        if self.layout.kind == "list":
            width = self.layout.inner[0]
            items = pa.Array.from_buffers(kind.value_type, self.rows * width, [None, _buffer(self.values)])
            return pa.Array.from_buffers(kind, count, [valid], offset=first, children=[items])
        if self.layout.kind == "text":
            # a copy of the offsets: they were checked, and a file that is cut later must not lead anybody outside
            start = first - first % 8
            valid = None if valid is None else valid.slice(start // 8)
            offsets = b"" if self.offsets is None else self.offsets.numpy()[start : first + count + 1].tobytes()
            buffers = [valid, pa.py_buffer(offsets), _buffer(self.bytes)]
            return pa.Array.from_buffers(kind, count, buffers, offset=first - start)
        if self.layout.kind == "views":
            buffers = [valid, _buffer(self.views), *(one.buffer for one in self.data)]
            return pa.Array.from_buffers(kind, count, buffers, offset=first)
        return pa.Array.from_buffers(kind, count, [valid, _buffer(self.values)], offset=first)

    def _require(self) -> None:
        """Raise MediumError if bytes of a file could not be read."""
        for file in {one.file for one in self.extents}:
            file.require()


class _Home(Protocol):
    """The parts of a table that a column uses."""

    path: str

    def require_open(self) -> None:
        """Raise ClosedError if it is closed."""

    def array_of(self, extent: Extent) -> Array:
        """Open an extent for kernels, once."""


class Column:
    """A column of a table.

    Attributes
    ----------
    name : str
    type : pyarrow.DataType
    rows : int
        Of the table.
    """

    def __init__(
        self,
        home: _Home,
        name: str,
        kind: Any,
        rows: int,
        runs: Callable[[], tuple[ColumnRun, ...]],
        zones: Callable[[], tuple[PartZones, ...]],
    ) -> None:
        self.name = name
        self.type = kind
        self.rows = rows
        self._home = home
        self._read = runs
        self._read_zones = zones
        self._runs: tuple[ColumnRun, ...] | None = None

    def __repr__(self) -> str:
        return f"<warpwell.table.Column {self.name!r} of {self.rows:,} rows of {self.type}>"

    def __len__(self) -> int:
        return self.rows

    @property
    def path(self) -> str:
        """The path of its table."""
        return self._home.path

    @property
    def runs(self) -> tuple[ColumnRun, ...]:
        """The runs in which its rows lie, in order; checked against the file, but not read."""
        self._home.require_open()
        if self._runs is None:
            self._runs = self._read()
        return self._runs

    @property
    def zones(self) -> tuple[PartZones, ...]:
        """The zone maps of its parts (files), in order; see `ZoneMap`."""
        self._home.require_open()
        return self._read_zones()

    @property
    def nulls(self) -> int:
        """How many rows are null."""
        return sum(run.nulls for run in self.runs)

    @property
    def values(self) -> Array:
        """What a kernel takes for the values: an array over the extent of the only run.

        The table opens it with its options, and closes it. A column of several runs has several: a kernel is launched
        once a run, over ``run.values.array()``.

        Raises
        ------
        ArgumentError
            The column has several runs or none, has codes, or its values have several sizes (strings).
        """
        run = self._only()
        if run.values is None:
            raise ArgumentError(
                f"column {self.name!r} of {self.type} has no values of one size: kernels take "
                + ("its codes" if run.codes else "its runs' offsets.array() and bytes.array()"),
            )
        return self._home.array_of(run.values)

    @property
    def codes(self) -> Array:
        """What a kernel takes for the codes, the places of the values in ``runs[0].dictionary``; see `values`.

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
        """What a kernel takes for the validity bits (see `is_valid`); None if no row is null.

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
                f"column {self.name!r} lies in {len(self.runs)} runs: launch a kernel for each of runs, over "
                "values.array(), or make one of them with ww.table.convert(table, path)"
            )
        return self.runs[0]

    def arrow(self, first: int = 0, rows: int | None = None, *, codes: bool = False) -> Any:
        """Return rows [first, first + rows) as a `pyarrow.Array`; by default all from `first` on.

        Within one run nothing is copied, except that strings and codes are read to check them; rows of several runs
        are copied into one array. For `codes` see `ColumnRun.arrow`.

        Raises
        ------
        ArgumentError
            The rows are outside of the table.
        FormatError, MediumError
            See `ColumnRun.arrow`.
        """
        start, end = bounds(first, rows, self.rows)
        parts = [
            run.arrow(max(start - run.first, 0), min(end, run.first + run.rows) - max(start, run.first), codes=codes)
            for run in self.runs
            if run.first < end and start < run.first + run.rows
        ]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return arrow().array([], self.type)
        return arrow().concat_arrays(parts)


def bounds(first: Any, rows: Any, total: int) -> tuple[int, int]:
    """Return the rows [start, end) that are asked for.

    Raises
    ------
    ArgumentError
    """
    try:
        start = operator.index(first)
        count = total - start if rows is None else operator.index(rows)
    except TypeError:
        raise ArgumentError(f"first is {first!r:.40} and rows is {rows!r:.40}: give integers") from None
    if start < 0 or count < 0 or start + count > total:
        raise ArgumentError(f"rows {start} to {start + count} of a table of {total}: give rows that it has")
    return start, start + count


def _buffer(extent: Extent | None) -> Any:
    return arrow().py_buffer(b"") if extent is None else extent.buffer


def checked_extent(file: MappedFile, buffer: Any, layout: Layout, shape: tuple[int, ...], what: str) -> Extent | None:
    """Return the extent of a buffer that pyarrow found in a file, if it holds items of that shape.

    Raises
    ------
    FormatError
        It is too short, or was not left where it is: compressed, or of the other byte order.
    """
    assert layout.dtype is not None
    extent = Extent(file, 0, layout.dtype, shape)
    size = 0 if buffer is None else int(buffer.size)
    if extent.nbytes > size:
        raise FormatError(
            f"{file.path}: {what} has {size} bytes, and its rows take {extent.nbytes}: the file is "
            "damaged, write it again",
            path=file.path,
        )
    if not extent.nbytes:
        return None
    at = file.offset_of(buffer)
    if at is None:
        raise in_place_error(file.path)
    return Extent(file, at, extent.dtype, shape)


def validate(array: Any) -> None:
    """Check what leads from an array elsewhere: offsets, codes, bytes of strings; raise pyarrow.ArrowException.

    Of dates and times any integer will do, as it does where they have no codes.
    """
    pa = arrow()
    values = array.dictionary if isinstance(array, pa.DictionaryArray) else array
    if pa.types.is_temporal(values.type):
        plain = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
        array = plain if values is array else pa.DictionaryArray.from_arrays(array.indices, plain, safe=False)
    array.validate(full=True)


def in_place_error(path: str) -> FormatError:
    """Return the error for a file whose bytes are not those of memory."""
    return FormatError(
        f"{path} is compressed, or big-endian, and cannot be read in place: write ww.table.convert({path!r}, "
        "'NAME.ww') once and open that, or write the file without compression",
        path=path,
    )


def line_of(error: BaseException) -> str:
    """Return the first line of a message, for pyarrow appends where in its source it arose."""
    return str(error).split("\n")[0][:200]
