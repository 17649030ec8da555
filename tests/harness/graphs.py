"""Real graphs: traversals agree with SciPy, in several tiers and with caches of one page or more.

    python -m tests.harness.graphs --data FOLDER

Each file of the folder that is known here is converted, and given weights from a seed; the program prints a table, and
fails where a result differs. ``--device cuda`` runs it on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csgraph, csr_array

from warpwell.graph import Graph, LoadedGraph, bfs, build, connected_components, convert, pagerank, sssp, triangles

FILES = {
    "facebook_combined.txt.gz": True,
    "delaunay_n16.mtx.gz": True,
    "soc-slashdot0902.txt.gz": False,
    "ego-twitter-undirected.txt.gz": True,
    "cnr-2000.txt.gz": False,
}
"""Known files, the smallest first, and whether they are undirected."""
SEED = 27
PAGE = 4096
LONG = 1_000_000
"""Edges of graphs whose shortest paths with one page take minutes: edges and weights take it from one another."""


def given_rows(graph: Graph, part: str = "") -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return offsets, destinations and weights, by default 1, in the given numbers; with "in_" of in-edges."""
    part = "" if graph.undirected else part
    stored = np.load(graph.path / f"{part}offsets.npy"), np.load(graph.path / f"{part}edges.npy")
    weights = np.load(graph.path / f"{part}weights.npy") if graph.weights else np.ones(graph.edges, np.int8)
    order = np.load(graph.path / "order.npy") if graph.order == "degree" else np.arange(graph.vertices)
    rows = {int(vertex): slice(*stored[0][k : k + 2]) for k, vertex in enumerate(order)}
    index = np.concatenate([np.arange(graph.edges)[rows[v]] for v in range(graph.vertices)] or [[]]).astype(np.int64)
    sources = np.repeat(np.arange(graph.vertices), [rows[v].stop - rows[v].start for v in range(graph.vertices)])
    destinations = order[stored[1][index]]
    sort = np.lexsort((weights[index], destinations, sources))
    offsets = np.searchsorted(sources, np.arange(graph.vertices + 1))
    return offsets, destinations[sort].astype(stored[1].dtype), weights[index][sort]


def weighted(graph: Graph, folder: Path, dtype: str, order: str) -> Graph:
    """Build a graph again with weights: integers from 1 to 255, or fractions; both directions have the same one."""
    offsets, edges = (np.asarray(part).astype(np.int64) for part in graph.load())
    starts = np.repeat(np.arange(graph.vertices), np.diff(offsets))
    low, high = np.minimum(starts, edges), np.maximum(starts, edges)
    names = np.random.default_rng(SEED).integers(1, 1 << 20, graph.vertices)
    # the draw of an edge depends on its ends alone
    draws = (names[low] * 31 + names[high]) % 255 + 1
    weights = draws.astype(np.int32) if dtype == "int32" else (draws / 255).astype(np.float32)
    return build(
        [(starts, edges, weights)],
        folder,
        weights=dtype,
        vertices=graph.vertices,
        symmetric=graph.undirected,
        in_edges=True,
        order=order,
    )


class Expected:
    """SciPy's results for a graph."""

    def __init__(self, graph: Graph, source: int) -> None:
        offsets, edges, weights = given_rows(graph)
        weights = weights.astype(np.float64)
        shape = (graph.vertices,) * 2
        self.graph, self.source = graph, source
        self._links = csr_array((np.ones(graph.edges), edges, offsets), shape=shape)
        self._weights = csr_array((weights, edges, offsets), shape=shape)

    def bfs(self) -> NDArray[Any]:
        """Return levels."""
        found = csgraph.shortest_path(self._links, unweighted=True, indices=self.source)
        return np.where(np.isinf(found), -1, found)

    def sssp(self) -> NDArray[Any]:
        """Return distances."""
        return np.asarray(csgraph.dijkstra(self._weights, indices=self.source))

    def components(self) -> NDArray[Any]:
        """Return the least vertex of each vertex's component."""
        count, groups = csgraph.connected_components(self._links, directed=False)
        smallest = np.full(count, self.graph.vertices)
        np.minimum.at(smallest, groups, np.arange(self.graph.vertices))
        return smallest[groups]

    def pagerank(self, iterations: int) -> NDArray[Any]:
        """Return ranks after some iterations."""
        n, degrees = self.graph.vertices, self._links.sum(axis=1)
        ranks, links = np.full(n, 1 / n), self._links.T.tocsr()
        for _ in range(iterations):
            shares = np.where(degrees > 0, ranks / np.maximum(degrees, 1), 0)
            ranks = 0.15 / n + 0.85 * (links @ shares + ranks[degrees == 0].sum() / n)
        return np.asarray(ranks)

    def triangles(self) -> NDArray[Any]:
        """Return the number of triangles."""
        links = self._links.tocoo()
        keep = links.row > links.col
        lower = csr_array((np.ones(keep.sum()), (links.row[keep], links.col[keep])), shape=self._links.shape)
        return np.array([(lower @ lower).multiply(lower).sum()])


def distances(found: Any) -> NDArray[Any]:
    """Return distances as SciPy has them."""
    unreached = found.values == np.iinfo(np.int64).max if found.values.dtype == np.int64 else np.isinf(found.values)
    return np.where(unreached, np.inf, found.values)


def runs(loaded: LoadedGraph, source: int, iterations: int) -> dict[str, Callable[[], tuple[Any, NDArray[Any]]]]:
    """Return the traversals of a graph, by name: their results, in the form that is compared with SciPy's."""

    def of(run: Callable[[], Any], part: Callable[[Any], Any]) -> Callable[[], tuple[Any, NDArray[Any]]]:
        def call() -> tuple[Any, NDArray[Any]]:
            found = run()
            return found, part(found)

        return call

    found = {
        "bfs": of(lambda: bfs(loaded, source), lambda r: r.values),
        "sssp": of(lambda: sssp(loaded, source), distances),
        "pagerank": of(lambda: pagerank(loaded, tolerance=0.0, iterations=iterations), lambda r: r.values),
    }
    if loaded.graph.undirected:
        found["components"] = of(lambda: connected_components(loaded), lambda r: r.values)
        found["triangles"] = of(lambda: triangles(loaded), lambda r: np.array([r.count]))
    return found


def check(graph: Graph, name: str, device: str | None, quick: bool, everything: bool) -> int:
    """Run everything on a graph; print a line for each result, and return how many differ."""
    source = int(np.argmax(np.diff(graph.load()[0])))
    expected, solved, wrong = Expected(graph, source), dict[str, NDArray[Any]](), 0
    quarter = max(PAGE, graph.edges * 4 // 4)
    settings: list[tuple[str, dict[str, Any]]] = [
        ("host", {"tier": "host"}),
        ("storage, a quarter", {"tier": "storage", "cache": quarter}),
        ("storage, one page", {"tier": "storage", "cache": PAGE}),
    ]
    if device in (None, "cpu"):
        settings.insert(0, ("auto", {}))
    for setting, options in settings[: 1 if quick else None]:
        iterations = 2 if "one page" in setting else 20
        with LoadedGraph(graph, device=device, page_size=None if setting == "auto" else PAGE, **options) as loaded:
            for algorithm, run in runs(loaded, source, iterations).items():
                if algorithm == "sssp" and "one page" in setting and graph.edges > LONG and not everything:
                    print(f"{name:28} {loaded.edges.tier:8} {setting:20} {algorithm:11} left out (--all)", flush=True)
                    continue
                key = f"{algorithm} {iterations}" if algorithm == "pagerank" else algorithm
                if key not in solved:
                    arguments = (iterations,) if algorithm == "pagerank" else ()
                    solved[key] = getattr(expected, algorithm)(*arguments)
                start = time.perf_counter()
                result, found = run()
                took = time.perf_counter() - start
                close = np.allclose(found, solved[key], rtol=1e-10, atol=0)
                equal = close if algorithm == "pagerank" else np.array_equal(found, solved[key])
                wrong += not equal
                read = f"{result.stats.bytes_read / 1e6:.1f} MB"
                print(
                    f"{name:28} {loaded.edges.tier:8} {setting:20} {algorithm:11} "
                    f"{'equal' if equal else 'DIFFERS':8}{took:8.2f} s {read:>12}",
                    flush=True,
                )
    return wrong


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files")
    parser.add_argument("--only", nargs="+", default=list(FILES), metavar="FILE")
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true", help="the first tier alone")
    parser.add_argument("--all", action="store_true", help="shortest paths of large graphs with one page, too")
    options = parser.parse_args()
    wrong = checked = 0
    for file in options.only:
        if not (options.data / file).exists():
            print(f"{file}: not in {options.data}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            kinds = [(True, "int32")] if FILES[file] else [(False, "float32"), (True, "int32")]
            for undirected, dtype in kinds:
                out = Path(folder) / f"{undirected}.ww"
                plain = convert(options.data / file, out, undirected=undirected)
                for order in ("degree", "given"):
                    graph = weighted(plain, Path(folder) / f"{undirected}-{order}.ww", dtype, order)
                    name = f"{file.split('.')[0]}, {order}{'' if undirected else ', directed'}"
                    print(
                        f"{name}: {graph.vertices:,} vertices, {graph.edges:,} edges, made in "
                        f"{time.perf_counter() - start:.1f} s",
                        flush=True,
                    )
                    wrong += check(graph, name, options.device, options.quick, options.all)
                    checked += 1
    print(f"{checked} graphs, {wrong} results differ from SciPy's")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
