"""Queries of Polars over a table on storage give what they give over the same rows in memory."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.harness import table_frames, table_queries
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors
from warpwell.array.gather import fetch
from warpwell.table import predicate

module = importlib.import_module("warpwell.table.scan")


@pytest.fixture(scope="module", params=["file", "indexed"])
def written(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "all.arrow"
    if request.param == "indexed":  # many blocks of rows cannot match
        table = table_queries.write_indexed(path, 3)
        with table_queries.small_blocks():
            yield path, pl.from_arrow(table)
    else:
        yield path, pl.from_arrow(table_queries.write(path, 3))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, of which rows are taken unless most match."""
    monkeypatch.setattr(module, "CHUNK_ROWS", 500)
    monkeypatch.setattr(module, "DENSE_FRACTION", 1.5)


def test_random_queries(written):
    path, frame = written
    assert table_frames.first_difference(ww.table.scan(path), frame, 1, 60) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_queries(written):  # with zone maps and without
    path, frame = written
    assert table_frames.first_difference(ww.table.scan(path), frame, 2, 1000) is None


def _first_rows_of_matches(path, schema, names, predicate, n_rows, *more):
    limit = n_rows if predicate is None else None
    return _FRAMES(path, schema, names, predicate, limit, *more)


def _last_first(calls, workers=None):
    yield from reversed(list(_IN_ORDER(calls, workers)))


def _last_column_first(table):
    return _TO_POLARS(table.select(table.column_names[::-1]).rename_columns(table.column_names))


FAULTS = {
    "rows are counted after the predicate": ("_frames", _first_rows_of_matches),
    "row numbers of a chunk are used as row numbers of the table": (
        "take",
        lambda c, n, r: _TAKE(c, n - n[:1] // 500 * 500, r),
    ),
    "null is true": ("mask_of", lambda f, p: _EVALUATED(f, p.fill_null(True))),
    "chunks come in another order": ("in_order", _last_first),
    "columns come in the table's order": ("to_polars", _last_column_first),
}
_FRAMES, _TAKE, _EVALUATED, _TO_POLARS = module._frames, module.take, module.mask_of, module.to_polars
_IN_ORDER = module.in_order


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(written, monkeypatch, fault):
    path, frame = written
    lazy = ww.table.scan(path)
    monkeypatch.setattr(module, *FAULTS[fault])
    try:
        found = table_frames.first_difference(lazy, frame, 1, 60)
    except (pl.exceptions.PolarsError, IndexError, TypeError, ValueError):
        return
    assert found is not None


def _negated(node, type_of, *, negated):
    return _CONDITION_OF(node, type_of, negated=not negated if "BinaryExpr" in node else negated)


BLOCK_FAULTS = {
    "NaN is not the greatest": (predicate, "compare", lambda *arguments, nan_is_greatest: _COMPARE(*arguments)),
    "null is a value": (predicate, "ONLY_NULL", predicate.EVERYTHING),
    "either part is both": (predicate, "_disjoin", lambda a, b: predicate._conjoin(a, b)),
    "less is greater": (predicate, "_OPERATORS", {**predicate._OPERATORS, "Lt": ">", "Gt": "<"}),
    "comparisons are negated": (predicate, "_condition_of", _negated),
}
_COMPARE, _CONDITION_OF = predicate.compare, predicate._condition_of


_PRUNABLE = [
    pl.col("f64") > 100.0,
    pl.col("f64") == 30.0,
    pl.lit(7) > pl.col("i64"),
    pl.col("i64").is_between(2, 9),
    pl.col("text") == "ab",
    pl.col("text") > "zzz",
    pl.col("text").is_null(),
    pl.col("coded") == "ab",
    pl.col("f64").is_nan(),
    pl.col("u8").is_in([7]),
    pl.col("u8") >= 254,
    (pl.col("i64") < 0) & (pl.col("f64") * 2 > 3),
    (pl.col("i64") == 0) | (pl.col("u64") == 7),
    pl.col("date32") < pl.date(1950, 1, 1),
]
_UNKNOWN = [
    pl.col("f64") * 2 > 200.0,
    (pl.col("i64") < 0) | (pl.col("f64") * 2 > 3),
    pl.col("f64") < float("inf"),
]


def _blocks(path, frame):
    """Return, for each predicate, whether all matching rows are kept, and whether all blocks are."""
    with ww.table.open(path) as table:
        for expression in _PRUNABLE + _UNKNOWN:
            columns = {name: table[name] for name in expression.meta.root_names()}
            schema = frame.select(list(columns)).schema
            condition = predicate.pushed_down(expression, schema, lambda name: table[name].type)
            ranges = condition.candidate_rows(columns)
            rows = {row for start, end in ranges for row in range(start, end)}
            yield set(np.flatnonzero(predicate.mask_of(frame, expression))) <= rows, len(rows) == len(table)


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
@pytest.mark.parametrize("written", ["indexed"], indirect=True)
def test_a_block_left_out_wrongly_is_found(written, monkeypatch, fault):
    monkeypatch.setattr(*BLOCK_FAULTS[fault])
    assert not all(sound for sound, _ in _blocks(*written))


@pytest.mark.parametrize("written", ["indexed"], indirect=True)
def test_blocks_that_cannot_match_are_left_out(written):
    prunable, unknown = (len(expressions) for expressions in (_PRUNABLE, _UNKNOWN))
    assert list(_blocks(*written)) == [(True, False)] * prunable + [(True, True)] * unknown


@pytest.mark.parametrize(("unit", "limits"), [(512, {5e-4: 1.3, 1e-2: 4.5}), (4096, {5e-4: 2.4, 1e-2: 5.7})])
def test_sparse_rows_are_read_in_blocks_of_the_drive(tmp_path, monkeypatch, unit, limits):
    random, path = np.random.default_rng(3), tmp_path / "t.arrow"
    table = pa.table({name: random.random(1 << 20) for name in "abcdef"})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setitem(fetch._direct_units, path.stat().st_dev, unit)
    with ww.table.open(path, device="cpu") as opened:
        for share, limit in limits.items():
            rows = opened.where([("a", "<", share)])
            reads = [*rows.explain(), *rows.explain(list("bcdef"))]
            assert sum(each.read for each in reads) <= limit * sum(each.wanted for each in reads), share
        reads = opened.where([("a", "<", 0.9)]).explain(["b"])  # dense rows are read through the page cache
        assert reads[0].read == table["b"].nbytes // 4096 * 4096 + 4096 and reads[0].commands == 65


def test_only_the_pages_of_matching_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.undo()  # restores the original chunk size
    monkeypatch.setenv("WARPWELL_READ_GAP_BYTES", "0")
    rows = 1 << 20
    random = np.random.default_rng(1)
    names = [f"n{k:07}" for k in range(rows)]
    table = pa.table({"key": random.random(rows), "value": random.random(rows), "name": names})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    counters = ww.table.IoCounters()
    lazy = ww.table.scan(tmp_path / "t.arrow", counters=counters)
    found = lazy.filter(pl.col("key") > 0.9999).select(pl.col("value").mean(), pl.col("name").max(), pl.len()).collect()
    chosen = table.filter(pa.compute.greater(table["key"], 0.9999))
    mean = math.fsum(chosen["value"].to_pylist()) / len(chosen)
    assert found["value"][0] == pytest.approx(mean, rel=1e-12) and found["len"][0] == len(chosen)
    counts = counters.columns
    assert counts["key"].read <= 8 * rows + 4096 * 20
    assert counts["value"].wanted == 8 * len(chosen) and counts["value"].read <= 4096 * (len(chosen) + 1)
    assert counts["name"].wanted == 16 * len(chosen) and counts["name"].read <= 3 * 4096 * len(chosen)


def test_rows_come_in_batches_of_the_size_asked_for(written):
    path, frame = written
    schema = module._schema(ww.table.open(path, device="cpu"))
    for where in (None, pl.col("i8") > -200):
        frames = list(module._frames(str(path), schema, ["i8", "f64"], where, 1000, 64, ww.table.IoCounters()))
        assert all(0 < len(batch) <= 64 for batch in frames) and frames[0].columns == ["i8", "f64"]
    assert sum(map(len, frames)) == frame.head(1000)["i8"].count()


def test_a_closed_table_and_wrong_names(written, tmp_path):
    with pytest.raises(errors.MissingFileError):
        ww.table.scan(tmp_path / "none.arrow")
    with pytest.raises(pl.exceptions.ColumnNotFoundError):
        ww.table.scan(written[0]).select("none").collect()
    two = pa.table([[1], [2]], names=["a", "a"])
    with pa.ipc.new_file(tmp_path / "t.arrow", two.schema) as writer:
        writer.write_table(two)
    with pytest.raises(errors.ArgumentError, match="two columns 'a'"):
        ww.table.scan(tmp_path / "t.arrow")


def test_nested_columns_are_carried_and_types_that_polars_lacks_are_left_out(tmp_path, caplog):
    rows = range(1000)
    table = pa.table(
        {
            "number": rows,
            "list": [[str(k)] * (k % 3) if k % 5 else None for k in rows],
            "struct": [{"x": k} if k % 7 else None for k in rows],
            "interval": pa.nulls(1000, pa.month_day_nano_interval()),
            "wide": pa.nulls(1000, pa.decimal256(60, 2)),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1000]), pa.array([5])),
        }
    )
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    with caplog.at_level("WARNING", "warpwell.table"):
        lazy = ww.table.scan(tmp_path / "t.arrow")
    frame = pl.from_arrow(table.select(["number", "list", "struct"]))
    for name in ("interval", "wide", "runs"):
        assert repr(name) in caplog.text
    for where in (pl.col("number") > 900, pl.col("list").list.len() > 1, pl.col("struct").struct.field("x") < 9):
        assert lazy.filter(where).collect().equals(frame.filter(where))
        with ww.table.open(tmp_path / "t.arrow", device="cpu") as opened:
            assert opened.where(where).take(frame.columns).polars().equals(frame.filter(where))
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as opened:
        assert opened.where([("list", "is null")]).numpy().tolist() == list(range(0, 1000, 5))


def test_an_empty_table(tmp_path):
    empty = pa.table({"a": pa.array([], pa.int64())})
    with pa.ipc.new_file(tmp_path / "t.arrow", empty.schema):
        pass
    lazy = ww.table.scan(tmp_path / "t.arrow")
    assert lazy.filter(pl.col("a") > 1).collect().equals(pl.DataFrame({"a": []}, {"a": pl.Int64}))
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as table:
        assert len(table.where([("a", ">", 1)]).take()) == 0


@pytest.mark.parametrize("direct", [False, True])
def test_what_explain_counts_is_what_the_system_reads(tmp_path, direct):
    # rows far from one another, in a file that the page cache has dropped; no other reads
    rows, path = 1 << 19, tmp_path / "t.arrow"
    random = np.random.default_rng(2)
    table = pa.table({name: random.random(rows) for name in ("key", "a", "b")})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with ww.table.open(path, device="cpu") as opened:
        chosen = opened.where([("key", "<", 1e-3)])  # compiles
        assert opened["a"].runs[0].values.numpy().sum() > 0
    if not _dropped(path):
        pytest.skip("the file system keeps its pages: tmpfs, or another process has them")
    with ww.table.open(path, device="cpu", direct=direct) as opened:
        before = _bytes_read()
        again = opened.where([("key", "<", 1e-3)])
        selected = again.take(["a", "b"])
        read = _bytes_read() - before
        reported = sum(read_report.from_storage for read_report in again.explain())
    assert len(selected) == len(chosen) and sum(read_report.read for read_report in again.explain()) >= reported
    assert abs(read - reported) <= 0.03 * reported + 64 * 1024, (read, reported)


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("read_bytes")).split()[1])


def _dropped(path):
    before = _bytes_read()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(descriptor, 4096, 1 << 20)
        found = _bytes_read() > before
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return found
    finally:
        os.close(descriptor)


_EXIT = """
import importlib, sys, threading, time
import polars as pl
import warpwell as ww

module = importlib.import_module("warpwell.table.scan")
entered, mask_of = threading.Event(), module.mask_of

def slow_mask(frame, predicate):
    entered.set()
    time.sleep(0.05)
    return mask_of(frame, predicate)

module.mask_of, module.CHUNK_ROWS = slow_mask, 64
query = ww.table.scan(sys.argv[1]).filter(pl.col("i8") > 0)
threading.Thread(target=query.collect, daemon=True).start()
entered.wait()
"""


def test_a_program_that_exits_during_a_query(written):
    """The thread of Polars that runs the query would abort the process when it needs the interpreter again."""
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(written[0])], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
