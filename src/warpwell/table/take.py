"""`Taken`: the rows of a selection, of which only the bytes near which they lie are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array.gather import Pieces, fetch_pieces
from ..errors import ArgumentError, FormatError
from .column import Column, ColumnRun, validate
from .extent import Extent, MappedFile
from .layout import storage_of
from .library import arrow, polars
from .reading import Reads


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


MOST_BYTES = 128 << 20
"""Most bytes that a take reads at a time."""
ROW_BYTES = 16 << 10
"""Bytes that a row of a column is expected to take of that, with pages and gaps: no more rows are read at a time."""


def take(columns: Sequence[Column], numbers: NDArray[np.int64], reads: Reads) -> Any:
    """Return rows of columns, ascending by number, as a `pyarrow.Table`; count in `reads` what that reads.

    Raises
    ------
    FormatError
        Offsets or codes of a row lead outside, or its bytes are no UTF-8.
    MediumError
        A file was cut, or cannot be read.
    """
    pa = arrow()
    chunks: list[list[Any]] = [[] for _ in columns]
    for some in _slices(columns, numbers):
        plans = [(column, list(pieces(column.runs, some))) for column in columns]
        taken = _fetched(plans, reads)
        for (column, parts), found in zip(plans, chunks, strict=True):
            found += [_taken(column.name, run, rows, taken) for run, rows in parts]
    arrays = [
        pa.chunked_array(found, type=found[0].type if found else column.type)
        for column, found in zip(columns, chunks, strict=True)
    ]
    fields = [pa.field(column.name, array.type) for column, array in zip(columns, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def _slices(columns: Sequence[Column], numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield rows so that what is read of fixed size for some of them at a time is bounded."""
    widths = [
        sum(one.nbytes for one in column.runs[0].extents) // max(1, column.runs[0].rows)
        for column in columns
        if column.runs
    ]
    span = MOST_BYTES // (sum(widths) + 1)
    each = max(1, MOST_BYTES // ((len(columns) + 1) * ROW_BYTES))
    start = 0
    while start < len(numbers):
        end = max(start + each, int(np.searchsorted(numbers, numbers[start] + span)))
        yield numbers[start:end]
        start = end


Plan = tuple[Column, list[tuple[ColumnRun, NDArray[np.int64]]]]
_ITEMS = ("values", "codes", "views", "offsets")


def pieces(runs: Sequence[ColumnRun], numbers: NDArray[np.int64]) -> Iterator[tuple[ColumnRun, NDArray[np.int64]]]:
    """Yield the runs in which rows lie, and these, counted from the run's first."""
    ends = np.searchsorted(numbers, [run.first + run.rows for run in runs]).tolist()
    start = 0
    for run, end in zip(runs, ends, strict=True):
        if end > start:
            yield run, numbers[start:end] - run.first
        start = end


class _Together:
    """Pieces of one size of some runs of a column in one file, which are fetched and copied together."""

    def __init__(self, name: str, file: MappedFile, size: Any) -> None:
        self.name, self.file, self.size = name, file, size
        self.starts: list[NDArray[np.int64]] = []
        self.edges = [0]
        self._items: NDArray[np.uint8] | None = None

    def follows(self, starts: NDArray[np.int64]) -> bool:
        """Return whether pieces come after those that are here."""
        return not (self.starts and len(starts)) or bool(self.starts[-1][-1] <= starts[0])

    def add(self, starts: NDArray[np.int64]) -> _Part:
        """Add pieces of a run, from these bytes of the file on."""
        if len(starts):
            self.starts.append(starts)
            self.edges.append(self.edges[-1] + len(starts))
        return _Part(self, self.edges[-1] - len(starts), self.edges[-1])

    def planned(self, direct: bool) -> Pieces:
        """Return all of them, to be fetched."""
        starts = self.starts[0] if len(self.starts) == 1 else np.concatenate([np.zeros(0, np.int64), *self.starts])
        self.pieces = self.file.pieces(starts, self.size, self.edges[:-1])
        self.pieces.direct &= direct
        return self.pieces

    def items(self) -> NDArray[np.uint8]:
        """Return a copy of what was fetched, the same each time."""
        if self._items is None:
            self._items = self.pieces.items()
        return self._items


@dataclass
class _Part:
    """The pieces [first, end) of some, those of one run."""

    together: _Together
    first: int
    end: int

    def items(self) -> NDArray[np.uint8]:
        """Return a copy of them, one after another; shape (pieces, size) if they have one size."""
        every = self.together.items()
        return every[self.first : self.end] if isinstance(self.together.size, int) else every


Taking = dict[tuple[int, str], _Part]
"""The pieces of a run, by its id and what they are."""


def explain(columns: Sequence[Column], numbers: NDArray[np.int64], reads: Reads) -> None:
    """Count what `take` would read."""
    _fetched([(column, list(pieces(column.runs, numbers))) for column in columns], reads, dry=True)


def bring(column: Column, numbers: NDArray[np.int64], reads: Reads) -> None:
    """Have the system's page cache get what rows of a column need."""
    for some in _slices([column], numbers):
        _fetched([(column, list(pieces(column.runs, some)))], reads, cached=True)


def _fetched(plans: Sequence[Plan], reads: Reads, *, dry: bool = False, cached: bool = False) -> Taking:
    """Fetch everything that rows need: what they lie in, and then the bytes that offsets lead to."""
    found: Taking = {}
    latest: dict[tuple[str, str, int, Any], _Together] = {}
    asked: list[_Together] = []

    def add(name: str, run: ColumnRun, what: str, extent: Extent | None, starts: NDArray[np.int64], sizes: Any) -> None:
        if extent is not None and extent.nbytes:
            key = name, what, id(extent.file), sizes
            starts = starts + extent.offset
            some = latest.get(key) if isinstance(sizes, int) else None  # of several sizes: each run alone
            if some is None or not some.follows(starts):
                some = _Together(name, extent.file, sizes)
                asked.append(some)
                if isinstance(sizes, int):
                    latest[key] = some
            found[id(run), what] = some.add(starts)

    for column, parts in plans:
        for run, rows in parts:
            add(column.name, run, "valid", run.valid, rows >> 3, 1)
            if run.layout.kind == "bits":
                add(column.name, run, "values", run.values, rows >> 3, 1)
            for what in ("codes", "views", "offsets") if run.layout.kind == "bits" else _ITEMS:
                extent = getattr(run, what)
                if extent is not None and extent.nbytes:
                    width = extent.nbytes // extent.shape[0]
                    add(column.name, run, what, extent, rows * width, width * (2 if what == "offsets" else 1))
    fetch_pieces([one.planned(not cached) for one in asked], plan_only=dry)
    first = len(asked)
    for column, parts in plans:
        for run, rows in parts:
            if run.offsets is not None and run.bytes is not None:
                starts, ends = _offsets(column.name, run, rows, found if not dry else None)
                used = np.flatnonzero(ends > starts)
                used = used[np.argsort(starts[used], kind="stable")]  # as they are, but in a damaged file
                add(column.name, run, "bytes", run.bytes, starts[used], (ends - starts)[used])
    fetch_pieces([one.planned(not cached) for one in asked[first:]], plan_only=dry)
    for one in asked:
        reads.pieces(one.name, one.pieces)
    return found


def _offsets(
    name: str, run: ColumnRun, rows: NDArray[np.int64], found: Taking | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the bytes of rows begin and end, checked; null rows have none; mapped without `found`."""
    assert run.offsets is not None
    if found is None:
        offsets = run.offsets.numpy()
        starts, ends = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
        bits = None if run.valid is None else run.valid.numpy().reshape(-1)[rows >> 3]
    else:
        both = found[id(run), "offsets"].items().view(run.offsets.dtype).astype(np.int64)
        starts, ends = both[:, 0], both[:, 1]
        bits = _byte(run, rows, found, "valid")
    if bits is not None:
        valid = _bit(bits, rows)
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
        "it again",
        path=file.path,
    )


def _byte(run: ColumnRun, rows: NDArray[np.int64], found: Taking, what: str) -> NDArray[np.uint8] | None:
    """Return the byte in which the bit of each row is."""
    one = found.get((id(run), what))
    return None if one is None else one.items().reshape(-1)


def _bit(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((bits >> (rows & 7).astype(np.uint8)) & 1, np.bool_)


def _packed(bits: NDArray[np.uint8] | None, rows: NDArray[np.int64]) -> Any:
    return None if bits is None else arrow().py_buffer(np.packbits(_bit(bits, rows), bitorder="little"))


def _taken(name: str, run: ColumnRun, rows: NDArray[np.int64], taking: Taking) -> Any:
    """Return rows of a run as a `pyarrow.Array`."""
    pa = arrow()
    kind, layout, count = storage_of(run.type), run.layout, len(rows)
    bits = _packed(_byte(run, rows, taking, "valid"), rows)
    what = {"codes": "codes", "views": "views"}.get(layout.kind, "values")
    one = taking.get((id(run), what))
    items = pa.py_buffer(b"" if one is None or layout.kind == "bits" else one.items())
    if layout.kind == "null":
        found = pa.nulls(count)
    elif layout.kind == "fixed":
        found = pa.Array.from_buffers(kind, count, [bits, items])
    elif layout.kind == "bits":
        found = pa.Array.from_buffers(kind, count, [bits, _packed(_byte(run, rows, taking, "values"), rows)])
    elif layout.kind == "list":
        values = pa.Array.from_buffers(kind.value_type, count * layout.inner[0], [None, items])
        found = pa.Array.from_buffers(kind, count, [bits], children=[values])
    elif layout.kind == "codes":
        codes = pa.Array.from_buffers(pa.from_numpy_dtype(layout.dtype), count, [bits, items])
        ordered = pa.types.is_dictionary(kind) and kind.ordered
        found = _sound(name, run, pa.DictionaryArray.from_arrays(codes, run.dictionary, ordered=ordered, safe=False))
        if not pa.types.is_dictionary(kind):
            found = found.dictionary_decode()
    elif layout.kind == "views":
        found = _sound(name, run, pa.Array.from_buffers(kind, count, [bits, items, *(x.buffer for x in run.data)]))
    else:
        starts, ends = _offsets(name, run, rows, taking)
        offsets = np.concatenate(([0], np.cumsum(ends - starts)))
        if offsets[-1] >= 1 << 31:
            binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            kind = pa.large_binary() if binary else pa.large_string()
        small = not (pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))
        one = taking.get((id(run), "bytes"))
        data = b"" if one is None else _in_order(one.items(), starts, ends)
        buffers = [bits, pa.py_buffer(offsets.astype(np.int32 if small else np.int64)), pa.py_buffer(data)]
        found = _sound(name, run, pa.Array.from_buffers(kind, count, buffers))
    for file in {extent.file for extent in run.extents}:
        file.require()
    return found if not isinstance(run.type, pa.BaseExtensionType) else pa.ExtensionArray.from_storage(run.type, found)


def _in_order(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of rows in the order of rows; they were fetched in the order in which they lie."""
    used = np.flatnonzero(ends > starts)
    order = np.argsort(starts[used], kind="stable")
    if (order[1:] > order[:-1]).all():
        return data
    sizes = (ends - starts)[used]
    at = np.empty(len(used), np.int64)
    at[order] = np.cumsum(sizes[order]) - sizes[order]
    before = np.cumsum(sizes) - sizes
    return np.asarray(data[np.arange(int(sizes.sum())) + np.repeat(at - before, sizes)])


def _sound(name: str, run: ColumnRun, found: Any) -> Any:
    try:
        validate(found)
    except arrow().ArrowException as error:
        file = run.extents[0].file
        file.require()
        raise FormatError(
            f"{file.path}: column {name!r}, rows from {run.first}: {error}: the file is damaged, write it again",
            path=file.path,
        ) from None
    return found
