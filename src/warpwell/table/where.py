"""`where`: the rows of a table that match filters or a Polars expression; `Selection`, which takes their columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .._trace import traced
from ..array import Array
from ..array.gather import begin, by_stream, indices_of, new_result
from ..errors import ArgumentError
from ..targets import empty, stream_of, to_device, to_host, zeros
from . import selecting
from .column import Column, ColumnRun
from .extent import Extent
from .layout import layout_of
from .library import arrow, polars
from .predicate import Condition, IntervalSet, mask_of, order_keys, pushed_down
from .reading import ColumnReads, IoCounters, Ranges, read_ranges, split_ranges
from .take import ColumnBatch, corrupt_offsets, plan_take, readahead_rows, split_by_run, take

_KINDS = {"fixed": selecting.NUMBERS, "codes": selecting.NUMBERS, "bits": selecting.BITS, "text": selecting.TEXT}
_WARP = 32
MAX_FILTER_ROWS = 1 << 20
"""Rows on which Polars evaluates an expression at a time."""


class QueriedTable(Protocol):
    """The parts of a table that a query uses."""

    path: str
    rows: int
    schema: Any

    @property
    def names(self) -> list[str]:
        """The names of the columns."""

    def __getitem__(self, name: str | int) -> Column:
        """Return a column."""

    def array_of(self, extent: Extent) -> Array:
        """Open an extent for kernels."""


class Selection:
    """The rows that match, by their numbers, ascending. `take` reads columns of them; see `Table.where`.

    ``len(rows)`` is their count. The numbers are an array of int64 for NumPy and by DLPack.
    """

    def __init__(self, table: QueriedTable, numbers: NDArray[np.int64], counters: IoCounters | None = None) -> None:
        self._table = table
        self._numbers = numbers
        self._counters = IoCounters() if counters is None else counters

    def __repr__(self) -> str:
        return f"<warpwell.table.Selection: {len(self):,} of {self._table.rows:,} rows of {self._table.path!r}>"

    def __len__(self) -> int:
        return len(self._numbers)

    def numpy(self) -> NDArray[np.int64]:
        """Return the numbers of the rows, ascending."""
        return self._numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._numbers, dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._numbers.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._numbers.__dlpack__(**options)

    def head(self, count: int) -> Selection:
        """Return the first rows."""
        return Selection(self._table, self._numbers[:count], self._counters)

    def take(self, columns: Sequence[str | int] | str | None = None) -> ColumnBatch:
        """Read columns of these rows, and only the bytes around them.

        Parameters
        ----------
        columns : sequence of str or int, optional
            Names or numbers; default: all.

        Returns
        -------
        ColumnBatch
            In the order of `columns`.

        Raises
        ------
        FormatError, MediumError
            The file is corrupt, was truncated, or cannot be read.
        """
        rows = take(self._columns(columns), self._numbers, self._counters)
        return ColumnBatch(rows.replace_schema_metadata(self._table.schema.metadata))  # the index of pandas is there

    def gather(self, columns: Sequence[str | int] | str | None = None) -> dict[str, Any]:
        """Return columns of these rows in memory of the table's device, by `warpwell.gather`.

        On "cuda" only bytes that storage puts into host memory pass through it.

        Parameters
        ----------
        columns : sequence of str or int, optional
            Names or numbers of columns of numbers without nulls; default: all.

        Returns
        -------
        dict of str to `DeviceArray` or ndarray
            Values as they are stored, of dates and times integers; of fixed-size lists, shape (len(self), size). A
            `DeviceArray`, which other libraries take by DLPack without a copy, of tables on "cuda"; else NumPy arrays.

        Raises
        ------
        ArgumentError
            Values of a column have several sizes, or a dictionary, or some are null: `take` returns these.
        MediumError
        """
        selected = self._columns(columns)
        if len({column.name for column in selected}) != len({id(column) for column in selected}):
            raise ArgumentError("two columns have one name: gather them one after another, by their numbers")
        results = {
            column.name: _begin_gather(self._table, column, self._numbers, self._counters) for column in selected
        }
        return {name: result() for name, result in results.items()}

    def explain(self, columns: Sequence[str | int] | str | None = None) -> list[ColumnReads]:
        """Return the reads so far; with `columns`, the reads that `take` of these would add.

        The offsets of strings are read to find their bytes.
        """
        if columns is None:
            return self._counters.listed()
        planned = IoCounters()
        plan_take(self._columns(columns), self._numbers, planned)
        return planned.listed()

    def _columns(self, columns: Sequence[str | int] | str | None) -> list[Column]:
        names = range(len(self._table.names)) if columns is None else [columns] if isinstance(columns, str) else columns
        return [self._table[name] for name in names]


def _begin_gather(
    table: QueriedTable, column: Column, numbers: NDArray[np.int64], counters: IoCounters
) -> Callable[[], Any]:
    """Begin to gather rows of a column on the table's device; return a function that waits for them."""
    layout = layout_of(column.type)
    for run in column.runs:
        why = "nulls" if column.nulls else "a dictionary" if run.codes is not None else f"values of {column.type}"
        if layout.kind not in ("fixed", "list") or run.layout.kind == "nested" or run.codes is not None or column.nulls:
            raise ArgumentError(f"column {column.name!r} has {why}, and gather copies rows of numbers: use take")
    parts = list(split_by_run(column.runs, numbers)) or [(run, numbers) for run in column.runs if run.rows][:1]
    if not parts:
        return lambda: np.empty((0, *layout.inner), layout.dtype)
    futures, at, read = [], 0, list[int]()
    result: Any = None
    for run, rows in parts:
        array = rows_of(table, run)
        if result is None:
            result, address = new_result(array, (len(numbers), *array.shape[1:]))
        nbytes = array._strides[0]
        indices: Any = indices_of(rows, 0) if by_stream(array) else rows
        stream = stream_of(array.device, 0) if by_stream(array) else None
        futures.append(begin(array, indices, result, address + at, result, stream, report_bytes=read.append))
        at += len(rows) * nbytes

    def wait() -> Any:
        for future in futures:
            future.result()
        counters.add_reads(ColumnReads(column.name, at, sum(read), from_storage=sum(read)))
        return result

    return wait


def rows_of(table: QueriedTable, run: ColumnRun) -> Array:
    """Return the values of a run as rows of the array of words that filters read; both share a cache."""
    assert run.values is not None
    array, _ = _words_of(table, run.values)
    return array.over(8 * _first_word(run.values), run.values.shape, run.values.dtype)


# -- conditions -------------------------------------------------------------------------------------------------------


@traced("where")
def where(table: QueriedTable, filters: Any) -> Selection:
    """Return the rows that match; see `Table.where`."""
    counters = IoCounters()
    if not hasattr(filters, "meta"):
        condition = Condition.from_filters(filters, lambda name: table[name].type)
    else:
        names = list(dict.fromkeys(filters.meta.root_names()))
        fields = [arrow().field(name, table[name].type) for name in names]
        schema = polars().from_arrow(arrow().schema(fields).empty_table()).schema
        condition = pushed_down(filters, schema, lambda name: table[name].type)
    rows = _rows_of_condition(table, condition, counters)
    if not condition.is_exact:
        parts = [rows[:0]]
        for start in range(0, len(rows), MAX_FILTER_ROWS):
            candidates = rows[start : start + MAX_FILTER_ROWS]
            frame = polars().from_arrow(take([table[name] for name in names], candidates, counters))
            try:
                parts.append(candidates[mask_of(frame, filters).to_numpy()])
            except polars().exceptions.PolarsError as error:
                raise ArgumentError(f"Polars cannot evaluate the expression: {error!s:.300}", name="filters") from None
        rows = np.concatenate(parts)
    return Selection(table, rows, counters)


def _rows_of_condition(table: QueriedTable, condition: Condition, counters: IoCounters) -> NDArray[np.int64]:
    """Return the rows that match one of the conjunctions."""
    matches: Any = None
    runs = table[0].runs if table.names else ()
    for sets in condition.conjunctions:
        left = _remaining_sets(table, sets)
        if left is not None:
            bitmap = _evaluate_sets(table, left, runs, counters)
            matches = bitmap if matches is None else to_host(matches) | to_host(bitmap)
    return _rows_in_bitmap(runs, matches)


def _remaining_sets(table: QueriedTable, sets: Mapping[str, IntervalSet]) -> dict[str, IntervalSet] | None:
    """Return the sets that not all rows match; None if no row can match one of them."""
    left = {}
    for name, values in sets.items():
        runs = table[name].runs
        nulls = sum(run.nulls for run in runs)
        has_nulls = nulls or any(run.dictionary is not None and run.dictionary.null_count for run in runs)
        if not (has_nulls if values.nulls else nulls < table.rows):
            return None
        if not (nulls == table.rows if values.nulls else values.has_all_keys and not has_nulls):
            left[name] = values
    return left


# -- selection bitmaps: a bit for each row, in which each run begins a new word of 64 ---------------------------------


def _first_words(runs: Sequence[ColumnRun]) -> list[int]:
    """Return the word in which each run begins, and the end."""
    return [0, *np.cumsum([(run.rows + 63) // 64 for run in runs]).tolist()]


def _rows_in_bitmap(runs: Sequence[ColumnRun], bitmap: Any) -> NDArray[np.int64]:
    """Return the numbers of the rows whose bits are set."""
    if bitmap is None or not len(bitmap):
        return np.zeros(0, np.int64)
    if isinstance(bitmap, np.ndarray):
        full = np.flatnonzero(bitmap)
        bits = np.unpackbits(bitmap[full].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        which, bit = np.nonzero(bits)
        positions = full[which] * 64 + bit
    else:
        positions = _set_bits(bitmap)
    starts = np.array(_first_words(runs)) * 64
    firsts = np.array([run.first for run in runs], np.int64)
    run = np.searchsorted(starts, positions, "right") - 1
    return np.asarray(positions + (firsts - starts[:-1])[run])


def _set_bits(bitmap: Any, device: str = "cuda") -> NDArray[np.int64]:
    """Return which bits of a bitmap in memory of a device are set, ascending; the device lists them."""
    count = zeros(device, 1)
    selecting.count_bits[len(bitmap)](bitmap, count, device=device)
    n = int(to_host(count)[0])
    if not n:
        return np.zeros(0, np.int64)
    positions, count = empty(device, n), zeros(device, 1)
    selecting.list_bits[len(bitmap)](bitmap, positions, count, device=device)
    return np.sort(to_host(positions))


def _bitmap_of_ranges(runs: Sequence[ColumnRun], ranges: Ranges) -> NDArray[np.int64]:
    """Return the bitmap of ranges of rows, rounded to words: it may have more rows of the same runs."""
    starts = _first_words(runs)
    bitmap = np.zeros(starts[-1], np.int64)
    for number, first, end in split_ranges(runs, ranges):
        bitmap[starts[number] + first // 64 : starts[number] + -(-end // 64)] = -1
    return _without_tails(runs, bitmap)


def _without_tails(runs: Sequence[ColumnRun], bitmap: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a bitmap without the bits behind the last row of each run."""
    for run, end in zip(runs, _first_words(runs)[1:], strict=True):
        if run.rows % 64:
            bitmap[end - 1] &= (1 << run.rows % 64) - 1
    return bitmap


def _bitmap_of_validity(runs: Sequence[ColumnRun], *, nulls: bool) -> NDArray[np.int64]:
    """Return the bitmap of the rows that are null, or of those that are not."""
    starts = _first_words(runs)
    bitmap = np.zeros(starts[-1], np.int64)
    for run, start, end in zip(runs, starts, starts[1:], strict=False):
        part = bitmap[start:end]
        if run.valid is not None:
            part.view(np.uint8)[: run.valid.nbytes] = run.valid.numpy().reshape(-1)
            run.valid.file.require()
        elif run.layout.kind != "null":
            part[:] = -1
        if nulls:
            np.invert(part, out=part)
    return _without_tails(runs, bitmap)


# -- evaluation -------------------------------------------------------------------------------------------------------


def _evaluate_sets(
    table: QueriedTable, sets: Mapping[str, IntervalSet], runs: Sequence[ColumnRun], counters: IoCounters
) -> Any:
    """Return the bitmap of the rows that match all sets; the first column is read in all blocks that may match."""
    columns = {name: table[name] for name in sets} or {"": table[0]}
    ranges = Condition([sets]).candidate_rows(columns)
    bitmap: Any = None
    if not sets or ranges != [(0, table.rows)]:
        bitmap = _bitmap_of_ranges(runs, ranges)
    for number, (name, values) in enumerate(sets.items()):
        column = columns[name]
        if number:
            rows = _rows_in_bitmap(runs, bitmap)
            if not len(rows):
                return bitmap
            readahead_rows(column, rows, counters)
        has_keys = values.edges or any(run.dictionary is not None and run.dictionary.null_count for run in column.runs)
        parts = []
        if has_keys:
            parts.append(_select(table, column, values, bitmap, ranges if number == 0 else None, counters))
        if values.nulls or not has_keys:
            nbytes = sum(run.valid.nbytes for run in column.runs if run.valid is not None)
            counters.add_reads(ColumnReads(name, nbytes, nbytes))
            validity = _bitmap_of_validity(column.runs, nulls=values.nulls)
            parts.append(validity if bitmap is None else validity & to_host(bitmap))
        bitmap = parts[0] if len(parts) == 1 else to_host(parts[0]) | to_host(parts[1])
    return bitmap


def _select(
    table: QueriedTable,
    column: Column,
    values: IntervalSet,
    before: Any,
    ranges: Ranges | None,
    counters: IoCounters,
) -> Any:
    """Return the bitmap of rows whose keys are in a set, in memory of the device.

    Only rows of the bitmap `before` are selected. `ranges` are read ahead if nearly all rows are candidates.
    """
    starts = _first_words(column.runs)
    groups: dict[tuple[Any, ...], list[tuple[ColumnRun, int]]] = {}
    for run, start in zip(column.runs, starts, strict=False):
        if run.rows:
            key = tuple(extent and (extent.path, extent.offset % 8) for extent in _buffers(run))
            groups.setdefault(key, []).append((run, start))
    bitmap: Any = None
    # the buffers of all runs of a group are in the same arrays
    for runs in groups.values():
        arrays, tails = _arrays(table, runs[0][0])
        device = arrays[0].device
        if bitmap is None:
            bitmap = zeros(device, starts[-1])
            before = to_device(device, before) if device == "cuda" and isinstance(before, np.ndarray) else before
            if ranges is not None:
                read_ranges(column, ranges, counters, is_mapped=arrays[0].tier == "mapped")
        kind, *form = _form(runs[0][0])
        units, records, edges, pool = _tables(runs, values, kind)
        lanes = _WARP if device == "cuda" else 1
        form.append(int(before is not None))
        inputs: list[Any] = [np.array(tails, np.int64), np.zeros(1, np.int64) if before is None else before]
        if ranges is not None and kind == selecting.NUMBERS and device != "cpu":  # there a plain loop is as fast
            near = [
                to_device(device, array) if isinstance(array, np.ndarray) else array
                for array in (records, edges, *inputs)
            ]
            for first, end in _units_read_ahead(arrays[0], runs, units) if before is None else [(0, units)]:
                kernel = selecting.select_whole[(end - first) * lanes]
                kernel(*arrays[:2], *near[:2], *form, *near[2:], bitmap, first)
            continue
        corrupt = np.zeros(1, np.int64)
        selecting.select[units * lanes](*arrays, records, edges, pool, kind, *form, *inputs, bitmap, corrupt)
        if corrupt[0]:
            run, start = next(pair for pair in reversed(runs) if 64 * pair[1] < corrupt[0])
            file = (run.offsets or run.extents[0]).file
            raise corrupt_offsets(file, column.name, int(run.first + corrupt[0] - 1 - 64 * start))
    return np.zeros(starts[-1], np.int64) if bitmap is None else bitmap


def _buffers(run: ColumnRun) -> tuple[Extent | None, Extent | None, Extent | None]:
    """Return the extents of values (or codes, or offsets), of validity, and of bytes."""
    if run.layout.kind == "fixed" and run.layout.dtype == np.uint8 and run.layout.inner:
        return None, run.valid, run.values
    values = run.offsets if run.layout.kind == "text" else run.codes if run.layout.kind == "codes" else run.values
    return values, run.valid, run.bytes


_FIRST_BYTE = 16
"""Byte of a file at which its array of words begins, as spans need it. Arrow files have no buffer before it."""


def _words_of(table: QueriedTable, extent: Extent) -> tuple[Array, int]:
    """Return an extent's file as 64-bit words, shifted so that the extent begins at one, and the file's last bytes."""
    file, first = extent.file, _FIRST_BYTE + extent.offset % 8
    count = (file.nbytes - first) // 8
    end = first + 8 * count
    tail = file.buffer.slice(end, file.nbytes - end).to_pybytes()
    array = table.array_of(Extent(file, first, np.dtype("<i8"), (count,)))
    return array, int.from_bytes(tail.ljust(8, b"\0"), "little", signed=True)


def _first_word(extent: Extent | None, missing: int = 0) -> int:
    """Return the word of its array at which an extent begins."""
    return missing if extent is None else (extent.offset - _FIRST_BYTE) // 8


def _arrays(table: QueriedTable, run: ColumnRun) -> tuple[list[Array], list[int]]:
    """Return the arrays of a run's buffers and their last words; a missing buffer gets the array of another buffer."""
    opened = [None if extent is None else _words_of(table, extent) for extent in _buffers(run)]
    default = next(pair for pair in opened if pair is not None)
    return [(pair or default)[0] for pair in opened], [0 if pair is None else pair[1] for pair in opened]


MAX_AHEAD_RUNS = 16
"""Maximum runs of a column that is read ahead of a filter through a cache."""


def _units_read_ahead(array: Array, runs: Sequence[tuple[ColumnRun, int]], units: int) -> Iterator[tuple[int, int]]:
    """Yield units [first, end) with words in the cache, while words of the next units are read in large commands."""
    if array.tier != "storage" or len(runs) > MAX_AHEAD_RUNS:
        yield 0, units
        return
    part_bytes = array.cache.space(array._nsid).pool.frames * array.cache.page_size // 4
    part_bytes += part_bytes // 8  # three parts are used at a time; half of all frames are two parts without a rest
    parts, unit = [], 0
    for run, _ in runs:
        items = run.codes or run.values
        assert items is not None
        base, count, nbytes = _first_word(items), -(-run.rows // (64 * selecting.UNIT)), items.nbytes
        each = max(1, -(-count // -(-nbytes // max(part_bytes, 1)))) if nbytes else 1
        for first in range(0, count, each):
            end = min(first + each, count)
            low, high = (base + (nbytes * k // count >> 3) for k in (first, end))
            parts.append((unit + first, unit + end, low, min(high + 1, array.size)))
        unit += count
    with array.cache.keep_io_threads_running():
        prefetches = deque(array.prefetch(*parts[k][2:]) for k in range(min(2, len(parts))))
        for k, (first, end, _, _) in enumerate(parts):
            prefetches.popleft().exception()
            yield first, end
            if k + 2 < len(parts):
                prefetches.append(array.prefetch(*parts[k + 2][2:]))


def _tables(
    runs: Sequence[tuple[ColumnRun, int]], values: IntervalSet, kind: int
) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return the number of units, the records of runs, and the edges and their bytes, for the kernels."""
    records = np.zeros((len(runs), selecting.RUN_WORDS), np.int64)
    step = 2 if kind in (selecting.WIDE, selecting.TEXT, selecting.BYTES) else 1
    tables: list[NDArray[np.int64]] = []
    edges_of: dict[int, tuple[int, int]] = {}
    end = unit = 0
    for record, (run, start) in zip(records, runs, strict=True):
        key = id(run.dictionary)
        if key not in edges_of:
            edges, pool = _encode(values if run.codes is None else _indices_of(run, values), kind)
            tables.append(edges)
            edges_of[key] = end, len(edges) // step
            end += len(edges)
        buffers = _buffers(run)
        nbytes = 0 if buffers[2] is None else buffers[2].nbytes
        starts = [_first_word(extent, missing) for extent, missing in zip(buffers, (0, -1, 0), strict=True)]
        record[:] = unit, start, run.rows, *starts, nbytes, *edges_of[key]
        unit += -(-run.rows // (64 * selecting.UNIT))
    return unit, records.reshape(-1), np.concatenate([*tables, np.zeros(1, np.int64)]), np.append(pool, np.uint8(0))


def _indices_of(run: ColumnRun, values: IntervalSet) -> IntervalSet:
    """Return the keys of the dictionary indices of a run whose values are in a set."""
    dictionary = run.dictionary
    valid = dictionary.is_valid().to_numpy(zero_copy_only=False)
    inside = np.where(valid, values.contains(order_keys(dictionary)), values.nulls)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], inside.astype(np.int8), [0]))))
    dtype = run.layout.dtype
    assert dtype is not None
    minimum = -(1 << (8 * dtype.itemsize - 1)) if dtype.kind == "u" else 0
    return IntervalSet(tuple((edges + minimum).tolist()))


def _encode(values: IntervalSet, kind: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return edges as words for the kernel, and the bytes that they point into.

    Integers are one word each, or two for `WIDE`: high, and low with the order of signed words. Bytes are a start and
    an end. A set from the start begins at the smallest word. Edges above the largest word are left out.
    """
    if kind in (selecting.TEXT, selecting.BYTES):
        texts = [b""] * values.from_start + list(values.edges)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        starts = ends - np.array([len(text) for text in texts], np.int64)
        return np.stack([starts, ends], axis=1).reshape(-1), np.frombuffer(b"".join(texts), np.uint8)
    bits = 127 if kind == selecting.WIDE else 63
    edges = [-(1 << bits)] * values.from_start + [int(edge) for edge in values.edges if edge < 1 << bits]
    edges = edges[2:] if edges[1:2] == [-(1 << bits)] else edges  # no key is below the smallest word
    if kind == selecting.WIDE:
        edges = [word for edge in edges for word in (edge >> 64, (edge & ((1 << 64) - 1)) - (1 << 63))]
    return np.array(edges, np.int64), np.zeros(0, np.uint8)


def _form(run: ColumnRun) -> tuple[int, int, int, int]:
    """Return kind, shift, pattern and order of a column's items, for the kernel."""
    layout = run.layout
    kind = _KINDS[layout.kind]
    dtype = np.dtype(np.uint8) if layout.dtype is None else layout.dtype
    bits = 8 * dtype.itemsize
    if kind == selecting.NUMBERS and layout.inner:
        return (selecting.WIDE, 0, 0, 0) if dtype.kind == "i" else (selecting.BYTES, layout.inner[0], 0, 0)
    pattern = order = 0
    if kind == selecting.NUMBERS and dtype.kind == "u":
        pattern = sum(1 << (bits * k - 1) for k in range(1, 64 // bits + 1)) - (1 << 64)  # as a signed word
    elif kind == selecting.NUMBERS and dtype.kind == "f":
        order = (1 << (bits - 1)) - 1
    return kind, bits.bit_length() - 1, pattern, order
