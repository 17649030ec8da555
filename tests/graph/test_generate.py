"""Generated graphs: the GAP benchmark's own, the same on every machine."""

import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from warpwell.errors import ArgumentError
from warpwell.graph import Graph, generate
from warpwell.graph.generate import KINDS, random_edges

# The module, not the function of the same name in the package.
MODULE = sys.modules["warpwell.graph.generate"]


def all_edges(kind: str, scale: int, **options: int) -> npt.NDArray[np.int64]:
    sources, destinations = map(np.concatenate, zip(*random_edges(kind, scale, **options), strict=True))
    return np.stack([sources, destinations], axis=1)


def digest(array: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<i4")).hexdigest()[:16]


# Digests of edges of GAP's algorithm in C++ (std::mt19937 and GCC 12's distributions), as pairs of 32-bit
# integers. Scale 16 and degree 5 make two blocks.
GAP = {"urand": "00fbe40fc273f7a2", "kron": "e892b0ebbe742f16"}


def test_urand_is_the_graph_of_gap() -> None:
    assert digest(all_edges("urand", 16, degree=5)) == GAP["urand"]


def test_kron_is_the_graph_of_gap_but_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    named = all_edges("kron", 16, degree=5)

    class Unnamed(np.random.RandomState):
        def permutation(self, x: int) -> npt.NDArray[np.int64]:  # type: ignore[override]
            return np.arange(x)

    monkeypatch.setattr(np.random, "RandomState", Unnamed)
    plain = all_edges("kron", 16, degree=5)
    assert digest(plain) == GAP["kron"]
    # Each vertex has one new name.
    names = np.full(1 << 16, -1)
    names[plain] = named
    assert np.array_equal(names[plain], named)
    assert np.unique(names[names >= 0]).size == np.unique(plain).size


@pytest.mark.parametrize("kind", KINDS)
def test_edges_do_not_depend_on_the_number_of_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many = all_edges(kind, 16, degree=20)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert np.array_equal(all_edges(kind, 16, degree=20), many)
    assert many.shape == (20 << 16, 2)


@pytest.mark.quick("kron")
@pytest.mark.parametrize("kind", KINDS)
def test_near_seeds_share_no_edges(kind: str) -> None:
    graphs = [all_edges(kind, 17, degree=4, seed=seed) for seed in (0, 1, 2)]
    keys = [graph[:, 0] << 20 | graph[:, 1] for graph in graphs]
    for left, right in itertools.combinations(keys, 2):
        # Some edges are in both graphs by chance, more in the skewed ones.
        assert np.isin(right, left).mean() < 0.02


def test_degrees_are_skewed_in_kron_and_even_in_urand() -> None:
    degrees = {kind: np.bincount(all_edges(kind, 14).reshape(-1), minlength=1 << 14) for kind in KINDS}
    assert all(counts.mean() == 32 for counts in degrees.values())
    assert degrees["urand"].max() < 80
    assert degrees["kron"].max() > 1000
    assert (degrees["kron"] == 0).sum() > 1000


def test_quadrants_of_kron_have_their_shares() -> None:
    edges = all_edges("kron", 1, degree=1 << 17)
    # With two vertices there is one level; vertex 0 may have been renamed 1.
    shares = np.bincount(edges[:, 0] * 2 + edges[:, 1], minlength=4) / len(edges)
    if shares[3] > shares[0]:
        shares = shares[::-1]
    assert np.abs(shares - [0.57, 0.19, 0.19, 0.05]).max() < 0.005


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_graph_is_undirected_without_loops(tmp_path: Path, kind: str) -> None:
    graph = generate(kind, 10, tmp_path / "graph.ww", degree=8)
    offsets, edges = graph.load()
    sources = np.repeat(np.arange(1024), np.diff(offsets))
    keys = sources << 10 | edges
    assert (np.diff(keys) > 0).all()
    assert np.array_equal(np.sort(edges << 10 | sources), keys)
    assert (sources != edges).all()
    made = all_edges(kind, 10, degree=8)
    made = made[made[:, 0] != made[:, 1]]
    assert np.array_equal(np.unique(np.concatenate([made, made[:, ::-1]]), axis=0), np.stack([sources, edges], axis=1))
    assert (graph.vertices, graph.undirected, graph.source) == (
        1024,
        True,
        f"{kind} scale=10 degree=8 seed=0",
    )
    again = generate(kind, 10, tmp_path / "again.ww", degree=8, memory_bytes=1 << 16)
    assert again.edges_path.read_bytes() == graph.edges_path.read_bytes()


@pytest.mark.parametrize(("kind", "edges"), [("kron", 10496), ("urand", 16103)])
def test_sizes_are_those_that_gap_prints(tmp_path: Path, kind: str, edges: int) -> None:
    # Of `-g 10` and `-u 10`, "undirected edges", as in the reference outputs of its own tests.
    assert generate(kind, 10, tmp_path / "graph.ww").edges == 2 * edges


def test_edges_as_they_are_made(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    graph = generate(
        "urand",
        4,
        tmp_path / "graph.ww",
        undirected=False,
        self_loops=True,
        progress=lambda *call: calls.append(call),
    )
    assert graph.edges == 16 << 4
    assert not graph.undirected
    assert calls == [("generate", 256, 256), ("write", 256, 768), ("write", 512, 768), ("write", 768, 768)]


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("lattice", {}, "kind is 'lattice'.*kron and urand"),
        ("kron", {"scale": 0}, "scale is 0"),
        ("kron", {"scale": 32}, "scale is 32"),
        ("kron", {"degree": 0}, "degree is 0"),
        ("kron", {"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_out_of_range(tmp_path: Path, kind: str, options: dict[str, int], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        generate(kind, **({"scale": 10} | options), out=tmp_path / "graph.ww")
    assert not list(tmp_path.iterdir())


def test_a_failure_stops_the_threads(tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate("kron", 20, tmp_path / "graph.ww", progress=progress)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        Graph.open(tmp_path / "graph.ww")
