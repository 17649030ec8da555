"""Random filters over a table of every type, and pyarrow's results for them."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import warpwell as ww
from warpwell.table import predicate, zones

BATCHES = (1, 63, 0, 64, 65, 700, 1100)
"""Rows of record batches: around the words of a mask."""
ROWS = sum(BATCHES)

_TEXTS = ["", "a", "ab", "a\0", "ä", "zzzzzzzz", "zzzzzzzzz", "Williamsburg", "\U0001f600", "b" * 70]
_UTC = datetime.UTC
_COMPARE = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    ">": pc.greater,
    "<=": pc.less_equal,
    ">=": pc.greater_equal,
}


def columns(seed: int) -> dict[str, pa.Array]:
    """Return a column of each type, extremes, NaN and nulls included."""
    random = np.random.default_rng(seed)
    found = {}
    for bits in (8, 16, 32, 64):
        for kind in "iu":
            info = np.iinfo(f"{kind}{bits // 8}")
            few = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 7, info.max // 2]
            sample = random.choice(np.array(few, info.dtype), ROWS)
            found[f"{kind}{bits}"] = sample
    for bits in (16, 32, 64):
        dtype = np.dtype(f"f{bits // 8}")
        few = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, np.finfo(dtype).max, np.finfo(dtype).tiny, 2.25, 30.0]
        values = random.choice(np.array(few, dtype), ROWS)
        found[f"f{bits}"] = np.where(random.random(ROWS) < 0.1, -values, values)
    arrays = {name: pa.array(values, mask=random.random(ROWS) < 0.1) for name, values in found.items()}
    arrays["no nulls"] = pa.array(random.integers(-3, 4, ROWS))
    arrays["bool"] = pa.array(random.random(ROWS) < 0.5, mask=random.random(ROWS) < 0.2)

    def of(values: list[Any], kind: pa.DataType) -> pa.Array:
        chosen = [values[k] if k < len(values) else None for k in random.integers(0, len(values) + 1, ROWS)]
        return pa.array(chosen, kind)

    cents = [decimal.Decimal(f"{number}e-2") for number in (-(10**11), -325, -1, 0, 1, 325, 10**11)]
    for bits in (32, 64, 128):
        in_range = cents[1:-1] if bits == 32 else cents
        arrays[f"d{bits}"] = of(in_range, getattr(pa, f"decimal{bits}")({32: 9, 64: 18, 128: 38}[bits], 2))
    far = [decimal.Decimal(10**37), decimal.Decimal(-(10**37)), decimal.Decimal(1 << 64)]
    arrays["huge"] = of(far, pa.decimal128(38))
    days = [datetime.date(1970, 1, 1), datetime.date(1, 1, 1), datetime.date(9999, 12, 31), datetime.date(2024, 2, 29)]
    times = [datetime.datetime(2024, 2, 29, 12, k) for k in range(4)] + [datetime.datetime(1912, 3, 4, 5, 6, 7)]
    zoned = [moment.replace(tzinfo=_UTC) for moment in times]
    arrays["date32"], arrays["date64"] = of(days, pa.date32()), of(days, pa.date64())
    for unit in ("s", "ms", "us", "ns"):
        arrays[f"at {unit}"] = of(times, pa.timestamp(unit))
        arrays[f"zoned {unit}"] = of(zoned, pa.timestamp(unit, "America/New_York"))
    arrays["duration"] = of([datetime.timedelta(seconds=k) for k in (-5, 0, 86_400)], pa.duration("ms"))
    arrays["time"] = of([datetime.time(k) for k in (0, 12, 23)], pa.time64("us"))
    for name, kind in (("text", pa.string()), ("large text", pa.large_string())):
        arrays[name] = of(_TEXTS, kind)
    arrays["binary"] = of([text.encode() for text in _TEXTS] + [b"\xff", b"\xff\0"], pa.binary())
    arrays["three"] = of([b"abc", b"ab\xff", b"\0\0\0"], pa.binary(3))
    arrays["coded"] = of(_TEXTS, pa.string()).dictionary_encode()
    arrays["coded numbers"] = arrays["f64"].dictionary_encode()
    return arrays


def write(path: Path, seed: int) -> pa.Table:
    """Write such a table as an Arrow file of several batches; return it."""
    table = pa.table(columns(seed))
    _write_batches(path, table)
    return table


def _write_batches(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        start = 0
        for rows in BATCHES:
            parts = [column.combine_chunks().slice(start, rows) for column in table.columns]
            writer.write_batch(pa.RecordBatch.from_arrays(parts, schema=table.schema))
            start += rows


def write_indexed(path: Path, seed: int) -> pa.Table:
    """Write such a table, sorted by `clustered`, with zone maps of small blocks; to be read in `small_blocks`."""
    table = clustered(pa.table(columns(seed)))
    _write_batches(path, table)
    with small_blocks():
        ww.table.index(path)
    return table


def clustered(table: pa.Table) -> pa.Table:
    """Return a table with each column sorted for itself, so that blocks of rows have few values; nulls are spread."""
    columns = []
    for column in table.columns:
        kind = column.type
        tests = (
            pa.types.is_floating,
            pa.types.is_integer,
            pa.types.is_date,
            pa.types.is_string,
            pa.types.is_dictionary,
        )
        if any(test(kind) for test in tests):
            values = column.combine_chunks()
            plain = values.cast(kind.value_type) if pa.types.is_dictionary(kind) else values
            order = pc.sort_indices(plain.cast(pa.float32()) if pa.types.is_float16(kind) else plain)
            turned = np.roll(order.to_numpy(), len(order) // 3)  # the minimum is in the middle, next to NaN
            column = pa.chunked_array([values.take(pa.array(turned))])
        columns.append(column)
    return pa.table(columns, names=table.column_names)


@contextlib.contextmanager
def small_blocks(rows: int = 64) -> Iterator[None]:
    """Let the zone maps of tables that are indexed and read in this context have blocks of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (predicate, zones):
            patch.setattr(module, "BLOCK_ROWS", rows)
        yield


def clause(table: pa.Table, random: np.random.Generator) -> tuple[Any, ...]:
    """Return a random clause; its literals are values of the column, or near them."""
    name = str(random.choice(table.column_names))
    op = str(random.choice(["=", "==", "!=", "<", ">", "<=", ">=", "in", "not in", "is null", "IS NOT NULL"]))
    if op.lower().startswith("is"):
        return name, op
    count = int(random.integers(0, 5)) if op.endswith("in") else 1
    values = [_literal(table.column(name), random) for _ in range(count)]
    return name, op, values if op.endswith("in") else values[0]


def _literal(column: pa.ChunkedArray, random: np.random.Generator) -> Any:
    while True:
        value = column[int(random.integers(len(column)))]
        if not value.is_valid:
            continue
        found = value.as_py()
        if isinstance(found, str) and random.random() < 0.3:
            return found[:-1]
        if type(found) is int and pa.types.is_integer(column.type) and random.random() < 0.3:
            return min(
                max(found + int(random.integers(-1, 2)), np.iinfo(column.type.to_pandas_dtype()).min),
                np.iinfo(column.type.to_pandas_dtype()).max,
            )
        if hasattr(found, "to_pydatetime"):  # pandas, for nanoseconds
            return found.to_pydatetime()
        return found


def filters(table: pa.Table, random: np.random.Generator) -> list[Any]:
    """Return random filters, in the form of pyarrow."""
    if random.random() < 0.5:
        return [clause(table, random) for _ in range(random.integers(1, 4))]
    return [[clause(table, random) for _ in range(random.integers(1, 3))] for _ in range(random.integers(1, 4))]


def reference(table: pa.Table, conditions: list[Any]) -> np.ndarray[Any, Any]:
    """Return the rows that match, by pyarrow: nulls match nothing, and lists compare as ``==`` does."""
    lists = conditions if isinstance(conditions[0], list) else [conditions]
    masks = [
        functools.reduce(operator.and_, (_mask(table.column(c[0]), *c[1:]) for c in conjunction))
        for conjunction in lists
    ]
    return np.flatnonzero(functools.reduce(operator.or_, masks))


def _mask(column: pa.ChunkedArray, op: str, literal: Any = None) -> np.ndarray[Any, Any]:
    kind = column.type
    if op.lower().startswith("is"):
        return np.asarray((column.is_null() if op == "is null" else column.is_valid()).to_numpy())
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if op in ("in", "not in"):
        found = np.zeros(len(column), bool)
        for item in literal:
            found |= _mask(column, "==", item)
        return found if op == "in" else ~found & column.is_valid().to_numpy()
    if pa.types.is_float16(kind):  # pyarrow cannot compare float16
        column, kind = column.cast(pa.float32()), pa.float32()
    elif pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        column, kind = column.cast(pa.decimal128(18, 2)), pa.decimal128(18, 2)
    elif pa.types.is_fixed_size_binary(kind):
        column, kind = column.cast(pa.binary()), pa.binary()
    return np.asarray(_COMPARE[op](column, pa.scalar(literal, kind)).fill_null(False).to_numpy())


def first_difference(opened: Any, table: pa.Table, seed: int, count: int) -> tuple[int, list[Any]] | None:
    """Return the first random filter whose rows differ from pyarrow's, and its number."""
    random = np.random.default_rng(seed)
    for number in range(count):
        conditions = filters(table, random)
        if not np.array_equal(opened.where(conditions).numpy(), reference(table, conditions)):
            return number, conditions
    return None
