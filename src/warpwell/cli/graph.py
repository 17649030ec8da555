"""``warpwell graph``: makes, describes and traverses graphs on disk."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ._common import (
    Commands,
    Run,
    add_command,
    add_group,
    cache_option,
    device_option,
    json_option,
    new_file,
    output_of,
    page_size_option,
)

if TYPE_CHECKING:
    from ..cache import Statistics
    from ..graph import Graph, LoadedGraph


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``graph`` and its commands."""
    verbs = add_group(commands, "graph", "convert, generate and traverse graphs")
    _add_makers(verbs)
    _graph(add_command(verbs, "info", info, "describe a graph"), json=True)
    search = _traversal(verbs, "bfs", "search breadth-first from a vertex")
    search.add_argument("--source", type=int, required=True, metavar="VERTEX", help="vertex to start from")
    search.add_argument("--out", metavar="FILE.npy", help="write the levels (int64; -1: not reached)")
    components = _traversal(verbs, "cc", "find the connected components of an undirected graph")
    components.add_argument("--out", metavar="FILE.npy", help="write the smallest vertex of each component (int64)")
    paths = _traversal(verbs, "sssp", "find the shortest paths from a vertex to all others by weight")
    paths.add_argument("--source", type=int, required=True, metavar="VERTEX", help="vertex to start from")
    paths.add_argument("--delta", type=float, metavar="WIDTH", help="width of a bucket (default: from the weights)")
    paths.add_argument("--out", metavar="FILE.npy", help="write the distances (the largest int64 or inf: no path)")
    ranks = _traversal(verbs, "pagerank", "rank the vertices of an undirected graph, or one with in-edges")
    ranks.add_argument("--damping", type=float, default=0.85, metavar="D", help="damping factor (default: 0.85)")
    text = "stop if all ranks together change by less than T (default: 1e-6)"
    ranks.add_argument("--tolerance", type=float, default=1e-6, metavar="T", help=text)
    ranks.add_argument("--iterations", type=int, default=100, metavar="N", help="maximum number (default: 100)")
    ranks.add_argument("--out", metavar="FILE.npy", help="write the ranks (float64)")
    _traversal(verbs, "triangles", "count the triangles of an undirected graph")


def _add_makers(verbs: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(verbs, "convert", convert, "convert a file of edges")
    parser.add_argument("edges", metavar="EDGES", help="edge list, .csv with a header, MatrixMarket or SciPy .npz")
    parser.add_argument("out", metavar="OUT", help="folder of the graph, usually NAME.ww")
    parser.add_argument("--undirected", action="store_true", help="store each edge in both directions, once")
    parser.add_argument("--vertices", type=int, metavar="N", help="number of vertices, if the file does not state it")
    parser.add_argument("--columns", metavar="SRC,DST[,WEIGHT]", help="column names in the header of a .csv file")
    parser.add_argument("--weights", choices=("int32", "float32", "none"), help="weight type (default: as in the file)")
    _maker_options(parser)

    parser = add_command(verbs, "generate", generate, "generate a graph of the GAP benchmark")
    parser.add_argument("kind", choices=("kron", "urand"), help="Kronecker or uniformly random graph")
    parser.add_argument("out", metavar="OUT", help="folder of the graph, usually NAME.ww")
    parser.add_argument("--scale", type=int, default=16, metavar="N", help="2**N vertices (default: 16)")
    parser.add_argument("--degree", type=int, default=16, metavar="N", help="edges generated per vertex (default: 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the generator (default: 0)")
    parser.add_argument("--directed", action="store_true", help="keep the edges as generated, in one direction")
    parser.add_argument("--weights", choices=("int32", "float32"), help="random weights: 1 to 255, or above 0 up to 1")
    _maker_options(parser)


def _maker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in-edges", action="store_true", help="also store the edges that end in a vertex, if directed"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing graph")
    parser.add_argument("--memory", metavar="SIZE", help="memory for sorting (default: half of the free memory)")
    json_option(parser)


def _graph(parser: argparse.ArgumentParser, json: bool = False) -> argparse.ArgumentParser:
    parser.add_argument("graph", metavar="GRAPH", help="folder of the graph")
    if json:
        json_option(parser)
    return parser


def _traversal(verbs: Commands[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = _graph(add_command(verbs, name, _ALGORITHMS[name], text))
    run_options(parser)
    return parser


def run_options(parser: argparse.ArgumentParser, cache: str | None = None) -> None:
    """Add the options of a traversal: device, tier, cache, and JSON output."""
    group = parser.add_argument_group("how to run")
    device_option(group)
    group.add_argument(
        "--tier",
        choices=("auto", "mapped", "storage", "host-cached", "host", "device"),
        default="auto",
        help="where the edges are stored (default: mapped on the CPU without --cache and --page-size, else storage)",
    )
    cache_option(group, cache, cache or "256MiB")
    page_size_option(group, text="4KiB; 16KiB on the CPU with a cache of 16MiB or more")
    json_option(group)


# -- convert, generate, info -------------------------------------------------------------------------------------------


def convert(arguments: argparse.Namespace) -> int:
    """Convert a file of edges."""
    import warnings

    from ..graph import convert

    def make(options: dict[str, Any]) -> Graph:
        return convert(
            arguments.edges,
            arguments.out,
            undirected=arguments.undirected,
            vertices=arguments.vertices,
            weights=False if arguments.weights == "none" else arguments.weights,
            columns=None if arguments.columns is None else arguments.columns.split(","),
            **options,
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _make(arguments, make)
    for warning in caught:
        output_of(arguments).notes.print(f"note: {warning.message}")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Generate a graph."""
    from ..graph import generate

    def make(options: dict[str, Any]) -> Graph:
        return generate(
            arguments.kind,
            arguments.scale,
            arguments.out,
            degree=arguments.degree,
            seed=arguments.seed,
            undirected=not arguments.directed,
            weights=arguments.weights,
            **options,
        )

    _make(arguments, make)
    return 0


def _make(arguments: argparse.Namespace, make: Callable[[dict[str, Any]], Graph]) -> None:
    import time

    from .._check import checked_nbytes

    output = output_of(arguments)
    options: dict[str, Any] = {"in_edges": arguments.in_edges, "overwrite": arguments.overwrite}
    options["memory_bytes"] = None if arguments.memory is None else checked_nbytes(arguments.memory, "memory")
    started = time.perf_counter()
    with output.progress() as report:
        graph = make({**options, "progress": report})
    output.result(str(graph.path), {**_description(graph), "seconds": time.perf_counter() - started})


def info(arguments: argparse.Namespace) -> int:
    """Print the description of a graph, and its degrees."""
    import numpy as np

    from ..graph import Graph

    graph = Graph.open(arguments.graph)
    degrees = graph.degrees()
    values = {
        **_description(graph),
        "largest_degree": int(degrees.max(initial=0)),
        "mean_degree": graph.edges / max(graph.vertices, 1),
        "vertices_without_edges": int(np.count_nonzero(degrees == 0)),
    }
    output_of(arguments).result(str(graph.path), values)
    return 0


def _description(graph: Graph) -> dict[str, Any]:
    names = ("source", "vertices", "edges", "undirected", "destinations", "weights", "in_edges", "bytes_on_disk")
    return {"graph": str(graph.path), **{name: getattr(graph, name) for name in names}}


# -- traversals --------------------------------------------------------------------------------------------------------


def bfs(arguments: argparse.Namespace) -> int:
    """Search breadth-first."""
    from ..graph import bfs
    from ..graph.algorithms.search import require_vertex

    return _traverse(
        arguments,
        check=lambda graph: require_vertex(arguments.source, graph.vertices),
        search=lambda loaded, report: bfs(loaded, arguments.source, progress=report),
        shown=("source", "reached", "depth"),
        written="levels",
    )


def cc(arguments: argparse.Namespace) -> int:
    """Find connected components."""
    from ..graph import connected_components
    from ..graph.algorithms.components import require_undirected

    return _traverse(
        arguments,
        check=require_undirected,
        search=lambda loaded, report: connected_components(loaded, progress=report),
        shown=("components",),
        written="labels",
    )


def sssp(arguments: argparse.Namespace) -> int:
    """Find shortest paths."""
    from ..graph import sssp
    from ..graph.algorithms.search import require_vertex
    from ..graph.algorithms.shortest_paths import require_weights

    def check(graph: Graph) -> None:
        require_weights(graph)
        require_vertex(arguments.source, graph.vertices)

    return _traverse(
        arguments,
        check=check,
        search=lambda loaded, report: sssp(loaded, arguments.source, delta=arguments.delta, progress=report),
        shown=("source", "reached", "delta", "rounds"),
        written="distances",
    )


def pagerank(arguments: argparse.Namespace) -> int:
    """Rank vertices."""
    from ..graph import pagerank
    from ..graph.algorithms.pagerank import require_in_edges

    options = {name: getattr(arguments, name) for name in ("damping", "tolerance", "iterations")}
    return _traverse(
        arguments,
        check=require_in_edges,
        search=lambda loaded, report: pagerank(loaded, **options, progress=report),
        shown=("iterations", "change", "converged"),
        written="ranks",
    )


def triangles(arguments: argparse.Namespace) -> int:
    """Count triangles."""
    from ..graph import triangles
    from ..graph.algorithms.components import require_undirected

    return _traverse(
        arguments,
        check=lambda graph: require_undirected(graph, "triangles"),
        search=lambda loaded, report: triangles(loaded, progress=report),
        shown=("triangles",),
    )


_ALGORITHMS: dict[str, Run] = {"bfs": bfs, "cc": cc, "sssp": sssp, "pagerank": pagerank, "triangles": triangles}


def _traverse(
    arguments: argparse.Namespace,
    *,
    check: Callable[[Graph], object],
    search: Callable[..., Any],
    shown: tuple[str, ...],
    written: str = "",
) -> int:
    """Traverse a graph, and report the run and the bytes that were read.

    Parameters
    ----------
    arguments
    check : callable
        Raises if the graph does not suit the algorithm. It is called before anything is loaded.
    search : callable
        Runs the algorithm on a `LoadedGraph`, with a function that reports progress.
    shown : tuple of str
        Attributes of the result to report.
    written : str
        Attribute of the result that ``--out`` writes.
    """
    import numpy as np

    from ..graph import Graph
    from ..graph.npy import storage_full
    from ..replacing import replacing

    output = output_of(arguments)
    graph = Graph.open(arguments.graph)
    name = getattr(arguments, "out", None)
    if name is not None and not name.endswith(".npy"):
        raise ArgumentError(f"--out {name} must end in .npy, because results are written as NumPy arrays")
    check(graph)
    target = None if name is None else new_file(name, "--out")
    with output.progress() as report, open_graph(graph, arguments) as loaded:
        result = search(loaded, report)
        values = {key: getattr(result, key) for key in shown}
        values |= run_values(loaded, result.seconds, result.stats)
    if target is not None:
        with storage_full(target), replacing(target) as part, part.open("wb") as file:
            np.save(file, getattr(result, written))
        values["out"] = str(target)
    output.result(f"{arguments.command.split()[-1]} of {graph.path}", values)
    return 0


def open_graph(graph: Graph, arguments: argparse.Namespace) -> LoadedGraph:
    """Open a graph with the options of `run_options`."""
    from ..graph import LoadedGraph
    from ..targets import default_device

    device = arguments.device or default_device()
    has_cache_options = arguments.cache is not None or arguments.page_size is not None
    mapped = arguments.tier == "mapped" or (arguments.tier == "auto" and device == "cpu" and not has_cache_options)
    return LoadedGraph(
        graph,
        device=device,
        tier=arguments.tier,
        cache=arguments.cache,
        page_size=arguments.page_size,
        stats=None if mapped else "full",
    )


def run_values(loaded: LoadedGraph, seconds: float, stats: Statistics) -> dict[str, Any]:
    """Return the results that every traversal reports: configuration, time and reads."""
    edges = loaded.edges
    cached = edges.tier in ("storage", "host-cached")
    return {
        "graph": str(loaded.graph.path),
        "vertices": loaded.graph.vertices,
        "edges": loaded.graph.edges,
        "seconds": seconds,
        "device": loaded.device,
        "tier": edges.tier,
        "medium": edges.medium.description,
        "emulated": edges.medium.emulated,
        "page_size": edges.cache.page_size,
        "cache_bytes": None if edges.tier == "mapped" else edges.cache.cache_bytes,
        "edge_bytes": edges.nbytes,
        # read before the run: offsets, and for the tiers in memory all edges
        "loaded_bytes": 8 * (loaded.graph.vertices + 1) + (0 if edges.tier in ("mapped", "storage") else edges.nbytes),
        "hits": stats.hits if cached else None,
        "misses": stats.misses,
        "evictions": stats.evictions,
        "bytes_read": stats.bytes_read,
        "bytes_wanted": stats.bytes_wanted if cached else None,
        "io_amplification": stats.io_amplification if cached else None,
    }
