"""The command line, running on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from tests.harness.until import HANG_SECONDS, until

from warpwell.cli import main
from warpwell.graph import generate

KEYS = {
    "device", "tier", "page_size", "cache_bytes", "vertices", "edges", "seconds", "hits", "misses", "evictions",
    "bytes_read", "bytes_wanted", "io_amplification", "medium", "emulated",
}  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with --json; return the one object that it prints."""
    assert main([*(str(a) for a in arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    values: dict[str, Any] = json.loads(captured.out)
    assert values["schema"] == 1 and values["command"] in (arguments[0], " ".join(map(str, arguments[:2])))
    return values


@pytest.fixture
def ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Two rings, of 1,000 and of 200 vertices."""
    edges = [f"{v} {(v + 1) % 1000}" for v in range(1000)]
    edges += [f"{1000 + v} {1000 + (v + 1) % 200}" for v in range(200)]
    (tmp_path / "edges.txt").write_text("\n".join(edges))
    graph = tmp_path / "ring.ww"
    answer(capsys, "graph", "convert", tmp_path / "edges.txt", graph, "--undirected")
    return graph


def test_bfs(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = ring.with_name("levels.npy")
    options = ("--device", "cpu", "--cache", "4KiB", "--page-size", 512, "--out", levels)
    report = answer(capsys, "graph", "bfs", ring, "--source", 990, *options)
    assert report.keys() >= KEYS | {"reached", "depth"}
    assert (report["reached"], report["depth"]) == (1000, 500)
    assert (report["device"], report["tier"], report["page_size"], report["cache_bytes"]) == (
        "cpu",
        "storage",
        512,
        4096,
    )
    assert (report["vertices"], report["edges"], report["emulated"]) == (1200, 2400, False)
    assert report["bytes_wanted"] == 2000 * 4
    assert report["misses"] > 0
    assert report["evictions"] > 0
    assert report["io_amplification"] == report["bytes_read"] / report["bytes_wanted"]
    around = np.abs(np.arange(1000) - 990)
    assert np.array_equal(np.load(levels), np.concatenate([np.minimum(around, 1000 - around), np.full(200, -1)]))
    assert [p.name for p in ring.parent.iterdir() if p.name.startswith(".")] == []


def test_cc(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = ring.with_name("labels.npy")
    report = answer(capsys, "graph", "cc", ring, "--device", "cpu", "--cache", "8KiB", "--out", labels)
    assert report.keys() >= KEYS | {"components"}
    assert report["components"] == 2
    assert np.array_equal(np.load(labels), np.repeat([0, 1000], [1000, 200]))


@pytest.mark.slow
def test_paths_ranks_and_triangles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = generate("urand", 6, tmp_path / "urand.ww", degree=4, weights="int32").path
    options = ("--device", "cpu", "--cache", "8KiB", "--page-size", 512)
    distances, ranks = tmp_path / "distances.npy", tmp_path / "ranks.npy"
    report = answer(capsys, "graph", "sssp", graph, "--source", 3, "--delta", 64, *options, "--out", distances)
    assert report.keys() >= KEYS | {"reached", "rounds"}
    assert (report["reached"], np.load(distances)[3]) == (64, 0)
    report = answer(capsys, "graph", "pagerank", graph, "--iterations", 3, "--tolerance", 0, *options, "--out", ranks)
    assert (report["iterations"], round(np.load(ranks).sum(), 9)) == (3, 1.0)
    assert report["change"] > 0
    report = answer(capsys, "graph", "triangles", graph, *options)
    assert report["triangles"] > 0
    assert main(["graph", "pagerank", str(graph), "--device", "cpu", "--damping", "2"]) == 2
    assert "damping" in capsys.readouterr().err


def test_vertices_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("from,to\nalice,bob\nbob,carol\ncarol,alice\ndave,alice\n")
    graph, out = tmp_path / "a.ww", tmp_path / "ranks.csv"
    values = answer(capsys, "graph", "convert", tmp_path / "a.csv", graph, "--names", "--in-edges")
    assert (values["vertices"], values["names"], values["order"]) == (4, "string", "degree")
    options = ("--device", "cpu", "--tolerance", "1e-9")
    values = answer(capsys, "graph", "pagerank", graph, *options, "--out", out)
    assert [row["vertex"] for row in values["top"]] == ["alice", "bob", "carol", "dave"]
    header, *rows = out.read_text().splitlines()
    assert header == "vertex,rank"
    ranks = {name: float(rank) for name, rank in (row.split(",") for row in rows)}
    assert ranks == {row["vertex"]: row["rank"] for row in values["top"]}
    assert main(["graph", "pagerank", str(graph), *options]) == 0
    text = capsys.readouterr().out
    assert "largest ranks" in text and "alice" in text and "0.000" not in text
    values = answer(capsys, "graph", "bfs", graph, "--device", "cpu", "--source", "dave", "--out", out)
    assert (values["source"], values["reached"]) == ("dave", 4)
    assert out.read_text().split() == ["vertex,level", "alice,1", "bob,2", "carol,3", "dave,0"]
    assert main(["graph", "bfs", str(graph), "--source", "zoe"]) == 2
    assert "no vertex 'zoe'; expected one of its names" in capsys.readouterr().err


TIERS = ["mapped", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("host-cached", "host", "device"))]


@pytest.mark.parametrize("tier", TIERS)
def test_other_tiers(ring: Path, capsys: pytest.CaptureFixture[str], tier: str) -> None:
    report = answer(capsys, "graph", "bfs", ring, "--source", 1100, "--device", "cpu", "--tier", tier)
    assert (report["tier"], report["reached"], report["depth"]) == (tier, 200, 100)
    assert (report["hits"] is None) == (tier != "host-cached")
    heads = 0 if tier == "device" else 16 * 1200  # a search in device memory needs no first neighbors
    assert report["loaded_bytes"] == 8 * 1201 + heads + (0 if tier == "mapped" else 4 * 2400)


def test_interpreted(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "graph", "bfs", ring, "--source", 1100, "--device", "interp", "--cache", "8KiB")
    assert (report["device"], report["reached"], report["depth"]) == ("interp", 200, 100)


def test_a_table(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "cc", str(ring), "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    for word in ("components", "misses", "bytes wanted", "io amplification"):
        assert word in table


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "info")
    assert report["numpy"] == np.__version__
    assert "cpu" in report["devices"]
    assert report["pyarrow"] == pyarrow.__version__
    assert main(["info"]) == 0
    assert "default device" in capsys.readouterr().out


FEATURES = """
import sys, numpy, warpwell as ww
from warpwell.graph import bfs, generate, sssp
with ww.kv.create(sys.argv[1] + "/store.kv") as store:
    store.put_many([1, 2], numpy.zeros((2, 5), numpy.uint8))
    store[3] = b"three"
assert ww.kv.open(store.path)[3] == b"three"
graph = generate("kron", 9, sys.argv[1] + "/graph.ww", weights="int32")
for cache in None, "16KiB", "1MiB":
    bfs(graph, 0, cache=cache)
    sssp(graph, 0, cache=cache)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes of an idle core
def test_features_compile_nothing_after_compile(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = os.environ | {"WARPWELL_CACHE_DIR": str(cache), "WARPWELL_DEVICE": "cpu"}
    command = [sys.executable, "-m", "warpwell", "compile", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert Path(json.loads(done.stdout)["folder"]).is_relative_to(cache)
    compiled = {path.name for path in cache.rglob("*") if path.suffix in (".o", ".nbc")}
    assert {Path(name).suffix for name in compiled} == {".o", ".nbc"}
    subprocess.run([sys.executable, "-c", FEATURES, str(tmp_path)], env=environment, check=True, timeout=600)
    assert compiled == {path.name for path in cache.rglob("*") if path.suffix in (".o", ".nbc")}


@pytest.mark.slow
@pytest.mark.parametrize("compiling", [False, True])
def test_an_interrupt_ends_a_run(tmp_path: Path, compiling: bool) -> None:
    graph = generate("kron", 17, tmp_path / "kron.ww")
    # minutes of work
    command = [sys.executable, "-m", "warpwell", "graph", "pagerank", str(graph.path), "--device", "cpu",
               "--cache", "512KiB", "--page-size", "512", "--iterations", "100000", "--tolerance", "1e-300",
               "--out", str(tmp_path / "ranks.npy")]  # fmt: skip
    nothing_kept = {"WARPWELL_CACHE_DIR": str(tmp_path / "cache")} if compiling else {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | nothing_kept
    )
    if compiling:
        assert until(lambda: any((tmp_path / "cache").rglob("*.lock")))
    time.sleep(1.5 if compiling else 5)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "ranks.npy").exists()
