"""Folders of tables: what is converted is read again, by us and by plain NumPy; append, codes, statistics."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.table.test_table_arrow import mixed

import warpwell as ww
from warpwell.errors import ArgumentError, DTypeError, FormatError, SchemaError
from warpwell.table.convert import stored_schema


def stored(table: Any) -> Any:
    """What a folder holds of a table: 64-bit offsets, no dictionaries."""
    return table.cast(stored_schema(table.schema))


@pytest.mark.parametrize("codes", [(), "auto"])
def test_what_is_converted_is_read_again(tmp_path: Path, codes: Any) -> None:
    table = mixed(20_001)
    pieces = pa.Table.from_batches(table.to_batches(max_chunksize=7_001))  # bits begin within bytes
    with ww.table.convert(pieces, tmp_path / "t.ww", codes=codes) as t:
        assert t.schema == stored_schema(table.schema) and t.rows == 20_001
        assert t.arrow().equals(stored(table))
        assert t.arrow(9_999, 3).equals(stored(table).slice(9_999, 3).combine_chunks())
        assert [t[name].nulls for name in t.names] == [table[name].null_count for name in t.names]
        coded = [name for name in t.names if t[name].runs[0].codes is not None]
        small = ["i4", "text", "large", "view", "binary", "date", "code"]
        assert coded == (small if codes else ["code"])
        if codes:
            assert t["i4"].runs[0].codes.dtype == np.uint8
            dictionary = t["text"].runs[0].dictionary.to_pylist()
            assert dictionary == sorted(dictionary)
            assert t["text"].arrow(0, 9, codes=True).cast(pa.large_string()).equals(t["text"].arrow(0, 9))
    again = tmp_path / "again.ww"
    ww.table.convert(table, again, codes=codes).close()
    files = sorted(p.relative_to(again) for p in again.rglob("*"))
    assert files == sorted(p.relative_to(tmp_path / "t.ww") for p in (tmp_path / "t.ww").rglob("*"))
    for file in files:  # in other pieces, the same bytes
        assert (again / file).is_dir() or (again / file).read_bytes() == (tmp_path / "t.ww" / file).read_bytes(), file


def test_plain_numpy_reads_a_folder(tmp_path: Path) -> None:
    table = mixed()
    ww.table.convert(table, tmp_path / "t.ww").close()
    part = tmp_path / "t.ww" / "0"
    assert np.array_equal(np.load(part / "0-i4.values.npy", mmap_mode="r"), table["i4"].to_numpy())
    assert np.load(part / "12-embedding.values.npy").shape == (1000, 4)
    offsets, data = np.load(part / "4-text.offsets.npy"), np.load(part / "4-text.bytes.npy")
    assert bytes(data[offsets[5] : offsets[6]]).decode() == (table["text"][5].as_py() or "")
    valid = np.unpackbits(np.load(part / "1-f8.valid.npy"), bitorder="little")[:1000]
    assert np.array_equal(valid == 0, table["f8"].is_null().to_numpy())
    with ww.open(part / "1-f8.values.npy", device="cpu") as a:
        assert a._origin % 4096 == 0 and np.array_equal(np.asarray(a)[valid == 1], table["f8"].drop_null().to_numpy())


def test_statistics_leave_nulls_and_nan_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(3 * 8192 + 5)
    x[:8192] = np.nan
    x[-2] = np.nan
    mask = rng.random(x.size) < 0.1
    mask[8192 : 2 * 8192] = True
    n = pa.array(np.arange(x.size) % 300, pa.int16())
    table = pa.table({"x": pa.array(x, mask=mask, from_pandas=False), "n": n})
    with ww.table.convert(table, tmp_path / "t.ww", codes=["n"]) as t:
        found = t["x"].runs[0].statistics.numpy()
        assert found["flags"].tolist() == [3, 1, 1, 2 | bool(mask[-5:].any())]
        assert (found["least"] > found["greatest"]).tolist() == [True, True, False, False]
        third = x[2 * 8192 : 3 * 8192][~mask[2 * 8192 : 3 * 8192]]
        assert found["least"][2] == third.min() and found["greatest"][2] == third.max()
        coded = t["n"].runs[0].statistics.numpy()
        assert coded.dtype["least"] == np.uint16 and coded["greatest"].tolist() == [299, 299, 299, 280]
        with pytest.raises(ArgumentError, match="its codes"):
            _ = t["n"].values
        assert t["n"].codes.dtype == np.uint16


def test_codes_keep_every_bit(tmp_path: Path) -> None:
    bits = np.array([0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64)
    x = np.tile(bits, 5000).view(np.float64)
    with ww.table.convert(pa.table({"x": x}), tmp_path / "t.ww", codes=["x"]) as t:
        assert t["x"].runs[0].codes is not None and len(t["x"].runs[0].dictionary) == 5
        assert np.array_equal(t["x"].arrow().to_numpy().view(np.uint64), x.view(np.uint64))


def test_too_many_values_for_codes(tmp_path: Path) -> None:
    many = pa.table({"x": pa.array([None, *range(70_000), *range(70_000)]), "s": [f"{k}" for k in range(140_001)]})
    for name in ("x", "s"):
        with pytest.raises(ArgumentError, match="more than 65,536 values"):
            ww.table.convert(many, tmp_path / "t.ww", codes=[name])
        assert not list(tmp_path.iterdir())
    with ww.table.convert(many.to_reader(max_chunksize=9_999), tmp_path / "t.ww", codes="auto") as t:
        assert all(t[name].runs[0].codes is None for name in t.names) and t.arrow().equals(stored(many))


def test_append(tmp_path: Path) -> None:
    table, more = mixed(1003), mixed(2005)
    path = tmp_path / "t.ww"
    before = ww.table.convert(table, path, codes=["text"])
    assert ww.table.append(path, more) == 2005
    with before, ww.table.open(path) as t:
        assert before.rows == 1003 and before.arrow().equals(stored(table))
        assert t.rows == 3008 and [run.first for run in t["i4"].runs] == [0, 1003]
        assert t.arrow().equals(pa.concat_tables([stored(table), stored(more)]).combine_chunks())
        assert all(run.codes is not None for run in t["text"].runs)
        with ww.table.convert(t, tmp_path / "one.ww") as one:
            assert len(one["i4"].runs) == 1 and one.arrow().equals(t.arrow())
    with pytest.raises(SchemaError, match="'i4'"):
        ww.table.append(path, more.set_column(0, "i4", more["i4"].cast(pa.int64())))
    with pytest.raises(ArgumentError, match="no column 'null'"):
        ww.table.append(path, more.drop_columns(["null"]))
    assert sorted(p.name for p in path.iterdir()) == ["0", "1", "schema.arrow", "table.json"]


def test_types_that_tables_do_not_have(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "l": [[1, 2]], "s": [{"x": 1}], "e": pa.array([[1, None]], pa.list_(pa.int8(), 2))})
    for names, words in (("l", "fixed_size_list"), ("s", "each of its fields"), ("e", "null items")):
        with pytest.raises(DTypeError, match=words):
            ww.table.convert(table, tmp_path / "t.ww", columns=["a", names])
        assert not list(tmp_path.iterdir())
    ww.table.convert(table, tmp_path / "t.ww", columns=["a"]).close()


def test_a_table_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.ww"
    with ww.table.convert(mixed(), path) as t:
        kept = t["i4"].arrow()
        with pytest.raises(ArgumentError, match="overwrite=True"):
            ww.table.convert(mixed(), path)
        ww.table.convert(mixed(2000), path, overwrite=True).close()
        with pytest.raises(FormatError, match="was replaced"):
            _ = t["f8"].runs
        assert kept.equals(mixed()["i4"].combine_chunks())


@pytest.mark.parametrize("key", ["rows", "parts", "columns", "format", "schema_crc32c"])
@pytest.mark.parametrize("value", [None, -1, 1 << 70, "0", [], {}, [{}]])
def test_a_description_that_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "t.ww"
    ww.table.convert(mixed(10), path).close()
    found = json.loads((path / "table.json").read_text())
    (path / "table.json").write_text(json.dumps({**found, key: value}))
    with pytest.raises(FormatError):
        ww.table.open(path)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of 160 MB, in pieces of 1 MB, a fraction is in memory."""
    items = np.arange(131_072.0)

    def batches() -> Iterator[Any]:
        for k in range(160):
            yield pa.record_batch({"x": items + k})

    def memory(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(what))

    with ww.table.convert(mixed(10), tmp_path / "small.ww", codes="auto") as t:
        t.arrow()  # loads what is compiled
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = memory("VmRSS")
    schema = pa.schema({"x": pa.float64()})
    steps: list[tuple[str, int, int]] = []
    with ww.table.convert(
        pa.RecordBatchReader.from_batches(schema, batches()),
        tmp_path / "t.ww",
        codes="auto",
        progress=lambda *step: steps.append(step),
    ) as t:
        assert memory("VmHWM") - before < 80
        assert t.rows == 160 * 131_072 and t["x"].arrow(t.rows - 1, 1).to_pylist() == [131_071.0 + 159]
    assert steps[-1] == ("convert", t.rows, 0) and len(steps) == 160


def test_sources(tmp_path: Path) -> None:
    """Files, folders of files, frames: what each reads as is what pyarrow, Polars and pandas say of it."""
    table = pa.table({"a": [1, 2, None], "s": ["x", None, "z"], "d": [0.5, 1.5, 2.5]})
    pq = pytest.importorskip("pyarrow.parquet")
    csv = pytest.importorskip("pyarrow.csv")
    feather = pytest.importorskip("pyarrow.feather")
    pq.write_table(table, tmp_path / "a.parquet")
    csv.write_csv(table, tmp_path / "a.csv", csv.WriteOptions(quoting_style="none"))
    feather.write_feather(table, str(tmp_path / "a.feather"))  # compressed
    with pa.ipc.new_stream(
        str(tmp_path / "a.arrows"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as out:
        out.write_table(table)
    (tmp_path / "months" / "m=1").mkdir(parents=True)
    (tmp_path / "months" / "m=2").mkdir()
    for month in ("m=2", "m=1"):
        pq.write_table(table, tmp_path / "months" / month / "a.parquet")
    (tmp_path / "a.tsv").write_text("a\ts\td\n1\tx\t0.5\n2\t\t1.5\n\tz\t2.5\n")
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    dataset = pytest.importorskip("pyarrow.dataset")
    frame = pandas.DataFrame({"a": pandas.array([1, 2, None], "Int64"), "s": ["x", None, "z"], "d": [0.5, 1.5, 2.5]})
    sources = [
        tmp_path / "a.parquet",
        tmp_path / "a.csv",
        tmp_path / "a.feather",
        str(tmp_path / "a.arrows"),
        tmp_path / "a.tsv",
        table,
        table.to_batches()[0],
        polars.from_arrow(table),
        frame,
        dataset.dataset(tmp_path / "a.parquet"),
        [tmp_path / "a.parquet"],
    ]
    for k, source in enumerate(sources):
        with ww.table.convert(source, tmp_path / f"{k}.ww", columns=["d", "a", "s"]) as t:
            found = t.arrow().to_pydict()
            text = [s or None for s in found.pop("s")]  # CSV tells no empty string from none
            assert (found, text) == ({"d": [0.5, 1.5, 2.5], "a": [1, 2, None]}, ["x", None, "z"]), source
    with ww.table.convert(tmp_path / "months", tmp_path / "m.ww") as t:
        assert t["m"].arrow().to_pylist() == [1, 1, 1, 2, 2, 2] and t["a"].nulls == 2
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + bytes(99))
    for source, said in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "bad.parquet", "cannot be read"),
        (3, "no source of rows"),
        ([], "no source of rows"),
    ):
        with pytest.raises((ArgumentError, FormatError, FileNotFoundError), match=said):
            ww.table.convert(source, tmp_path / "x.ww")
        assert not (tmp_path / "x.ww").exists()
