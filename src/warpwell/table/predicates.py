"""`may_match`: which blocks of rows a predicate of Polars may be true in, by their least and greatest values.

Expressions are not parsed. A predicate is taken apart by Polars (``meta.pop``), and what it is made of is put together
again in the forms that are known here; if Polars says that one of them is the predicate (``meta.eq``), the form is
known. Then Polars evaluates it on the leasts and greatests, so that casts and the order of values are its own. Where a
part has none of the forms, it leaves no block out.

A part about one column with codes needs no form: it is evaluated for each value of the dictionary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .column import Column, ColumnRun
from .layout import storage_of
from .library import arrow, polars
from .reading import Reads
from .statistics import Blocks, Kept, blocks_of, by_codes, values_of

_CLOSED = ("both", "left", "right", "none")
Test = Callable[[Any, Any], NDArray[np.bool_]]
"""Of frames of the leasts and of the greatests: which blocks may match."""


def may_match(columns: dict[str, Column], predicate: Any, reads: Reads) -> Blocks:
    """Return the blocks of a table, of which those are kept in which a predicate may be true for a row.

    Parameters
    ----------
    columns : dict
        At least those that the predicate names.
    predicate : polars.Expr
        What Polars computes row by row.
    reads : Reads
        Where the statistics that are read are counted.
    """
    roots = predicate.meta.root_names()
    blocks = Blocks(columns[roots[0]].runs)
    if any(run.statistics is not None for name in set(roots) for run in columns[name].runs):
        kept = _kept(columns, predicate, reads)
        if kept is not None:
            blocks.kept = kept
    return blocks


def evaluated(frame: Any, predicate: Any) -> NDArray[np.bool_]:
    """Return which rows of a frame a predicate is true for; null is not."""
    return np.asarray(mask_of(frame, predicate).to_numpy(), np.bool_)


def mask_of(frame: Any, predicate: Any) -> Any:
    """Return the same as a `polars.Series` without nulls."""
    name = "predicate" + "_" * (1 + max(map(len, frame.columns)))
    mask = frame.select(predicate.alias(name).fill_null(False)).get_column(name)
    if len(mask) != len(frame):  # of constants alone
        mask = frame.with_columns(mask).get_column(name)
    return mask


def of_dictionary(name: str, run: ColumnRun, predicate: Any) -> NDArray[np.bool_]:
    """Return which values of a run's dictionary a predicate is true for; the last one is that of null."""
    values = arrow().chunked_array([run.dictionary, arrow().nulls(1, run.dictionary.type)])
    return evaluated(polars().from_arrow(arrow().table([values], names=[name]), rechunk=False), predicate)


def has_codes(column: Column, run: ColumnRun) -> bool:
    """Return whether a run has codes, and Polars sees the values that they stand for."""
    return run.codes is not None and not arrow().types.is_dictionary(storage_of(column.type))


def _kept(columns: dict[str, Column], part: Any, reads: Reads) -> Kept | None:
    """Return the blocks that a part of a predicate keeps; None if all."""
    inside = _popped(part)
    if len(inside) == 2:
        for join, both in ((operator.and_, np.logical_and), (operator.or_, np.logical_or)):
            if _is(part, join, inside[0], inside[1]):
                a, b = _kept(columns, inside[0], reads), _kept(columns, inside[1], reads)
                if join is operator.and_ and (a is None or b is None):
                    return b if a is None else a
                return None if a is None or b is None else np.asarray(both(a, b))
    roots = set(part.meta.root_names())
    if len(roots) != 1:
        return None
    column = columns[roots.pop()]
    test = _test(part, inside)
    known: dict[int, NDArray[np.bool_]] = {}

    def kept(run: ColumnRun, records: NDArray[Any]) -> Kept:
        if has_codes(column, run):
            if id(run.dictionary) not in known:
                known[id(run.dictionary)] = of_dictionary(column.name, run, part)
            of_value = known[id(run.dictionary)]
            return by_codes(records, of_value[:-1], bool(of_value[-1]))
        if test is None or run.codes is not None:
            return np.ones(len(records), np.bool_)
        frames = [
            polars().from_arrow(arrow().table([values_of(run, records[end])], names=[column.name]))
            for end in ("least", "greatest")
        ]
        return test(*frames)

    if test is None and not any(has_codes(column, run) for run in column.runs):
        return None
    return blocks_of(column, kept, reads)


def _test(part: Any, inside: Sequence[Any]) -> Test | None:
    """Return how a comparison of a column with literals is decided by least and greatest; None for anything else."""
    if len(inside) == 2:
        for column, literal in ((inside[0], inside[1]), (inside[1], inside[0])):
            if column.meta.is_column() and literal.meta.is_literal():
                return _comparison(part, column, literal)
    if len(inside) == 3 and inside[0].meta.is_column() and all(one.meta.is_literal() for one in inside[1:]):
        column, low, high = inside
        if any(_is(part, column.is_between.__func__, column, low, high, closed) for closed in _CLOSED):
            return lambda least, greatest: evaluated(greatest, column >= low) & evaluated(least, column <= high)
    return None


def _comparison(part: Any, column: Any, literal: Any) -> Test | None:
    if _is(part, operator.eq, column, literal) or _is(part, operator.eq, literal, column):
        return lambda least, greatest: evaluated(greatest, column >= literal) & evaluated(least, column <= literal)
    for compare, swapped in ((operator.ge, operator.le), (operator.gt, operator.lt)):
        if _is(part, compare, column, literal) or _is(part, swapped, literal, column):
            return lambda least, greatest: evaluated(greatest, part)
        if _is(part, swapped, column, literal) or _is(part, compare, literal, column):
            return lambda least, greatest: evaluated(least, part)
    return None


def _popped(part: Any) -> list[Any]:
    """Return what an expression is made of, in order; nothing where Polars does not say."""
    try:
        return list(part.meta.pop())[::-1]
    except Exception:
        return []


def _is(part: Any, make: Callable[..., Any], *given: Any) -> bool:
    """Return whether Polars says that a part is what `make` makes."""
    try:
        return bool(make(*given).meta.eq(part))
    except Exception:
        return False
