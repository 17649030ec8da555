"""Filters select the same rows as pyarrow, and `take` returns the same values."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import mmap

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.harness import table_frames, table_queries

import warpwell as ww
from warpwell import errors
from warpwell.table import predicate, where

DAY = datetime.date(2024, 2, 29)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "all.arrow"
    return path, table_queries.write(path, 1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks and slices, and columns that are read where rows are left."""
    monkeypatch.setattr(where, "CHUNK_ROWS", 500)
    monkeypatch.setattr(where, "DENSE_FRACTION", 2)
    monkeypatch.setattr(predicate, "SLICE_ROWS", 64)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """Sorted columns, in which many blocks cannot match, with zone maps."""
    path = tmp_path_factory.mktemp("table") / "all.arrow"
    table = table_queries.write_indexed(path, 1)
    with table_queries.small_blocks():
        yield path, table


def test_filters_over_zone_maps(indexed):
    path, table = indexed
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 3, 100) is None


def test_blocks_that_cannot_match_are_not_read(indexed):
    path, table = indexed
    with ww.table.open(path, device="cpu") as opened:
        for name, literal in (("i32", 7), ("f64", 30.0), ("u16", 7), ("text", "ab"), ("coded", "ab"), ("date32", DAY)):
            condition = predicate.Condition.from_filters([(name, "==", literal)], lambda name: opened[name].type)
            ranges = condition.candidate_rows({name: opened[name]})
            candidates = sum(end - start for start, end in ranges)
            matches = table_queries.reference(table, [(name, "==", literal)])
            assert len(matches) <= candidates <= len(matches) + 3 * 64, name


def _with_zone(**changes):
    """Return the function that decides by zone maps, over other zone maps."""
    return lambda values, zone: _BLOCKS_OF(
        values, dataclasses.replace(zone, **{k: f(zone) for k, f in changes.items()})
    )


_BLOCKS_OF = predicate._blocks_of
BLOCK_FAULTS = {
    "NaN is left out": _with_zone(has_nan=lambda zone: zone.has_nan & False),
    "null is left out": _with_zone(null_counts=lambda zone: 0 * zone.null_counts),
    "blocks are those before": lambda values, zone: np.roll(_BLOCKS_OF(values, zone), 1),
    "only the minimum counts": _with_zone(maximum=lambda zone: zone.minimum),
    "only the maximum counts": _with_zone(minimum=lambda zone: zone.maximum),
}


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_a_block_left_out_wrongly_is_found(indexed, monkeypatch, fault):
    path, table = indexed
    monkeypatch.setattr(predicate, "_blocks_of", BLOCK_FAULTS[fault])
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 3, 100) is not None


def test_filters_select_what_pyarrow_selects(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 1, 200) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_filters(written, monkeypatch):
    monkeypatch.undo()  # restores the original chunk size
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 2, 2000) is None


def _no_order(values):
    keys = _KEYS(values)
    return np.where(keys < 0, keys ^ 0x7FFF_FFFF_FFFF_FFFF, keys) if pa.types.is_float64(values.type) else keys


def _no_pattern(values):
    keys = _KEYS(values)
    return np.where(keys < 0, keys + 128, keys - 128) if pa.types.is_uint8(values.type) else keys


_KEYS, _EQUAL_TO, _MATCHES = predicate.order_keys, predicate._equal_to, predicate.IntervalSet.matches
_WIDE, _CONTAINS = predicate.IntervalSet._matches_wide, predicate.IntervalSet.contains
FAULTS = {
    "negative floats descend": (predicate, "order_keys", _no_order),
    "unsigned integers are signed": (predicate, "order_keys", _no_pattern),
    "negative zero is less": (predicate, "_equal_to", lambda keys, _: _EQUAL_TO(keys, predicate.EVERYTHING)),
    "NaN is the greatest": (predicate, "compare", functools.partial(predicate.compare, nan_is_greatest=True)),
    "a complement is the set": (predicate.IntervalSet, "__invert__", lambda values: values),
    "only the last clause of a column counts": (predicate.IntervalSet, "__and__", lambda a, b: b),
    "nulls match": (predicate.IntervalSet, "matches", lambda s, v, d=None: _MATCHES(_with_null(s), v, d)),
    "null is a value": (predicate, "ONLY_NULL", predicate.EVERYTHING),
    "an end belongs to its interval": (
        predicate.IntervalSet,
        "contains",
        lambda s, keys: _CONTAINS(s, keys) | np.isin(keys, s.edges[1::2]),
    ),
    "bytes are compared by their first": (
        predicate.IntervalSet,
        "_matches_wide",
        lambda s, v: (
            _WIDE(dataclasses.replace(s, edges=tuple(e[:1] for e in s.edges)), v)
            if isinstance(s.edges[0], bytes)
            else _WIDE(s, v)
        ),
    ),
    "rows of a chunk are counted from the table's": (
        where,
        "split_ranges",
        lambda runs, ranges: [(0 * n, a, b) for n, a, b in _SPLIT(runs, ranges)],
    ),
    "rows after the first column are not compared": (
        where,
        "take",
        lambda columns, rows, counters: _TAKE(columns, 0 * rows, counters),
    ),
}
_SPLIT, _TAKE = where.split_ranges, where.take


def _with_null(values):
    return dataclasses.replace(values, nulls=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(written, monkeypatch, fault):
    path, table = written
    monkeypatch.setattr(*FAULTS[fault])
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 1, 200) is not None


def test_taken_rows_are_those_of_pyarrow(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        rows = opened.where([("i8", ">=", 0)])
        selected = rows.take()
        for name in table.column_names:  # compared as text, because NaN is not equal to itself
            assert str(selected[name].to_pylist()) == str(table[name].take(rows.numpy()).to_pylist()), name
            assert selected[name].type == table[name].type
        assert selected.names == table.column_names and len(selected) == len(rows)
        assert rows.take("text").arrow().column_names == ["text"]
        assert np.array_equal(np.from_dlpack(rows), rows.numpy())
        two_columns = rows.take(["no nulls", "f64"])
        assert np.array_equal(two_columns.numpy()["no nulls"], table["no nulls"].to_numpy()[rows.numpy()])
        assert two_columns.polars().equals(__import__("polars").from_arrow(two_columns.arrow()))
        assert np.array_equal(rows.head(3).take("no nulls").numpy()["no nulls"], two_columns.numpy()["no nulls"][:3])
        filters = [("i8", ">=", pa.scalar(0)), ("i8", "in", pa.array(range(128), pa.int8()))]
        # Scalars and arrays of Arrow are valid literals.
        assert np.array_equal(opened.where(filters).numpy(), rows.numpy())
        for number in range(8):  # one row, and one column twice: the texts have different lengths
            single = where.Selection(opened, np.array([number])).take(["text", "i8", "text"]).arrow()
            expected = table["text"][number : number + 1].to_pylist()
            assert single.column(0).to_pylist() == single.column(2).to_pylist() == expected
        empty = opened.where([("i8", "in", [])])
        assert len(empty) == 0 and not empty and len(empty.take()) == 0


def test_gathered_columns_are_those_that_are_taken(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        for filters in ([("i8", ">=", 0)], [("i8", "in", [])]):
            rows = opened.where(filters)
            found = rows.gather("no nulls")["no nulls"]
            assert found.dtype == np.int64 and np.array_equal(found, table["no nulls"].to_numpy()[rows.numpy()])
        for name, why in (("i8", "nulls"), ("text", "nulls")):
            with pytest.raises(errors.ArgumentError, match=f"{name}.*{why}.*take"):
                rows.gather(["no nulls", name])


REFUSED = [
    (("u8", "==", 300), "0 to 255"),
    (("u64", "==", 1 << 64), "not in range: 0 to 18446744073709551615"),
    (("i64", "==", 1 << 63), "not in range: -9223372036854775808 to 9223372036854775807"),
    (("i64", "<", 1e30), "not in range: -9223372036854775808 to 9223372036854775807"),
    (("i64", "<", float("-inf")), "not in range: -9223372036854775808 to 9223372036854775807"),
    (("i64", "in", [1, -(1 << 70)]), "not in range: -9223372036854775808 to 9223372036854775807"),
    (("u64", ">", -1), "not in range: 0 to 18446744073709551615"),
    (("f64", "<", 10**30), "the nearest value is 1e\\+30"),
    (("i8", "==", 1.5), "expected an integer"),
    (("i8", "==", float("nan")), "integer"),
    (("i8", "==", True), "expected an integer"),
    (("i8", "==", "1"), "expected an integer"),
    (("f32", ">", 0.1), "numpy.float32"),
    (("f16", ">", 1e300), "nearest"),
    (("f64", ">", 2**53 + 1), "nearest"),
    (("bool", "==", 1), "True or False"),
    (("d128", "==", decimal.Decimal("0.001")), "would cause data loss"),
    (("d128", "==", 0.5), "decimal.Decimal"),
    (("text", "==", b"a"), "expected a string"),
    (("coded", "==", 1), "expected a string"),
    (("date32", "==", datetime.datetime(2024, 1, 1)), "datetime.date"),
    (("date32", "==", np.datetime64("2024-01-01T03")), "datetime.date"),
    (("at s", "==", datetime.datetime(2024, 1, 1, microsecond=1)), "would lose data"),
    (("at s", "==", datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)), "without a time zone"),
    (("zoned s", "==", datetime.datetime(2024, 1, 1)), "with a time zone"),
    (("time", "==", datetime.time(3, tzinfo=datetime.UTC)), "without a time zone"),
    (("i8", "==", None), "null matches nothing"),
    (("date32", "==", pa.scalar(None)), "null matches nothing"),
    (("i8", "in", 3), "expected a list"),
    (("text", "in", "abc"), "expected a list"),
    (("i8", "~", 3), "unknown operator"),
    (("i8", "is", None), "unknown operator"),
    (("none", "==", 3), "no column"),
]


@pytest.mark.parametrize(("condition", "reason"), REFUSED)
def test_a_literal_that_does_not_fit_is_refused(written, condition, reason):
    with ww.table.open(written[0], device="cpu") as opened, pytest.raises(errors.ArgumentError, match=reason):
        opened.where([condition])


LITERALS = [
    ("u64", 2**64 - 2, 2**64 - 2),
    ("f64", 2**53, float(2**53)),
    ("i8", 7.0, 7),
    ("i8", decimal.Decimal(7), 7),
    ("f32", decimal.Decimal("1.5"), 1.5),
    ("d32", 3, decimal.Decimal(3)),
    ("f16", np.float16(2.25), 2.25),
    ("date64", np.datetime64("2024-02-29"), DAY),
    ("date32", np.datetime64("2024-02"), datetime.date(2024, 2, 1)),
    ("at ms", np.datetime64("2024-02-29T12"), datetime.datetime(2024, 2, 29, 12)),
    ("duration", np.timedelta64(1, "D"), datetime.timedelta(1)),
    ("three", b"ab\xff", b"ab\xff"),
    ("coded", pa.scalar("ab", pa.large_string()), "ab"),
]


@pytest.mark.parametrize(("name", "literal", "plain"), LITERALS)
def test_a_literal_of_another_type(written, name, literal, plain):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        for op in ("==", "<", ">="):
            expected = table_queries.reference(table, [(name, op, plain)])
            assert np.array_equal(opened.where([(name, op, literal)]).numpy(), expected), op


@pytest.mark.parametrize(
    "filters",
    [None, [], [[]], "a > 3", [("a", ">")], [("a", "is null", 3, 4)], [3], ("i8", ">", 3), [[("i8", ">", 3)], 3]],
)
def test_filters_of_another_form_are_refused(written, filters):
    with ww.table.open(written[0], device="cpu") as opened, pytest.raises(errors.ArgumentError, match="filters"):
        opened.where(filters)


def test_types_that_are_not_compared_are_named(tmp_path):
    table = pa.table(
        {
            "views": pa.array(["a"], pa.string_view()),
            "list": pa.array([[1.0]], pa.list_(pa.float32(), 1)),
            "nothing": pa.nulls(1),
            "i": [1],
        }
    )
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as opened:
        for name, value in (("views", "a"), ("list", 1.0), ("nothing", 1)):
            with pytest.raises(errors.DTypeError, match=f"{name}.*ww.table.scan"):
                opened.where([(name, "==", value)])
        assert opened.where([("i", "==", 1)]).take().arrow().equals(table)
        for name, rows in (("views", 0), ("list", 0), ("nothing", 1)):
            assert (
                len(opened.where([(name, "is null")])) == rows
                and len(opened.where([(name, "is not null")])) == 1 - rows
            )


def test_integers_that_python_does_not_print(written):
    path, _ = written
    with ww.table.open(path, device="cpu") as opened:
        for op, value in (("==", 10**5000), ("in", [1, -(10**5000)]), ("in", 10**5000)):
            with pytest.raises(errors.ArgumentError, match=r"integer of 166[0-9]+ bits"):
                opened.where([("i8", op, value)])


def test_nulls_of_a_dictionary_are_null(tmp_path):
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2, 1]), pa.array(["a", None, "b"]))
    table = pa.table({"d": values})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as opened:
        assert opened.where([("d", "is null")]).numpy().tolist() == [1, 2, 4]
        assert opened.where([("d", "is not null")]).numpy().tolist() == [0, 3]
        assert opened.where([("d", "!=", "a")]).numpy().tolist() == [3]


def test_nulls_of_a_dictionary_column_are_found_without_its_codes(tmp_path):
    path, codes = tmp_path / "t.arrow", np.array([0, 1, 0, 1, 1], np.int32)
    mask = np.array([False, False, True, False, False])
    values = pa.DictionaryArray.from_arrays(pa.array(codes, mask=mask), pa.array(["a", "b"]))
    table = pa.table({"d": values})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    raw = path.read_bytes()
    assert raw.count(codes.tobytes()) == 1
    for wrong in (7, -1, -7):
        path.write_bytes(raw.replace(codes.tobytes(), np.array([wrong, 1, 0, 1, 1], np.int32).tobytes()))
        with ww.table.open(path, device="cpu") as opened:
            assert opened.where([("d", "is null")]).numpy().tolist() == [2]
            assert opened.where([("d", "is not null")]).numpy().tolist() == [0, 1, 3, 4]
            with pytest.raises(errors.FormatError, match="damaged"):
                opened.where([("d", "==", "a")])


def test_expressions_of_polars_select_what_polars_selects(written):
    path, table = written
    frame, random = pl.from_arrow(table), np.random.default_rng(1)
    with ww.table.open(path, device="cpu") as opened:
        for number in range(100):
            expression = table_frames.predicate(frame, random)
            expected = np.flatnonzero(predicate.mask_of(frame, expression).to_numpy())
            assert np.array_equal(opened.where(expression).numpy(), expected), (number, expression)


@pytest.mark.parametrize("text", ["f64 = 0.5", "f64 > 0.25", "f64 < 0.5 and i8 > 1.5", "not f64 + 0.5 = 1"])
def test_expressions_of_sql(written, text):
    path, table = written
    expression = pl.sql_expr(text)
    expected = np.flatnonzero(predicate.mask_of(pl.from_arrow(table), expression).to_numpy())
    with ww.table.open(path, device="cpu") as opened:
        assert np.array_equal(opened.where(expression).numpy(), expected)


def test_large_binary_beyond_offsets_of_32_bits(tmp_path):
    size = (1 << 31) + 8
    offsets = np.array([size - 8, size - 1, size - 1, size], np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(mmap.mmap(-1, size))]  # zeros that take no memory
    for kind in (pa.large_binary(), pa.large_string()):
        values = pa.Array.from_buffers(kind, 3, buffers)
        zero = b"\0" if kind == pa.large_binary() else "\0"
        assert predicate.compare("b", kind, "==", zero).matches(values).tolist() == [False, False, True]
        assert predicate.compare("b", kind, "<", zero).matches(values).tolist() == [False, True, False]


def test_rows_of_types_that_polars_and_numpy_do_not_have(tmp_path):
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    table = pa.table({"u": union, "w": pa.array([1], pa.decimal256(60, 2)), "i": [1]})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as opened:
        rows = opened.where([("i", "==", 1)])
        for name in ("u", "w"):
            with pytest.raises(errors.DTypeError, match="Polars"):
                rows.take(name).polars()
        with pytest.raises(errors.DTypeError, match="'u'"):
            rows.take("u").numpy()


def test_alternatives_for_one_column_are_one_set(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        filters = [[("i8", "==", 7)], [("i8", "<", 0)], [("i8", ">", 100)]]
        condition = predicate.Condition.from_filters(filters, lambda name: opened[name].type)
        assert [list(sets) for sets in condition.conjunctions] == [["i8"]]
        assert np.array_equal(opened.where(filters).numpy(), table_queries.reference(table, filters))
        deep = functools.reduce(lambda a, b: a | b, [pl.col("i8") == value % 100 for value in range(400)])
        assert np.array_equal(opened.where(deep).numpy(), opened.where([("i8", "in", range(100))]).numpy())


REFUSED_EXPRESSIONS = [
    (pl.col("i8") > pl.col("i8").mean(), "row by row"),
    (pl.col("i8").shift(1) > 2, "row by row"),
    (pl.sql_expr("f64 = 0.1").sum() > 2, "row by row"),
    (pl.col("none") > 2, "no column 'none'"),
    (pl.col("i8") == "a", "Polars"),
    (pl.col("text").str.to_integer(strict=True) > 1, "Polars"),
    (pl.col("i8") + 1, "Polars"),
]


@pytest.mark.parametrize(("expression", "reason"), REFUSED_EXPRESSIONS)
def test_an_expression_that_is_refused(written, expression, reason):
    with ww.table.open(written[0], device="cpu") as opened, pytest.raises(errors.ArgumentError, match=reason):
        opened.where(expression)


def test_offsets_that_lead_outside_are_an_error(tmp_path):
    path = tmp_path / "t.arrow"
    table = pa.table({"s": [f"{k:05}" for k in range(1000)]})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    raw = bytearray(path.read_bytes())
    offsets = np.arange(0, 5005, 5, np.int32).tobytes()
    at = raw.index(offsets)
    raw[at + 400 : at + 404] = np.int32(1 << 30).tobytes()
    path.write_bytes(raw)
    with ww.table.open(path, device="cpu") as opened:
        with pytest.raises(errors.FormatError, match=r"rows from 0 of a string .*damaged"):
            opened.where([("s", "==", "00500")])
        rows = np.arange(98, 101)
        with pytest.raises(errors.FormatError, match="row 99"):
            where.Selection(opened, rows).take("s")
