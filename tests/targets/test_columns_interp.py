"""Columns of pandas, Polars and Arrow as arguments: read in place, or an error that names the replacement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.harness.arrays.kernels import add, read, write

from warpwell import errors
from warpwell.targets.arguments import viewed

ITEMS = [3, 1, 4, 1, 5]
ACCEPTED: dict[str, Callable[[], Any]] = {
    "polars": lambda: pl.Series(ITEMS),
    "polars, a part": lambda: pl.Series([9, *ITEMS, 9])[1:6],
    "polars, small": lambda: pl.Series(ITEMS, dtype=pl.UInt8),
    "polars, days": lambda: pl.Series(ITEMS, dtype=pl.Int32).cast(pl.Date),
    "polars, times": lambda: pl.Series(ITEMS).cast(pl.Datetime("us", "UTC")),
    "pandas": lambda: pd.Series(ITEMS),
    "pandas, of a table": lambda: pd.DataFrame(np.transpose([ITEMS, ITEMS]))[1],
    "pandas, may have nulls": lambda: pd.Series(ITEMS, dtype="Int64"),
    "pandas, of Arrow": lambda: pd.Series(ITEMS, dtype="int64[pyarrow]"),
    "pandas, times": lambda: pd.Series(ITEMS).astype("datetime64[ns]"),
    "pandas, times of a zone": lambda: pd.Series(ITEMS).astype("datetime64[ns, UTC]"),
    "pandas, spans of time": lambda: pd.Series(ITEMS).astype("timedelta64[s]"),
    "Arrow": lambda: pa.array(ITEMS),
    "Arrow, a part": lambda: pa.array([9, *ITEMS, 9]).slice(1, 5),
    "Arrow, one chunk": lambda: pa.chunked_array([ITEMS]),
    "Arrow, days": lambda: pa.array(ITEMS, pa.date32()),
    "Arrow, times": lambda: pa.array(ITEMS, pa.timestamp("ms", "UTC")),
    "Arrow, a part without the nulls": lambda: pa.array([None, *ITEMS]).slice(1),
}


def view(column: Any) -> np.ndarray[Any, Any]:
    (array,) = viewed(read, [column])
    assert isinstance(array, np.ndarray)
    return array


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_column_is_read_where_it_is(make: Callable[[], Any]) -> None:
    column = make()
    out = np.zeros(5, np.int64)
    read[5](column, np.arange(5), out, device="interp")
    assert out.tolist() == ITEMS
    first, second = view(column), view(column)
    assert np.shares_memory(first, second) and not first.flags.writeable


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED.keys())
@pytest.mark.parametrize("kernel", [write, add], ids=["store", "atomic_add"])
def test_a_column_is_not_written(kernel: Any, make: Callable[[], Any]) -> None:
    column = make()
    with pytest.raises(ValueError, match="read-only"):
        kernel[1](column, np.zeros(1, np.int64), np.ones(1, np.int64), device="interp")
    assert view(column).tolist() == ITEMS


def test_fixed_lists_are_rows() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 2)
    nested = pa.FixedSizeListArray.from_arrays(lists, 3)
    series = pl.Series(rows.tolist(), dtype=pl.Array(pl.Float64, 2))
    assert np.array_equal(view(lists.slice(1)), rows[1:])
    assert np.array_equal(view(nested), rows.reshape(2, 3, 2))
    assert np.array_equal(view(series[2:]), rows[2:])
    assert np.array_equal(
        view(pl.Series(rows.reshape(2, 3, 2).tolist(), dtype=pl.Array(pl.Float64, (3, 2)))), rows.reshape(2, 3, 2)
    )


@pytest.mark.parametrize(
    "empty",
    [
        pl.Series([], dtype=pl.Float32),
        pd.Series([], dtype="float32"),
        pa.array([], pa.float32()),
        pa.chunked_array([], pa.float32()),
    ],
    ids=["polars", "pandas", "Arrow", "no chunk"],
)
def test_empty_columns_are_empty_arrays(empty: Any) -> None:
    assert view(empty).shape == (0,) and view(empty).dtype == np.float32


def misaligned() -> Any:
    return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(bytes(9)).slice(1)])


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: pl.Series([1, None]), r"\(polars Series\) has 1 null, .*: pass series.fill_null\(0\)"),
    (lambda: pl.Series([1]).append(pl.Series([2])), r"2 chunks, .*series.rechunk\(\)"),
    (lambda: pl.Series([True, None]), r"booleans, .*series.cast\(polars.UInt8\)"),
    (lambda: pl.Series(["a", None]), r"text, .*series.cast\(polars.Categorical\).to_physical\(\)"),
    (lambda: pl.Series(["a"], dtype=pl.Categorical), r"categories: .*series.to_physical\(\)"),
    (
        lambda: pl.Series([0], dtype=pl.Int64).cast(pl.Datetime).set(pl.Series([True]), None),
        r"1 null.*series.to_physical\(\).fill_null\(0\)",
    ),
    (lambda: pl.Series([1], dtype=pl.Decimal(9, 2)), r"Decimal.*series.cast\(polars.Float64\)"),
    (lambda: pl.Series([[1]]), r"items of List\(Int64\)"),
    (lambda: pl.Series([1], dtype=pl.Int128), "items of Int128"),
    (lambda: pl.Series([[1.0, None]], dtype=pl.Array(pl.Float64, 2)), "1 null"),
    (lambda: pl.DataFrame({"x": [1]}), r'\(polars DataFrame\) has columns: .*table\["name"\]'),
    (lambda: pl.LazyFrame({"x": [1]}), r'table.collect\(\)\["name"\]'),
    (lambda: pa.array([1, None, None]), r"\(pyarrow Int64Array\) has 2 nulls, .*: pass array.fill_null\(0\)"),
    (lambda: pa.chunked_array([[1], [2]]), r"2 chunks, .*array.combine_chunks\(\)"),
    (lambda: pa.array([True]), r'booleans, .*array.cast\("uint8"\)'),
    (lambda: pa.array(["a"]), r"text, .*array.dictionary_encode\(\).indices"),
    (lambda: pa.array(["a"]).dictionary_encode(), r"dictionary-encoded: pass array.indices"),
    (lambda: pa.array([1], pa.decimal128(9)), r'decimal128.*array.cast\("float64"\)'),
    (lambda: pa.array([{"a": 1}]), r"items of struct<a: int64>, but kernels take numbers"),
    (lambda: pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())), r"pass array.storage"),
    (lambda: pa.table({"x": [1]}), r'\(pyarrow Table\) has columns: .*table\["name"\]'),
    (misaligned, r"are not 8-byte aligned: pass numpy.array\(array\)"),
    (lambda: pd.Series([1, None], dtype="Int64"), r"\(pandas Series\) has 1 null, .*series.fillna\(0\)"),
    (lambda: pd.Series([1, None], dtype="int64[pyarrow]"), r"has 1 null, .*series.fillna\(0\)"),
    (lambda: pd.Series(pd.to_datetime(["2020-01-01", None])), r"1 null.*series.dropna\(\)"),
    (lambda: pd.Series([True], dtype="bool[pyarrow]"), r'booleans, .*series.astype\("uint8"\)'),
    (lambda: pd.Series(["a"]), r'text, .*series.astype\("category"\).cat.codes'),
    (lambda: pd.Series(["a"], dtype="category"), "series.cat.codes"),
    (lambda: pd.Series([object()]), "text or other objects"),
    (lambda: pd.Series(pd.period_range("2020", periods=1)), r"items of period\[D\]"),
    (lambda: pd.DataFrame({"x": [1]}), r"\(pandas DataFrame\) has columns"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_has_no_array_of_numbers_is_refused_with_what_to_write(make: Callable[[], Any], says: str) -> None:
    out = np.zeros(1, np.int64)
    with pytest.raises((errors.ArgumentError, errors.DTypeError), match=f"argument 'a' of kernel 'read' .*{says}"):
        read[1](make(), np.zeros(1, np.int64), out, device="interp")


def test_what_the_errors_say_to_write_is_taken() -> None:
    codes = "series.cast(polars.Categorical).to_physical()"
    for expression, name, column in (
        ("series.fill_null(0)", "series", pl.Series([1, None])),
        ("series.rechunk()", "series", pl.Series([1]).append(pl.Series([2]))),
        ("series.cast(polars.UInt8)", "series", pl.Series([True])),
        (codes, "series", pl.Series(["a"])),
        ("series.cast(polars.Float64)", "series", pl.Series([1], dtype=pl.Decimal(9, 2))),
        ("series.to_physical().fill_null(0)", "series", pl.Series([None, 0]).cast(pl.Date)),
        ('table.collect()["x"]', "table", pl.LazyFrame({"x": [1]})),
        ("array.fill_null(0)", "array", pa.array([1, None])),
        ("array.fill_null(0)", "array", pa.array([1, None], pa.timestamp("ns"))),
        ("array.combine_chunks()", "array", pa.chunked_array([[1], [2]])),
        ('array.cast("uint8")', "array", pa.array([True])),
        ("array.dictionary_encode().indices", "array", pa.array(["a"])),
        ("array.indices", "array", pa.array(["a"]).dictionary_encode()),
        ('array.cast("float64")', "array", pa.array([1], pa.decimal128(9))),
        ("numpy.array(array)", "array", misaligned()),
        ("series.fillna(0)", "series", pd.Series([1, None], dtype="Int64")),
        ("series.dropna()", "series", pd.Series(pd.to_datetime(["2020-01-01", None]))),
        ('series.astype("uint8")', "series", pd.Series([True], dtype="bool[pyarrow]")),
        ('series.astype("category").cat.codes', "series", pd.Series(["a"])),
    ):
        made = eval(expression, {name: column, "polars": pl, "numpy": np})
        (array,) = viewed(read, [made])
        assert array.flags.aligned and array.dtype.kind in "iuf", expression


def test_ordinary_arguments_are_handed_on_as_they_are() -> None:
    args = (np.zeros(1), 3, 2.5, np.float32(1))
    assert viewed(read, args) is args
    assert viewed(read, (*args, pl.Series([1])))[0] is args[0]


def test_a_launch_imports_no_library_of_columns() -> None:
    program = """
import sys, numpy as np, warpwell as ww
@ww.kernel
def double(x):
    x[ww.gpu.grid(1)] *= 2
x = np.arange(3)
double[3](x, device="interp")
assert x.tolist() == [0, 2, 4]
print([name for name in ("pandas", "polars", "pyarrow", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
