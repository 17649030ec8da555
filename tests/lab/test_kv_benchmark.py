"""The benchmark beside LMDB and RocksDB, on a small scale: all systems run all rows and agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("durability", [pytest.param("commit", marks=pytest.mark.slow), "none"])
def test_every_row(tmp_path: Path, durability: str) -> None:
    for package in ("lmdb", "rocksdict"):
        pytest.importorskip(package)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lab.bench.kv_host",
            "--records",
            "400",
            "--operations",
            "1024",
            "--rounds",
            "1",
            "--durability",
            durability,
            "--folder",
            str(tmp_path),
            "--json",
            str(tmp_path / "out.json"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 16
    assert sum(row["read_only"] for row in rows) == 8
    for row in rows:
        assert row["ratio"] == pytest.approx(row["Warpwell"] / max(row["LMDB"], row["RocksDB"]))
        assert min(row["Warpwell"], row["LMDB"], row["RocksDB"]) > 0
        assert row["row"] in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
