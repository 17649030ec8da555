"""`scan`: a table as a Polars LazyFrame, of which a query reads the columns that it names where rows match.

Polars hands down the columns, the first rows, and a predicate that it computes row by row, and which it evaluates
itself here, on columns where they lie, but for blocks of rows whose least and greatest values exclude a match
(`predicates`). Its expressions are not parsed. The other columns are read in the rows that are left.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, DTypeError
from .column import Column, ColumnRun
from .library import arrow, polars
from .predicates import evaluated, has_codes, may_match, of_dictionary
from .reading import Reads
from .statistics import Ranges
from .table import Table, open_table
from .take import take

CHUNK = 1 << 20
"""Rows on which a predicate is evaluated at a time."""
_DENSE = 8
"""If more than one row of so many matches, whole columns are read and filtered."""


def scan(path: str | os.PathLike[str], *, reads: Reads | None = None) -> Any:
    """Return a table as a `polars.LazyFrame`; nothing is read before it is collected.

    Each query opens the table and closes it. Of Polars' engines the streaming one may ask for several parts of a plan
    side by side.

    Parameters
    ----------
    path : path
        As of `open`.
    reads : Reads, optional
        Where it is counted what queries read.

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
        return _frames(name, schema, names, predicate, n_rows, batch_size, Reads() if reads is None else reads)

    return register_io_source(source, schema=schema, is_pure=True, explain_name="warpwell", explain_detail=name)


def _schema(table: Table) -> dict[str, Any]:
    """Return the types that Polars gives to the columns."""
    found = {}
    for field in table.schema:
        if field.name in found:
            raise ArgumentError(f"{table.path} has two columns {field.name!r}, which Polars refuses: convert the "
                                "others, with columns=")  # fmt: skip
        try:
            found[field.name] = _frame([field.name], [arrow().chunked_array([], type=field.type)]).schema[field.name]
        except BaseException as error:  # Polars panics, which is no Exception
            if isinstance(error, KeyboardInterrupt | MemoryError | SystemExit):
                raise
            raise DTypeError(f"column {field.name!r} is {field.type}, which Polars does not have ({error}): use "
                             "ww.table.open") from None  # fmt: skip
    return found


def _frames(
    path: str, schema: dict[str, Any], names: list[str], predicate: Any, n_rows: int | None, batch_size: int | None,
    reads: Reads,
) -> Iterator[Any]:  # fmt: skip
    """Yield the frames of a query."""
    with open_table(path) as table:
        end = table.rows if n_rows is None else min(table.rows, n_rows)
        most = max(1, batch_size or CHUNK)
        roots = [] if predicate is None else list(dict.fromkeys(predicate.meta.root_names()))
        columns = {name: table[name] for name in dict.fromkeys([*names, *roots])}
        first = names if predicate is None else roots
        wanted = [(0, end)] if not roots else may_match(columns, predicate, reads).ranges(end)
        groups = _groups(wanted, min(CHUNK, most) if predicate is None else CHUNK)
        empty = True
        following = next(groups, None)
        _announce(columns, first, following, reads)
        while following is not None:
            group, following = following, next(groups, None)
            _announce(columns, first, following, reads)  # while these are looked at
            if predicate is None:
                found = _whole(columns, names, group)
            else:
                found = _matching(columns, names, roots, predicate, group, reads)
            if found is not None and len(found):
                empty = False
                yield from found.iter_slices(most) if len(found) > most else (found,)
        if empty:
            yield polars().DataFrame(schema={name: schema[name] for name in names})


def _groups(wanted: Ranges, most: int) -> Iterator[Ranges]:
    """Yield rows in groups of at most so many."""
    group: Ranges = []
    count = 0
    for start, end in wanted:
        while start < end:
            stop = min(end, start + most - count)
            group.append((start, stop))
            count += stop - start
            start = stop
            if count == most:
                yield group
                group, count = [], 0
    if group:
        yield group


def _matching(
    columns: dict[str, Column], names: Sequence[str], roots: Sequence[str], predicate: Any, group: Ranges, reads: Reads
) -> Any:
    """Return the rows of a group for which a predicate is true; None if there are none."""
    if not roots:
        return _whole(columns, names, group) if polars().select(predicate).item() is True else None
    frame = None
    if len(roots) == 1:
        mask = _mask_of_codes(columns[roots[0]], predicate, group)
    if len(roots) != 1 or mask is None:
        frame = _whole(columns, roots, group)
        mask = evaluated(frame, predicate)
    count = int(np.count_nonzero(mask))
    if not count:
        return None
    if count == len(mask):
        return _whole(columns, names, group)
    if count * _DENSE > len(mask):
        return _whole(columns, names, group).filter(polars().Series(mask))
    numbers = _numbers(group, np.flatnonzero(mask))
    rest = [name for name in names if frame is None or name not in roots]
    parts = {}
    if rest:
        taken = take([columns[name] for name in rest], numbers, reads)
        parts = {one.name: one for one in _frame(rest, taken.columns)}
    if frame is not None:
        kept = frame.filter(polars().Series(mask))
        parts |= {name: kept.get_column(name) for name in roots}
    return polars().DataFrame([parts[name] for name in names])


def _numbers(group: Ranges, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows at places of a group."""
    starts = np.array([start for start, _ in group], np.int64)
    before = np.cumsum([0, *(end - start for start, end in group[:-1])])
    which = np.searchsorted(before, places, "right") - 1
    return np.asarray(places - before[which] + starts[which])


def _mask_of_codes(column: Column, predicate: Any, group: Ranges) -> NDArray[np.bool_] | None:
    """Return which rows of a group a predicate over a column with codes is true for; None if it has no codes.

    The predicate is evaluated once for each value of the dictionary: what Polars hands down, it computes row by row.
    """
    parts = []
    known: dict[int, NDArray[np.bool_]] = {}
    for run, first, end in _runs(column, group):
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
    return np.concatenate(parts)


def _whole(columns: dict[str, Column], names: Sequence[str], group: Ranges) -> Any:
    """Return rows of columns as a frame, without a copy where Polars can use Arrow's buffers."""
    if not names:
        return polars().DataFrame(height=sum(end - start for start, end in group))
    return _frame(names, [
        arrow().chunked_array(
            [run.arrow(first, end - first) for run, first, end in _runs(columns[name], group)],
            type=columns[name].type,
        )
        for name in names
    ])  # fmt: skip


def _frame(names: Sequence[str], arrays: Sequence[Any]) -> Any:
    return polars().from_arrow(arrow().table(list(arrays), names=list(names)), rechunk=False)


def _runs(column: Column, group: Ranges) -> Iterator[tuple[ColumnRun, int, int]]:
    """Yield the runs in which rows lie, and which of the run's own rows these are."""
    runs = column.runs
    for start, stop in group:
        at = max(0, bisect_right(runs, start, key=lambda run: run.first) - 1)
        while at < len(runs) and runs[at].first < stop:
            run = runs[at]
            first, end = max(start - run.first, 0), min(stop - run.first, run.rows)
            if end > first:
                yield run, first, end
            at += 1


def _announce(columns: dict[str, Column], names: Sequence[str], group: Ranges | None, reads: Reads) -> None:
    """Have rows of columns read."""
    for name in names if group else ():
        for run, first, end in _runs(columns[name], group or []):
            reads.span(name, run, first, end)
