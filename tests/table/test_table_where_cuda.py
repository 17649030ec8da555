"""Filters on a GPU select the rows that pyarrow selects, and `gather` has columns of them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.harness import table_queries

import warpwell as ww
from warpwell.errors import ArgumentError
from warpwell.table import predicate

OPTIONS = {
    "evicting": {"cache": "256KiB", "page_size": 512},
    "cached": {"cache": "64MiB"},
    "device": {"tier": "device"},
    "host": {"tier": "host"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("table") / "all.arrow"
    return path, table_queries.write(path, 1)


@pytest.mark.parametrize("options", OPTIONS)
def test_filters_select_what_pyarrow_selects(written: Any, options: str) -> None:
    path, table = written
    with ww.table.open(path, device="cuda", **OPTIONS[options]) as opened:
        assert table_queries.first_difference(opened, table, 5, 100) is None


@pytest.mark.parametrize("options", OPTIONS)
def test_expressions_select_what_polars_selects(written: Any, options: str) -> None:
    pl = pytest.importorskip("polars")
    path, table = written
    with ww.table.open(path, device="cuda", **OPTIONS[options]) as opened:
        for expression in (
            (pl.col("i8") > 3) & pl.col("text").str.starts_with("a"),
            pl.col("u8").ne_missing(7) | pl.col("bool"),
            pl.col("f64").is_nan() & pl.col("i16").is_null(),
        ):
            expected = np.flatnonzero(predicate.mask_of(pl.from_arrow(table), expression).to_numpy())
            assert np.array_equal(opened.where(expression).numpy(), expected), expression


@pytest.mark.parametrize("options", OPTIONS)
def test_columns_of_many_rows(tmp_path: Any, options: str) -> None:
    random, n = np.random.default_rng(9), 200_001
    table = pa.table(
        {
            "i8": random.integers(-128, 128, n).astype(np.int8),
            "f32": random.random(n, dtype=np.float32),
            "u16": pa.array(random.integers(0, 9, n).astype(np.uint16), mask=random.random(n) < 0.1),
            "v": np.arange(n),
        }
    )
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=70_001)
    with ww.table.open(tmp_path / "t.arrow", device="cuda", **OPTIONS[options]) as opened:
        for filters in ([("i8", "<", 3)], [("u16", "in", [1, 5])], [("f32", ">", 0.5), ("u16", "!=", 4)]):
            rows = opened.where(filters)
            expected = table_queries.reference(table, filters)
            assert np.array_equal(rows.numpy(), expected)
            found = rows.gather(["f32", "v"])
            assert np.array_equal(found["v"].copy_to_host(), expected)
            assert np.array_equal(found["f32"].copy_to_host(), table["f32"].to_numpy()[expected])
        with pytest.raises(ArgumentError, match="nulls"):
            rows.gather("u16")
