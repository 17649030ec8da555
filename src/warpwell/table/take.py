"""`Taken`: the rows of a selection, of which only the pages in which they lie are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, FormatError
from .column import Column, ColumnRun, validate
from .extent import Extent
from .layout import storage_of
from .library import arrow, polars
from .reading import Reads, pages_of


class Taken:
    """Some rows of some columns, in memory.

    ``taken["name"]`` is a `pyarrow.ChunkedArray`. What takes an Arrow stream (``__arrow_c_stream__``) takes it without
    a copy: Polars, pandas, DuckDB.

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
        return f"<warpwell.table.Taken of {len(self):,} rows of {', '.join(self.names)}>"

    def __getitem__(self, name: str) -> Any:
        return self._table.column(name)

    def arrow(self) -> Any:
        """Return them as a `pyarrow.Table`."""
        return self._table

    def polars(self) -> Any:
        """Return them as a `polars.DataFrame`."""
        return polars().from_arrow(self._table)

    def numpy(self) -> dict[str, NDArray[Any]]:
        """Return a NumPy array of each column; nulls of numbers are NaN, and others None.

        Arrays without nulls share no memory with Arrow, can be written, and go to other libraries by DLPack.
        """
        found = {}
        if len(set(self.names)) != len(self.names):
            raise ArgumentError("two columns have one name: take them one after another, by their numbers")
        for name in self.names:
            column = self._table.column(name)
            kind = storage_of(column.type)
            if arrow().types.is_fixed_size_list(kind) and not column.null_count:
                flat = column.combine_chunks()
                flat = flat if not hasattr(flat, "chunks") else arrow().concat_arrays(flat.chunks)
                items = np.array(flat.flatten().to_numpy(zero_copy_only=False))
                found[name] = items.reshape(len(column), kind.list_size)
            else:
                found[name] = np.array(column.to_numpy())
        return found

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def take(columns: Sequence[Column], numbers: NDArray[np.int64], reads: Reads) -> Any:
    """Return rows of columns, ascending by number, as a `pyarrow.Table`; count in `reads` what that reads.

    Raises
    ------
    FormatError
        Offsets or codes of a row lead outside, or its bytes are no UTF-8.
    """
    pa = arrow()
    plans = [(column, list(pieces(column.runs, numbers))) for column in columns]
    announce(plans, reads)
    arrays = []
    for column, parts in plans:
        chunks = [_taken(column.name, run, rows) for run, rows in parts]
        arrays.append(pa.chunked_array(chunks, type=chunks[0].type if chunks else column.type))
    fields = [pa.field(column.name, array.type) for column, array in zip(columns, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


Plan = tuple[Column, list[tuple[ColumnRun, NDArray[np.int64]]]]


def pieces(
    runs: Sequence[ColumnRun], numbers: NDArray[np.int64]
) -> Iterator[tuple[ColumnRun, NDArray[np.int64]]]:
    """Yield the runs in which rows lie, and these, counted from the run's first."""
    ends = np.searchsorted(numbers, [run.first + run.rows for run in runs]).tolist()
    start = 0
    for run, end in zip(runs, ends, strict=True):
        if end > start:
            yield run, numbers[start:end] - run.first
        start = end


def announce(plans: Sequence[Plan], reads: Reads) -> None:
    """Have everything read that rows need: what they lie in, and then the bytes that offsets or views lead to."""
    for column, parts in plans:
        for run, rows in parts:
            reads.bits(column.name, run.valid, rows)
            if run.layout.kind == "bits":
                reads.bits(column.name, run.values, rows)
            else:
                reads.items(column.name, run.values, rows)
            reads.items(column.name, run.codes, rows)
            reads.items(column.name, run.views, rows)
            reads.items(column.name, run.offsets, rows, 2)
    for column, parts in plans:
        for run, rows in parts:
            if run.offsets is not None and run.bytes is not None:
                starts, ends = _offsets(column.name, run, rows)
                used = np.flatnonzero(ends > starts)
                first = run.bytes.offset + starts[used]
                order = np.argsort(first, kind="stable")  # as they are, but in a damaged file
                last = np.maximum.accumulate(run.bytes.offset + ends[used][order])
                reads.add(column.name, run.bytes.file, int((ends - starts).sum()), pages_of(first[order], last))


def _offsets(name: str, run: ColumnRun, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the bytes of rows begin and end, checked; null rows have none."""
    assert run.offsets is not None
    offsets = run.offsets.numpy()
    starts, ends = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
    valid = _valid(run, rows)
    if valid is not None:
        starts, ends = np.where(valid, starts, 0), np.where(valid, ends, 0)
    size = 0 if run.bytes is None else run.bytes.nbytes
    wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > size))
    if len(wrong):
        raise damaged(run.offsets.file, name, int(run.first + rows[wrong[0]]))
    return starts, ends


def damaged(file: Any, name: str, row: int) -> FormatError:
    """Return the error for a row whose offsets lead outside."""
    file.require()
    return FormatError(
        f"{file.path}: column {name!r}, row {row}: its offsets lead outside of its bytes: the file is damaged, write "
        "it again", path=file.path,
    )  # fmt: skip


def _valid(run: ColumnRun, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    if run.valid is None:
        return None
    bits = run.valid.numpy().reshape(-1)
    return np.asarray((bits[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1, np.bool_)


def _taken(name: str, run: ColumnRun, rows: NDArray[np.int64]) -> Any:
    """Return rows of a run as a `pyarrow.Array`."""
    pa = arrow()
    kind, layout = storage_of(run.type), run.layout
    if layout.kind in ("fixed", "bits", "list", "null"):
        return run.arrow().take(pa.array(rows))
    valid = _valid(run, rows)
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if layout.kind == "codes":
        assert run.codes is not None
        codes = pa.Array.from_buffers(
            pa.from_numpy_dtype(layout.dtype), len(rows), [bits, pa.py_buffer(run.codes.numpy()[rows])]
        )
        ordered = pa.types.is_dictionary(kind) and kind.ordered
        found = _sound(name, run, pa.DictionaryArray.from_arrays(codes, run.dictionary, ordered=ordered, safe=False))
        if not pa.types.is_dictionary(kind):
            found = found.dictionary_decode()
    elif layout.kind == "views":
        assert run.views is not None
        buffers = [bits, pa.py_buffer(run.views.numpy()[rows]), *(one.buffer for one in run.data)]
        found = _sound(name, run, pa.Array.from_buffers(kind, len(rows), buffers))
    else:
        starts, ends = _offsets(name, run, rows)
        offsets = np.concatenate(([0], np.cumsum(ends - starts)))
        if offsets[-1] >= 1 << 31:
            binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            kind = pa.large_binary() if binary else pa.large_string()
        small = not (pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))
        data = _bytes(run.bytes, starts, offsets)
        buffers = [bits, pa.py_buffer(offsets.astype(np.int32 if small else np.int64)), pa.py_buffer(data)]
        found = _sound(name, run, pa.Array.from_buffers(kind, len(rows), buffers))
    return found if not isinstance(run.type, pa.BaseExtensionType) else pa.ExtensionArray.from_storage(run.type, found)


def _bytes(extent: Extent | None, starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of rows, one after another; each begins at its start and has its place between offsets."""
    if extent is None or not offsets[-1]:
        return np.zeros(0, np.uint8)
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))
    return np.asarray(extent.numpy()[places])


def _sound(name: str, run: ColumnRun, found: Any) -> Any:
    try:
        validate(found)
    except arrow().ArrowException as error:
        file = run.extents[0].file
        file.require()
        raise FormatError(f"{file.path}: column {name!r}, rows from {run.first}: {error}: the file is damaged, write "
                          "it again", path=file.path) from None  # fmt: skip
    return found
