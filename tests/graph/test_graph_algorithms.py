"""Shortest paths, PageRank and triangles: equal to SciPy's, in every tier and however small the cache."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csgraph, csr_array
from tests.harness.graphs import given_rows

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph import Graph, LoadedGraph, bfs, build, connected_components, generate, pagerank, sssp, triangles
from warpwell.graph.algorithms.work_items import SEGMENT
from warpwell.targets import compiler

TIERS = ["storage", "host-cached", "host", "device", "mapped"]
Edges = list[tuple[int, int, int]]


def matrix(graph: Graph, values: npt.NDArray[Any] | None = None) -> csr_array:
    offsets, edges = graph.load()
    weights = np.ones(graph.edges) if values is None else values
    return csr_array((weights, edges, offsets), shape=(graph.vertices,) * 2)


def expected_distances(graph: Graph, source: int) -> npt.NDArray[Any]:
    """Bellman and Ford's distances in float64 or int64: SciPy drops edges of weight 0 of a sparse matrix."""
    offsets, edges, weights = given_rows(graph)
    weights = weights.astype(np.float64 if graph.weights == "float32" else np.int64)
    starts = np.repeat(np.arange(graph.vertices), np.diff(offsets))
    no_path: Any = np.inf if graph.weights == "float32" else np.iinfo(np.int64).max
    found = np.full(graph.vertices, no_path, weights.dtype)
    found[source] = 0
    while True:
        before = found.copy()
        reached = found[starts] != no_path
        np.minimum.at(found, edges[reached], found[starts[reached]] + weights[reached])
        if np.array_equal(before, found):
            return found


def expected_ranks(graph: Graph, damping: float, iterations: int) -> npt.NDArray[np.float64]:
    links, n = matrix(graph), graph.vertices
    degrees = np.diff(graph.load()[0])
    ranks = np.full(n, 1 / n)
    for _ in range(iterations):
        shares = np.where(degrees > 0, ranks / np.maximum(degrees, 1), 0)
        ranks = (1 - damping) / n + damping * (links.T @ shares + ranks[degrees == 0].sum() / n)
    return np.asarray(ranks)


def expected_triangles(graph: Graph) -> int:
    offsets, edges = graph.load()
    starts = np.repeat(np.arange(graph.vertices), np.diff(offsets))
    keep = starts != edges
    links = csr_array((np.ones(keep.sum(), np.int64), (starts[keep], edges[keep])), shape=(graph.vertices,) * 2)
    links.sum_duplicates()
    links.data[:] = 1
    return int((links @ links).multiply(links).sum()) // 6


def made(folder: Path, edges: Edges, weights: str | None = None, **options: Any) -> Graph:
    array = np.array(edges, np.int64).reshape(-1, 3)
    columns = [array[:, k].copy() for k in range(3)]
    values = columns[2].astype(weights or np.int64)
    chunk = (columns[0], columns[1], values) if weights else (columns[0], columns[1])
    return build([chunk], folder / "made.ww", weights=weights, **options)


@pytest.fixture(scope="module", params=["int32", "float32"])
def kron(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Graph:
    return generate("kron", 9, tmp_path_factory.mktemp("kron") / "kron.ww", degree=6, weights=request.param)


@pytest.fixture(scope="module")
def directed(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("urand") / "urand.ww"
    return generate("urand", 9, folder, degree=2, undirected=False, in_edges=True, weights="int32")


@pytest.mark.quick("int32-storage", "int32-host")
@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(kron: Graph, tier: str) -> None:
    source = int(np.argmax(np.diff(kron.load()[0])))
    # a mapping of the file has no cache
    options: dict[str, Any] = {} if tier == "mapped" else {"cache": "16KiB", "page_size": 4096}
    with LoadedGraph(kron, device="cpu", tier=tier, **options) as loaded:
        paths = sssp(loaded, source)
        assert np.array_equal(paths.values, expected_distances(kron, source))
        assert paths.values.dtype == (np.int64 if kron.weights == "int32" else np.float64)
        assert paths.count == np.count_nonzero(paths.values < paths.values.max())
        ranks = pagerank(loaded, tolerance=0.0, iterations=20)
        assert np.allclose(ranks.values, expected_ranks(kron, 0.85, 20), rtol=1e-12, atol=0)
        assert ranks.rounds == 20 and ranks.change > 0
        assert triangles(loaded).count == expected_triangles(kron)


@pytest.mark.quick("False")
@pytest.mark.parametrize("undirected", [True, False])
def test_levels_of_hundreds_of_pages(tmp_path: Path, undirected: bool) -> None:
    graph = generate("kron", 12, tmp_path / "kron.ww", degree=6, undirected=undirected, in_edges=True)
    sources = np.flatnonzero(np.diff(graph.load()[0]))[::400]
    options: dict[str, Any] = {"device": "cpu", "cache": "64KiB", "page_size": 512}
    with LoadedGraph(graph, tier="storage", **options) as stored, LoadedGraph(graph, device="cpu", tier="host") as host:
        for source in sources:
            found = bfs(stored, int(source))
            assert np.array_equal(found.values, bfs(host, int(source)).values)
            assert found.stats.bytes_read < 2 * 4 * graph.edges
        if undirected:
            assert np.array_equal(connected_components(stored).values, connected_components(host).values)


@pytest.mark.parametrize("cache", [4096, 8192])
def test_the_smallest_caches(kron: Graph, cache: int | str) -> None:
    options: dict[str, Any] = {"device": "cpu", "tier": "storage", "cache": cache, "page_size": 4096}
    ranks = pagerank(kron, tolerance=0.0, iterations=2, **options)
    assert np.allclose(ranks.values, expected_ranks(kron, 0.85, 2), rtol=1e-12, atol=0)
    assert ranks.stats.evictions > 0
    found = triangles(kron, **options)
    assert found.count == expected_triangles(kron)
    assert found.stats.evictions > 0


@pytest.mark.parametrize("cache", [512, "1KiB"])
def test_shortest_paths_with_the_smallest_caches(tmp_path: Path, cache: int | str) -> None:
    graph = generate("urand", 6, tmp_path / "urand.ww", degree=4, weights="int32")
    paths = sssp(graph, 3, device="cpu", tier="storage", cache=cache, page_size=512)
    assert np.array_equal(paths.values, expected_distances(graph, 3))
    assert paths.stats.evictions > 0


def test_scipy_agrees(kron: Graph) -> None:
    source = 5
    weights = given_rows(kron)[2].astype(np.float64)
    expected = csgraph.dijkstra(matrix(kron, weights), indices=source)
    found = sssp(kron, source, device="cpu").values
    found = np.where(found == np.iinfo(np.int64).max, np.inf, found) if kron.weights == "int32" else found
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("delta", [0.5, 3.0, 1e6])
def test_any_delta(kron: Graph, delta: float) -> None:
    found = sssp(kron, 5, delta=delta, device="cpu")
    assert np.array_equal(found.values, expected_distances(kron, 5))


@pytest.mark.quick("host")
@pytest.mark.parametrize("tier", ["storage", "host"])
def test_buckets_of_vertices_without_edges(tmp_path: Path, tier: str) -> None:
    graph = made(tmp_path, [(0, 1, 1), (0, 2, 5), (0, 3, 9), (3, 4, 1), (3, 5, 7)], "int32")
    found = sssp(graph, 0, delta=0.5, device="cpu", tier=tier)
    assert found.values.tolist() == [0, 1, 5, 9, 10, 16]


def test_ranks_that_do_not_converge_are_logged(directed: Graph, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell.graph")
    found = pagerank(directed, device="cpu", tolerance=1e-12, iterations=3)
    messages = [record.getMessage() for record in caplog.records if record.name == "warpwell.graph.algorithms"]
    assert messages == [
        f"the ranks changed by {found.change:.3g} in the last of 3 iterations, but the tolerance is 1e-12: allow more "
        f"iterations"
    ]
    pagerank(directed, device="cpu", tolerance=0.0, iterations=3)  # exactly three
    pagerank(directed, device="cpu")
    assert sum(record.name == "warpwell.graph.algorithms" for record in caplog.records) == 1


def test_directed(directed: Graph) -> None:
    for source in (0, 200):
        assert np.array_equal(sssp(directed, source, device="cpu").values, expected_distances(directed, source))
    found = pagerank(directed, device="cpu", tolerance=1e-12)
    assert found.change < 1e-12
    assert np.allclose(found.values, expected_ranks(directed, 0.85, 200), rtol=1e-9, atol=0)
    assert found.values.sum() == pytest.approx(1)
    # in-edges let a search pull
    levels = csgraph.shortest_path(matrix(directed), unweighted=True, indices=7)
    assert np.array_equal(bfs(directed, 7, device="cpu").values, np.where(np.isinf(levels), -1, levels))


@pytest.mark.slow
def test_distances_of_more_than_four_bytes(tmp_path: Path) -> None:
    graph = made(tmp_path, [(v, v + 1, (1 << 31) - 2) for v in range(5)], "int32")
    found = sssp(graph, 0, device="cpu")
    assert found.values.tolist() == [v * ((1 << 31) - 2) for v in range(6)]
    assert sssp(graph, 5, device="cpu").values.tolist() == [np.iinfo(np.int64).max] * 5 + [0]


def test_a_search_reads_the_pages_that_many_small_vertices_share(tmp_path: Path) -> None:
    # The source has 400 middle vertices, all linked with one another. Each of 4,000 leaves has one of them, and four
    # vertices of a larger degree, which are its first neighbors: the first neighbors do not decide its level. The
    # other vertices are on a ring, and have no other than first neighbors.
    large, middle, leaves, source = np.arange(4), 4 + np.arange(400), 404 + np.arange(4000), 4404
    pairs = [(source, m) for m in middle]
    pairs += [(m, n) for m in middle for n in middle if m < n]
    pairs += [(leaf, neighbor) for k, leaf in enumerate(leaves) for neighbor in (*large, middle[k % 400])]
    ring = np.arange(120_000)
    links = [4405 + np.concatenate([ring, (ring + step) % ring.size]).reshape(2, -1) for step in (1, 2)]
    graph = build([np.array(pairs).T, *links], tmp_path / "g.ww", undirected=True, order="degree")
    found = bfs(graph, source, device="cpu", tier="storage", cache="4MiB", page_size=4096, threads=1)
    assert np.array_equal(found.values, np.repeat([3, 1, 2, 0, -1], [4, 400, 4000, 1, ring.size]))
    # The edges of the leaves and large vertices are on 36 pages, and the edges of the middle vertices on 160.
    assert found.stats.bytes_read <= 50 * 4096


def test_a_vertex_with_many_neighbors(tmp_path: Path) -> None:
    leaves = 3 * SEGMENT + 5
    graph = made(tmp_path, [(leaves, leaf, 1 + leaf % 7) for leaf in range(leaves)], "int32", undirected=True)
    options: dict[str, Any] = {"device": "cpu", "tier": "storage", "cache": "16KiB"}
    assert np.array_equal(sssp(graph, 3, **options).values, expected_distances(graph, 3))
    ranks = pagerank(graph, tolerance=0.0, iterations=3, **options).values
    assert np.allclose(ranks, expected_ranks(graph, 0.85, 3), rtol=1e-10, atol=0)
    assert triangles(graph, **options).count == 0


def test_no_edges(tmp_path: Path) -> None:
    graph = made(tmp_path, [], "int32", undirected=True, vertices=3)
    assert sssp(graph, 1, device="cpu").values.tolist() == [np.iinfo(np.int64).max, 0, np.iinfo(np.int64).max]
    assert np.allclose(pagerank(graph, device="cpu").values, 1 / 3)
    assert triangles(graph, device="cpu").count == 0


def test_what_is_refused(tmp_path: Path, directed: Graph) -> None:
    (tmp_path / "bare").mkdir()
    bare = made(tmp_path / "bare", [(0, 1, 0), (1, 2, 0)])
    with pytest.raises(ArgumentError, match="no weights"):
        sssp(bare, 0, device="cpu")
    with pytest.raises(ArgumentError, match="--in-edges"):
        pagerank(bare, device="cpu")
    with pytest.raises(ArgumentError, match=r"triangles.*--undirected"):
        triangles(directed, device="cpu")
    with pytest.raises(ArgumentError, match="source"):
        sssp(directed, -1, device="cpu")
    for options in ({"damping": 1.5}, {"tolerance": -1.0}, {"tolerance": np.nan}, {"iterations": 0}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            pagerank(directed, device="cpu", **options)
    for delta in (0, -1.0, np.inf, np.nan):
        with pytest.raises(ArgumentError, match="delta"):
            sssp(directed, 0, delta=delta, device="cpu")


def test_weights_below_0(tmp_path: Path) -> None:
    graph = made(tmp_path, [(0, 1, 4), (1, 2, -4)], "int32")
    with pytest.raises(ArgumentError, match="1 weights are below 0"):
        sssp(graph, 0, device="cpu")


def test_destinations_that_are_no_vertices(tmp_path: Path) -> None:
    graph = made(tmp_path, [(v, v + 1, 1) for v in range(20)], "int32", undirected=True)
    edges = np.load(graph.edges_path)
    edges[[3, 9]] = -7, 1 << 30
    np.save(graph.edges_path, edges)
    for run in (
        lambda: sssp(graph, 0, device="cpu"),
        lambda: pagerank(graph, device="cpu"),
        lambda: triangles(graph, device="cpu"),
    ):
        with pytest.raises(FormatError, match="outside of 0 to 20"):
            run()


def test_progress(kron: Graph) -> None:
    steps: list[tuple[str, int, int]] = []
    pagerank(kron, device="cpu", iterations=2, tolerance=0.0, progress=lambda *step: steps.append(step))
    assert [step for step in steps if step[0] != "compile"] == [("iterate", 0, 2), ("iterate", 1, 2)]
    assert steps[:2] == [("compile", 0, 1), ("compile", 1, 1)] and len(steps) == 2 + 3 * 2
    steps.clear()
    assert sssp(kron, 5, device="cpu", progress=lambda *step: steps.append(step)).rounds == steps[-1][1]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Edges, bool, str]:
    vertices = draw(st.integers(1, 40))
    vertex = st.integers(0, vertices - 1)
    edges = draw(st.lists(st.tuples(vertex, vertex, st.integers(0, 9)), max_size=120))
    return vertices, edges, draw(st.booleans()), draw(st.sampled_from(["given", "degree"]))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=graphs(), weights=st.sampled_from(["int32", "float32"]), storage=st.booleans())
def test_random_graphs(
    drawn: tuple[int, Edges, bool, str], weights: str, storage: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Self-loops, repeated edges, vertices without edges, several components, weights of 0."""
    vertices, edges, undirected, order = drawn
    folder = tmp_path_factory.mktemp("random")
    graph = made(folder, edges, weights, vertices=vertices, undirected=undirected, in_edges=True, order=order)
    options: dict[str, Any] = {"tier": "storage", "cache": 1024, "page_size": 512} if storage else {"tier": "host"}
    links = matrix(graph)
    with LoadedGraph(graph, device="cpu", **options) as loaded:
        assert np.array_equal(sssp(loaded, 0).values, expected_distances(graph, 0))
        steps = csgraph.shortest_path(links, unweighted=True, indices=0)
        assert np.array_equal(bfs(loaded, 0).values, np.where(np.isinf(steps), -1, steps))
        ranks = pagerank(loaded, tolerance=0.0, iterations=5).values
        assert np.allclose(ranks, expected_ranks(graph, 0.85, 5), rtol=1e-12, atol=1e-15)
        if undirected:
            count, groups = csgraph.connected_components(links, directed=False)
            smallest = np.full(count, vertices)
            np.minimum.at(smallest, groups, np.arange(vertices))
            assert np.array_equal(connected_components(loaded).values, smallest[groups])
            assert triangles(loaded).count == expected_triangles(graph)


def test_no_launch_is_in_progress_while_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I/O threads that poll for commands take a fifth of a core from the compiler."""
    graph = generate("kron", 6, tmp_path / "kron.ww")
    compile_launch, in_progress = compiler.compile_launch, []

    def record(*arguments: Any) -> None:
        in_progress.append(loaded.edges.cache._in_flight)
        compile_launch(*arguments)

    with LoadedGraph(graph, device="cpu", tier="storage", cache="64KiB") as loaded:
        monkeypatch.setattr(compiler, "compile_launch", record)
        source = int(np.argmax(np.diff(graph.load()[0])))
        assert bfs(loaded, source).count > 1
        assert in_progress == [0] * len(in_progress) and len(in_progress) > 1
        monkeypatch.undo()
        assert loaded.edges.cache._in_flight == 0
