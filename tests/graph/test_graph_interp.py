"""Graph kernels under interleavings on weak memory."""

import inspect
import itertools
import textwrap
from collections import deque

import numpy as np
import pytest

import warpwell as ww
from warpwell import gpu
from warpwell.graph import Graph, bfs, build, connected_components, pagerank, sssp, triangles
from warpwell.graph.algorithms import components


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Three components: random edges, a path and a lone vertex."""
    random = np.random.default_rng(7)
    sources = np.concatenate([random.integers(0, 40, 70), np.arange(40, 52)])
    destinations = np.concatenate([random.integers(0, 40, 70), np.arange(41, 53)])
    weights = random.integers(0, 9, sources.size).astype(np.int32)
    chunk, out = (sources, destinations, weights), tmp_path_factory.mktemp("g") / "g.ww"
    return build([chunk], out, undirected=True, vertices=54, weights="int32")


def levels_of(graph: Graph, source: int) -> list[int]:
    offsets, edges = graph.load()
    levels = [-1] * graph.vertices
    levels[source] = 0
    waiting = deque([source])
    while waiting:
        vertex = waiting.popleft()
        for neighbor in edges[offsets[vertex] : offsets[vertex + 1]].tolist():
            if levels[neighbor] < 0:
                levels[neighbor] = levels[vertex] + 1
                waiting.append(neighbor)
    return levels


@ww.kernel
def link_pairs(pairs, parents):
    k = gpu.grid(1)
    components._link(pairs[k, 0], pairs[k, 1], parents)


def unlinked(seeds: range) -> list[int]:
    """Return the seeds with which threads that link a few vertices leave some of them apart."""
    found = []
    for seed in seeds:
        # the last vertex is the larger root for all of them
        pairs = np.random.default_rng(seed).permutation([(v, 7) for v in range(7)])
        parents = np.arange(8, dtype=np.int32)
        link_pairs[7](pairs, parents, device="interp", seed=seed)
        roots = parents.copy()
        for _ in range(8):
            roots = parents[roots]
        if roots.any():
            found.append(seed)
    return found


def test_links_that_meet_leave_nothing_apart() -> None:
    assert unlinked(range(200)) == []


def test_a_link_that_forgets_the_tree_that_came_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a thread that finds its root linked by another thread does not link its own tree."""
    original, planted = "            p = above\n            q = low", "            return"
    source = inspect.getsource(components._link)
    assert original in source
    source = source.replace(original, planted)
    scope = dict(vars(components))
    exec(compile(textwrap.dedent(source), "planted", "exec"), scope)
    monkeypatch.setattr(components, "_link", scope["_link"])
    assert unlinked(range(200))


@pytest.mark.quick("512-0")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 4))])
@pytest.mark.parametrize("cache", [512, 1024])
def test_search_and_components(graph: Graph, seed: int, cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_SEED", str(seed))
    options = {"device": "interp", "cache": cache, "page_size": 512, "stats": "full"}
    found = bfs(graph, seed, **options)
    assert found.values.tolist() == levels_of(graph, seed)
    assert found.stats.evictions > 0
    labels = [min(v for v in range(54) if levels_of(graph, u)[v] >= 0) for u in range(54)]
    components = connected_components(graph, **options)
    assert components.values.tolist() == labels
    assert components.count == len(set(labels))


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_paths_ranks_and_triangles(graph: Graph, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_SEED", str(seed))
    options = {"device": "interp", "tier": "storage", "cache": 1024, "page_size": 512}
    offsets, edges = graph.load()
    weights = graph.map(graph.weights_path)
    neighbors = [
        dict(zip(edges[a:b].tolist(), weights[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(offsets.tolist())
    ]
    distances = {seed: 0}
    for _ in range(graph.vertices):
        for v, d in list(distances.items()):
            for u, w in neighbors[v].items():
                distances[u] = min(d + w, distances.get(u, d + w))
    found = sssp(graph, seed, **options)
    assert found.values.tolist() == [distances.get(v, np.iinfo(np.int64).max) for v in range(graph.vertices)]
    ranks = [1 / 54] * 54
    lost = sum(rank for rank, row in zip(ranks, neighbors, strict=True) if not row) / 54
    ranks = [0.15 / 54 + 0.85 * (lost + sum(ranks[u] / len(neighbors[u]) for u in row)) for row in neighbors]
    assert np.allclose(pagerank(graph, tolerance=0.0, iterations=1, **options).values, ranks, rtol=1e-12)
    count = sum(1 for v, row in enumerate(neighbors) for u in row for w in row if v < u < w and w in neighbors[u])
    assert triangles(graph, **options).count == count
