"""Graph kernels for a GPU: they compile to PTX anywhere; on a GPU they find what the CPU finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from warpwell.array.view import ArrayView, ViewStatic
from warpwell.graph import LoadedGraph, bfs, build, connected_components, generate, pagerank, sssp, triangles
from warpwell.graph.algorithms import components, search, shortest_paths
from warpwell.graph.algorithms import pagerank as ranks
from warpwell.graph.algorithms import triangles as counts
from warpwell.graph.algorithms.work_items import SEGMENT, list_items
from warpwell.targets.compiler import run_cuda

INTEGERS = np.zeros(8, np.int64)
LABELS = np.zeros(8, np.int32)
BITS = np.zeros(8, np.uint32)
RANKS = np.zeros(8, np.float64)


def edges(full: bool, *, cached: bool = True, dtype: str = "<i4") -> ArrayView:
    static = ViewStatic(dtype, 1, cached, writable=False, full=full, aligned=True, stride=np.dtype(dtype).itemsize)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


@pytest.mark.slow
@pytest.mark.ptx
@pytest.mark.parametrize("full", [False, True], ids=["basic", "full"])
def test_kernels_that_read_edges_compile(full: bool) -> None:
    w, e, lengths = INTEGERS, edges(full), edges(full, dtype="<f4")
    for kernel, arguments, update in (
        (search._push, (e, w, LABELS, BITS, w, 0, 0, 0, 0, w), ".or.b32"),
        (search._pull_heads, (e, w, w, LABELS, BITS, BITS, 0, 0, 1, w), "vote.sync.ballot"),
        (search._pull_items, (e, w, w, LABELS, BITS, BITS, w, 0, 0, w), ".or.b32"),
        (components._link_heads, (e, w, LABELS, 0, w), ".min.s32"),
        (components._link_neighbors, (e, w, LABELS, w, 0, w), ".min.s32"),
        (shortest_paths._relax, (e, e, w, LABELS, BITS, w, 0, LABELS, 1, np.int64(0), 0, LABELS, w), ".min.s32"),
        (shortest_paths._relax, (e, lengths, w, RANKS, BITS, w, 0, RANKS, 1, np.float64(0), 0.0, RANKS, w), ".min.s64"),
        (ranks._gather, (e, w, w, 0, (0, 0), RANKS, RANKS, w), ".add.f64"),
        (counts._orient, (e, w, 0, 0, (0, 0), 0, LABELS, w, w), "vote.sync.ballot"),
    ):
        text = run_cuda.ptx(kernel, arguments)
        # the hit path's acquire, and one claim or hook that orders nothing
        assert "ld.acquire.gpu" in text
        assert f"atom.relaxed.gpu.global{update}" in text if update[0] == "." else update in text


@pytest.mark.slow
@pytest.mark.ptx
def test_kernels_on_vertices_and_edges_in_memory_compile() -> None:
    w, e = INTEGERS, edges(False, cached=False)
    for kernel, arguments in (
        (search._push_levels, (e, w, LABELS, BITS, w, 0, 0, 0, 0, 0, w)),
        (search._pull, (e, w, w, LABELS, BITS, BITS, BITS, 0, 0, 0, 1, w)),
        (search._pull_heads, (LABELS, w, w, LABELS, BITS, BITS, 0, 0, 1, w)),
        (search._list_undecided, (w, BITS, w, 0, 0, BITS, 8, w)),
        (list_items, (w, LABELS, 0, 1, 0, 0, 1, w, 0, w)),
        (list_items, (w, w, -1, 0, 0, 0, 1, w, 0, w)),
        (components._link_heads, (LABELS, w, LABELS, 0, w)),
        (shortest_paths._relax, (e, e, w, LABELS, BITS, w, 0, LABELS, 1, np.int64(0), 0, LABELS, w)),
        (components._link_neighbors, (e, w, LABELS, w, 0, w)),
        (components._compress, (LABELS, 0)),
        (components._sample, (LABELS, 1, 0, w)),
        (shortest_paths._select, (w, LABELS, BITS, 1.0, w, 0, 0, 1, LABELS, w)),
        (shortest_paths._select, (w, RANKS, BITS, 1.0, w, 0, 0, 1, RANKS, w)),
        (ranks._step, (w, RANKS, RANKS, RANKS, 0.0, 0.0, 1, 0, 1, RANKS)),
        (counts._count, (LABELS, w, 0, w)),
    ):
        assert ".entry" in run_cuda.ptx(kernel, arguments)


@pytest.mark.parametrize("cache", ["8KiB", "128KiB", "64MiB"])
@pytest.mark.parametrize("tier", ["storage", "host-cached"])
def test_a_gpu_finds_what_the_cpu_finds(tmp_path: Path, cache: str, tier: str) -> None:
    graph = generate("kron", 12, tmp_path / "kron.ww", degree=8)
    source = int(np.argmax(np.diff(graph.load()[0])))
    found = []
    for device in ("cuda", "cpu"):
        with LoadedGraph(graph, device=device, tier=tier, cache=cache, stats="full") as loaded:
            found.append((bfs(loaded, source), connected_components(loaded)))
    (levels, labels), (cpu_levels, cpu_labels) = found
    assert np.array_equal(levels.values, cpu_levels.values)
    assert np.array_equal(labels.values, cpu_labels.values)


@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "device"])
def test_a_vertex_with_many_neighbors(tmp_path: Path, tier: str) -> None:
    leaves = np.arange(9 * SEGMENT + 5)
    graph = build([(np.full(leaves.size, leaves.size), leaves)], tmp_path / "star.ww", undirected=True)
    with LoadedGraph(graph, device="cuda", tier=tier, cache="64KiB") as loaded:
        found = bfs(loaded, 0)
        assert (found.count, found.rounds) == (graph.vertices, 2)
        assert connected_components(loaded).count == 1


@pytest.mark.parametrize("weights", ["int32", "float32"])
@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "device"])
def test_paths_ranks_and_triangles_are_the_cpus(tmp_path: Path, tier: str, weights: str) -> None:
    graph = generate("kron", 11, tmp_path / "kron.ww", degree=8, weights=weights)
    source = int(np.argmax(np.diff(graph.load()[0])))
    found = []
    for device in ("cuda", "cpu"):
        with LoadedGraph(graph, device=device, tier=tier, cache="64KiB") as loaded:
            found.append((sssp(loaded, source), pagerank(loaded, tolerance=0.0, iterations=5), triangles(loaded)))
    assert np.array_equal(found[0][0].values, found[1][0].values)
    assert np.allclose(found[0][1].values, found[1][1].values, rtol=1e-12, atol=0)
    assert found[0][2].count == found[1][2].count


def test_many_searches_of_one_graph(tmp_path: Path) -> None:
    """A search leaves nothing behind for the next: launches of one do not wait for their end."""
    graph = generate("urand", 10, tmp_path / "urand.ww", degree=4)
    with LoadedGraph(graph, device="cpu") as on_cpu, LoadedGraph(graph, device="cuda", tier="device") as on_gpu:
        for source in range(0, 1024, 64):
            assert np.array_equal(bfs(on_gpu, source).values, bfs(on_cpu, source).values)
