"""Every type that tables have, in any pieces: an Arrow file and a folder give back what was written."""

import datetime
import decimal
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

import warpwell as ww
from warpwell.table.convert import stored_type

DATES = st.dates(datetime.date(1, 1, 1))
TIMES = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))
INTEGERS: list[tuple[Any, Any]] = [
    (kind, st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1))
    for bits, signed, kind in (
        (8, True, pa.int8()),
        (16, True, pa.int16()),
        (32, True, pa.int32()),
        (64, True, pa.int64()),
        (8, False, pa.uint8()),
        (16, False, pa.uint16()),
        (32, False, pa.uint32()),
        (64, False, pa.uint64()),
    )
]
TYPES: list[tuple[Any, Any]] = [
    *INTEGERS,
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.date32(), DATES),
    (pa.date64(), DATES),
    (pa.timestamp("us"), TIMES),
    (pa.timestamp("ms", "UTC"), TIMES),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    (pa.time64("ns"), st.integers(0, 86_399 * 10**9)),
    (pa.duration("ns"), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.decimal32(7, 2), st.decimals(-99999, 99999, places=2)),
    (pa.decimal64(15, 3), st.decimals(-9e9, 9e9, places=3)),
    (pa.decimal128(30, 2), st.integers(-(10**27), 10**27).map(decimal.Decimal)),
    (pa.decimal256(60, 0), st.integers(-(10**55), 10**55).map(decimal.Decimal)),
    (pa.string(), st.text(max_size=20)),
    (pa.large_string(), st.text(max_size=20)),
    (pa.string_view(), st.text(max_size=20)),
    (pa.binary(), st.binary(max_size=20)),
    (pa.large_binary(), st.binary(max_size=9)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.list_(pa.float32(), 3), st.lists(st.floats(width=32), min_size=3, max_size=3)),
    (pa.list_(pa.int8(), 2), st.lists(st.integers(-128, 127), min_size=2, max_size=2)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "", "ö" * 9])),
    (pa.dictionary(pa.int16(), pa.int64()), st.integers(0, 99)),
]


@st.composite
def tables(draw: Any) -> tuple[Any, list[str], int]:
    """A table, the columns that get codes, and the rows of a piece."""
    rows = draw(st.integers(0, 40))
    chosen = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
    columns, coded = {}, []
    for k, (kind, values) in enumerate(chosen):
        with_nulls = draw(st.booleans())
        found = draw(st.lists(st.none() | values if with_nulls else values, min_size=rows, max_size=rows))
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        column = pa.array(found, plain)
        columns[f"c{k}"] = column.dictionary_encode().cast(kind) if plain is not kind else column
        codable = not (
            pa.types.is_nested(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_null(kind)
            or pa.types.is_fixed_size_binary(kind)
            or pa.types.is_decimal(kind)
        )
        if codable and draw(st.booleans()):
            coded.append(f"c{k}")
    table = pa.table(columns)
    skipped = draw(st.integers(0, min(rows, 9)))
    return table.slice(skipped), coded, draw(st.integers(1, 40))


def stored(table: Any, coded: list[str]) -> Any:
    """Return what a table's file holds of a table: dictionaries of the columns with codes, and no views."""
    fields, columns = [], []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = stored_type(field.type)
        if field.name in coded:
            kind = pa.dictionary(pa.uint16(), kind.value_type if pa.types.is_dictionary(kind) else kind)
        fields.append(field.with_type(kind))
        plain = column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column
        columns.append(plain.dictionary_encode().cast(kind) if plain is not column else column.cast(kind))
    return pa.table(columns, pa.schema(fields))


def same(found: Any, expected: Any) -> bool:
    """Return True if two tables are equal, with NaN equal to NaN; the text form compares the stored values."""
    return bool(found.schema == expected.schema) and str(found.to_pydict()) == str(expected.to_pydict())


@pytest.fixture(scope="module")
def tables_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(case=tables())
def test_files_and_folders_give_back_what_was_written(tables_folder: Path, case: tuple[Any, list[str], int]) -> None:
    table, coded, piece = case
    path, folder = tables_folder / "t.arrow", tables_folder / "t.ww"
    shutil.rmtree(folder, ignore_errors=True)
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=piece)
    pieces = table.to_reader(max_chunksize=piece)
    expected = stored(table, coded)
    with ww.table.open(path) as t:
        assert same(t.arrow(), table) and t.rows == len(table)
    with ww.table.convert(pieces, folder, codes=coded) as t:
        assert same(t.arrow(), expected)
        half = len(table) // 2
        assert same(t.arrow(half, len(table) - half), expected.slice(half))
        assert [t[k].nulls for k in range(len(t.names))] == [column.null_count for column in expected.columns]
    if len(table):
        ww.table.append(folder, path)
        with ww.table.open(folder) as t:
            assert same(t.arrow(), pa.concat_tables([expected, expected]))
    assert ww.table.check(folder).sound
