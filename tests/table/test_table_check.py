"""`check` and the ``warpwell table`` commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.table.test_table_arrow import mixed, write

import warpwell as ww
from warpwell.cli import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.ww"
    names = ["i4", "f8", "bool", "text", "large", "embedding", "code"]
    ww.table.convert(mixed(5000), path, columns=names, codes=["i4", "text"]).close()
    ww.table.append(path, mixed(300).select(names))
    return path


def test_what_is_sound(path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    found = ww.table.check(path, progress=lambda *step: steps.append(step))
    assert found.sound and found.rows == 5300 and found.nbytes > 100_000
    assert steps[-1][0] == "verify" and steps[-1][1] == found.nbytes


def test_every_flipped_byte_is_found(path: Path) -> None:
    rng = np.random.default_rng(0)
    for file in sorted(path.glob("*.arrow*")):
        raw = file.read_bytes()
        for at in [0, len(raw) - 1, *map(int, rng.integers(0, len(raw), 10))]:
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << int(rng.integers(8))]) + raw[at + 1 :])
            found = ww.table.check(path)
            assert [Path(problem.path) for problem in found.problems] == [file], (file, at)
        file.write_bytes(raw)
    assert ww.table.check(path).sound


def test_files_that_are_cut_longer_or_gone(path: Path) -> None:
    for file in sorted(path.glob("*.arrow*")):
        raw = file.read_bytes()
        for damaged in (raw[:-1], raw[: len(raw) // 2], raw[:100], b"", raw + bytes(1 << 20), None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            found = ww.table.check(path)
            assert not found.sound and {Path(problem.path) for problem in found.problems} == {file}, file
        file.write_bytes(raw)
    assert ww.table.check(path).sound


def test_a_file_without_zones_and_with_old_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", mixed(100))
    assert ww.table.check(path).sound
    ww.table.index(path)
    assert ww.table.check(path).sound
    table = mixed(100)
    # The new file has the same size.
    write(path, table.set_column(0, "i4", pa.compute.add(table["i4"], 1).cast(pa.int32())))
    found = ww.table.check(path)
    assert [(problem.path, problem.offset) for problem in found.problems] == [(str(path), 0)]


def test_an_arrow_file_whose_offsets_lead_outside(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", pa.table({"s": ["a", "bb", "ccc"], "l": [[1], [2], [3]]}))
    assert ww.table.check(path).sound
    with ww.table.open(path) as t:
        at = t["s"].runs[0].offsets.offset
    raw = bytearray(path.read_bytes())
    raw[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(raw)
    assert not ww.table.check(path).sound
    with ww.table.open(path) as t, pytest.raises(ww.errors.FormatError, match="damaged"):
        t["s"].arrow()


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert main(["table", *(str(a) for a in arguments), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    values: dict[str, Any] = json.loads(captured.out)
    assert (values["schema"], values["command"]) == (1, f"table {arguments[0]}")
    return values


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.csv"
    source.write_text("name,n,x\nada,1,0.5\nbob,2,\nada,3,1.5\n")
    path = tmp_path / "t.ww"
    made = answer(capsys, "convert", source, path, "--codes", "name")
    assert made["rows"] == 3 and made["bytes_on_disk"] > 1000
    assert answer(capsys, "convert", source, path, "--append")["rows"] == 6
    shown = answer(capsys, "head", path, "--rows", "2")
    assert [column["values"] for column in shown["columns"]] == [["ada", "bob"], [1, 2], [0.5, None]]
    assert shown["columns"][2]["nulls"] == 2 and shown["columns"][2]["runs"] == 2
    assert main(["table", "head", str(path), "--columns", "x"]) == 0 and "double" in capsys.readouterr().out
    assert answer(capsys, "check", path)["sound"]
    for arguments, message in (
        (["convert", source, path], "--overwrite"),
        (["convert", source, tmp_path / "u.ww", "--columns", "y"], "no column 'y'"),
        (["convert", source, path, "--append", "--codes", "n"], "omit --columns"),
        (["head", tmp_path / "none"], "does not exist"),
        (["head", source], "not an Arrow IPC file"),
        (["head", tmp_path], "folder, but not a table"),
    ):
        assert main(["table", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    raw = (path / "0.arrow").read_bytes()
    (path / "0.arrow").write_bytes(raw[:500] + bytes([raw[500] ^ 1]) + raw[501:])
    found = answer(capsys, "check", path, code=1)
    assert not found["sound"] and "differs" in found["problems"][0]["what"]
    (tmp_path / "a.arrow").write_bytes(raw)
    assert answer(capsys, "index", tmp_path / "a.arrow")["file"].endswith("a.arrow.zones")
    assert answer(capsys, "check", tmp_path / "a.arrow")["sound"]


def test_without_pyarrow(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from warpwell.cli import main; sys.exit(main())"
    for arguments in (["table", "head", str(tmp_path)], ["table", "convert", str(tmp_path), str(tmp_path / "t")]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and "[table]" in done.stderr, done.stderr
    code = "import sys, warpwell as ww; ww.table, ww.table.open; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=dict(os.environ))
