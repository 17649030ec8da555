"""`take`: rows of columns by their numbers, as a `ColumnBatch`; only the bytes around them are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array.gather import Pieces, fetch_pieces
from ..errors import ArgumentError, DTypeError
from . import arrow as pa
from .column import Column, ColumnRun
from .extent import validate
from .layout import storage_of
from .library import line_of, to_polars
from .reading import IoCounters


class ColumnBatch:
    """Rows of columns, in memory.

    ``batch["name"]`` is a `pyarrow.ChunkedArray`. Polars, pandas, DuckDB, and other readers of Arrow streams
    (``__arrow_c_stream__``) take the batch without a copy.

    Attributes
    ----------
    names : list of str
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self.names: list[str] = list(table.schema.names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __repr__(self) -> str:
        return f"<warpwell.table.ColumnBatch of {len(self):,} rows of {', '.join(self.names)}>"

    def __getitem__(self, name: str) -> Any:
        return self._table.column(name)

    def arrow(self) -> Any:
        """Return the rows as a `pyarrow.Table`."""
        return self._table

    def polars(self) -> Any:
        """Return the rows as a `polars.DataFrame`; raise DTypeError if Polars does not have a column's type."""
        return to_polars(self._table).rechunk()

    def numpy(self) -> dict[str, NDArray[Any]]:
        """Return a NumPy array of each column; nulls of numbers are NaN, other nulls None.

        Arrays without nulls share no memory with Arrow, are writable, and can be passed to other libraries by DLPack.
        """
        arrays = {}
        if len(set(self.names)) != len(self.names):
            raise ArgumentError("two columns have one name: take them one after another, by their numbers")
        for name in self.names:
            column = self._table.column(name)
            kind = storage_of(column.type)
            if pa.types.is_fixed_size_list(kind) and not column.null_count:
                items = np.array(column.combine_chunks().flatten().to_numpy(zero_copy_only=False))
                arrays[name] = items.reshape(len(column), kind.list_size)
            else:
                try:
                    arrays[name] = np.array(column.to_numpy())
                except pa.ArrowException as error:
                    raise DTypeError(
                        f"NumPy cannot have column {name!r} of {column.type} ({line_of(error)}): use arrow()"
                    ) from None
        return arrays

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


MAX_READ_BYTES = 128 << 20
"""Maximum bytes that a take reads at a time."""
ROW_READ_BYTES = 16 << 10
"""Expected size in bytes of the read of one row of a column, with pages and gaps. It limits the rows of a read."""


def take(columns: Sequence[Column], numbers: NDArray[np.int64], counters: IoCounters | None) -> Any:
    """Return rows of columns, ascending by number, as a `pyarrow.Table`; count the reads if there are counters.

    Raises
    ------
    FormatError
        Offsets or codes of a row point outside, or its bytes are not UTF-8.
    MediumError
        A file was truncated, or cannot be read.
    """
    chunks: list[list[Any]] = [[] for _ in columns]
    for rows in _slices(columns, numbers):
        for segment, number in _read(columns, rows, counters):
            chunks[number].append(segment.arrow())
    arrays = []
    for column, chunk_arrays in zip(columns, chunks, strict=True):
        kind = max((array.type for array in chunk_arrays), key=lambda kind: "large" in str(kind), default=column.type)
        chunk_arrays = [array if array.type == kind else array.cast(kind) for array in chunk_arrays]
        arrays.append(pa.chunked_array(chunk_arrays, type=kind))
    fields = [pa.field(column.name, array.type) for column, array in zip(columns, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def plan_take(columns: Sequence[Column], numbers: NDArray[np.int64], counters: IoCounters) -> None:
    """Count the bytes that `take` would read. The offsets of strings are read."""
    for rows in _slices(columns, numbers):
        _read(columns, rows, counters, plan_only=True)


def _slices(columns: Sequence[Column], numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield slices of rows, so that the bytes of fixed-size items that are read per slice are bounded."""
    runs = [column.runs[0] for column in columns if column.runs]
    width = 1 + sum(sum(extent.nbytes for extent in run.extents) // max(1, run.rows) for run in runs)
    min_rows = max(1, MAX_READ_BYTES // ((len(columns) + 1) * ROW_READ_BYTES))
    start = 0
    while start < len(numbers):
        end = max(start + min_rows, int(np.searchsorted(numbers, numbers[start] + MAX_READ_BYTES // width)))
        yield numbers[start:end]
        start = end


def _read(
    columns: Sequence[Column],
    numbers: NDArray[np.int64],
    counters: IoCounters | None,
    *,
    plan_only: bool = False,
) -> list[tuple[_Segment, int]]:
    """Read the bytes of rows, or with `plan_only` offsets alone; return segments, each with its column's number."""
    segments = [(segment, number) for number, column in enumerate(columns) for segment in _segments(column, numbers)]
    is_counted = counters is not None
    offsets = [pieces for segment, _ in segments if segment.has_offsets for pieces in segment.pieces.values()]
    fetch_pieces(offsets, is_counted=is_counted)
    for segment, _ in segments:
        if segment.has_offsets:
            segment.add_bytes()
    unread = [
        pieces
        for segment, _ in segments
        for attribute, pieces in segment.pieces.items()
        if attribute == "bytes" or not segment.has_offsets
    ]
    fetch_pieces(unread, plan_only=plan_only, is_counted=is_counted)
    if counters is not None:
        for segment, _ in segments:
            counters.add(segment.column.name, segment.pieces.values())
    return segments


def split_by_run(
    runs: Sequence[ColumnRun], numbers: NDArray[np.int64]
) -> Iterator[tuple[ColumnRun, NDArray[np.int64]]]:
    """Yield the runs that contain rows, and their rows, counted from the run's first."""
    ends = np.searchsorted(numbers, [run.first + run.rows for run in runs]).tolist()
    for run, start, end in zip(runs, [0, *ends], ends, strict=False):
        if end > start:
            yield run, numbers[start:end] - run.first


def _segments(column: Column, numbers: NDArray[np.int64]) -> Iterator[_Segment]:
    """Yield rows in segments: of consecutive runs in one file with one dictionary, without views and nested values."""

    def key(part: tuple[ColumnRun, Any]) -> tuple[Any, ...]:
        run = part[0]
        return run.file.path, id(run.dictionary), run.layout, run.layout.kind in ("views", "nested") and id(run)

    for _, parts in groupby(split_by_run(column.runs, numbers), key):
        yield _Segment(column, list(parts))


class _Segment:
    """Rows of one column that are read and assembled together.

    Attributes
    ----------
    column : Column
    pieces : dict of str to Pieces
        Bytes to read, by attribute of `ColumnRun`.
    has_offsets : bool
    """

    def __init__(self, column: Column, parts: Sequence[tuple[ColumnRun, NDArray[np.int64]]]) -> None:
        self.column = column
        self._runs = [run for run, _ in parts]
        self._rows = np.concatenate([rows for _, rows in parts])
        self._run_of = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
        self.has_offsets = self._runs[0].layout.kind == "text"
        self.pieces: dict[str, Pieces] = {}
        self._add("valid", self._rows >> 3, 1)
        for attribute in ("values", "codes", "views", "offsets"):
            extent = getattr(self._runs[0], attribute)
            if extent is not None and extent.nbytes:
                is_bits = self._runs[0].layout.kind == "bits"
                width = 1 if is_bits else extent.nbytes // extent.shape[0]
                rows = self._rows >> 3 if is_bits else self._rows
                self._add(attribute, rows * width, 2 * width if attribute == "offsets" else width)

    def _offsets(self, attribute: str) -> NDArray[np.int64]:
        """Return the offset in the file of the extent of each row's run; -1 without an extent."""
        extents = [getattr(run, attribute) for run in self._runs]
        offsets = np.array([-1 if extent is None or not extent.nbytes else extent.offset for extent in extents])
        return np.asarray(offsets[self._run_of])

    def _add(self, attribute: str, starts: NDArray[np.int64], sizes: Any) -> None:
        """Add bytes that are counted from the beginning of each row's extent; skip rows without an extent."""
        offsets = self._offsets(attribute)
        used = np.flatnonzero((offsets >= 0) & (np.asarray(sizes) > 0))
        if len(used):
            firsts = np.flatnonzero(np.diff(self._run_of[used], prepend=-1)).tolist()
            sizes = sizes if isinstance(sizes, int) else sizes[used]
            self.pieces[attribute] = self._runs[0].file.pieces((offsets + starts)[used], sizes, firsts)

    def add_bytes(self) -> None:
        """Add the bytes of strings after their offsets were fetched."""
        starts, ends = self._string_bounds
        self._add("bytes", starts, ends - starts)

    @cached_property
    def _string_bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The checked begin and end of the bytes of each row; null rows are empty."""
        offsets = self._runs[0].offsets
        assert offsets is not None
        starts, ends = self._items("offsets").view(offsets.dtype).astype(np.int64).T
        is_valid = self._bits("valid")
        if is_valid is not None:
            starts, ends = np.where(is_valid, starts, 0), np.where(is_valid, ends, 0)
        sizes = np.array([0 if run.bytes is None else run.bytes.nbytes for run in self._runs])[self._run_of]
        wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > sizes))
        if len(wrong):
            run = self._runs[self._run_of[wrong[0]]]
            row = run.first + self._rows[wrong[0]]
            raise run.file.damaged(f"column {self.column.name!r}, row {row}: its offsets point outside of its bytes")
        return starts, ends

    def _items(self, attribute: str) -> NDArray[np.uint8]:
        return self.pieces[attribute].items() if attribute in self.pieces else np.zeros(0, np.uint8)

    def _bits(self, attribute: str) -> NDArray[np.bool_] | None:
        """Return the bit of each row, or 1 if the row's run has no bits."""
        if attribute not in self.pieces:
            return None
        packed = np.full(len(self._rows), 255, np.uint8)
        packed[self._offsets(attribute) >= 0] = self._items(attribute).reshape(-1)
        return np.asarray((packed >> (self._rows & 7).astype(np.uint8)) & 1, np.bool_)

    def _packed(self, attribute: str) -> Any:
        bits = self._bits(attribute)
        return None if bits is None else pa.py_buffer(np.packbits(bits, bitorder="little"))

    def arrow(self) -> Any:
        """Return the rows as a `pyarrow.Array`."""
        run, count = self._runs[0], len(self._rows)
        kind, layout, valid = storage_of(run.type), run.layout, self._packed("valid")
        if layout.kind == "nested":
            return run.take_nested(self._rows)
        if layout.kind == "null":
            return pa.nulls(count)
        attribute = layout.kind if layout.kind in ("codes", "views") else "values"
        items = self._packed("values") if layout.kind == "bits" else pa.py_buffer(self._items(attribute))
        buffers = [valid, items, *(extent.buffer for extent in run.data)]
        if layout.kind == "text":
            starts, ends = self._string_bounds
            offsets = np.concatenate(([0], np.cumsum(ends - starts)))
            if offsets[-1] >= 1 << 31:
                kind = pa.large_binary() if "binary" in str(kind) else pa.large_string()
            width = np.int64 if str(kind).startswith("large") else np.int32
            buffers = [valid, pa.py_buffer(offsets.astype(width)), pa.py_buffer(self._items("bytes"))]
        if layout.kind == "list":
            values = pa.Array.from_buffers(kind.value_type, count * layout.inner[0], [None, items])
            array = pa.Array.from_buffers(kind, count, [valid], children=[values])
        elif layout.kind == "codes":
            codes = pa.Array.from_buffers(pa.from_numpy_dtype(layout.dtype), count, buffers)
            array = pa.DictionaryArray.from_arrays(codes, run.dictionary, ordered=kind.ordered, safe=False)
        else:
            array = pa.Array.from_buffers(kind, count, buffers)
        if layout.kind in ("text", "views", "codes"):
            with run.file.checking(f"column {self.column.name!r}, rows from {run.first}"):
                validate(array)
        run.file.require()
        is_extension = isinstance(run.type, pa.BaseExtensionType)
        return pa.ExtensionArray.from_storage(run.type, array) if is_extension else array
