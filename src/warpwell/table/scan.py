"""`scan`: a table as a Polars LazyFrame, of which a query reads the columns that it names where rows match.

Polars hands down the columns, the first rows, and a predicate that it computes row by row, and which it evaluates
itself here, on columns where they lie, but for blocks of rows whose least and greatest values exclude a match
(`predicates`): in chunks, which several threads look at. Its expressions are not parsed. The other columns are read in
the rows that are left, of several chunks together.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array.gather import ChunkedTask, WorkerGroup
from ..errors import ArgumentError, DTypeError
from .column import Column, ColumnRun
from .library import arrow, polars
from .predicates import has_codes, mask_of, may_match, of_dictionary
from .reading import Reads
from .statistics import Ranges
from .table import Table, open_table
from .take import take

CHUNK = 1 << 20
"""Rows on which a predicate is evaluated at a time."""
AHEAD = 4
"""Chunks that are looked at before the one that is used."""
GROUP_ROWS = 1 << 16
"""Most rows of several chunks that are taken together."""
IDLE_ROWS = 1 << 12
"""Rows that are taken at once if nothing is being taken."""
_DENSE = 8
"""If more than one row of so many matches, whole columns are read and filtered."""


def scan(path: str | os.PathLike[str], *, reads: Reads | None = None, direct: bool | None = None) -> Any:
    """Return a table as a `polars.LazyFrame`; nothing is read before it is collected.

    Each query opens the table and closes it. Of Polars' engines the streaming one may ask for several parts of a plan
    side by side.

    Parameters
    ----------
    path : path
        As of `open`.
    reads : Reads, optional
        Where it is counted what queries read.
    direct : bool, optional
        As of `open`.

    Returns
    -------
    polars.LazyFrame

    Raises
    ------
    MissingFileError, FormatError
    ArgumentError
        pyarrow or Polars is not installed, or two columns have one name.
    DTypeError
        Polars has no such type.

    Notes
    -----
    It is made by ``polars.io.plugins.register_io_source``, which Polars calls unstable: with another version than those
    of the ``table`` extra it may fail.
    """
    polars()
    name = os.fspath(path)
    with open_table(name) as table:
        schema = _schema(table)
    from polars.io.plugins import register_io_source  # Polars is loaded when it is first needed

    def source(
        with_columns: list[str] | None, predicate: Any, n_rows: int | None, batch_size: int | None
    ) -> Iterator[Any]:
        names = list(schema) if with_columns is None else list(dict.fromkeys(with_columns))  # it may name one twice
        # a generator of its own: it is closed, and the table with it, whatever the query does
        counts = Reads() if reads is None else reads
        return _frames(name, schema, names, predicate, n_rows, batch_size, counts, direct)

    return register_io_source(source, schema=schema, is_pure=True, explain_name="warpwell", explain_detail=name)


def _schema(table: Table) -> dict[str, Any]:
    """Return the types that Polars gives to the columns."""
    found = {}
    for field in table.schema:
        if field.name in found:
            raise ArgumentError(
                f"{table.path} has two columns {field.name!r}, which Polars refuses: convert the others, with columns="
            )
        try:
            found[field.name] = _frame([field.name], [arrow().chunked_array([], type=field.type)]).schema[field.name]
        except BaseException as error:  # Polars panics, which is no Exception
            if isinstance(error, KeyboardInterrupt | MemoryError | SystemExit):
                raise
            raise DTypeError(
                f"column {field.name!r} is {field.type}, which Polars does not have ({error}): use ww.table.open"
            ) from None
    return found


def _frames(
    path: str,
    schema: dict[str, Any],
    names: list[str],
    predicate: Any,
    n_rows: int | None,
    batch_size: int | None,
    reads: Reads,
    direct: bool | None = None,
) -> Iterator[Any]:
    """Yield the frames of a query."""
    with open_table(path, direct=direct) as table:
        end = table.rows if n_rows is None else min(table.rows, n_rows)
        most = max(1, batch_size or CHUNK)
        roots = [] if predicate is None else list(dict.fromkeys(predicate.meta.root_names()))
        empty = True
        columns = {name: table[name] for name in dict.fromkeys([*names, *roots])}
        if roots:
            made = _matching(columns, names, roots, predicate, end, reads)
        else:
            made = _unfiltered(columns, names, predicate, end, min(CHUNK, most), reads)
        with contextlib.closing(made):  # before the table
            for found in made:
                if len(found):
                    empty = False
                    yield from found.iter_slices(most) if len(found) > most else (found,)
        if empty:
            yield polars().DataFrame(schema={name: schema[name] for name in names})


def _unfiltered(
    columns: dict[str, Column], names: Sequence[str], predicate: Any, end: int, step: int, reads: Reads
) -> Generator[Any, None, None]:
    """Yield all rows of [0, end), but none if there is a predicate, of constants alone, and it is not true."""
    if predicate is None or polars().select(predicate).item() is True:
        for chunk in _chunks(columns, names, [(0, end)], step, reads):
            yield _whole(columns, names, chunk)


def _chunks(
    columns: dict[str, Column], names: Sequence[str], wanted: Ranges, most: int, reads: Reads
) -> Iterator[Ranges]:
    """Yield rows in chunks of at most so many; the next is read while one is looked at."""
    chunks = _cut(wanted, most)
    following = next(chunks, None)
    _announce(columns, names, following, reads)
    while following is not None:
        chunk, following = following, next(chunks, None)
        _announce(columns, names, following, reads)
        yield chunk


def _cut(wanted: Ranges, most: int) -> Iterator[Ranges]:
    """Yield rows in chunks of at most so many."""
    chunk: Ranges = []
    count = 0
    for start, end in wanted:
        while start < end:
            stop = min(end, start + most - count)
            chunk.append((start, stop))
            count += stop - start
            start = stop
            if count == most:
                yield chunk
                chunk, count = [], 0
    if chunk:
        yield chunk


def _matching(
    columns: dict[str, Column], names: Sequence[str], roots: Sequence[str], predicate: Any, end: int, reads: Reads
) -> Generator[Any, None, None]:
    """Yield the rows of [0, end) for which a predicate is true.

    Chunks are looked at by several threads, and where few rows match, those of several chunks are taken together, so
    that many of their pages are read at once.
    """
    wanted = may_match(columns, predicate, reads).ranges(end)
    several = sum(stop - start for start, stop in wanted) > CHUNK
    workers = WorkerGroup(len(os.sched_getaffinity(0))) if several else None
    with _Coming(workers) as coming, _Coming(workers) as looking:
        group: list[_Found] = []
        for found in _ahead(columns, names, roots, predicate, wanted, reads, looking):
            few = found.whole is None
            rows = sum(len(one.numbers) for one in group)
            if group and (
                not few
                or rows + len(found.numbers) > GROUP_ROWS
                or (found.kept is None) != (group[0].kept is None)
                or (rows >= IDLE_ROWS and coming.idle)
            ):
                coming.begin(partial(_taken, columns, names, group, reads))
                group = []
            while len(coming) > (1 if few else 0):
                yield coming.next()
            if not few:
                yield found.whole
            elif len(found.numbers):
                group.append(found)
        if group:
            coming.begin(partial(_taken, columns, names, group, reads))
        while len(coming):
            yield coming.next()


class _Coming:
    """What other threads find out, in the order in which it was begun."""

    def __init__(self, workers: WorkerGroup | None) -> None:
        self._workers = workers
        self._started: deque[ChunkedTask] = deque()

    def __len__(self) -> int:
        return len(self._started)

    @property
    def idle(self) -> bool:
        """Whether nothing is being found."""
        return all(task.done() for task in self._started)

    def begin(self, find: Callable[[], Any]) -> None:
        """Begin to find something."""
        self._started.append(ChunkedTask(1, lambda chunk: find(), self._workers))

    def next(self) -> Any:
        """Wait for what was begun first, and return it, or raise what was raised."""
        found = self._started[0].result()
        self._started.popleft()
        return found

    def __enter__(self) -> _Coming:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._started:
            task.cancel()
        for task in self._started:
            task.exception()


@dataclass
class _Found:
    """Rows of a chunk that match: all columns, if they are many, or else their numbers.

    Attributes
    ----------
    whole : polars.DataFrame or None
    numbers : ndarray of int64
    kept : polars.DataFrame or None
        Columns that were read to find these rows.
    """

    whole: Any
    numbers: NDArray[np.int64]
    kept: Any


def _ahead(
    columns: dict[str, Column],
    names: Sequence[str],
    roots: Sequence[str],
    predicate: Any,
    wanted: Ranges,
    reads: Reads,
    looking: _Coming,
) -> Iterator[_Found]:
    """Yield what is found in each chunk; a few chunks ahead are looked at, at first one."""
    most = 0
    for chunk in _chunks(columns, roots, wanted, CHUNK, reads):
        looking.begin(partial(_looked, columns, names, roots, predicate, chunk))
        if len(looking) > most:
            yield looking.next()
            most = min(most + 1, AHEAD)
    while len(looking):
        yield looking.next()


def _looked(
    columns: dict[str, Column], names: Sequence[str], roots: Sequence[str], predicate: Any, chunk: Ranges
) -> _Found:
    """Return the rows of a chunk for which a predicate is true."""
    mask, frame = None, None
    if len(roots) == 1:
        mask = _mask_of_codes(columns[roots[0]], predicate, chunk)
    if mask is None:
        frame = _whole(columns, roots, chunk)
        mask = mask_of(frame, predicate)
    count = mask.sum()
    if count * _DENSE > len(mask):
        whole = _whole(columns, names, chunk)
        return _Found(whole if count == len(mask) else whole.filter(mask), np.zeros(0, np.int64), None)
    places = _true(mask)
    return _Found(None, _numbers(chunk, places), None if frame is None else frame[places])


def _taken(columns: dict[str, Column], names: Sequence[str], group: Sequence[_Found], reads: Reads) -> Any:
    """Return the rows of some chunks as a frame."""
    kept = None if group[0].kept is None else polars().concat([one.kept for one in group])
    rest = [name for name in names if kept is None or name not in kept.columns]
    parts = {} if kept is None else {name: kept.get_column(name) for name in kept.columns}
    if rest:
        taken = take([columns[name] for name in rest], np.concatenate([one.numbers for one in group]), reads)
        parts |= {one.name: one for one in _frame(rest, taken.columns)}
    return polars().DataFrame([parts[name] for name in names])


def _true(mask: Any) -> NDArray[np.int64]:
    """Return which rows of a mask, a Series without nulls, are true; few are: most of its bytes are 0."""
    bits = mask.to_arrow()
    if bits.offset:
        return np.flatnonzero(mask.to_numpy())
    found = np.frombuffer(bits.buffers()[1], np.uint8)[: (len(bits) + 7) >> 3]
    some = np.flatnonzero(found != 0)
    ones = np.flatnonzero(np.unpackbits(found[some], bitorder="little"))
    rows = (some[ones >> 3] << 3) + (ones & 7)
    return np.asarray(rows[: np.searchsorted(rows, len(bits))], np.int64)


def _numbers(chunk: Ranges, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows at places of a chunk."""
    starts = np.array([start for start, _ in chunk], np.int64)
    before = np.cumsum([0, *(end - start for start, end in chunk[:-1])])
    which = np.searchsorted(before, places, "right") - 1
    return np.asarray(places - before[which] + starts[which])


def _mask_of_codes(column: Column, predicate: Any, chunk: Ranges) -> Any:
    """Return which rows of a chunk a predicate over codes is true for, as a Series; None if it has no codes.

    The predicate is evaluated once for each value of the dictionary: what Polars hands down, it computes row by row.
    """
    parts = []
    known: dict[int, NDArray[np.bool_]] = {}
    for run, first, end in _runs(column, chunk):
        if not has_codes(column, run):
            return None
        if id(run.dictionary) not in known:
            known[id(run.dictionary)] = of_dictionary(column.name, run, predicate)
        of_value = known[id(run.dictionary)]
        assert run.codes is not None
        codes = run.codes.numpy()[first:end]
        if len(codes) and not (0 <= codes.min() and codes.max() < len(of_value) - 1):
            run.arrow(first, end - first)  # raises, but where null rows have codes of no value
            return None
        mask = of_value[codes]
        if run.valid is not None:
            rows = np.arange(first, end)
            valid = (run.valid.numpy()[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
            mask = np.where(valid == 1, mask, of_value[-1])
        parts.append(mask)
        for file in {one.file for one in run.extents}:
            file.require()
    return polars().Series(np.concatenate(parts))


def _whole(columns: dict[str, Column], names: Sequence[str], chunk: Ranges) -> Any:
    """Return rows of columns as a frame, without a copy where Polars can use Arrow's buffers."""
    if not names:
        return polars().DataFrame(height=sum(end - start for start, end in chunk))
    return _frame(
        names,
        [
            arrow().chunked_array(
                [run.arrow(first, end - first) for run, first, end in _runs(columns[name], chunk)],
                type=columns[name].type,
            )
            for name in names
        ],
    )


def _frame(names: Sequence[str], arrays: Sequence[Any]) -> Any:
    return polars().from_arrow(arrow().table(list(arrays), names=list(names)), rechunk=False)


def _runs(column: Column, chunk: Ranges) -> Iterator[tuple[ColumnRun, int, int]]:
    """Yield the runs in which rows lie, and which of the run's own rows these are."""
    runs = column.runs
    for start, stop in chunk:
        at = max(0, bisect_right(runs, start, key=lambda run: run.first) - 1)
        while at < len(runs) and runs[at].first < stop:
            run = runs[at]
            first, end = max(start - run.first, 0), min(stop - run.first, run.rows)
            if end > first:
                yield run, first, end
            at += 1


def _announce(columns: dict[str, Column], names: Sequence[str], chunk: Ranges | None, reads: Reads) -> None:
    """Have rows of columns read."""
    for name in names if chunk else ():
        for run, parts in groupby(_runs(columns[name], chunk or []), key=itemgetter(0)):
            reads.spans(name, run, [(first, end) for _, first, end in parts])
