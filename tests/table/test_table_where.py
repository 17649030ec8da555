"""Filters select the rows that pyarrow selects; what is taken of them is what pyarrow takes."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from tests.harness import table_queries

import warpwell as ww
from warpwell import errors
from warpwell.table import key_sets, statistics, where


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "all.arrow"
    return path, table_queries.write(path, 1)


@pytest.fixture(scope="module")
def folder(written, tmp_path_factory):
    """The same in a folder of two parts, some columns with codes, in which many blocks cannot match."""
    path, table = tmp_path_factory.mktemp("table") / "all.ww", table_queries.clustered(written[1])
    with table_queries.small_blocks():
        ww.table.convert(table[:1000], path, codes=["i32", "f32", "date32", "text", "at us", "u64"]).close()
        ww.table.append(path, table[1000:])
        with ww.table.open(path, device="cpu") as found:
            table = found.arrow()
        yield path, table


def test_filters_over_a_folder(folder):
    path, table = folder
    with ww.table.open(path, device="cpu") as opened:
        assert {run.layout.kind for name in ("i32", "f32", "u64") for run in opened[name].runs} == {"codes"}
        assert table_queries.first_difference(opened, table, 3, 100) is None


def test_blocks_that_cannot_match_are_not_read(folder):
    path, table = folder
    with ww.table.open(path, device="cpu") as opened:
        blocks = -(-1000 // 64) + -(-(len(table) - 1000) // 64)
        for name, literal in (("i32", 7), ("f64", 30.0), ("u16", 7), ("f32", 2.25)):
            flips = key_sets.set_of(name, opened[name].type, "==", literal)
            kept = where._kept(opened[name], flips, {}, ww.table.Reads())
            with_nan = sum(1 for run in opened[name].runs for one in run.statistics.numpy() if one["flags"] & 2)
            assert len(kept) == blocks and 0 < kept.sum() <= with_nan + blocks // 4, name


BLOCK_FAULTS = {
    "NaN is left out": (statistics, "HAS_NAN", 0),
    "blocks are those of the run before": (statistics, "by_keys", lambda r, flips: np.roll(_BY_KEYS(r, flips), 1)),
    "only the least counts": (statistics, "by_keys", lambda r, flips: _BY_KEYS(_narrowed(r, "least"), flips)),
    "only the greatest counts": (statistics, "by_keys", lambda r, flips: _BY_KEYS(_narrowed(r, "greatest"), flips)),
    "unsigned integers begin at 0": (statistics, "_keys", lambda items: _keys_of_signed(items)),
}
_BY_KEYS, _KEYS = statistics.by_keys, statistics._keys


def _keys_of_signed(items):
    return _KEYS(items.view(f"<i{items.itemsize}") if items.dtype.kind == "u" else items)


def _narrowed(records, end):
    found = records.copy()
    found["least"] = found["greatest"] = records[end]
    return found


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_a_block_left_out_wrongly_is_found(folder, monkeypatch, fault):
    path, table = folder
    module, name, value = BLOCK_FAULTS[fault]
    monkeypatch.setattr(module, name, value)
    if hasattr(where, name):
        monkeypatch.setattr(where, name, value)
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 3, 100) is not None


def test_filters_select_what_pyarrow_selects(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 1, 200) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_filters(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        assert table_queries.first_difference(opened, table, 2, 2000) is None


def _no_order(column, run):
    kind, shift, pattern, _ = _FORM(column, run)
    return kind, shift, pattern, 0


def _no_pattern(column, run):
    kind, shift, _, order = _FORM(column, run)
    return kind, shift, 0, order


def _one_zero(bits):
    keys = _FLOATS(bits)
    return key_sets.Keys(keys.least, keys.floor, keys.ceiling, lambda v: keys.of(v) and (keys.of(v)[1],) * 2)


def _nan_is_greatest(bits):
    keys = _FLOATS(bits)
    return key_sets.Keys(keys.least, keys.floor, 1 << (bits - 1), keys.of)


_FORM, _FLOATS = where._form, key_sets._floats
FAULTS = {
    "negative floats descend": (where, "_form", _no_order),
    "unsigned integers are signed": (where, "_form", _no_pattern),
    "negative zero is less": (key_sets, "_floats", _one_zero),
    "NaN is the greatest": (key_sets, "_floats", _nan_is_greatest),
    "a complement forgets the least": (key_sets, "complement", lambda flips, least: flips[1:] or [least]),
    "only the last clause of a column counts": (where, "intersection", lambda a, b: b),
    "nulls match": (where, "_buffers", lambda run: (*_BUFFERS(run)[:1], None, _BUFFERS(run)[2])),
}
_BUFFERS = where._buffers


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
        taken = rows.take()
        for name in table.column_names:  # as text, for NaN is equal to nothing
            assert str(taken[name].to_pylist()) == str(table[name].take(rows.numpy()).to_pylist()), name
            assert taken[name].type == table[name].type
        assert taken.names == table.column_names and len(taken) == len(rows)
        assert rows.take("text").arrow().column_names == ["text"]
        assert np.array_equal(np.from_dlpack(rows), rows.numpy())
        some = rows.take(["no nulls", "f64"])
        assert np.array_equal(some.numpy()["no nulls"], table["no nulls"].to_numpy()[rows.numpy()])
        assert some.polars().equals(__import__("polars").from_arrow(some.arrow()))
        assert np.array_equal(rows.head(3).take("no nulls").numpy()["no nulls"], some.numpy()["no nulls"][:3])
        filters = [("i8", ">=", pa.scalar(0)), ("i8", "in", pa.array(range(128), pa.int8()))]
        assert np.array_equal(opened.where(filters).numpy(), rows.numpy())  # what `take` and Arrow return is a literal
        for number in range(8):  # one column twice, of one row: its bytes have several sizes
            one = where.Matches(opened, np.array([number]), []).take(["text", "i8", "text"]).arrow()
            expected = table["text"][number : number + 1].to_pylist()
            assert one.column(0).to_pylist() == one.column(2).to_pylist() == expected
        none = opened.where([("i8", "in", [])])
        assert len(none) == 0 and not none and len(none.take()) == 0


def test_gathered_columns_are_those_that_are_taken(written):
    path, table = written
    with ww.table.open(path, device="cpu") as opened:
        for given in ([("i8", ">=", 0)], [("i8", "in", [])]):
            rows = opened.where(given)
            found = rows.gather("no nulls")["no nulls"]
            assert found.dtype == np.int64 and np.array_equal(found, table["no nulls"].to_numpy()[rows.numpy()])
        for name, why in (("i8", "nulls"), ("text", "nulls")):
            with pytest.raises(errors.ArgumentError, match=f"{name}.*{why}.*take"):
                rows.gather(["no nulls", name])


REFUSED = [
    (("u8", "==", 300), "values from 0 to 255"),
    (("i8", "==", 1.5), "give an integer"),
    (("i8", "==", True), "give an integer"),
    (("i8", "==", "1"), "give an integer"),
    (("f32", ">", 0.1), "numpy.float32"),
    (("f64", ">", 2**53 + 1), "nearest"),
    (("bool", "==", 1), "True or False"),
    (("d128", "==", decimal.Decimal("0.001")), "2 digits"),
    (("d128", "==", 0.5), "decimal.Decimal"),
    (("text", "==", b"a"), "give a string"),
    (("coded", "==", 1), "give a string"),
    (("date32", "==", datetime.datetime(2024, 1, 1)), "datetime.date"),
    (("at s", "==", datetime.datetime(2024, 1, 1, microsecond=1)), "no such instant"),
    (("at s", "==", datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)), "no zone"),
    (("zoned s", "==", datetime.datetime(2024, 1, 1)), "with a zone"),
    (("i8", "==", None), "null matches nothing"),
    (("date32", "==", pa.scalar(None)), "null matches nothing"),
    (("i8", "in", 3), "give a list"),
    (("text", "in", "abc"), "give a list"),
    (("i8", "~", 3), "no operator"),
    (("none", "==", 3), "no column"),
]


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_a_literal_that_does_not_fit_is_refused(written, given, reason):
    with ww.table.open(written[0], device="cpu") as opened, pytest.raises(errors.ArgumentError, match=reason):
        opened.where([given])


@pytest.mark.parametrize("given", [None, [], [[]], "a > 3", [("a", ">")], [3], ("i8", ">", 3), [[("i8", ">", 3)], 3]])
def test_filters_of_another_form_are_refused(written, given):
    with ww.table.open(written[0], device="cpu") as opened, pytest.raises(errors.ArgumentError, match="filters"):
        opened.where(given)


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
        with pytest.raises(errors.FormatError, match="row 99: its offsets lead outside"):
            opened.where([("s", "==", "00500")])
        rows = np.arange(98, 101)
        with pytest.raises(errors.FormatError, match="row 99"):
            where.Matches(opened, rows, []).take("s")
