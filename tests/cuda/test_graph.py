"""Graph kernels for a GPU: they compile to PTX anywhere; on a GPU they find what the CPU finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from warpwell.array.view import ArrayView, ViewStatic
from warpwell.graph import LoadedGraph, bfs, build, components, connected_components, generate, search
from warpwell.graph.work_items import PIECE
from warpwell.targets.compiler import run_cuda

WORDS = np.zeros(8, np.int64)


def edges(full: bool) -> ArrayView:
    static = ViewStatic("<i4", 1, True, False, False, full, True, 4)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


@pytest.mark.ptx
@pytest.mark.parametrize("full", [False, True], ids=["basic", "full"])
def test_kernels_that_read_edges_compile(full: bool) -> None:
    w = WORDS
    for kernel, arguments in (
        (search._advance, (edges(full), w, w, w, 0, 0, 0, w)),
        (components._link_first, (edges(full), w, w, 0, w)),
        (components._link_rest, (edges(full), w, w, w, 0, w)),
    ):
        text = run_cuda.ptx(kernel, arguments)
        # the hit path's acquire, and one claim or hook by compare-and-swap
        assert "ld.acquire.gpu" in text
        assert ".cas.b64" in text


@pytest.mark.ptx
def test_kernels_on_vertices_compile() -> None:
    w = WORDS
    for kernel, arguments in (
        (search._begin, (0, w, w, w, w)),
        (search._rewind, (w, 0)),
        (search._collect, (w, w, 0, w, w)),
        (components._compress, (w,)),
        (components._sample, (w, 1, w)),
        (components._select, (w, w, 0, w, w)),
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
    assert levels.stats.bytes_wanted == cpu_levels.stats.bytes_wanted


@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "device"])
def test_a_vertex_with_many_neighbours(tmp_path: Path, tier: str) -> None:
    leaves = np.arange(9 * PIECE + 5)
    graph = build([(np.full(leaves.size, leaves.size), leaves)], tmp_path / "star.ww", undirected=True)
    with LoadedGraph(graph, device="cuda", tier=tier, cache="64KiB") as loaded:
        found = bfs(loaded, 0)
        assert (found.reached, found.depth) == (graph.vertices, 2)
        assert connected_components(loaded).components == 1
