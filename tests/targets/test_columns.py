"""Columns of other libraries as arguments of compiled kernels, alone and under a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.harness.arrays.kernels import add, read, write
from tests.harness.until import HANG_SECONDS

from warpwell import errors
from warpwell.scheduler import Scheduler

ITEMS = list(range(1000))
COLUMNS = [pl.Series(ITEMS), pd.Series(ITEMS), pa.array(ITEMS), pa.chunked_array([ITEMS])]
INDEX = np.arange(1000)[::-1].copy()


@pytest.mark.parametrize("column", COLUMNS, ids=["polars", "pandas", "array", "chunked"])
def test_kernels_read_columns(column: Any) -> None:
    out = np.zeros(1000, np.int64)
    read[1000](column, INDEX, out, device="cpu")
    assert np.array_equal(out, INDEX)
    out[:] = 0
    with Scheduler("cpu") as scheduler:
        scheduler.submit(read[1000], column, INDEX, out).result(HANG_SECONDS)
    assert np.array_equal(out, INDEX)


def test_a_column_may_be_given_twice() -> None:
    series = pl.Series(ITEMS)
    out = np.zeros(1000, np.int64)
    read[1000](series, series, out, device="cpu")
    assert out.tolist() == ITEMS


@pytest.mark.parametrize(("kernel", "says"), [(write, "readonly"), (add, "read-only")])
def test_a_store_is_refused_as_for_any_array_that_is_read_only(kernel: Any, says: str) -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    for column in (frozen, pl.Series([0, 1, 2, 3])):
        with pytest.raises(errors.CompileError, match=says):
            kernel[1](column, np.zeros(1, np.int64), np.ones(1, np.int64), device="cpu")
        assert list(column) == [0, 1, 2, 3]


def test_what_is_refused_is_refused_by_a_scheduler_when_it_is_submitted() -> None:
    with Scheduler("cpu") as scheduler, pytest.raises(errors.ArgumentError, match=r"series.fill_null\(0\)"):
        scheduler.submit(read[1], pl.Series([1, None]), INDEX, np.zeros(1, np.int64))
