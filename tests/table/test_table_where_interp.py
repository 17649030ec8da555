"""The kernel of filters on `interp`, over a mapping and behind a cache."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest
from tests.harness import table_queries

import warpwell as ww
from warpwell.table import where


@pytest.mark.parametrize("options", [{}, {"cache": "16KiB", "page_size": 512}])
def test_filters_of_each_kind(tmp_path, options):
    table = pa.table(
        {
            "a": np.arange(200),
            "s": [f"{k % 7}" for k in range(200)],
            "b": [k % 3 == 0 for k in range(200)],
            "f": np.float32(np.arange(200) - 100),
            "u": pa.array(range(200), pa.uint8()),
            "d": [decimal.Decimal(k) for k in range(200)],
        }
    )
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    with ww.table.open(tmp_path / "t.arrow", device="interp", **options) as opened:
        for filters, rows in (
            ([("a", ">", 150), ("s", "in", ["3", "5"])], [k for k in range(151, 200) if k % 7 in (3, 5)]),
            ([("b", "==", True), ("f", "<", -90)], [0, 3, 6, 9]),
            ([[("u", "in", [3, 199, 7]), ("d", ">=", 7)], [("a", "==", 0)]], [0, 7, 199]),
        ):
            assert opened.where(filters).numpy().tolist() == rows


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Columns of numbers that a kernel compares, in batches that end within a word of the bitmap."""
    path = tmp_path_factory.mktemp("table") / "t.arrow"
    columns = table_queries.columns(4)
    names = ["i8", "u8", "i32", "u16", "u64", "f16", "f32", "f64", "coded", "coded numbers"]
    table = pa.table({name: columns[name].slice(0, 150) for name in names})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return path, table


def test_random_filters(numbers):
    path, table = numbers
    with ww.table.open(path, device="interp") as opened:
        assert table_queries.first_difference(opened, table, 3, 60) is None


_FORM = where._form
FAULTS = {
    "negative floats descend": ("_form", lambda dtype: (*_FORM(dtype)[:2], 0)),
    "unsigned integers are signed": ("_form", lambda dtype: (_FORM(dtype)[0], 0, _FORM(dtype)[2])),
    "null is not cleared": ("set_bits", lambda bits: np.arange(8 * len(bits))),
    "the last word is left out": ("_units", lambda *a: _UNITS(*a) - [0, 0, 1]),
}
_UNITS = where._units


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(numbers, monkeypatch, fault):
    path, table = numbers
    monkeypatch.setattr(where, *FAULTS[fault])
    with ww.table.open(path, device="interp") as opened:
        assert table_queries.first_difference(opened, table, 3, 60) is not None
