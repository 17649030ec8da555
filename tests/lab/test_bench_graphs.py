"""The benchmark of graphs reads the files of GAP and finds results that differ from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from lab.bench import graphs


def wsg(path: Path, offsets, destinations, weights) -> Path:
    """Write a graph as GAP does."""
    with path.open("wb") as file:
        file.write(b"\0")
        np.array([len(destinations), len(offsets) - 1]).tofile(file)
        np.array(offsets).tofile(file)
        np.stack([destinations, weights], 1).astype(np.int32).tofile(file)
    return path


@pytest.mark.slow
def test_a_graph_of_gap_is_ours(tmp_path: Path) -> None:
    path = wsg(tmp_path / "g.wsg", [0, 2, 3, 4], [1, 2, 0, 0], [5, 7, 5, 7])
    graph = graphs.import_gap_graph(path, tmp_path / "g.ww", "kron", 2)
    assert (graph.vertices, graph.edges, graph.undirected, graph.weights) == (3, 4, True, "int32")
    assert ww.graph.bfs(graph, 1, device="cpu").values.tolist() == [1, 0, 2]
    plain = (tmp_path / "g.sg").read_bytes()
    assert len(plain) == 17 + 4 * 8 + 4 * 4 and np.frombuffer(plain[-16:], np.int32).tolist() == [1, 2, 0, 0]


def test_results_that_differ_from_gaps_are_found(tmp_path: Path) -> None:
    np.array([1, 1, 0], np.int32).tofile(tmp_path / "bfs.0")  # parents
    np.array([0, 0, 0], np.int32).tofile(tmp_path / "cc.0")
    np.array([5, 0, 2**30], np.int32).tofile(tmp_path / "sssp.0")

    def check() -> dict:
        return {"folder": tmp_path, "source": 1}

    agreed = check()
    graphs.require_same_result("bfs", np.array([1, 0, 2]), agreed)
    graphs.require_same_result("cc", np.array([0, 0, 0]), agreed)
    assert agreed["agrees"] == {"bfs": True, "cc": True}
    for name, wrong in (("bfs", [1, 0, 1]), ("bfs", [1, 0, -1]), ("cc", [0, 0, 2]), ("sssp", [5, 0, 2**30])):
        with pytest.raises(SystemExit, match="GAP"):
            graphs.require_same_result(name, np.array(wrong), check())
    with pytest.raises(SystemExit, match="another tier"):
        graphs.require_same_result("bfs", np.array([1, 0, 1]), agreed)
