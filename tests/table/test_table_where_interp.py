"""The kernel of filters on `interp`, over a mapping and behind a cache."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest

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
        for given, rows in (
            ([("a", ">", 150), ("s", "in", ["3", "5"])], [k for k in range(151, 200) if k % 7 in (3, 5)]),
            ([("b", "==", True), ("f", "<", -90)], [0, 3, 6, 9]),
            ([[("u", "in", [3, 199, 7]), ("d", ">=", 7)], [("a", "==", 0)]], [0, 7, 199]),
        ):
            assert opened.where(given).numpy().tolist() == rows


def test_bits_that_are_set_are_listed():
    mask = np.array([0, 5, -1, 0, -(1 << 63)])
    expected = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert where._set_bits(mask, "interp").tolist() == expected.tolist()
    assert where._set_bits(mask[:1], "interp").tolist() == []
