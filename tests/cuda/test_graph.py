"""Graph kernels for a GPU: they compile to PTX anywhere; on a GPU they find what the CPU finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from warpwell.array.page_set import PageSetView
from warpwell.array.view import ArrayView, ViewStatic
from warpwell.graph import LoadedGraph, bfs, build, connected_components, generate
from warpwell.graph.algorithms import components, search
from warpwell.graph.algorithms.work_items import PIECE
from warpwell.targets.compiler import run_cuda

WORDS = np.zeros(8, np.int64)
LABELS = np.zeros(8, np.int32)
BITS = np.zeros(8, np.uint32)


def edges(full: bool, *, cached: bool = True, dtype: str = "<i4") -> ArrayView:
    static = ViewStatic(dtype, 1, cached, False, False, full, True, np.dtype(dtype).itemsize)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


def pages() -> PageSetView:
    return PageSetView((True, 4), dict.fromkeys((name for name, _ in PageSetView.layout(None)), 0))


@pytest.mark.ptx
@pytest.mark.parametrize("full", [False, True], ids=["basic", "full"])
def test_kernels_that_read_edges_compile(full: bool) -> None:
    w, e = WORDS, edges(full)
    for kernel, arguments, update in (
        (search._push, (e, w, LABELS, BITS, w, 0, 0, (0, 0), 0, 0, w), ".or.b32"),
        (search._pull, (e, w, LABELS, BITS, BITS, 0, (0, 0), 0, 0, 0, 1, w), "vote.sync.ballot"),
        (components._link_runs, (e, w, LABELS, 0, 0, w), ".min.s32"),
        (components._link_rest, (e, w, LABELS, w, 0, (0, 0), w), ".min.s32"),
    ):
        text = run_cuda.ptx(kernel, arguments)
        # the hit path's acquire, and one claim or hook that orders nothing
        assert "ld.acquire.gpu" in text
        assert f"atom.relaxed.gpu.global{update}" in text if update[0] == "." else update in text


@pytest.mark.ptx
def test_kernels_on_vertices_and_edges_in_memory_compile() -> None:
    w, e = WORDS, edges(False, cached=False)
    for kernel, arguments in (
        (search._push_levels, (e, w, LABELS, BITS, w, 0, 0, 0, 0, 0, w)),
        (search._collect, (w, LABELS, 0, w, 0, 0, 0, w)),
        (search._mark, (w, w, LABELS, 0, pages(), pages())),
        (components._link_first, (e, w, LABELS, 0, w)),
        (components._mark_runs, (pages(), 0, 0)),
        (components._mark_rest, (w, LABELS, 0, pages())),
        (components._compress, (LABELS, 0)),
        (components._sample, (LABELS, 1, 0, w)),
        (components._select, (w, LABELS, 0, 0, 0, 0, w, 0, w)),
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
    assert np.array_equal(levels.levels, cpu_levels.levels)
    assert np.array_equal(labels.labels, cpu_labels.labels)


@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "device"])
def test_a_vertex_with_many_neighbours(tmp_path: Path, tier: str) -> None:
    leaves = np.arange(9 * PIECE + 5)
    graph = build([(np.full(leaves.size, leaves.size), leaves)], tmp_path / "star.ww", undirected=True)
    with LoadedGraph(graph, device="cuda", tier=tier, cache="64KiB") as loaded:
        found = bfs(loaded, 0)
        assert (found.reached, found.depth) == (graph.vertices, 2)
        assert connected_components(loaded).components == 1
