"""Converted rows are read again, by Warpwell, pyarrow and Polars; append, dictionaries, sources."""

import datetime
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.table.test_table_arrow import mixed

import warpwell as ww
from warpwell.errors import ArgumentError, DTypeError, FormatError, MissingFileError, SchemaError
from warpwell.table.convert import stored_type

module = importlib.import_module("warpwell.table.convert")


def stored(table: Any) -> Any:
    """Return what a table's file holds of a table: dictionaries with codes of 32 bits, and no views."""
    return table.cast(pa.schema([field.with_type(stored_type(field.type)) for field in table.schema]))


@pytest.mark.parametrize("name", ["t.ww", "t.arrow"])
def test_what_is_converted_is_read_again(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1 << 20)  # several record batches, of whole blocks of 8,192 rows
    table = mixed(20_001)
    pieces = pa.Table.from_batches(table.to_batches(max_chunksize=7_001))  # bits begin within bytes
    with ww.table.convert(pieces, tmp_path / name) as t:
        assert t.schema == stored(table).schema and t.rows == 20_001
        assert [run.rows for run in t["i4"].runs] == [8192, 8192, 3617]
        assert t.arrow().equals(stored(table))
        assert t.arrow(9_999, 3).equals(stored(table).slice(9_999, 3).combine_chunks())
        assert [t[name].nulls for name in t.names] == [table[name].null_count for name in t.names]
        assert t.head(3).equals(stored(table).slice(0, 3)) and len(t.head(30_000)) == 20_001
    found = tmp_path / name
    assert ww.table.check(found).sound
    path = found if found.is_file() else found / "0.arrow"
    assert set(os.listdir(path.parent)) == {
        path.name,
        f"{path.name}.zones",
        *(["parts.json"] if found.is_dir() else []),
    }
    with pa.OSFile(str(path)) as file:
        assert pa.ipc.open_file(file).read_all().equals(stored(table))
    polars = pytest.importorskip("polars")
    # Polars fails at years that Python's datetime does not have.
    plain = table.drop_columns(["f2", "null", "fixed", "time"])
    ww.table.convert(plain, tmp_path / "plain.arrow").close()
    for frame in (polars.read_ipc(tmp_path / "plain.arrow"), polars.scan_ipc(tmp_path / "plain.arrow").collect()):
        assert frame.equals(polars.from_arrow(stored(plain)))


def test_a_dictionary_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polars reads no dictionaries that a later record batch adds to."""
    monkeypatch.setattr(module, "BATCH_BYTES", 1 << 16)
    text = [f"{k // 5000}" if k % 7 else None for k in range(50_000)]
    table = pa.table({"a": pa.array(text), "b": pa.array(text).dictionary_encode(), "c": range(50_000)})
    with ww.table.convert(table.to_reader(max_chunksize=3000), tmp_path / "t.arrow", codes=["a"]) as t:
        assert len(t["a"].runs) > 1 and t["a"].type == pa.dictionary(pa.uint16(), pa.string())
        assert t.arrow().to_pydict() == table.to_pydict()
    polars = pytest.importorskip("polars")
    assert polars.read_ipc(tmp_path / "t.arrow").to_dict(as_series=False) == table.to_pydict()
    assert ww.table.check(tmp_path / "t.arrow").sound
    assert sorted(os.listdir(tmp_path)) == ["t.arrow", "t.arrow.zones"]


def test_nulls_inside_dictionaries(tmp_path: Path) -> None:
    codes = pa.DictionaryArray.from_arrays(pa.array([2, 0, None, 1, 1], pa.int32()), pa.array(["b", None, "c"]))
    with ww.table.convert(pa.table({"c": codes}), tmp_path / "t.ww") as t:
        assert t["c"].nulls == 3 and t["c"].arrow().to_pylist() == codes.to_pylist()
        assert t["c"].runs[0].dictionary.to_pylist() == ["b", "c"]
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), pa.schema([("c", codes.type)])) as out:
        out.write_table(pa.table({"c": codes}))
    with ww.table.open(tmp_path / "t.arrow") as t:
        assert t["c"].nulls == 3 and t["c"].arrow().to_pylist() == codes.to_pylist()


def test_codes_keep_every_bit(tmp_path: Path) -> None:
    bits = np.array([0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64)
    x = np.tile(bits, 5000).view(np.float64)
    with ww.table.convert(pa.table({"x": x}), tmp_path / "t.ww", codes=["x"]) as t:
        assert len(t["x"].runs[0].dictionary) == 5 and t["x"].codes.dtype == np.uint16
        assert np.array_equal(t["x"].arrow().dictionary_decode().to_numpy().view(np.uint64), x.view(np.uint64))
        with pytest.raises(ArgumentError, match="its codes"):
            _ = t["x"].values


def test_too_many_values_for_codes(tmp_path: Path) -> None:
    many = pa.table({"x": pa.array([None, *range(70_000), *range(70_000)]), "s": [f"{k}" for k in range(140_001)]})
    for name in ("x", "s"):
        with pytest.raises(ArgumentError, match="more than 65,536 values"):
            ww.table.convert(many, tmp_path / "t.ww", codes=[name])
        assert not list(tmp_path.iterdir())
    for names in (["x"], "auto", ["y"]):
        with pytest.raises(ArgumentError, match="codes"):
            ww.table.convert(many.select(["s"]), tmp_path / "t.ww", codes=names)
    ordered = pa.DictionaryArray.from_arrays(pa.array([0, 1]), ["low", "high"], ordered=True)
    changed = pa.DictionaryArray.from_arrays(pa.array([0, 1]), ["low", "middle"], ordered=True)
    with pytest.raises(FormatError, match="ordered dictionary"):
        ww.table.convert(pa.table({"o": pa.chunked_array([ordered, changed])}), tmp_path / "t.ww")
    with ww.table.convert(pa.table({"o": pa.chunked_array([ordered, ordered])}), tmp_path / "t.ww") as t:
        assert t["o"].type.ordered and t["o"].arrow().to_pylist() == ["low", "high"] * 2


def test_append(tmp_path: Path) -> None:
    table, more = (mixed(rows).drop_columns("time") for rows in (1003, 2005))
    path = tmp_path / "t.ww"
    before = ww.table.convert(table, path, codes=["text"])
    assert ww.table.append(path, more) == 2005
    with before, ww.table.open(path) as t:
        assert before.rows == 1003 and before.arrow().to_pydict() == table.to_pydict()
        assert t.rows == 3008 and [run.first for run in t["i4"].runs] == [0, 1003]
        assert [(part.first, part.rows) for part in t["i4"].zones] == [(0, 1003), (1003, 2005)]
        assert t.arrow().to_pydict() == pa.concat_tables([table, more]).to_pydict()
        assert all(run.codes is not None for run in t["text"].runs)
        with ww.table.convert(t, tmp_path / "one.arrow") as single:
            assert len(single["i4"].runs) == 1 and single.arrow().to_pydict() == t.arrow().to_pydict()
    with pytest.raises(SchemaError, match="'i4'"):
        ww.table.append(path, more.set_column(0, "i4", more["i4"].cast(pa.string())))
    with pytest.raises(SchemaError, match="no column 'more'"):
        ww.table.append(path, more.append_column("more", more["i4"]))
    with pytest.raises(ArgumentError, match="no column 'null'"):
        ww.table.append(path, more.drop_columns(["null"]))
    with pytest.raises(MissingFileError, match="does not exist: create it with"):
        ww.table.append(tmp_path / "none.ww", more)
    with pytest.raises(FormatError, match="not a table's folder"):
        ww.table.append(tmp_path / "one.arrow", more)
    assert sorted(os.listdir(path)) == ["0.arrow", "0.arrow.zones", "1.arrow", "1.arrow.zones", "parts.json"]


APPENDED: dict[str, tuple[Any, Any, bool]] = {
    "wider integers": (pa.array([1, None], pa.int32()), pa.int64(), True),
    "integers that fit": (pa.array([127]), pa.int8(), True),
    "an integer that does not fit": (pa.array([128]), pa.int8(), False),
    "a negative integer": (pa.array([-1]), pa.uint64(), False),
    "integers as floats": (pa.array([5, None]), pa.float64(), True),
    "an integer that a float cannot hold": (pa.array([(1 << 53) + 1]), pa.float64(), False),
    "integers as short floats": (pa.array([2049]), pa.float16(), False),
    "floats as integers": (pa.array([5.0, None]), pa.int32(), True),
    "a fraction": (pa.array([0.5]), pa.int32(), False),
    "no number": (pa.array([float("nan")]), pa.int64(), False),
    "wider floats": (pa.array([0.1], pa.float32()), pa.float64(), True),
    "narrower floats": (pa.array([0.5]), pa.float32(), False),
    "days": (pa.array([datetime.date(2024, 1, 31)]), pa.timestamp("us"), True),
    "days out of range": (pa.array([datetime.date(2999, 1, 31)]), pa.timestamp("ns"), False),
    "days in a time zone": (pa.array([datetime.date(2024, 1, 31)]), pa.timestamp("us", "UTC"), False),
    "another time zone": (pa.array([0], pa.timestamp("us")), pa.timestamp("us", "UTC"), False),
    "finer times": (pa.array([1], pa.timestamp("ms")), pa.timestamp("us"), True),
    "coarser times": (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), False),
    "nulls": (pa.nulls(2), pa.list_(pa.int8()), True),
    "nulls as codes": (pa.nulls(2), pa.dictionary(pa.int32(), pa.string()), True),
    "values after nulls": (pa.array([1]), pa.null(), False),
    "integers as text": (pa.array([1]), pa.string(), False),
    "numbers as times": (pa.array([1]), pa.timestamp("us"), False),
}


@pytest.mark.parametrize("case", APPENDED)
def test_append_of_another_type(tmp_path: Path, case: str) -> None:
    """Each value is in the table as it was, or nothing is appended."""
    values, kind, fits = APPENDED[case]
    path = tmp_path / "t.ww"
    ww.table.convert(pa.table({"a": pa.nulls(1, kind)}), path).close()
    if fits:
        assert ww.table.append(path, pa.table({"a": values})) == len(values)
    else:
        with pytest.raises((SchemaError, FormatError), match="'a'"):
            ww.table.append(path, pa.table({"a": values}))
    with ww.table.open(path) as table:
        expected = values.cast(kind).to_pylist() if fits else []
        assert table["a"].arrow().to_pylist() == [None, *expected] and table["a"].type == kind
    assert len(os.listdir(path)) == (5 if fits else 3)


def test_append_of_text_files(tmp_path: Path) -> None:
    path = tmp_path / "t.ww"
    files = {
        "1.csv": "zone,n,t,code\n01234,1.5,soon,a\n",
        "2.csv": "zone,n,t,code\n10115,2,2024-01-31,a\n",
        "3.csv": "zone,n,t,code\n007,,true,5\n",
        "4.json": '{"zone": "5", "n": 2, "t": "2024-01-31", "code": "b"}\n{"zone": null, "n": null}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ww.table.convert(tmp_path / "1.csv", path, codes=["code"]).close()
    assert ww.table.append(path, [tmp_path / "2.csv", tmp_path / "3.csv"]) == 2
    assert ww.table.append(path, tmp_path / "4.json") == 2
    with ww.table.open(path) as table:
        assert table.arrow().to_pydict() == {
            "zone": ["01234", "10115", "007", "5", None],
            "n": [1.5, 2.0, None, 2.0, None],
            "t": ["soon", "2024-01-31", "true", "2024-01-31", None],
            "code": ["a", "a", "5", "b", None],
        }
    for name, text, message in (
        ("5.csv", "zone,n,t,code\n1,01,x,a\n", "'n'.*new table"),
        ("6.csv", "zone,t,code\n1,x,a\n", "no column 'n'"),
        ("7.json", '{"zone": 5, "n": 2, "t": "x", "code": "b"}\n', "'zone'.*new table"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises((SchemaError, ArgumentError), match=message):
            ww.table.append(path, tmp_path / name)


def test_nested_columns_are_carried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell")
    texts = pa.array(["x", None, "yy"])
    table = pa.table(
        {
            "a": [1, 2, 3],
            "list": pa.array([[1, 2], None, []], pa.large_list(pa.int8())),
            "struct": pa.StructArray.from_arrays([texts.dictionary_encode(), texts.cast(pa.string_view())], ["d", "v"]),
            "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            "pairs": pa.array([[1, None], None, [2, 3]], pa.list_(pa.int8(), 2)),
            "month": pa.array([(1, 2, 3), None, (4, 5, 6)], pa.month_day_nano_interval()),
            "runs": pa.compute.run_end_encode(pa.array(["r", "r", None])),
            "views": pa.array([["x"], ["y"], None], pa.list_(pa.string_view())),
        }
    )
    with ww.table.convert(table, tmp_path / "t.ww") as t:
        assert t.arrow().to_pydict() == table.to_pydict() and not caplog.text
        assert t["runs"].type == pa.string() and t["struct"].type.field("d").type == pa.string()
        selected = t.where([("a", "in", [1, 3])]).take()
        assert selected.arrow().to_pylist() == [table.to_pylist()[k] for k in (0, 2)]
    assert ww.table.check(tmp_path / "t.ww").sound
    union = pa.UnionArray.from_sparse(pa.array([0, 0, 1], pa.int8()), [texts, pa.array([1, 2, 3])])
    views = pa.array([[1], [2], [3]], pa.list_view(pa.int64()))
    wide = table.append_column("union", union).append_column("views of lists", views)
    with ww.table.convert(wide, tmp_path / "u.ww") as t:
        assert t.names == table.column_names
        assert "'union'" in caplog.text and "'views of lists'" in caplog.text
    with pytest.raises(DTypeError, match="'union'"):
        ww.table.convert(wide, tmp_path / "v.ww", columns=["union"])
    with pytest.raises(DTypeError, match="cannot have codes"):
        ww.table.convert(table, tmp_path / "v.ww", codes=["list"])


def test_a_table_that_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.ww"
    with ww.table.convert(mixed(), path) as t:
        with pytest.raises(ArgumentError, match="overwrite=True"):
            ww.table.convert(mixed(), path)
        ww.table.convert(mixed(2000), path, overwrite=True).close()
        assert t["f8"].arrow().equals(mixed()["f8"].combine_chunks())  # t still reads the files that it has opened
        with pytest.raises(FormatError, match="was replaced"):
            _ = t["f8"].values
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "file").write_text("mine")
    for existing in (folder, folder / "file"):
        with pytest.raises(ArgumentError, match="is not a table"):
            ww.table.convert(mixed(), existing, overwrite=True)
    (path / "parts.json").rename(path / "table.json")
    with pytest.raises(FormatError, match="not a table"):
        ww.table.open(path)


@pytest.mark.parametrize("key", ["parts", "format", "version"])
@pytest.mark.parametrize("value", [None, -1, 1 << 70, "0", [], {}, [{}]])
def test_a_description_that_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "t.ww"
    ww.table.convert(mixed(10), path).close()
    found = json.loads((path / "parts.json").read_text())
    (path / "parts.json").write_text(json.dumps({**found, key: value}))
    with pytest.raises(FormatError):
        ww.table.open(path)
    if key == "parts":
        for name in ("file", "rows", "id"):
            (path / "parts.json").write_text(json.dumps({**found, "parts": [{**found["parts"][0], name: value}]}))
            with pytest.raises((FormatError, FileNotFoundError)):
                ww.table.open(path)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 160 MB, in pieces of 1 MB, about two record batches of 16 MB are in memory."""
    monkeypatch.setattr(module, "BATCH_BYTES", 16 << 20)
    items = np.arange(131_072.0)

    def batches() -> Iterator[Any]:
        for k in range(160):
            yield pa.record_batch({"x": items + k})

    def memory(field: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(field))

    with ww.table.convert(mixed(10), tmp_path / "small.ww") as t:
        t.arrow()  # loads the compiled code
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = memory("VmRSS")
    schema = pa.schema({"x": pa.float64()})
    steps: list[tuple[str, int, int]] = []
    with ww.table.convert(
        pa.RecordBatchReader.from_batches(schema, batches()),
        tmp_path / "t.ww",
        progress=lambda *step: steps.append(step),
    ) as t:
        assert memory("VmHWM") - before < 80
        assert t.rows == 160 * 131_072 and t["x"].arrow(t.rows - 1, 1).to_pylist() == [131_071.0 + 159]
    assert steps[-1] == ("convert", t.rows, 0) and len(steps) == 320  # of 65,536 rows


def test_sources(tmp_path: Path) -> None:
    """Files, folders of files and frames are read as pyarrow, Polars and pandas read them."""
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
            text = [s or None for s in found.pop("s")]  # CSV does not distinguish an empty string from a null
            assert (found, text) == ({"d": [0.5, 1.5, 2.5], "a": [1, 2, None]}, ["x", None, "z"]), source
    with ww.table.convert(tmp_path / "months", tmp_path / "m.ww") as t:
        assert t["m"].arrow().to_pylist() == [1, 1, 1, 2, 2, 2] and t["a"].nulls == 2
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + bytes(99))
    for source, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "bad.parquet", "cannot be read"),
        (3, "not a source of rows"),
        ([], "not a source of rows"),
    ):
        with pytest.raises((ArgumentError, FormatError, FileNotFoundError), match=message):
            ww.table.convert(source, tmp_path / "x.ww")
        assert not (tmp_path / "x.ww").exists()
