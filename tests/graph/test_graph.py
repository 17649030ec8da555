"""Breadth-first search and connected components: equal to SciPy's, however small the cache."""

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.sparse import csgraph, csr_matrix

from warpwell.cache import Cache
from warpwell.errors import ArgumentError, DeviceNotFoundError, FormatError
from warpwell.graph import Graph, LoadedGraph, bfs, build, connected_components, convert, generate
from warpwell.graph.algorithms.work_items import SEGMENT

CNR = Path(__file__).parents[3] / "shared" / "data" / "cnr-2000.txt.gz"
Vertices = npt.NDArray[np.int64]


def matrix(graph: Graph) -> csr_matrix:
    offsets, edges = graph.load()
    return csr_matrix((np.ones(graph.edges, np.int8), edges, offsets), shape=(graph.vertices,) * 2)


def expected_levels(graph: Graph, source: int) -> Vertices:
    distances = csgraph.shortest_path(matrix(graph), unweighted=True, indices=source)
    return np.where(np.isinf(distances), -1, distances).astype(np.int64)


def expected_labels(graph: Graph) -> Vertices:
    count, groups = csgraph.connected_components(matrix(graph), directed=False)
    smallest = np.full(count, graph.vertices)
    np.minimum.at(smallest, groups, np.arange(graph.vertices))
    return smallest[groups]


def made(folder: Path, pairs: list[tuple[int, int]], *, undirected: bool = True, vertices: int | None = None) -> Graph:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    chunk = (array[:, 0].copy(), array[:, 1].copy())
    return build([chunk], folder / "made.ww", undirected=undirected, vertices=vertices)


@pytest.fixture(scope="module")
def kron(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    # 33 KB of edges, many components
    return generate("kron", 10, tmp_path_factory.mktemp("kron") / "kron.ww", degree=6)


@pytest.fixture(scope="module")
def directed(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate("urand", 10, tmp_path_factory.mktemp("urand") / "urand.ww", degree=3, undirected=False)


@pytest.mark.quick("one page", "all")
@pytest.mark.parametrize(
    ("cache", "page_size"),
    [(4096, 4096), (8192, 4096), (512, 512), (1024, 512), ("16KiB", 4096), ("1MiB", 4096)],
    ids=["one page", "two pages", "one of 512", "two of 512", "four pages", "all"],
)
def test_equal_to_scipy(kron: Graph, cache: int | str, page_size: int) -> None:
    options = {"device": "cpu", "cache": cache, "page_size": page_size, "stats": "full"}
    source = int(np.argmax(np.diff(kron.load()[0])))
    found = bfs(kron, source, **options)
    levels = expected_levels(kron, source)
    assert found.values.dtype == np.int64
    assert np.array_equal(found.values, levels)
    assert found.count == np.count_nonzero(levels >= 0)
    assert found.rounds == levels.max()
    # A pulling vertex stops reading its neighbors once it has found one of them.
    assert 0 < found.stats.bytes_wanted <= 4 * np.diff(kron.load()[0])[levels >= 0].sum()
    assert found.stats.misses > 0
    components = connected_components(kron, **options)
    labels = expected_labels(kron)
    assert np.array_equal(components.values, labels)
    assert components.count == np.unique(labels).size
    if cache != "1MiB":
        assert found.stats.evictions > 0
        assert components.stats.evictions > 0


@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "device"])
def test_every_tier(kron: Graph, tier: str) -> None:
    source = int(np.argmax(np.diff(kron.load()[0])))
    # These options use kernels that other tests have compiled.
    with LoadedGraph(kron, device="cpu", tier=tier, cache="16KiB", page_size=4096, stats="full") as loaded:
        assert np.array_equal(bfs(loaded, source).values, expected_levels(kron, source))
        assert np.array_equal(connected_components(loaded).values, expected_labels(kron))


def test_edges_are_followed_in_their_direction(directed: Graph) -> None:
    for source in range(0, 1024, 256):
        levels = bfs(directed, source, device="cpu", cache="8KiB", page_size=4096, stats="full").values
        assert np.array_equal(levels, expected_levels(directed, source))


def test_components_of_a_directed_graph_are_refused(directed: Graph) -> None:
    with pytest.raises(ArgumentError, match="--undirected"):
        connected_components(directed, device="cpu")


def test_a_vertex_with_many_neighbors_is_split(tmp_path: Path) -> None:
    leaves = 5 * SEGMENT + 7
    star = made(tmp_path, [(leaves, leaf) for leaf in range(leaves)])
    options = {"device": "cpu", "cache": "8KiB", "page_size": 4096, "stats": "full"}
    found = bfs(star, 3, **options)
    assert found.rounds == 2
    assert np.array_equal(found.values, expected_levels(star, 3))
    assert connected_components(star, **options).count == 1


def test_a_long_path(tmp_path: Path) -> None:
    path = made(tmp_path, [(v, v + 1) for v in range(300)])
    options = {"device": "cpu", "cache": "4KiB", "page_size": 512, "stats": "full"}
    found = bfs(path, 0, **options)
    assert found.rounds == 300
    assert np.array_equal(found.values, np.arange(301))
    assert not connected_components(path, **options).values.any()


def test_components_that_the_sample_misses(tmp_path: Path) -> None:
    """Many components of four vertices, linked in full only by their third neighbors."""
    pairs = [(4 * k + i, 4 * k + j) for k in range(500) for i in range(4) for j in range(i + 1, 4)]
    graph = made(tmp_path, [*pairs, *((v, v) for v in range(50))], vertices=2010)
    found = connected_components(graph, device="cpu", cache="8KiB", page_size=512, stats="full")
    assert found.count == 510
    assert np.array_equal(found.values, expected_labels(graph))


def test_a_graph_without_edges(tmp_path: Path) -> None:
    graph = made(tmp_path, [], vertices=5)
    found = bfs(graph, 2, device="cpu")
    assert found.values.tolist() == [-1, -1, 0, -1, -1]
    assert (found.count, found.rounds) == (1, 0)
    assert connected_components(made_again(tmp_path), device="cpu").values.tolist() == [0, 1, 2]


def made_again(folder: Path) -> Graph:
    return build([], folder / "again.ww", undirected=True, vertices=3)


@pytest.mark.parametrize("source", [-1, 1024, 1.5, True, "1"])
def test_a_source_that_is_no_vertex(kron: Graph, source: object) -> None:
    with pytest.raises(ArgumentError, match="source"):
        bfs(kron, source, device="cpu")  # type: ignore[arg-type]


def test_one_cache_for_several_runs(kron: Graph) -> None:
    with Cache("32KiB", device="cpu", stats="full") as cache, LoadedGraph(kron, cache=cache) as loaded:
        first, second = (bfs(loaded, source).stats for source in (0, 1))
        assert cache.stats.misses == first.misses + second.misses
        with pytest.raises(ArgumentError, match="loaded already"):
            bfs(loaded, 0, cache="1MiB")


def test_progress(kron: Graph) -> None:
    steps: list[tuple[str, int, int]] = []
    source = int(np.argmax(np.diff(kron.load()[0])))
    options = {"device": "cpu", "tier": "storage", "page_size": 4096, "stats": "full"}
    depth = bfs(kron, source, **options, progress=lambda *step: steps.append(step)).rounds
    # Each kernel is compiled before its first launch.
    compiled = [step for step in steps if step[0] == "compile"]
    assert len(compiled) >= 4 and compiled == [("compile", 0, 1), ("compile", 1, 1)] * (len(compiled) // 2)
    # Each level is reported. The last one finds nothing, unless its vertices have no edges left.
    levels = [level for stage, level, _ in steps if stage == "search"]
    assert levels == list(range(1, len(levels) + 1)) and len(levels) == len(steps) - len(compiled)
    assert levels[-1] in (depth, depth + 1)
    steps.clear()
    assert bfs(kron, source, device="cpu", progress=lambda *step: steps.append(step)).rounds == depth
    # In memory, one launch visits several levels of few edges, and only the first of them is reported.
    assert {stage for stage, _, _ in steps} == {"compile", "search"}
    levels = [level for stage, level, _ in steps if stage == "search"]
    assert levels[0] == 1 and levels == sorted(set(levels)) and levels[-1] <= depth + 1


def test_destinations_that_are_no_vertices(tmp_path: Path) -> None:
    graph = made(tmp_path, [(v, v + 1) for v in range(20)])
    edges = np.load(graph.edges_path)
    edges[[3, 9]] = -7, 1 << 30
    np.save(graph.edges_path, edges)
    heads = np.load(graph.heads_path)
    heads[[16, 17]] = -7, 1 << 30
    np.save(graph.heads_path, heads)
    for run in (lambda: bfs(graph, 0, device="cpu"), lambda: connected_components(graph, device="cpu")):
        with pytest.raises(FormatError, match="outside of 0 to 20"):
            run()


def test_offsets_that_fall(tmp_path: Path) -> None:
    graph = made(tmp_path, [(v, v + 1) for v in range(20)])
    offsets = np.load(graph.offsets_path)
    offsets[7] = 0
    np.save(graph.offsets_path, offsets)
    with pytest.raises(FormatError, match="offset 7 is smaller"):
        bfs(graph, 0, device="cpu")


def test_no_gpu(kron: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwell.targets.gpu.device.has_cuda", lambda: False)
    with pytest.raises(DeviceNotFoundError, match="cpu"):
        bfs(kron, 0, device="cuda")


REAL = ("karate.mtx", "jagmesh7.mtx", "west0067.mtx", "facebook_combined.txt.gz")
LARGE = ("bcsstk13.mtx.gz", "delaunay_n16.mtx.gz", "soc-slashdot0902.txt.gz", "ego-twitter-undirected.txt.gz")


@pytest.mark.skipif(not CNR.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("file", [*REAL, *(pytest.param(file, marks=pytest.mark.slow) for file in LARGE)])
def test_real_graphs_in_both_orders(tmp_path: Path, file: str) -> None:
    for order in ("degree", "given"):
        graph = convert(CNR.with_name(file), tmp_path / "g.ww", undirected=True, order=order, overwrite=True)
        source = int(np.argmax(graph.degrees()))
        options = {"device": "cpu", "tier": "storage", "cache": max(4096, graph.edges // 4096 * 4096)}
        with LoadedGraph(graph, page_size=4096, **options) as loaded:
            assert np.array_equal(bfs(loaded, source).values, expected_levels(graph, source))
            assert np.array_equal(connected_components(loaded).values, expected_labels(graph))


@pytest.mark.slow
@pytest.mark.skipif(not CNR.exists(), reason="the web crawl is not part of the repository")
def test_a_web_crawl(tmp_path: Path) -> None:
    crawl = convert(CNR, tmp_path / "cnr.ww")
    found = bfs(crawl, 10000, device="cpu", cache="2MiB", stats="full")
    assert found.count == 325557
    assert np.array_equal(found.values, expected_levels(crawl, 10000))
    assert found.stats.bytes_wanted == 4 * crawl.edges
    both = convert(CNR, tmp_path / "both.ww", undirected=True)
    assert json.loads((both.path / "graph.json").read_text())["undirected"]
    components = connected_components(both, device="cpu", cache="2MiB", stats="full")
    assert np.array_equal(components.values, expected_labels(both))
    assert found.stats.evictions > 1000
    assert found.stats.io_amplification is not None
    assert components.stats.bytes_read < 2 * both.edges  # half of the edges, with the first neighbors in the cache


def test_chunks_and_names_that_are_refused(tmp_path):
    ends = np.array([0])
    for chunk in ((ends,), (ends, ends, ends, ends), 5):
        with pytest.raises(ArgumentError, match="columns"):
            build([chunk], tmp_path / "g.ww")
    with pytest.raises(ArgumentError, match="names"):
        build([(ends, ends + 1)], tmp_path / "g.ww", names=["a", "\ud800"])
    assert not list(tmp_path.iterdir())


def test_offsets_that_exceed_the_free_memory(tmp_path, monkeypatch):
    module = sys.modules["warpwell.graph.build"]
    monkeypatch.setattr(module, "_memory_of", {"MemTotal": 1 << 40, "MemAvailable": 1 << 30}.get)
    with pytest.raises(FormatError, match="than is free"):
        build([], tmp_path / "g.ww", vertices=1 << 28)
    assert not list(tmp_path.iterdir())
