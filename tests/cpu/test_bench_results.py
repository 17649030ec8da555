"""The scripts that measure on a GPU: graphs beside GAP's files, and the page of tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(FOLDER))
    try:
        yield lambda name: importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def wsg(path: Path, offsets, destinations, weights) -> Path:
    """Write a graph as GAP does."""
    with path.open("wb") as file:
        file.write(b"\0")
        np.array([len(destinations), len(offsets) - 1]).tofile(file)
        np.array(offsets).tofile(file)
        np.stack([destinations, weights], 1).astype(np.int32).tofile(file)
    return path


def test_a_graph_of_gap_is_ours(script, tmp_path: Path) -> None:
    graphs = script("graphs")
    path = wsg(tmp_path / "g.wsg", [0, 2, 3, 4], [1, 2, 0, 0], [5, 7, 5, 7])
    graph = graphs.taken(path, tmp_path / "g.ww", "kron", 2)
    assert (graph.vertices, graph.edges, graph.undirected, graph.weights) == (3, 4, True, "int32")
    assert ww.graph.bfs(graph, 1, device="cpu").levels.tolist() == [1, 0, 2]
    plain = (tmp_path / "g.sg").read_bytes()
    assert len(plain) == 17 + 4 * 8 + 4 * 4 and np.frombuffer(plain[-16:], np.int32).tolist() == [1, 2, 0, 0]


def test_results_that_differ_from_gaps_are_found(script, tmp_path: Path) -> None:
    graphs = script("graphs")
    np.array([1, 1, 0], np.int32).tofile(tmp_path / "bfs.0")  # parents
    np.array([0, 0, 0], np.int32).tofile(tmp_path / "cc.0")
    np.array([5, 0, 2**30], np.int32).tofile(tmp_path / "sssp.0")

    def check() -> dict:
        return {"folder": tmp_path, "source": 1}

    agreed = check()
    graphs.same("bfs", np.array([1, 0, 2]), agreed)
    graphs.same("cc", np.array([0, 0, 0]), agreed)
    assert agreed["agrees"] == {"bfs": True, "cc": True}
    for name, wrong in (("bfs", [1, 0, 1]), ("bfs", [1, 0, -1]), ("cc", [0, 0, 2]), ("sssp", [5, 0, 2**30])):
        with pytest.raises(SystemExit, match="GAP"):
            graphs.same(name, np.array(wrong), check())
    with pytest.raises(SystemExit, match="another tier"):
        graphs.same("bfs", np.array([1, 0, 1]), agreed)


def test_the_page_of_results(script, tmp_path: Path) -> None:
    means = {"ms": 2.0, "least_ms": 1.0}
    tiers = {
        "host": {"loading_s": 0.1, "bfs": means | {"of_the_bus": 0.9}},
        "device": {"bfs": {"ms": 1.0}},
        "storage": {"loading_s": 0.0, "bfs": {"ms": 3.0}},
        "4 x P5800X (emulated)": {"bfs": means | {"of_the_drives": 0.87}},
    }
    kron = {"edges": 10, "tiers": tiers, "GAP": {"bfs": {"ms": 2.5}}, "agrees_with_GAP": {"bfs": True}}
    graphs = {"gpu": "G", "commit": "c0", "scale": 3, "sources": 2, "bus_GB_a_second": 50.0, "kron": kron}
    (tmp_path / "graphs.json").write_text(json.dumps(graphs))
    (tmp_path / "misses.json").write_text(json.dumps({"head": ["tier", "M/s"], "misses": [["storage", 12.34]]}))
    text = script("results_page").page(tmp_path)
    assert text.startswith("# G, commit c0") and "| storage | 12.3 |" in text
    assert "from storage 1.50 times as long" in text and "GAP takes 2.50 times" in text and "| 0.87 |" in text
    assert "with its loading takes 34.00" in text
