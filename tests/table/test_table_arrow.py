"""Arrow IPC files, opened where they are: every type, every way to lay batches out."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import warpwell as ww
from warpwell import gpu
from warpwell.errors import MediumError


def write(path: Path, table: Any, *, stream: bool = False, rows: int | None = None, **options: Any) -> Path:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=rows)
    return path


def mixed(rows: int = 1000) -> Any:
    rng = np.random.default_rng(0)
    nulls = rng.random(rows) < 0.2
    texts = [None if n else "ä" * int(k) for n, k in zip(nulls, rng.integers(0, 20, rows), strict=True)]
    return pa.table(
        {
            "i4": pa.array(rng.integers(-9, 9, rows), pa.int32()),
            "f8": pa.array(rng.random(rows), mask=nulls),
            "f2": pa.array(rng.random(rows).astype(np.float16)),
            "bool": pa.array(rng.random(rows) < 0.5, mask=nulls),
            "text": pa.array(texts),
            "large": pa.array(texts, pa.large_string()),
            "view": pa.array(texts, pa.string_view()),
            "binary": pa.array([None if t is None else t.encode() for t in texts], pa.binary()),
            "date": pa.array(rng.integers(0, 9999, rows).astype(np.int32)).cast(pa.date32()),
            "time": pa.array(rng.integers(0, 1 << 60, rows)).cast(pa.timestamp("us", "Europe/Berlin")),
            "money": pa.array(rng.integers(0, 10**9, rows)).cast(pa.decimal128(20, 0)).cast(pa.decimal128(22, 2)),
            "code": pa.array(texts).dictionary_encode(),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(4 * rows), pa.float32()), 4),
            "fixed": pa.array([b"abc"] * rows, pa.binary(3)),
            "null": pa.nulls(rows),
        }
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rows", [None, 64, 999])
def test_columns_are_what_pyarrow_reads(tmp_path: Path, stream: bool, rows: int | None) -> None:
    table = mixed()
    path = write(tmp_path / "t.arrow", table, stream=stream, rows=rows)
    with ww.table.open(path) as t:
        assert t.schema == table.schema and t.rows == len(t) == 1000 and t.names == table.schema.names
        assert t.arrow().equals(table)
        for name in t.names:
            column = t[name]
            assert column.arrow(60, 70).equals(pa.concat_arrays(table[name].slice(60, 70).chunks)), name
            assert column.nulls == table[name].null_count
            assert sum(run.rows for run in column.runs) == 1000
        assert np.array_equal(t["i4"].runs[0].values.numpy(), table["i4"].to_numpy()[: t["i4"].runs[0].rows])
        assert t["embedding"].runs[0].values.shape[1] == 4
        size = path.stat().st_size
        for run in (run for name in t.names for run in t[name].runs):
            assert all(0 <= e.offset and e.offset + e.nbytes <= size for e in run.extents)


@ww.kernel
def total(values: Any, valid: Any, out: Any) -> None:
    i = gpu.grid(1)
    if i < values.size and ww.table.is_valid(valid, i):
        gpu.atomic_add(out, 0, values[i])


def test_kernels_take_values_and_validity(tmp_path: Path) -> None:
    """And a file that is cut before a launch is an error of the launch, and of close."""
    table = pa.table({"x": pa.array([1.5, None, 2.0, None, 4.0] * 10_000), "y": pa.array(range(50_000))})
    path = write(tmp_path / "t.arrow", table)
    out = np.zeros(1)
    t = ww.table.open(path, device="cpu")
    total[50_000](t["x"].values, t["x"].valid, out, device="cpu")
    assert t["y"].valid is None
    values = t["y"].runs[0].values.numpy()
    assert not values.flags.writeable
    assert out[0] == 75_000.0 and values.sum() == 50_000 * 49_999 // 2
    os.truncate(path, 8192)
    with pytest.raises(MediumError, match="truncated"):
        total[50_000](t["x"].values, t["x"].valid, out, device="cpu")
    with pytest.raises(MediumError, match="truncated"):
        t.close()
