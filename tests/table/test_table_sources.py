"""Files of other programs are converted with every column and value, or refused by name."""

import datetime
import decimal
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import warpwell as ww
from warpwell.cli import main
from warpwell.cli._common import new_file
from warpwell.errors import ArgumentError, FormatError, WarpwellError
from warpwell.table import text_files

pq = pytest.importorskip("pyarrow.parquet")


def converted(folder: Path, source: Any, **options: Any) -> Any:
    """Return the rows of a source as a `pyarrow.Table`, through a new table."""
    with ww.table.convert(source, folder / "out.ww", overwrite=True, **options) as table:
        return table.arrow()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let text be parsed in blocks of 64 KiB, so that rows that come late are in a later block."""
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 16)


CSV: dict[str, tuple[list[str], Any, list[Any]]] = {
    "integers": (["1", "-2", "NA", ""], pa.int64(), [1, -2, None, None]),
    "spaces": ([" 1", "2 "], pa.int64(), [1, 2]),
    "beyond int64": (["5", str((1 << 64) - 1)], pa.uint64(), [5, (1 << 64) - 1]),
    "beyond uint64": (["5", str(1 << 64)], pa.string(), ["5", str(1 << 64)]),
    "beyond int64 and negative": (["-5", str(1 << 63)], pa.string(), ["-5", str(1 << 63)]),
    "integers and floats": (["5", "0.5", "1e3"], pa.float64(), [5.0, 0.5, 1000.0]),
    "large integers and floats": (["0.5", str(1 << 64)], pa.float64(), [0.5, 2.0**64]),
    "hexadecimal": (["0x10", "1"], pa.string(), ["0x10", "1"]),
    "negative leading zeros": (["-01", "1"], pa.string(), ["-01", "1"]),
    "leading zeros": (["00501", "2134"], pa.string(), ["00501", "2134"]),
    "quoted leading zeros": (['"00501"', '"02134"'], pa.string(), ["00501", "02134"]),
    "fractions below one": (["0.5", "0", "-0.25"], pa.float64(), [0.5, 0.0, -0.25]),
    "booleans": (["true", "False", "TRUE"], pa.bool_(), [True, False, True]),
    "numbers and booleans": (["1", "true"], pa.string(), ["1", "true"]),
    "days": (["2024-01-31", "0999-12-31"], pa.date32(), [datetime.date(2024, 1, 31), datetime.date(999, 12, 31)]),
    "days and times": (
        ["2024-01-31", "2024-01-31 10:00:00.5"],
        pa.timestamp("ns"),
        [datetime.datetime(2024, 1, 31), datetime.datetime(2024, 1, 31, 10, 0, 0, 500_000)],
    ),
    "times": (["08:15:00", "23:59:59"], pa.time32("s"), [datetime.time(8, 15), datetime.time(23, 59, 59)]),
    "zoned": (
        ["2024-01-31T10:00:00Z"],
        pa.timestamp("s", "UTC"),
        [datetime.datetime(2024, 1, 31, 10, tzinfo=datetime.UTC)],
    ),
    "no values": (["", "NULL"], pa.null(), [None, None]),
    "text late": (["1"] * 40_000 + ["x"], pa.string(), ["1"] * 40_000 + ["x"]),
    "floats late": (["1"] * 40_000 + ["0.5"], pa.float64(), [1.0] * 40_000 + [0.5]),
    "large integers late": (["1"] * 40_000 + [str(1 << 63)], pa.uint64(), [1] * 40_000 + [1 << 63]),
    "leading zeros late": (["1"] * 40_000 + ["01"], pa.string(), ["1"] * 40_000 + ["01"]),
    "lines in quotes": (['"a\nb"', "c"], pa.string(), ["a\nb", "c"]),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", CSV)
def test_types_of_csv(tmp_path: Path, case: str) -> None:
    fields, kind, values = CSV[case]
    path = tmp_path / "a.csv"
    path.write_text("n,a\n" + "".join(f"{number},{line}\n" for number, line in enumerate(fields)))
    found = converted(tmp_path, path)
    assert found["a"].type == kind
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        found = found.set_column(1, "a", found["a"].cast(pa.timestamp("us", kind.tz)))
    assert found["a"].to_pylist() == values and found["n"].to_pylist() == list(range(len(fields)))
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert converted(tmp_path, packed, columns=["a"]).schema == pa.schema([("a", kind)])


OPEN_QUOTES = ('2,"y\n3,z\n4,w\n', '2,"y', '2,"', '2,"y""\n', '2,"y\n3,"z"\n', '2,"' + "y\n" * 99_999)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", OPEN_QUOTES)
def test_quotes_that_do_not_close(tmp_path: Path, rows: str) -> None:
    for newline in ("\n", "\r\n"):
        (tmp_path / "a.csv").write_text("n,a\n1,x\n" + rows, newline=newline)
        for columns in (None, ["a"], ["n"]):
            with pytest.raises(FormatError, match=r"quote|two block boundaries"):
                converted(tmp_path, tmp_path / "a.csv", columns=columns)


@pytest.mark.parametrize("cell", ['5" wide', '"5"" wide"', '"5""\nwide"', '""', '"x"'])
def test_quotes_that_close(tmp_path: Path, cell: str) -> None:
    for end in ("", "\n"):
        (tmp_path / "a.csv").write_text("n,a\n1,x\n2," + cell + end)
        inner = cell[1:-1] if cell.startswith('"') else cell
        value = inner.replace('""', '"')
        assert converted(tmp_path, tmp_path / "a.csv").to_pydict() == {"n": [1, 2], "a": ["x", value]}
    (tmp_path / "a.csv").write_text("a\nx\n" + cell)
    assert converted(tmp_path, tmp_path / "a.csv")["a"].to_pylist() == ["x", value]


@pytest.mark.usefixtures("small_blocks")
def test_types_and_keys_of_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": number, "t": "2024-01-01", "n": {"x": 1}} for number in range(5000)]
    rows += [{"a": 1 << 64, "late": "x", "t": "soon", "n": {"y": [2]}}, {"later": 0.5}]
    path = tmp_path / "a.ndjson"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = converted(tmp_path, path)
    assert found["a"].type == pa.decimal128(38, 0) and found["a"].to_pylist()[4999:] == [
        4999,
        decimal.Decimal(1 << 64),
        None,
    ]
    assert found["late"].to_pylist()[-2:] == ["x", None] and found["later"].to_pylist()[-2:] == [None, 0.5]
    assert found["t"].type == pa.string() and found["t"].to_pylist()[-3:] == ["2024-01-01", "soon", None]
    assert found["n"].to_pylist()[-3:] == [{"x": 1, "y": None}, {"x": None, "y": [2]}, None]
    (tmp_path / "b.json").write_text('{"a": 1e300}\n{"a": 2}\n')
    assert converted(tmp_path, tmp_path / "b.json")["a"].to_pylist() == [1e300, 2.0]
    (tmp_path / "b.json").write_text('{"a": [1e300, 1]}\n')
    assert converted(tmp_path, tmp_path / "b.json")["a"].to_pylist() == [[1e300, 1.0]]
    for text, problem in (
        ('[{"a": 1}]', "one object a line"),
        ('{"a": 1}\n{"a": "x"}', "newline-delimited|in one row"),
        ('{"a": 1}\n' * 9000 + '{"a": "x"}', "'a' is int64 in one row and string in another"),
        ("", "is empty"),
        ('{"a": 1, "l": [{"x": 18446744073709551615}]}', "'l' has integers beyond 64 bits"),
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(FormatError, match=problem):
            converted(tmp_path, tmp_path / "c.json")


def test_names_of_other_formats(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.csv", "a.ndjson"):
        with pytest.raises(ArgumentError, match=r"NAME\.arrow"):
            ww.table.convert(pa.table({"a": [1]}), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_files_with_different_columns(tmp_path: Path) -> None:
    tables = {
        "1.parquet": pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}),
        "2.parquet": pa.table({"a": [2.5], "c": [True], "B": [1]}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / name)
    found = converted(tmp_path, [tmp_path / name for name in tables])
    assert found.to_pydict() == {"a": [1.0, 2.5], "b": ["x", None], "c": [None, True], "B": [None, 1]}
    (tmp_path / "1.csv").write_text("a\n1\n")
    (tmp_path / "2.csv").write_text("a,b\n02,3\n")
    found = converted(tmp_path, [tmp_path / "1.csv", str(tmp_path / "2.csv")])
    assert found.to_pydict() == {"a": ["1", "02"], "b": [None, 3]}
    pq.write_table(pa.table({"a": ["text"]}), tmp_path / "3.parquet")
    with pytest.raises(FormatError, match=r"differ in their columns.*Field a"):
        converted(tmp_path, [tmp_path / "1.parquet", tmp_path / "3.parquet"])
    pq.write_table(pa.table({"a": [(1 << 53) + 1]}), tmp_path / "4.parquet")
    with pytest.raises(FormatError, match="9007199254740993"):  # a double does not hold it
        converted(tmp_path, [tmp_path / "2.parquet", tmp_path / "4.parquet"])


def test_other_files_in_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell")
    (tmp_path / "in").mkdir()
    for name, content in {"a.csv": "a\n1\n", "README.md": "# rows\n", "_SUCCESS": "", ".a.csv.crc": "x"}.items():
        (tmp_path / "in" / name).write_text(content)
    assert converted(tmp_path, tmp_path / "in").to_pydict() == {"a": [1]}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'in'}: files of no known format are left out: README.md"
    ]
    (tmp_path / "in" / "a.csv").unlink()
    with pytest.raises(FormatError, match="has no files"):
        converted(tmp_path, tmp_path / "in")


def test_folders_without_permission() -> None:
    """The message names the folder, and no temporary file or other reason."""
    rows = pa.table({"a": [1]})
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folders are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        ww.table.convert(rows, folder / "t.ww").close()
        ww.table.convert(rows, folder / "hidden.ww").close()
        (folder / "hidden.ww").chmod(0)
        folder.chmod(0o555)
        (folder / "t.ww").chmod(0o555)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may do everything
        try:
            for act, culprit in (
                (lambda: ww.table.open(folder / "hidden.ww"), "hidden.ww/parts.json"),
                (lambda: ww.table.convert(folder / "hidden.ww", f"{folder}.ww"), "hidden.ww"),
                (lambda: ww.table.convert(rows, folder / "new.ww"), ""),
                (lambda: ww.table.append(folder / "t.ww", rows), "t.ww"),
            ):
                with pytest.raises(PermissionError) as raised:
                    act()
                assert Path(raised.value.filename) == folder / culprit
            with pytest.raises(WarpwellError, match=f"the folder {folder} is not writable"):
                new_file(str(folder / "b.csv"), "--out")
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
            for path in ("t.ww", "hidden.ww"):
                (folder / path).chmod(0o755)


def test_keys_of_folders(tmp_path: Path) -> None:
    for year, month in (("2023", "04"), ("2024", "11")):
        folder = tmp_path / "data" / f"year={year}" / f"month={month}" / "city=New%20York"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [1, 2]}), folder / "1.parquet")
        (folder / "_SUCCESS").write_text("")
    found = converted(tmp_path, tmp_path / "data")
    assert found["year"].to_pylist() == [2023, 2023, 2024, 2024] and found["year"].type == pa.int64()
    assert found["month"].to_pylist() == ["04", "04", "11", "11"]
    assert set(found["city"].to_pylist()) == {"New York"}
    assert converted(tmp_path, tmp_path / "data", columns=["month", "a"]).column_names == ["month", "a"]


def test_tables_as_sources(tmp_path: Path) -> None:
    """Other files of the folder, such as zone maps, are not read as rows."""
    table = pa.table({"a": [1, 2]})
    (tmp_path / "in").mkdir()
    ww.table.convert(table, tmp_path / "in" / "x.ww").close()
    ww.table.append(tmp_path / "in" / "x.ww", table)
    ww.table.convert(table, tmp_path / "in" / "y.arrow").close()
    assert converted(tmp_path, tmp_path / "in" / "x.ww").to_pydict() == {"a": [1, 2, 1, 2]}
    for source in (tmp_path / "in", [tmp_path / "in" / "y.arrow", tmp_path / "in" / "x.ww"]):
        assert converted(tmp_path, source).to_pydict() == {"a": [1, 2, 1, 2, 1, 2]}
    assert converted(tmp_path, tmp_path / "out.ww").num_rows == 6  # a table into itself


def test_int96(tmp_path: Path) -> None:
    near = pa.array([0, 1, -1, (1 << 62) + 7], pa.timestamp("ns"))
    far = pa.array(
        [datetime.datetime(9999, 12, 31), None, datetime.datetime(1000, 1, 1, 0, 0, 0, 5)], pa.timestamp("us")
    )
    for values in (near, far):
        lists = pa.array([[value] for value in values], pa.list_(values.type))
        table = pa.table({"t": values, "l": lists, "n": range(len(values)), "a.b": values})
        pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
        found = converted(tmp_path, tmp_path / "a.parquet")
        assert found["t"].combine_chunks().equals(values) and found["l"].to_pylist() == table["l"].to_pylist()
        pq.write_table(table.select(["n", "a.b"]), tmp_path / "d.parquet", use_deprecated_int96_timestamps=True)
        assert converted(tmp_path, tmp_path / "d.parquet")["a.b"].combine_chunks().equals(values)
    both = pa.concat_arrays([near.cast(pa.timestamp("us"), safe=False), far])
    pq.write_table(pa.table({"t": both}), tmp_path / "b.parquet", use_deprecated_int96_timestamps=True)
    found = converted(tmp_path, [tmp_path / "b.parquet", tmp_path / "a.parquet"])
    assert found["t"].to_pylist() == [*both.to_pylist(), *far.to_pylist()]
    # One value needs nanoseconds, and another one is out of their range.
    pq.write_table(pa.table({"t": near}), tmp_path / "c.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(FormatError, match="'t'"):
        converted(tmp_path, [tmp_path / "c.parquet", tmp_path / "a.parquet"])


def test_frames(tmp_path: Path) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    index = pandas.MultiIndex.from_product([list("xy"), range(2)], names=["level", None])
    frame = pandas.DataFrame({"a": range(4), "c": pandas.Categorical(list("abab"), ["b", "a"], ordered=True)}, index)
    frame.to_parquet(tmp_path / "a.parquet")
    for source in (frame, tmp_path / "a.parquet"):
        with ww.table.convert(source, tmp_path / "p.ww", overwrite=True) as table:
            assert table.names == ["a", "c", "level", "__index_level_1__"]
            pandas.testing.assert_frame_equal(table.to_pandas(), frame)
    named = pandas.DataFrame({"a": range(4)}, pandas.Index(list("wxyz"), name="k"))
    stepped = pandas.DataFrame({"a": range(4)}, pandas.RangeIndex(0, 8, 2, name="r"))
    for frame, index in ((named, named.index), (stepped, pandas.RangeIndex(4))):
        ww.table.convert(frame, tmp_path / "p.ww", overwrite=True).close()
        ww.table.append(tmp_path / "p.ww", frame)
        with ww.table.open(tmp_path / "p.ww") as table:
            assert table.to_pandas().index.equals(pandas.RangeIndex(8) if frame is stepped else index.append(index))
            assert table.arrow(4, 4).to_pandas().index.equals(index)
            assert (
                table.where([("a", ">", 1)])
                .head(2)
                .take()
                .arrow()
                .to_pandas()
                .index.equals(index[2:] if frame is named else index[:2])
            )
    with pytest.raises(FormatError, match=r"DataFrame.*\['a', 'a'\]"):
        ww.table.convert(pandas.DataFrame([[1, 2]], columns=["a", "a"]), tmp_path / "q.ww")
    data = polars.DataFrame(
        {
            "category": polars.Series(["a", "b", None, "a"], dtype=polars.Categorical),
            "choice": polars.Series(["low", "high", None, "low"], dtype=polars.Enum(["low", "high"])),
            "text": ["x", None, "y" * 20, ""],
            "list": [["x"], [], None, ["y"]],
            "struct": [{"u": "v", "w": 1}] * 4,
        }
    )
    data.write_ipc(tmp_path / "polars.arrow")
    data.write_ipc(tmp_path / "packed.arrow", compression="zstd")
    for source in (data, tmp_path / "polars.arrow", tmp_path / "packed.arrow"):
        with ww.table.convert(source, tmp_path / "t.arrow", overwrite=True) as table:
            assert table.arrow().to_pydict() == data.to_dict(as_series=False)
            assert table.where([("choice", "==", "low")]).numpy().tolist() == [0, 3]
        assert polars.read_ipc(tmp_path / "t.arrow").to_dict(as_series=False) == data.to_dict(as_series=False)
        assert ww.table.scan(tmp_path / "t.arrow").collect().to_dict(as_series=False) == data.to_dict(as_series=False)
    assert ww.table.scan(tmp_path / "polars.arrow").collect().to_dict(as_series=False) == data.to_dict(as_series=False)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters(tmp_path: Path, delimiter: str) -> None:
    for name, rows in (("a.csv", ["a", "b,;,;c", "x\ty", "1"]), ("a.CSV.gz", ["a", "b", "x", "1"])):
        rows = [delimiter.join((f'"{row}"' if name == "a.csv" else row, "0.5")) for row in rows]
        text = ("\r\n".join(rows) + "\n").encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        found = converted(tmp_path, tmp_path / name)
        assert found.num_columns == 2 and found.num_rows == 3 and found.column_names[0] == "a"
    (tmp_path / "b.csv").write_text(f'\ufeff"a\n,;,;\tb"{delimiter}"c"\n1{delimiter}2\n')
    assert converted(tmp_path, tmp_path / "b.csv").to_pydict() == {"a\n,;,;\tb": [1], "c": [2]}
    (tmp_path / "a.tsv").write_text("a,b,c\td;e;f\n1\t2\n")
    assert converted(tmp_path, tmp_path / "a.tsv").to_pydict() == {"a,b,c": [1], "d;e;f": [2]}
    assert converted(tmp_path, tmp_path / "a.tsv", columns=[1, "a,b,c"]).to_pydict() == {"d;e;f": [2], "a,b,c": [1]}
    for columns in ([2], [-1], [None], "a"):
        with pytest.raises(ArgumentError, match="column"):
            converted(tmp_path, tmp_path / "a.tsv", columns=columns)
    (tmp_path / "b.csv").write_text("a\n1\n")
    assert converted(tmp_path, tmp_path / "b.csv").to_pydict() == {"a": [1]}


@pytest.mark.filterwarnings("error")
def test_lazy_frames_are_refused(tmp_path: Path) -> None:
    lazy = pytest.importorskip("polars").LazyFrame({"a": [1]})
    with pytest.raises(ArgumentError, match=r"LazyFrame is not a source.*collect\(\)"):
        converted(tmp_path, lazy)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_series(tmp_path: Path, library: str) -> None:
    series = pytest.importorskip(library).DataFrame({"a": [1, 2]})["a"]
    with pytest.raises(ArgumentError, match="to_frame"):
        converted(tmp_path, series)
    assert converted(tmp_path, series.to_frame())["a"].to_pylist() == [1, 2]


def test_connections_with_one_result(tmp_path: Path) -> None:
    """A relation of DuckDB 2 has no length while its stream is open."""

    class Relation:
        is_open = False

        def __len__(self) -> int:
            assert not self.is_open
            return 2

        def __arrow_c_stream__(self, schema: object = None) -> object:
            self.is_open = True
            return pa.table({"a": [1, 2]}).__arrow_c_stream__(schema)

    assert converted(tmp_path, Relation()).to_pydict() == {"a": [1, 2]}


def test_duplicate_names(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array(["x"]), pa.array([2.5])], ["a", "a", "b"])
    pq.write_table(table, tmp_path / "a.parquet")
    for source in (table, tmp_path / "a.parquet"):
        assert converted(tmp_path, source).equals(table)
        with pytest.raises(WarpwellError, match="2 columns 'a'"):
            converted(tmp_path, source, columns=["a"])
    (tmp_path / "a.csv").write_text("a,a\n1,2\n")
    with pytest.raises(FormatError, match="two columns 'a'"):
        converted(tmp_path, tmp_path / "a.csv")
    frame = pytest.importorskip("pandas").DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(
        FormatError, match=r"Duplicate column names found: \['a', 'a'\]\): correct it, or give its rows"
    ):
        converted(tmp_path, frame)


def _damaged_page(path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), path, compression="none", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[4:20] = b"\xff" * 16
    path.write_bytes(raw)


def _stream(path: Path, cut: int) -> None:
    table = pa.table({"a": ["x"] * 1000})
    with pa.ipc.new_stream(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    path.write_bytes(path.read_bytes()[:cut])


DAMAGED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a page of Parquet": ("a.parquet", _damaged_page),
    "no footer": ("a.parquet", lambda p: p.write_bytes(b"PAR1" + bytes(100) + b"PAR1")),
    "a stream that ends early": ("a.arrows", lambda p: _stream(p, -40)),
    "a stream of noise": ("a.arrows", lambda p: p.write_bytes(np.random.default_rng(0).bytes(999))),
    "gzip without its name": ("a.csv", lambda p: p.write_bytes(gzip.compress(b"a\n1\n"))),
    "gzip that ends early": ("a.csv.gz", lambda p: p.write_bytes(gzip.compress(b"a\n" + b"1\n" * 9999)[:-20])),
    "a short row": ("a.csv", lambda p: p.write_text("a,b\n1,2\n3\n")),
    "not UTF-8": ("a.csv", lambda p: p.write_bytes(b"a\n\xe9\n")),
    "a name that is not UTF-8": ("a.csv", lambda p: p.write_bytes(b"\xe9\n1\n")),
    "an empty file": ("a.csv", lambda p: p.write_bytes(b"")),
    "an empty Parquet file": ("a.parquet", lambda p: p.write_bytes(b"")),
    "ORC": ("a.orc", lambda p: p.write_bytes(b"ORC" + bytes(50))),
    "an unknown format": ("a.bin", lambda p: p.write_bytes(b"what")),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, make = DAMAGED[case]
    make(tmp_path / name)
    for target in ("t.ww", "t.arrow"):
        with pytest.raises(FormatError, match=name):
            ww.table.convert(tmp_path / name, tmp_path / target)
    assert main(["table", "convert", str(tmp_path / name), str(tmp_path / "t.ww")]) == 2
    message = capsys.readouterr().err
    assert name in message and ("Row #3" in message) == (case == "a short row")
    assert os.listdir(tmp_path) == [name]
