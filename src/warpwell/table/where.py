"""`where`: the rows of a table that match pyarrow's ``filters=`` lists; `Matches`, which takes them from columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from .column_files import STATISTICS_ROWS
from .extent import Extent
from .key_sets import Flips, codes_of, encoded, intersection, set_of
from .layout import layout_of
from .reading import ColumnReads, Reads, together
from .statistics import Blocks, blocks_of, by_keys, spans
from .take import Taken, bring, damaged, explain, pieces, take

_KINDS = {"fixed": selecting.NUMBERS, "codes": selecting.NUMBERS, "bits": selecting.BITS, "text": selecting.TEXT}
_WARP = 32


class Home(Protocol):
    """The table that is asked."""

    path: str
    rows: int

    @property
    def names(self) -> list[str]:
        """The names of the columns."""

    def __getitem__(self, name: str | int) -> Column:
        """Return a column."""

    def array_of(self, extent: Extent) -> Array:
        """Open an extent for kernels."""


class Matches:
    """Rows that match: their numbers, ascending. `take` reads columns of them; see `Table.where`.

    ``len(rows)`` is how many there are; they are an array of int64 for NumPy and by DLPack.
    """

    def __init__(self, table: Home, numbers: NDArray[np.int64], reads: Sequence[Reads]) -> None:
        self._table = table
        self._numbers = numbers
        self._reads = list(reads)

    def __repr__(self) -> str:
        return f"<warpwell.table.Matches: {len(self):,} of {self._table.rows:,} rows of {self._table.path!r}>"

    def __len__(self) -> int:
        return len(self._numbers)

    def __bool__(self) -> bool:
        return len(self) > 0

    def numpy(self) -> NDArray[np.int64]:
        """Return the numbers of the rows, ascending."""
        return self._numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._numbers, dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._numbers.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._numbers.__dlpack__(**options)

    def head(self, count: int) -> Matches:
        """Return the first rows of them."""
        return Matches(self._table, self._numbers[:count], self._reads)

    def take(self, columns: Sequence[str | int] | str | None = None) -> Taken:
        """Read columns of these rows: only the pages in which they lie.

        Parameters
        ----------
        columns : sequence of str or int, optional
            Names or numbers; default: all.

        Returns
        -------
        Taken
            In the order of `columns`.

        Raises
        ------
        FormatError, MediumError
            The file is damaged, was cut, or cannot be read.
        """
        reads = Reads()
        found = take(self._columns(columns), self._numbers, reads)
        self._reads.append(reads)
        return Taken(found)

    def gather(self, columns: Sequence[str | int] | str | None = None) -> dict[str, Any]:
        """Return columns of these rows in memory of the table's device, by `warpwell.gather`.

        On "cuda" nothing passes through host memory but what storage puts there.

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
            Values of a column have several sizes, or codes, or some are null: `take` returns these.
        MediumError
        """
        reads, wanted = Reads(), self._columns(columns)
        if len({one.name for one in wanted}) != len({id(one) for one in wanted}):
            raise ArgumentError("two columns have one name: gather them one after another, by their numbers")
        found = {one.name: gathered(self._table, one, self._numbers, reads) for one in wanted}
        self._reads.append(reads)
        return {name: result() for name, result in found.items()}

    def explain(self, columns: Sequence[str | int] | str | None = None) -> list[ColumnReads]:
        """Return what was read so far; with `columns`, what `take` of them would read.

        Of strings the offsets are read to know where their bytes lie.
        """
        if columns is None:
            return together(self._reads)
        reads = Reads(dry=True)
        explain(self._columns(columns), self._numbers, reads)
        return reads.listed()

    def _columns(self, columns: Sequence[str | int] | str | None) -> list[Column]:
        names = self._table.names if columns is None else [columns] if isinstance(columns, str) else columns
        return [self._table[name] for name in (range(len(names)) if columns is None else names)]


@traced("where")
def where(table: Home, filters: Any) -> Matches:
    """Return the rows that match; see `Table.where`."""
    conjunctions = list(_normal(table, filters))
    reads, chosen = Reads(mapped=not conjunctions or _mapped(table, next(iter(conjunctions[0])))), None
    for sets in conjunctions:
        mask = _conjunction(table, sets, reads)
        chosen = mask if chosen is None else to_host(chosen) | to_host(mask)
    runs = table[0].runs if table.names else ()
    return Matches(table, _rows(runs, chosen), [reads])


def gathered(table: Home, column: Column, numbers: NDArray[np.int64], reads: Reads) -> Callable[[], Any]:
    """Begin to gather rows of a column on the table's device; return what waits for them, and returns them."""
    parts = list(pieces(column.runs, numbers)) or [(run, numbers) for run in column.runs if run.rows][:1]
    layout = layout_of(column.type, column.name)
    for run in column.runs:
        why = "nulls" if column.nulls else "codes" if run.codes is not None else f"values of {column.type}"
        if layout.kind not in ("fixed", "list") or run.codes is not None or column.nulls:
            raise ArgumentError(f"column {column.name!r} has {why}, and gather copies rows of numbers: use take")
    if not parts:
        return lambda: np.empty((0, *layout.inner), layout.dtype)
    futures, at, read = [], 0, list[int]()
    result: Any = None
    for run, rows in parts:
        array = _rows_of(table, run)
        if result is None:
            result, address = new_result(array, (len(numbers), *array.shape[1:]))
        nbytes = array._strides[0]
        given: Any = indices_of(rows, 0) if by_stream(array) else rows
        stream = stream_of(array.device, 0) if by_stream(array) else None
        futures.append(begin(array, given, result, address + at, result, stream, report_bytes=read.append))
        at += len(rows) * nbytes

    def wait() -> Any:
        for future in futures:
            future.result()
        reads.gathered(column.name, at, sum(read))
        return result

    return wait


def _rows_of(table: Home, run: ColumnRun) -> Array:
    """Return the values of a run as rows of the array of words that filters read, whose cache they share."""
    assert run.values is not None
    words, _ = _array(table, run.values)
    place = _place(run.values)
    assert words is not None and place is not None
    return words.over(run.values.offset - place[1], run.values.shape, run.values.dtype)


# -- filters ----------------------------------------------------------------------------------------------------

_Sets = dict[str, Flips]


def _normal(table: Home, filters: Any) -> Iterator[_Sets]:
    """Return the sets of keys, by column, of each conjunction that can match; all literals are checked first."""
    example = 'give [("a", ">", 3), ("b", "in", [1, 2])], or a list of such lists, of which one has to match'
    given = list(filters) if isinstance(filters, list | tuple) else None
    if not given:
        raise ArgumentError(f"filters is {filters!r:.60}: {example}", name="filters")
    if all(isinstance(one, tuple | list) and len(one) == 3 and isinstance(one[0], str) for one in given):
        given = [given]
    found = []
    for clauses in given:
        if not isinstance(clauses, list | tuple) or not clauses:
            raise ArgumentError(f"filters has {clauses!r:.60}: {example}", name="filters")
        sets: _Sets = {}
        for clause in clauses:
            if not isinstance(clause, list | tuple) or len(clause) != 3 or not isinstance(clause[0], str):
                raise ArgumentError(f"filters has {clause!r:.60}: {example}", name="filters")
            name, op, literal = clause
            column = table[name]
            flips = set_of(name, column.type, op, literal)
            sets[name] = intersection(sets[name], flips) if name in sets else flips
        found.append(sets)
    return (sets for sets in found if all(sets.values()))


# -- the mask: a bit for each row, where each run begins a new word of 64 ----------------------------------------


def _words(runs: Sequence[ColumnRun]) -> list[int]:
    """Return where the rows of runs begin in the mask, and where it ends."""
    starts = [0]
    for run in runs:
        starts.append(starts[-1] + (run.rows + 63) // 64)
    return starts


def _rows(runs: Sequence[ColumnRun], mask: Any) -> NDArray[np.int64]:
    """Return the numbers of the rows whose bits are set."""
    if mask is None:
        return np.zeros(0, np.int64)
    starts = np.array(_words(runs))
    firsts = np.array([one.first for one in runs], np.int64)
    if not isinstance(mask, np.ndarray):
        places = _set_bits(mask)
        run = np.searchsorted(starts * 64, places, "right") - 1
        return np.asarray(places + (firsts - starts[:-1] * 64)[run])
    full = np.flatnonzero(mask)
    bits = np.unpackbits(mask[full].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    run = np.searchsorted(starts, full, "right") - 1
    return np.asarray((firsts[run] + (full - starts[run]) * 64)[which] + bit)


def _set_bits(mask: Any, device: str = "cuda") -> NDArray[np.int64]:
    """Return which bits of a mask in memory of a device are set, ascending; the device lists them."""
    count = zeros(device, 1)
    selecting.count_bits[len(mask)](mask, count, device=device)
    n = int(to_host(count)[0])
    if not n:
        return np.zeros(0, np.int64)
    found, count = empty(device, n), zeros(device, 1)
    selecting.list_bits[len(mask)](mask, found, count, device=device)
    return np.sort(to_host(found))


def _conjunction(table: Home, sets: _Sets, reads: Reads) -> Any:
    """Return the mask of the rows that match all sets; the first column is read in all blocks that may match."""
    blocks = Blocks(table[next(iter(sets))].runs)
    codes: _Codes = {}
    for name, flips in sets.items():
        blocks.kept &= _kept(table[name], flips, codes, reads)
    mask = None if blocks.all else _mask_of(blocks, table[next(iter(sets))].runs)
    for number, (name, flips) in enumerate(sets.items()):
        column = table[name]
        if number == 0:
            for place, run in enumerate(column.runs):
                reads.spans(name, run, [(first, min(end, run.rows)) for first, end in spans(blocks.of_run(place))])
        else:
            assert mask is not None
            rows = _rows(column.runs, mask)
            if not len(rows):
                return mask
            bring(column, rows, reads)
        mask = _evaluate(table, column, flips, codes, mask, whole=number == 0)
    assert mask is not None
    return mask


_Codes = dict[tuple[str, int], Flips]
"""The set of codes of a column and a dictionary."""


def _kept(column: Column, flips: Flips, codes: _Codes, reads: Reads) -> NDArray[np.bool_]:
    """Return which blocks of a column may have keys of a set."""

    def kept(run: ColumnRun, records: NDArray[Any]) -> NDArray[np.bool_]:
        return by_keys(records, flips if run.layout.kind != "codes" else _set_of_codes(column, run, flips, codes))

    return blocks_of(column, kept, reads)


def _set_of_codes(column: Column, run: ColumnRun, flips: Flips, codes: _Codes) -> Flips:
    """Return the set of the codes whose values are in a set; looked for once for each dictionary."""
    key = column.name, id(run.dictionary)
    if key not in codes:
        codes[key] = codes_of(column.name, run.type, run.dictionary, flips, _least_code(run))
    return codes[key]


def _mask_of(blocks: Blocks, runs: Sequence[ColumnRun]) -> NDArray[np.int64]:
    """Return the mask of all rows of the blocks that are kept; bits behind a run's rows may be set, too."""
    starts = _words(runs)
    parts = [
        np.repeat(-blocks.of_run(number).astype(np.int64), STATISTICS_ROWS // 64)[: starts[number + 1] - starts[number]]
        for number in range(len(runs))
    ]
    return np.concatenate(parts)


def _least_code(run: ColumnRun) -> int:
    """Return the key of code 0."""
    dtype = run.layout.dtype
    return 0 if dtype is None or dtype.kind == "i" else -(1 << (8 * dtype.itemsize - 1))


def _mapped(table: Home, name: str) -> bool:
    """Return whether kernels read a column where its file is mapped."""
    extents = (one for run in table[name].runs for one in _buffers(run))
    array, _ = _array(table, next((one for one in extents if one is not None), None))
    return array is None or array.tier == "mapped"


def _evaluate(table: Home, column: Column, flips: Flips, codes: _Codes, before: Any, *, whole: bool) -> Any:
    """Return the mask of rows whose keys are in a set, of those of the mask before; `whole`: nearly all rows are.

    It is in memory of the device.
    """
    runs = column.runs
    starts = _words(runs)
    mask: Any = None
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, run in enumerate(runs):
        if run.layout.kind != "null":
            groups.setdefault(tuple(_place(one) for one in _buffers(run)), []).append(number)
    for numbers in groups.values():
        some = [(runs[k], starts[k]) for k in numbers]
        arrays, tails = _arrays(table, some[0][0])
        if mask is None:
            mask = zeros(arrays[0].device, starts[-1])
            if arrays[0].device == "cuda" and isinstance(before, np.ndarray):
                before = to_device("cuda", before)
        _launch(column, some, arrays, tails, flips, codes, before, mask, whole=whole)
    return np.zeros(starts[-1], np.int64) if mask is None else mask


def _buffers(run: ColumnRun) -> tuple[Extent | None, Extent | None, Extent | None]:
    """Return the extents of values (or codes, or offsets), of validity, and of bytes."""
    if run.layout.kind == "fixed" and run.layout.dtype == np.uint8 and run.layout.inner:
        return None, run.valid, run.values
    values = run.offsets if run.layout.kind == "text" else run.codes if run.layout.kind == "codes" else run.values
    return values, run.valid, run.bytes


def _place(extent: Extent | None) -> tuple[str, int] | None:
    """Return the file of an extent, and the byte of it where an array of words begins in which the extent does.

    Not at byte 0 where it can be helped: a .npy file that is opened there is read as such. At a multiple of 16, which
    spans want, if the extent begins at one of 8.
    """
    if extent is None:
        return None
    rest = extent.offset % 8
    return extent.path, rest + min(16, extent.offset - rest)


def _word(extent: Extent | None) -> int:
    """Return the word of its array where an extent begins; -1 if there is none."""
    place = _place(extent)
    return -1 if extent is None or place is None else (extent.offset - place[1]) // 8


def _array(table: Home, extent: Extent | None) -> tuple[Array | None, int]:
    """Return the words of the file of an extent, as an array for kernels, and its last bytes as a word."""
    place = _place(extent)
    if extent is None or place is None:
        return None, 0
    file, begin = extent.file, place[1]
    count = (file.nbytes - begin) // 8
    rest = file.buffer.slice(begin + 8 * count, file.nbytes - begin - 8 * count).to_pybytes()
    words = Extent(file, begin, np.dtype("<i8"), (count,))
    return table.array_of(words), int.from_bytes(rest.ljust(8, b"\0"), "little", signed=True)


def _launch(
    column: Column,
    runs: Sequence[tuple[ColumnRun, int]],
    arrays: Sequence[Array],
    tails: Sequence[int],
    flips: Flips,
    codes: _Codes,
    before: Any,
    mask: Any,
    *,
    whole: bool,
) -> None:
    """Launch a kernel over runs whose buffers lie in the same arrays."""
    kind = _form(column, runs[0][0])[0]
    units, records, tables, pool = _tables(column, runs, flips, codes)
    lanes = _WARP if arrays[0].device == "cuda" else 1
    rest = np.array(tails, np.int64), np.zeros(1, np.int64) if before is None else before, mask
    form = (*_form(column, runs[0][0])[1:], int(before is not None))
    if whole and kind == selecting.NUMBERS and arrays[0].device != "cpu":  # of mapped files a plain loop is as fast
        # to the device once for all launches; what is there already stays as it is
        near = [
            to_device(arrays[0].device, one) if isinstance(one, np.ndarray) else one
            for one in (records, tables, *rest[:2])
        ]
        given = *arrays[:2], *near[:2], *form, *near[2:], mask
        for first, end in _ahead(arrays[0], runs, units) if before is None else [(0, units)]:
            selecting.select_whole[(end - first) * lanes](*given, first)
        return
    bad = np.zeros(1, np.int64)
    selecting.select[units * lanes](*arrays, records, tables, pool, kind, *form, *rest, bad)
    if bad[0]:
        raise _damaged_text(column, runs)


MOST_RUNS = 16
"""Most runs that are read ahead of a filter."""


def _ahead(words: Array, runs: Sequence[tuple[ColumnRun, int]], units: int) -> Iterator[tuple[int, int]]:
    """Yield units [first, end) whose words are in the cache, while those of the next are read in large commands."""
    if words.tier != "storage" or len(runs) > MOST_RUNS:
        yield 0, units
        return
    room = words.cache.space(words._nsid).pool.frames * words.cache.page_size // 4
    room += room // 8  # of which three are used at a time; so half of all frames are two parts, and no rest
    parts, unit = [], 0
    for run, _ in runs:
        items = run.codes or run.values
        assert items is not None
        base, count, nbytes = _word(items), -(-run.rows // (64 * selecting.UNIT)), items.nbytes
        each = max(1, -(-count // -(-nbytes // max(room, 1)))) if nbytes else 1
        for first in range(0, count, each):
            end = min(first + each, count)
            low, high = (base + (nbytes * k // count >> 3) for k in (first, end))
            parts.append((unit + first, unit + end, low, min(high + 1, words.size)))
        unit += count
    with words.cache.keep_io_threads_running():
        prefetches = deque(words.prefetch(*parts[k][2:]) for k in range(min(2, len(parts))))
        for k, (first, end, _, _) in enumerate(parts):
            prefetches.popleft().exception()
            yield first, end
            if k + 2 < len(parts):
                prefetches.append(words.prefetch(*parts[k + 2][2:]))


def _arrays(table: Home, run: ColumnRun) -> tuple[list[Array], list[int]]:
    """Return the arrays of a run's buffers, some of them for those that it has not, and their last words."""
    opened = [_array(table, one) for one in _buffers(run)]
    some = next(array for array, _ in opened if array is not None)
    return [some if array is None else array for array, _ in opened], [tail for _, tail in opened]


def _tables(
    column: Column, runs: Sequence[tuple[ColumnRun, int]], flips: Flips, codes: _Codes
) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return the number of units, the records of runs, and the flips and their bytes, for the kernels."""
    kind = _form(column, runs[0][0])[0]
    records = np.zeros((len(runs), selecting.RUN_WORDS), np.int64)
    words, pool = encoded(flips, kind == selecting.WIDE)
    step = 2 if kind in (selecting.WIDE, selecting.TEXT, selecting.BYTES) else 1
    tables, at, unit = [words], 0, 0
    known: dict[int, tuple[int, int]] = {}
    for record, (run, start) in zip(records, runs, strict=True):
        first, count = 0, len(words) // step
        if run.layout.kind == "codes":
            first, count = known.get(id(run.dictionary), (-1, 0))
            if first < 0:
                places, _ = encoded(_set_of_codes(column, run, flips, codes), False)
                tables.append(places)
                first, count = len(words) + at, len(places)
                known[id(run.dictionary)] = first, count
                at += count
        buffers = _buffers(run)
        values, valid, data = map(_word, buffers)
        nbytes = 0 if buffers[2] is None else buffers[2].nbytes
        record[:] = unit, start, run.rows, max(values, 0), valid, max(data, 0), nbytes, first, count
        unit += -(-run.rows // (64 * selecting.UNIT))
    every = np.concatenate([*tables, [0]]).astype(np.int64)
    return unit, records.reshape(-1), every, np.append(pool, np.uint8(0))


def _form(column: Column, run: ColumnRun) -> tuple[int, int, int, int]:
    """Return kind, shift, pattern and order of a column's items, for the kernel."""
    layout = run.layout
    kind = _KINDS[layout.kind]
    dtype = np.dtype(np.uint8) if layout.dtype is None else layout.dtype
    bits = 8 * dtype.itemsize
    if kind == selecting.NUMBERS and layout.inner:
        return (selecting.WIDE, 0, 0, 0) if dtype.kind == "i" else (selecting.BYTES, layout.inner[0], 0, 0)
    pattern = order = 0
    if kind == selecting.NUMBERS and dtype.kind == "u":
        pattern = sum(1 << (bits * k - 1) for k in range(1, 64 // bits + 1))
        pattern -= 1 << 64  # as a signed word
    elif kind == selecting.NUMBERS and dtype.kind == "f":
        order = (1 << (bits - 1)) - 1
    return kind, bits.bit_length() - 1, pattern, order


def _damaged_text(column: Column, runs: Sequence[tuple[ColumnRun, int]]) -> Exception:
    """Return the error for offsets that lead outside: which row has them is looked for."""
    for run, _ in runs:
        if run.offsets is None:
            continue
        offsets = run.offsets.numpy().astype(np.int64)
        size = 0 if run.bytes is None else run.bytes.nbytes
        wrong = np.flatnonzero((offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > size))
        if len(wrong):
            return damaged(run.offsets.file, column.name, run.first + int(wrong[0]))
    return damaged(runs[0][0].extents[0].file, column.name, runs[0][0].first)
