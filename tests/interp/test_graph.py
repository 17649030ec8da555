"""Graph kernels under interleavings on weak memory."""

from collections import deque

import numpy as np
import pytest

from warpwell.graph import Graph, bfs, build, connected_components


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Three components: random edges, a path and a lone vertex."""
    random = np.random.default_rng(7)
    sources = np.concatenate([random.integers(0, 40, 70), np.arange(40, 52)])
    destinations = np.concatenate([random.integers(0, 40, 70), np.arange(41, 53)])
    return build([(sources, destinations)], tmp_path_factory.mktemp("g") / "g.ww", undirected=True, vertices=54)


def levels_of(graph: Graph, source: int) -> list[int]:
    offsets, edges = graph.load()
    levels = [-1] * graph.vertices
    levels[source] = 0
    waiting = deque([source])
    while waiting:
        vertex = waiting.popleft()
        for neighbour in edges[offsets[vertex] : offsets[vertex + 1]].tolist():
            if levels[neighbour] < 0:
                levels[neighbour] = levels[vertex] + 1
                waiting.append(neighbour)
    return levels


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.long) for k in (2, 3, 4))])
@pytest.mark.parametrize("cache", [512, 1024])
def test_search_and_components(graph: Graph, seed: int, cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_SEED", str(seed))
    options = {"device": "interp", "cache": cache, "page_size": 512, "stats": "full"}
    found = bfs(graph, seed, **options)
    assert found.levels.tolist() == levels_of(graph, seed)
    assert found.stats.evictions > 0
    labels = [min(v for v in range(54) if levels_of(graph, u)[v] >= 0) for u in range(54)]
    components = connected_components(graph, **options)
    assert components.labels.tolist() == labels
    assert components.components == len(set(labels))
