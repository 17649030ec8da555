"""pyarrow, Polars and DuckDB open the tables that Warpwell writes, unchanged: every type, one file and a folder."""

import datetime
import decimal
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import warpwell as ww

dataset = pytest.importorskip("pyarrow.dataset")
ROWS = 9_001
DAY = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)
NAMES = [f"w{k // 3000}" for k in range(ROWS)]
"""The second record batch has a value that the first one does not have."""


def times(zone: str | None = None, unit: str = "us") -> Any:
    return pa.array([DAY - datetime.timedelta(hours=k) for k in range(ROWS)], pa.timestamp("us")).cast(
        pa.timestamp(unit, zone), safe=False
    )


KINDS: dict[str, Any] = {
    **{
        f"{sign}int{bits}": pa.array([k % 100 - (not sign) for k in range(ROWS)], getattr(pa, f"{sign}int{bits}")())
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "half": pa.array([k % 8 / 8 for k in range(ROWS)], pa.float16()),
    "float": pa.array([k / 8 for k in range(ROWS)], pa.float32()),
    "double": pa.array([k / 7 if k % 9 else float("nan") for k in range(ROWS)]),
    "bool": pa.array([k % 3 == 0 for k in range(ROWS)]),
    "null": pa.nulls(ROWS),
    "text": pa.array(["ü" * (k % 4) for k in range(ROWS)]),
    "large text": pa.array([str(k) for k in range(ROWS)], pa.large_string()),
    "bytes": pa.array([bytes([k % 256]) * (k % 4) for k in range(ROWS)]),
    "fixed bytes": pa.array([k.to_bytes(4, "big") for k in range(ROWS)], pa.binary(4)),
    "dictionary": pa.array(NAMES).dictionary_encode(),
    "codes": pa.array(NAMES),
    "number codes": pa.array([k // 3000 for k in range(ROWS)]),
    "date": times().cast(pa.date32(), safe=False),
    "date64": times().cast(pa.date64(), safe=False),
    "seconds": times(unit="s"),
    "milliseconds": times(unit="ms"),
    "nanoseconds": times(unit="ns"),
    "zone": times("America/New_York"),
    "offset": times("+02:00"),
    "time": times().cast(pa.time64("us")),
    "time32": times().cast(pa.time64("us")).cast(pa.time32("s"), safe=False),
    "duration": pa.array([k - 99 for k in range(ROWS)], pa.duration("us")),
    "interval": pa.array([(k, -k, 1000 * k) for k in range(ROWS)], pa.month_day_nano_interval()),
    **{
        f"decimal{bits}": pa.array([decimal.Decimal(k - 99).scaleb(-3) for k in range(ROWS)], kind)
        for bits, kind in (
            (32, pa.decimal32(9, 3)),
            (64, pa.decimal64(18, 3)),
            (128, pa.decimal128(38, 3)),
            (256, pa.decimal256(60, 3)),
        )
    },
    "list": pa.array([[k] * (k % 3) for k in range(ROWS)], pa.list_(pa.int32())),
    "large list": pa.array([[str(k)] * (k % 3) for k in range(ROWS)], pa.large_list(pa.string())),
    "vector": pa.array([[k, -k] for k in range(ROWS)], pa.list_(pa.float32(), 2)),
    "struct": pa.array([{"x": k, "y": [{"z": DAY}] * (k % 3)} for k in range(ROWS)]),
    "map": pa.array([[(str(k), k)] * (k % 2) for k in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "words in a list": pa.ListArray.from_arrays(list(range(ROWS + 1)), pa.array(NAMES).dictionary_encode()),
}
LACKING: dict[str, set[str]] = {
    "pyarrow": set(),
    "polars": {"interval", "decimal256"},
    "duckdb": {"half", "decimal256"},
}
"""Types that a library does not have."""
INTERVAL = pa.month_day_nano_interval()


def of_pyarrow(paths: list[str], name: str) -> Any:
    return dataset.dataset(paths, format="ipc").to_table()[name]


def of_polars(paths: list[str], name: str) -> Any:
    polars = importlib.import_module("polars")
    eager = polars.concat([polars.read_ipc(path) for path in paths])
    assert polars.scan_ipc(paths).collect().equals(eager, null_equal=True)
    return eager.to_arrow(compat_level=polars.CompatLevel.oldest())[name]


def of_duckdb(paths: list[str], name: str) -> Any:
    connection = importlib.import_module("duckdb").connect()
    connection.register("data", dataset.dataset(paths, format="ipc"))
    return connection.sql("select * from data").to_arrow_table()[name]


def values(column: Any) -> list[str]:
    """Return the values of a column as text that does not depend on a library's name of their type."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_duration(column.type):  # DuckDB returns durations as intervals
        column = pa.array([None if k is None else (0, 0, 1000 * k) for k in column.cast("int64").to_pylist()], INTERVAL)
    elif pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns")).cast(pa.int64())
    return list(map(str, column.to_pylist()))


READERS: dict[str, Callable[[list[str], str], Any]] = {
    "pyarrow": of_pyarrow,
    "polars": of_polars,
    "duckdb": of_duckdb,
}
CASES = [(library, kind) for library in READERS for kind in KINDS if kind not in LACKING[library]]


@pytest.mark.parametrize(("library", "kind"), CASES)
def test_other_libraries_open_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, kind: str) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(importlib.import_module("warpwell.table.convert"), "BATCH_BYTES", 1 << 16)
    array = KINDS[kind]
    with_nulls = array.take(pa.array([k if k % 7 else None for k in range(ROWS)]))
    table = pa.table({kind: with_nulls, "row": range(ROWS)})
    codes = [name for name in table.column_names if "codes" in name]
    ww.table.convert(table.to_reader(3000), tmp_path / "t.arrow", codes=codes).close()
    ww.table.convert(table.to_reader(3000), tmp_path / "t.ww", codes=codes).close()
    ww.table.append(tmp_path / "t.ww", table.slice(5))
    expected, tail = values(table[kind]), values(table[kind].slice(5))
    folder = [str(tmp_path / "t.ww" / name) for name in ("0.arrow", "1.arrow")]
    assert values(READERS[library]([str(tmp_path / "t.arrow")], kind)) == expected
    assert values(READERS[library](folder, kind)) == expected + tail
