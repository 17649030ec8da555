"""``warpwell table query``: comparisons of a shell, and files."""

from __future__ import annotations

import datetime
import decimal
import json
import sys

import pyarrow as pa
import pytest

import warpwell as ww
from warpwell.cli.main import main
from warpwell.errors import ArgumentError

TABLE = pa.table(
    {
        "distance": pa.array([1.5, 30.25, None, 40.0, 0.1], pa.float32()),
        "place": pa.array(["Soho", "Williamsburg", "a,b", None, "Soho"]).dictionary_encode(),
        "cost": pa.array(
            [decimal.Decimal("1.25"), decimal.Decimal("3.50"), None, decimal.Decimal("0.00"), None], pa.decimal128(9, 2)
        ),
        "day": pa.array([datetime.date(2024, 1, day) for day in (1, 2, 3, 4, 5)]),
        "at": pa.array([datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (1, 2, 3, 4, 5)]),
        "tip": [True, False, None, True, False],
        "id": [b"\x00", b"\xff", b"ab", b"", None],
        "count": pa.array([0, 1, 2, 3, 255], pa.uint8()),
    }
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("query") / "trips.arrow"
    with pa.ipc.new_file(found, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return str(found)


def query(path, capsys, *arguments):
    code = main(["table", "query", path, "--device", "cpu", "--json", *arguments])
    assert code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("distance >= 30", [1, 3]),
        ("distance = 0.1", [4]),
        ("place = Soho", [0, 4]),
        ("place in Soho,Williamsburg", [0, 1, 4]),
        ('place in ["a,b"]', [2]),
        ("cost < 1.30", [0, 3]),
        ("day > 2024-01-03", [3, 4]),
        ("tip != true", [1, 4]),
        ("at <= 2024-01-02T00:00:00+00:00", [0, 1]),
        ("id = ff", [1]),
        ("count = 255", [4]),
        ("place is null", [3]),
        ("place IS NULL", [3]),
        ("distance is_not null", [0, 1, 3, 4]),
    ],
)
def test_a_comparison(path, capsys, where, rows):
    found = query(path, capsys, "--where", *(word.replace("_", " ") for word in where.split(" ", 2)))
    assert found["rows"] == rows and found["matches"] == len(rows)
    assert found["columns"]["count"] == TABLE["count"].take(rows).to_pylist()


@pytest.mark.parametrize(
    ("where", "rows"),
    [("n > -6", [0, 1]), ("f > -1e3", [1]), ("f > -inf", [0, 1]), ("n in -5,7", [0, 1]), ("s = -x", [0])],
)
def test_values_that_begin_with_a_dash(tmp_path, capsys, where, rows):
    table = pa.table({"n": [-5, 7], "f": [-2000.0, 1.0], "s": ["-x", "y"], "list": [[1], []], "pair": [{"a": 1}, None]})
    ww.table.convert(table, tmp_path / "t.ww").close()
    found = query(str(tmp_path / "t.ww"), capsys, "--where", *where.split(" ", 2), "--limit", "2")
    assert found["rows"] == rows and found["columns"]["list"] == [[[1], []][row] for row in rows]
    assert found["columns"]["pair"] == [[{"a": 1}, None][row] for row in rows]


def test_several_comparisons_columns_and_a_limit(path, capsys):
    found = query(
        path,
        capsys,
        "--where",
        "count",
        "<",
        "4",
        "--where",
        "count",
        "not in",
        "1",
        "--limit",
        "2",
        "--columns",
        "day,count",
    )
    assert found["matches"] == 3 and found["rows"] == [0, 2]
    assert found["columns"] == {"day": ["2024-01-01", "2024-01-03"], "count": [0, 2]}
    assert query(path, capsys, "--filters", '[["place", "is null"]]')["rows"] == [3]
    either = '[[["count", "=", 1]], [["place", "=", "Soho"], ["distance", "<", 0.5]]]'
    assert query(path, capsys, "--filters", either)["rows"] == [1, 4]


def test_what_is_read(path, capsys):
    found = query(path, capsys, "--where", "count", ">", "2", "--columns", "day", "--explain")
    assert [report["column"] for report in found["filters"]] == ["count"] and found["filters"][0]["wanted"] == 5
    assert [(report["column"], report["wanted"], report["commands"]) for report in found["columns"]] == [("day", 8, 1)]


@pytest.mark.parametrize("ending", ["csv", "arrow", "feather", "parquet"])
def test_rows_are_written(path, capsys, tmp_path, ending):
    out = tmp_path / f"out.{ending}"
    found = query(path, capsys, "--where", "count", ">=", "1", "--out", str(out), "--columns", "place,count")
    assert found["rows"] == 4
    if ending == "csv":
        assert out.read_text().splitlines()[:2] == ['"place","count"', '"Williamsburg",1']
    elif ending == "parquet":
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(out)["count"].to_pylist() == [1, 2, 3, 255]
    else:
        with ww.table.open(out, device="cpu") as written:
            assert written.arrow()["place"].to_pylist() == TABLE["place"].to_pylist()[1:]
    assert list(tmp_path.iterdir()) == [out]


def test_files_are_replaced_only_on_request(path, capsys, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("mine")
    options = ["--where", "count", "=", "1", "--columns", "count", "--out", str(out)]
    assert main(["table", "query", path, "--device", "cpu", *options]) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_text() == "mine"
    assert query(path, capsys, *options, "--overwrite")["rows"] == 1
    assert out.read_text().splitlines() == ['"count"', "1"]


@pytest.mark.parametrize("clause", [["count", "not", "in", "1,2"], ["place", "is", "not", "null"]])
def test_operators_of_two_words(path, capsys, clause):
    with pytest.raises(SystemExit):
        main(["table", "query", path, "--where", *clause])
    assert "--where takes 3 values, so put a value of several words in quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --where"),
        (["--where", "count", "=", "x"], "cannot convert"),
        (["--where", "count", "in", "[1,"], "is not a JSON list"),
        (["--where", "none", "=", "1"], "no column"),
        (["--where", "count", "=", "256"], "0 to 255"),
        (["--where", "at", "=", "2024-01-01"], "zone"),
        (["--filters", "count > 3"], "not JSON"),
        (["--filters", "3"], "invalid filters 3"),
        (["--filters", '[["a"]]'], "filters"),
        (["--where", "count", "=", "1", "--out", "none/x.csv"], "does not exist"),
        (["--where", "count", "=", "1", "--out", "x.txt"], "must end in .csv or"),
    ],
)
def test_wrong_arguments(path, capsys, arguments, reason):
    assert main(["table", "query", path, "--device", "cpu", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_table_for_people(path, capsys):
    assert main(["table", "query", path, "--device", "cpu", "--where", "place", "=", "Soho", "--columns", "day"]) == 0
    out = capsys.readouterr().out.split()
    assert {"2", "match", "4", "2024-01-05"} <= {*out}


def test_values_that_python_or_json_does_not_have(capsys, tmp_path):
    ends = [float("-inf"), float("inf")]
    rows = pa.table({"at": pa.array([2**62, 0], pa.timestamp("s")), "x": ends, "b": [b"\xff", b""]})
    ww.table.convert(rows, tmp_path / "t.ww").close()

    def strict(word):
        raise AssertionError(word)

    for verb in (["head"], ["query", "--where", "x", "<", "inf", "--device", "cpu"]):
        assert main(["table", verb[0], str(tmp_path / "t.ww"), *verb[1:]]) == 0
        capsys.readouterr()
        assert main(["table", verb[0], str(tmp_path / "t.ww"), *verb[1:], "--json"]) == 0
        text = capsys.readouterr().out
        assert "-Infinity" in str(json.loads(text, parse_constant=strict)) and str(2**62) in text
    out = str(tmp_path / "rows.csv")
    arguments = ["--where", "x", "<", "0", "--device", "cpu", "--out", out]
    assert main(["table", "query", str(tmp_path / "t.ww"), *arguments]) == 2
    assert "--columns" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.ww"]


def test_without_pandas(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with ww.table.open(path) as table, pytest.raises(ArgumentError, match="needs the package pandas: install it"):
        table.to_pandas()
