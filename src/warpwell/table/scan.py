"""`scan`: a table as a Polars LazyFrame. A query reads the columns that it names, and only where rows match.

Polars passes the columns, the number of rows, and a predicate that it computes row by row. Blocks of rows whose zone
maps exclude a match are skipped (`predicate`). Polars evaluates the predicate on the other rows, in chunks, in several
threads, on columns in place. The other columns of a chunk are read where rows match.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._os import clock
from ..array.gather import WorkerGroup, in_order
from ..errors import ArgumentError, DTypeError
from . import arrow as pa
from .library import polars, to_polars
from .predicate import Condition, mask_of
from .reading import IoCounters, Ranges, read_ranges, set_bits, split_ranges
from .table import Table, open_table
from .take import take
from .where import CHUNK_ROWS, DENSE_FRACTION

_log = logging.getLogger(__package__)

GROUP_ROWS = 1 << 12
"""Matching rows of several chunks that are taken together."""
EXIT_TIMEOUT_SECONDS = 2.0
"""Maximum wait at the end of the program for threads of Polars that read tables."""
_queries: weakref.WeakSet[Any] = weakref.WeakSet()
"""Generators of queries that Polars has not finished."""
_is_exiting = threading.Event()
_parked: list[threading.Thread] = []
"""Threads of Polars that stay in `_park_at_exit`."""


def scan(path: str | os.PathLike[str], *, counters: IoCounters | None = None, direct: bool | None = None) -> Any:
    """Return a table as a `polars.LazyFrame`; nothing is read before it is collected.

    Each query opens the table and closes it. Of Polars' engines, the streaming one may read several parts of a plan in
    parallel.

    Parameters
    ----------
    path : path
        As of `open`.
    counters : IoCounters, optional
        Counts the bytes that queries read.
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

    Notes
    -----
    Columns of types that Polars does not have are left out, and named in a warning of the log. The frame is made by
    ``polars.io.plugins.register_io_source``, which Polars calls unstable: it may fail with versions that the
    ``table`` extra does not allow.
    """
    polars()
    name = os.fspath(path)
    with open_table(name) as table:
        schema = _schema(table)
    from polars.io.plugins import register_io_source  # Polars is loaded on first use

    def source(
        with_columns: list[str] | None, predicate: Any, n_rows: int | None, batch_size: int | None
    ) -> Iterator[Any]:
        # Polars may name a column twice
        names = list(schema) if with_columns is None else list(dict.fromkeys(with_columns))
        # a separate generator: it is closed, and the table with it, even if the query fails
        frames = _frames(name, schema, names, predicate, n_rows, batch_size, counters, direct)
        _queries.add(frames)
        return frames

    return register_io_source(source, schema=schema, is_pure=True, explain_name="warpwell", explain_detail=name)


def _schema(table: Table) -> dict[str, Any]:
    """Return the types that Polars gives to the columns; columns of other types are left out, and named in the log."""
    schema, omitted = {}, []
    for field in table.schema:
        if table.names.count(field.name) > 1:
            raise ArgumentError(
                f"{table.path} has two columns {field.name!r}, which Polars refuses: convert the others, with columns="
            )
        try:
            schema[field.name] = to_polars(pa.table([pa.chunked_array([], field.type)], names=[field.name])).schema[
                field.name
            ]
        except DTypeError:
            omitted.append(f"{field.name!r} ({field.type})")
    if omitted:
        _log.warning(
            "the scan of %s leaves out columns of types that Polars does not have: %s", table.path, ", ".join(omitted)
        )
    return schema


def _frames(
    path: str,
    schema: Mapping[str, Any],
    names: Sequence[str],
    predicate: Any,
    n_rows: int | None,
    batch_size: int | None,
    counters: IoCounters | None,
    direct: bool | None = None,
) -> Iterator[Any]:
    """Yield the frames of a query."""
    _park_at_exit()
    with contextlib.ExitStack() as last, open_table(path, direct=direct) as table:
        last.callback(_park_at_exit)
        query = _Query(table, names, predicate, counters)
        end = table.rows if n_rows is None else min(table.rows, n_rows)
        max_rows = max(1, batch_size or CHUNK_ROWS)
        is_empty = True
        if query.roots:
            frames = query.matching_rows(end)
        else:
            is_selected = predicate is None or polars().select(predicate).item() is True
            chunks = _chunks([(0, end)] if is_selected else [], min(CHUNK_ROWS, max_rows))
            read = query.with_readahead(names, chunks)
            frames = in_order((partial(query.whole_columns, names, chunk) for chunk in read), None)
        with contextlib.closing(frames):  # close the frames before the table
            for frame in frames:
                if len(frame):
                    is_empty = False
                    for part in frame.iter_slices(max_rows):
                        yield part
                        _park_at_exit()
        if is_empty:
            yield polars().DataFrame(schema={name: schema[name] for name in names})


_Matches = tuple["NDArray[np.int64] | None", Any]
"""The numbers of a chunk's matching rows, and the predicate's columns of these rows; or None, and all columns."""


class _Query:
    """A query of an open table: the columns that it returns, its predicate, and the predicate's columns (`roots`)."""

    def __init__(self, table: Table, names: Sequence[str], predicate: Any, counters: IoCounters | None) -> None:
        self._names, self._predicate, self._counters = names, predicate, counters
        self.roots: list[str] = [] if predicate is None else list(dict.fromkeys(predicate.meta.root_names()))
        self._columns = {name: table[name] for name in dict.fromkeys([*names, *self.roots])}

    def matching_rows(self, end: int) -> Generator[Any, None, None]:
        """Yield the rows of [0, end) for which the predicate is true."""
        columns = self._columns
        condition = Condition.from_polars(self._predicate, lambda name: columns[name].type)
        ranges = condition.candidate_rows({name: columns[name] for name in self.roots})
        ranges = [(start, min(stop, end)) for start, stop in ranges if start < end]
        is_long = sum(stop - start for start, stop in ranges) > CHUNK_ROWS
        workers = WorkerGroup(len(os.sched_getaffinity(0))) if is_long else None
        chunks = self.with_readahead(self.roots, _chunks(ranges, CHUNK_ROWS))
        with contextlib.closing(in_order((partial(self._evaluate, chunk) for chunk in chunks), workers)) as matches:
            groups = (partial(self._take_columns, group) for group in _groups(matches))
            with contextlib.closing(in_order(groups, workers)) as frames:
                yield from frames

    def with_readahead(self, names: Sequence[str], chunks: Iterable[Ranges]) -> Iterator[Ranges]:
        """Return chunks; columns of each are read ahead while the previous chunk is used."""

        def read() -> Iterator[Ranges]:
            for chunk in chunks:
                _park_at_exit()
                for name in names:
                    read_ranges(self._columns[name], chunk, self._counters)
                yield chunk
            yield []

        return (chunk for chunk, _ in pairwise(read()))

    def _evaluate(self, chunk: Ranges) -> _Matches:
        """Return the rows of a chunk for which the predicate is true."""
        frame = self.whole_columns(self.roots, chunk)
        mask = mask_of(frame, self._predicate)
        count = mask.sum()
        if count * DENSE_FRACTION > len(mask):
            for name in self._names:
                if name not in self.roots:
                    read_ranges(self._columns[name], chunk, self._counters)
            rows = self.whole_columns(self._names, chunk)
            return None, rows if count == len(mask) else rows.filter(mask)
        positions = _true_rows(mask)
        return _row_numbers(chunk, positions), frame[positions]

    def _take_columns(self, group: Sequence[_Matches]) -> Any:
        """Return the matching rows of a group of chunks as a frame."""
        names = list(self._names)
        frames = [frame for numbers, frame in group if numbers is None]
        sparse = [(numbers, frame) for numbers, frame in group if numbers is not None]
        if sparse:
            rows = polars().concat([frame for _, frame in sparse], rechunk=False)
            if unread := [name for name in names if name not in rows.columns]:
                row_numbers = np.concatenate([numbers for numbers, _ in sparse])
                taken = take([self._columns[name] for name in unread], row_numbers, self._counters)
                rows = rows.hstack(to_polars(taken))
            if rows.columns != names:
                rows = rows.select(names) if names else polars().DataFrame(height=len(rows))
            frames.insert(0, rows)
        return frames[0] if len(frames) == 1 else polars().concat(frames, rechunk=False)

    def whole_columns(self, names: Sequence[str], chunk: Ranges) -> Any:
        """Return rows of columns as a frame, without a copy if Polars can use Arrow's buffers."""
        if not names:
            return polars().DataFrame(height=sum(end - start for start, end in chunk))
        arrays = []
        for name in names:
            column = self._columns[name]
            parts = [column.runs[k].arrow(first, end - first) for k, first, end in split_ranges(column.runs, chunk)]
            arrays.append(pa.chunked_array(parts, type=column.type))
        return to_polars(pa.table(arrays, names=list(names)))


def _groups(matches: Iterable[_Matches]) -> Iterator[list[_Matches]]:
    """Yield groups of chunks: several chunks if few rows match, so that more rows are read at once."""
    group: list[_Matches] = []
    count = 0
    for match in matches:
        group.append(match)
        count += len(match[1])
        if match[0] is None or count >= GROUP_ROWS:
            yield group
            group, count = [], 0
    if count:
        yield group


def _park_at_exit() -> None:
    """Stop the calling thread forever if the program exits and Polars started the thread.

    Such a thread aborts the process if it needs the interpreter after its end.
    """
    if _is_exiting.is_set() and threading.current_thread() is not threading.main_thread():
        _parked.append(threading.current_thread())
        threading.Event().wait()


@atexit.register
def _park_queries() -> None:
    """Wait until each unfinished query has stopped."""
    _is_exiting.set()
    deadline = clock.monotonic() + EXIT_TIMEOUT_SECONDS
    while sum(query.gi_frame is not None for query in list(_queries)) > len(_parked) and clock.monotonic() < deadline:
        clock.sleep(0.001)


def _chunks(ranges: Ranges, max_rows: int) -> Iterator[Ranges]:
    """Yield ranges of rows in chunks of at most `max_rows` rows."""
    chunk: Ranges = []
    count = 0
    for start, end in ranges:
        while start < end:
            stop = min(end, start + max_rows - count)
            chunk.append((start, stop))
            count += stop - start
            start = stop
            if count == max_rows:
                yield chunk
                chunk, count = [], 0
    if chunk:
        yield chunk


def _true_rows(mask: Any) -> NDArray[np.int64]:
    """Return where a `polars.Series` without nulls is true."""
    bits = mask.to_arrow()
    end = bits.offset + len(bits)
    positions = set_bits(np.frombuffer(bits.buffers()[1], np.uint8)[: -(-end // 8)])
    return np.asarray(positions[(positions >= bits.offset) & (positions < end)] - bits.offset)


def _row_numbers(chunk: Ranges, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows at positions of a chunk."""
    starts = np.array([start for start, _ in chunk], np.int64)
    before = np.cumsum([0, *(end - start for start, end in chunk[:-1])])
    which = np.searchsorted(before, positions, "right") - 1
    return np.asarray(positions - before[which] + starts[which])
