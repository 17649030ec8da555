"""`where`: the rows of a table that match filters or a Polars expression; `Selection`, which takes their columns."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._trace import traced
from ..array import Array
from ..array.gather import ChunkedTask, WorkerGroup, begin, by_stream, indices_of, new_result
from ..errors import ArgumentError
from ..targets import stream_of, to_device, to_host, zeros
from . import arrow as pa
from . import selecting
from .column import Column, ColumnRun, TableParts
from .extent import Extent
from .layout import layout_of
from .library import polars, to_polars
from .predicate import Condition, IntervalSet, mask_of, pushed_down
from .reading import ColumnReads, IoCounters, Ranges, read_ranges, set_bits, split_ranges
from .take import ColumnBatch, plan_take, split_by_run, take

CHUNK_ROWS = 1 << 20
"""Maximum rows of a chunk, which one thread compares."""
DENSE_FRACTION = 8
"""If more than one row in this many matches, other columns are read whole."""
MAX_FILTER_ROWS = 1 << 20
"""Rows on which Polars evaluates an expression at a time."""


class Selection:
    """The numbers of the rows that match, ascending. `take` reads columns of these rows; see `Table.where`.

    ``len(rows)`` is the number of rows. NumPy and DLPack take a selection as an int64 array of row numbers.
    """

    def __init__(self, table: TableParts, numbers: NDArray[np.int64], counters: IoCounters | None = None) -> None:
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
            The file is damaged, was truncated, or cannot be read.
        """
        rows = take(self._columns(columns), self._numbers, self._counters)
        # the metadata describes the pandas index
        return ColumnBatch(rows.replace_schema_metadata(self._table.schema.metadata))

    def gather(self, columns: Sequence[str | int] | str | None = None) -> dict[str, Any]:
        """Return columns of these rows in memory of the table's device, by `warpwell.gather`.

        On "cuda", data passes through host memory only if the storage delivers it there.

        Parameters
        ----------
        columns : sequence of str or int, optional
            Names or numbers of columns of numbers without nulls; default: all.

        Returns
        -------
        dict of str to `DeviceArray` or ndarray
            Values as they are stored: dates and times are integers, and fixed-size lists have the shape (len(self),
            size). For tables on "cuda", each array is a `DeviceArray`, which other libraries take by DLPack without a
            copy; otherwise a NumPy array.

        Raises
        ------
        ArgumentError
            The values of a column have different sizes, are in a dictionary, or some are null. Use `take` for such a
            column.
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
        """Return the reads so far. With `columns`, return the reads that `take` of these columns would add.

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
    table: TableParts, column: Column, numbers: NDArray[np.int64], counters: IoCounters
) -> Callable[[], Any]:
    """Begin to gather rows of a column on the table's device; return a function that waits for them."""
    layout = layout_of(column.type)
    for run in column.runs:
        why = "nulls" if column.nulls else "a dictionary" if run.codes is not None else f"values of {column.type}"
        if layout.kind not in ("fixed", "list") or run.layout.kind == "nested" or run.codes is not None or column.nulls:
            raise ArgumentError(f"column {column.name!r} has {why}, but gather copies rows of numbers: use take")
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


def rows_of(table: TableParts, run: ColumnRun) -> Array:
    """Return the values of a run as rows of the array of words that filters read; both share a cache."""
    assert run.values is not None
    array, _ = _words_of(table, run.values)
    return array.over(8 * _first_word(run.values), run.values.shape, run.values.dtype)


# -- conditions -------------------------------------------------------------------------------------------------------


@traced("where")
def where(table: TableParts, filters: Any) -> Selection:
    """Return the rows that match; see `Table.where`."""
    counters = IoCounters()
    if not hasattr(filters, "meta"):
        condition = Condition.from_filters(filters, lambda name: table[name].type)
    else:
        names = list(dict.fromkeys(filters.meta.root_names()))
        schema = to_polars(pa.table([pa.chunked_array([], table[name].type) for name in names], names=names)).schema
        condition = pushed_down(filters, schema, lambda name: table[name].type)
    found = [_rows_of_sets(table, sets, counters) for sets in condition.conjunctions]
    rows = functools.reduce(np.union1d, found) if found else np.zeros(0, np.int64)
    if not condition.is_exact:
        parts = [rows[:0]]
        for start in range(0, len(rows), MAX_FILTER_ROWS):
            candidates = rows[start : start + MAX_FILTER_ROWS]
            frame = to_polars(take([table[name] for name in names], candidates, counters))
            try:
                parts.append(candidates[mask_of(frame, filters).to_numpy()])
            except polars().exceptions.PolarsError as error:
                raise ArgumentError(f"Polars cannot evaluate the expression: {error!s:.300}", name="filters") from None
        rows = np.concatenate(parts)
    return Selection(table, rows, counters)


def _rows_of_sets(table: TableParts, sets: Mapping[str, IntervalSet], counters: IoCounters) -> NDArray[np.int64]:
    """Return the rows that match all sets; after the first column, only values of rows that still match are read."""
    if not sets:
        return np.arange(table.rows)
    columns = {name: table[name] for name in sets}
    ranges = Condition([sets]).candidate_rows(columns)
    candidates = sum(end - first for first, end in ranges)
    rows: NDArray[np.int64] | None = None
    for name, values in sorted(sets.items(), key=lambda item: not item[1].edges):  # validity alone excludes few rows
        if rows is None or len(rows) * DENSE_FRACTION > candidates:
            found = _rows_in_set(table, columns[name], values, ranges, counters)
            rows = found if rows is None else rows[np.isin(rows, found, assume_unique=True, kind="table")]
        elif len(rows):
            taken = take([columns[name]], rows, counters).column(0)
            rows = rows[np.concatenate([values.matches(chunk) for chunk in taken.chunks])]
    assert rows is not None
    return rows


def _rows_in_set(
    table: TableParts, column: Column, values: IntervalSet, ranges: Ranges, counters: IoCounters
) -> NDArray[np.int64]:
    """Return the rows of some ranges whose values are in a set."""
    dictionaries = {id(run.dictionary): run.dictionary for run in column.runs if run.dictionary is not None}
    matches_of = {key: values.matches(dictionary) for key, dictionary in dictionaries.items()}
    if values.edges and column.runs and all(map(_has_words, column.runs)):
        device = _words_of(table, _numbers_of(column.runs[0]))[0].device
        if device != "cpu":
            read_ranges(column, ranges, counters, is_mapped=False)
            return _select(table, column, values, matches_of, ranges, device)
    has_keys = values.edges or any(dictionary.null_count for dictionary in dictionaries.values())
    if has_keys:
        read_ranges(column, ranges, counters)
    else:
        nbytes = sum(run.valid.nbytes for run in column.runs if run.valid is not None)
        counters.add_reads(ColumnReads(column.name, nbytes, nbytes))
    parts = [
        (column.runs[number], start, min(CHUNK_ROWS, end - start))
        for number, first, end in split_ranges(column.runs, ranges)
        for start in range(first, end, CHUNK_ROWS)
    ]
    found = [np.zeros(0, np.int64)] * (1 + len(parts))

    def compare(k: int) -> None:
        run, first, count = parts[k]
        array = run.arrow(first, count) if has_keys else run.array.slice(first, count)
        found[k] = np.flatnonzero(values.matches(array, matches_of.get(id(run.dictionary)))) + (run.first + first)
        run.file.require()

    if parts:
        is_long = sum(count for *_, count in parts) > CHUNK_ROWS
        workers = WorkerGroup(len(os.sched_getaffinity(0))) if is_long else None
        ChunkedTask(len(parts), compare, workers).result()
    return np.concatenate(found)


# -- on a device ------------------------------------------------------------------------------------------------------


_FIRST_BYTE = 16
"""Byte of a file at which its array of words begins, as spans need it. Arrow files have no buffer before it."""
_WARP = 32
MAX_AHEAD_PARTS = 16
"""Maximum contiguous parts of a column that is read ahead of a filter through a cache."""


def _words_of(table: TableParts, extent: Extent) -> tuple[Array, int]:
    """Return an extent's file as 64-bit words, shifted so that a word begins at the extent, and its last bytes."""
    file, first = extent.file, _FIRST_BYTE + extent.offset % 8
    count = (file.nbytes - first) // 8
    end = first + 8 * count
    tail = file.buffer.slice(end, file.nbytes - end).to_pybytes()
    array = table.array_of(Extent(file, first, np.dtype("<i8"), (count,)))
    return array, int.from_bytes(tail.ljust(8, b"\0"), "little", signed=True)


def _first_word(extent: Extent) -> int:
    """Return the word of its array at which an extent begins."""
    return (extent.offset - _FIRST_BYTE) // 8


def _numbers_of(run: ColumnRun) -> Extent:
    """Return the numbers or dictionary indices of a run."""
    numbers = run.values if run.codes is None else run.codes
    assert numbers is not None
    return numbers


def _has_words(run: ColumnRun) -> bool:
    """Return True if the kernel compares the items of a run: numbers of at most 64 bits."""
    return run.layout.kind in ("fixed", "codes") and not run.layout.inner and _numbers_of(run).offset % 8 == 0


def _select(
    table: TableParts,
    column: Column,
    values: IntervalSet,
    matches_of: Mapping[int, NDArray[np.bool_]],
    ranges: Ranges,
    device: str,
) -> NDArray[np.int64]:
    """Return the rows of blocks whose numbers are in a set; the device sets their bits in a bitmap."""
    runs, form = column.runs, _form(_numbers_of(column.runs[0]).dtype)
    starts = np.cumsum([0, *((run.rows + 63) // 64 for run in runs)]).tolist()
    bitmap = zeros(device, starts[-1])
    groups = groupby(split_ranges(runs, ranges), lambda part: (runs[part[0]].file.path, id(runs[part[0]].dictionary)))
    for (_, dictionary), group in groups:
        parts = list(group)
        units = [_units(runs[number], starts[number], first, end, form[0]) for number, first, end in parts]
        array, tail = _words_of(table, _numbers_of(runs[parts[0][0]]))
        edges = to_device(device, _edges(values, matches_of.get(dictionary), form))
        for part in _units_read_ahead(array, units) if len(edges) else ():
            threads = len(part) * (_WARP if device == "cuda" else 1)
            selecting.select[threads](array, to_device(device, part.reshape(-1)), edges, *form, tail, bitmap)
    rows = [np.zeros(0, np.int64)]
    words = to_host(bitmap)
    for run, start in zip(runs, starts, strict=False):
        bits = words[start:].view(np.uint8)[: -(-run.rows // 8)]
        found = set_bits(bits if run.valid is None else bits & run.valid.numpy())
        rows.append(found[found < run.rows] + run.first)
        run.file.require()
    return np.concatenate(rows)


def _units(run: ColumnRun, start: int, first: int, end: int, shift: int) -> NDArray[np.int64]:
    """Return the records of the units of rows [first, end) of a run whose bits begin at a word of the bitmap."""
    groups = np.arange(first // 64 // selecting.UNIT * selecting.UNIT, -(-end // 64), selecting.UNIT)
    last_rows = np.minimum(64 * (groups + selecting.UNIT), run.rows)
    base = _first_word(_numbers_of(run))
    return np.stack([start + groups, base + (groups << shift), base + ((last_rows << shift) + 63 >> 6)], axis=1)


def _units_read_ahead(array: Array, parts: Sequence[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    """Yield units with words in the cache, while words of the next units are read in large commands."""
    if array.tier != "storage" or len(parts) > MAX_AHEAD_PARTS:
        yield np.concatenate(parts)
        return
    ahead_bytes = array.cache.space(array._nsid).pool.frames * array.cache.page_size // 4
    ahead_bytes += ahead_bytes // 8  # three parts are used at a time; half of all frames are two parts without a rest
    sizes = [int(8 * (units[-1, selecting.END_WORD] - units[0, selecting.FIRST_WORD])) for units in parts]
    parts = [
        part
        for units, nbytes in zip(parts, sizes, strict=True)
        for part in np.array_split(units, min(len(units), -(-nbytes // max(ahead_bytes, 1))))
    ]

    def prefetch(units: NDArray[np.int64]) -> Any:
        first, end = units[0, selecting.FIRST_WORD], units[-1, selecting.END_WORD]
        return array.prefetch(int(first), min(int(end), array.size))

    with array.cache.keep_io_threads_running():
        prefetches = deque(map(prefetch, parts[:2]))
        for k, units in enumerate(parts):
            prefetches.popleft().exception()
            yield units
            prefetches.extend(map(prefetch, parts[k + 2 : k + 3]))


def _edges(values: IntervalSet, matches: NDArray[np.bool_] | None, form: tuple[int, int, int]) -> NDArray[np.int64]:
    """Return the edges of a set for the kernel; with `matches` of a dictionary, of the indices whose values match.

    A set from the start begins at the smallest word. Edges above the largest word are left out.
    """
    if matches is not None:
        indices = np.flatnonzero(np.diff(matches, prepend=False, append=False))
        return indices + (-(1 << (1 << form[0]) - 1) if form[1] else 0)
    edges = [-(1 << 63)] * values.from_start + [edge for edge in values.edges if edge < 1 << 63]
    return np.array(edges[2:] if edges[1:2] == [-(1 << 63)] else edges, np.int64)  # no key is below the smallest word


def _form(dtype: np.dtype[Any]) -> tuple[int, int, int]:
    """Return shift, pattern and order of numbers for the kernel."""
    bits = 8 * dtype.itemsize
    pattern = sum(1 << (bits * k - 1) for k in range(1, 64 // bits + 1)) - (1 << 64)  # as a signed word
    order = (1 << (bits - 1)) - 1
    return bits.bit_length() - 1, pattern if dtype.kind == "u" else 0, order if dtype.kind == "f" else 0
