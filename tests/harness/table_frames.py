"""Random queries of Polars, over a scan and over the same rows in memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import polars as pl
from polars.testing import assert_frame_equal

NUMBERS = ("i8", "u8", "i32", "i64", "u64", "f32", "f64", "no nulls", "coded numbers")
NON_NUMERIC = ("bool", "date32", "at us", "zoned ms", "d128", "text", "binary", "coded", "u16", "f16", "three", "time")


def predicate(frame: pl.DataFrame, random: np.random.Generator, deep: int = 2) -> pl.Expr:
    """Return a random predicate."""
    if deep and random.random() < 0.5:
        a, b = predicate(frame, random, deep - 1), predicate(frame, random, deep - 1)
        return [lambda: a & b, lambda: a | b, lambda: ~a, lambda: a ^ b][int(random.integers(4))]()
    kind = int(random.integers(8))
    name = str(random.choice(NUMBERS + NON_NUMERIC))
    column = pl.col(name)
    values = frame.get_column(name).drop_nulls()
    value = values[int(random.integers(len(values)))]
    if frame.schema[name] in (pl.Categorical, pl.Binary) or kind == 0:
        return column.is_null() if random.random() < 0.5 else column == pl.lit(value)
    if kind == 1:
        return column.is_in([value, values[0]]) if name not in ("f16",) else column.is_not_null()
    if kind == 2 and name in NUMBERS:
        return (column.cast(pl.Float64) * 2 + 1) > float(value)
    if kind == 3 and frame.schema[name] == pl.String:
        return column.str.starts_with(value[:1])
    if kind == 4 and frame.schema[name].is_float():
        return column.is_nan()
    if kind == 5:
        return pl.lit(bool(random.random() < 0.7)) & column.is_not_null()
    if kind == 6:
        return pl.col("i8").cast(pl.Int64) < pl.col("no nulls")
    literal = pl.lit(value, dtype=frame.schema[name])
    return [column >= literal, column < literal, column != literal, column.eq_missing(literal)][int(random.integers(4))]


def query(frame: pl.DataFrame, random: np.random.Generator) -> Any:
    """Return a random query: a function from a LazyFrame to another."""
    where = predicate(frame, random)
    names = [str(name) for name in random.choice(NUMBERS + NON_NUMERIC, int(random.integers(1, 4)), replace=False)]
    count = int(random.integers(0, frame.height + 5))
    few = [pl.col(names[0]).count().alias("count"), pl.col("u16").min().alias("least")]
    number = str(random.choice(NUMBERS))
    return [
        lambda lf: lf.filter(where),
        lambda lf: lf.filter(where).select(names),
        lambda lf: lf.filter(where).select(names).head(count),
        lambda lf: lf.head(count).filter(where).select(names),
        lambda lf: lf.select(names).slice(count // 2, 50),
        lambda lf: lf.filter(where).select(pl.len(), pl.col(number).sum(), pl.col("text").max()),
        lambda lf: lf.filter(where).group_by("bool", maintain_order=True).agg(*few),
        lambda lf: lf.filter(where).with_columns(twice=pl.col("i64") // 2).filter(pl.col("twice") > 0).tail(7),
        lambda lf: lf.with_row_index().filter(where).select("index", *names),
        lambda lf: lf.filter(where).select(pl.lit(1).alias("one"), *names),
        lambda lf: pl.concat([lf.filter(where).select(names), lf.select(names).head(3)]),
        lambda lf: lf.select(pl.len()),
    ][int(random.integers(12))]


def first_difference(lazy: pl.LazyFrame, frame: pl.DataFrame, seed: int, count: int) -> tuple[int, str] | None:
    """Return the number of the first random query whose frames differ, and the difference."""
    random = np.random.default_rng(seed)
    for number in range(count):
        build_query = query(frame, random)
        engine = "streaming" if number % 4 == 0 else "in-memory"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = build_query(frame.lazy()).collect(engine="in-memory")
            found = build_query(lazy).collect(engine=engine)
        try:
            assert_frame_equal(found, expected, check_exact=True, categorical_as_str=True)
        except AssertionError as error:
            return number, f"{build_query(lazy).explain()}\n{error}"
    return None
