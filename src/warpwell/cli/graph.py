"""``warpwell graph``: makes, describes and traverses graphs on disk."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._common import (
    Commands,
    add_command,
    add_group,
    cache_option,
    device_option,
    json_option,
    new_file,
    output_of,
    page_size_option,
    split_names,
)

if TYPE_CHECKING:
    from ..cache import Statistics
    from ..graph import Graph, LoadedGraph


_COMMANDS = {
    "convert": "convert a file of edges",
    "generate": "generate a graph of the GAP benchmark",
    "info": "describe a graph",
    "bfs": "search breadth-first from a vertex",
    "cc": "find the connected components of an undirected graph",
    "sssp": "find the shortest paths from a vertex to all others by weight",
    "pagerank": "rank the vertices of an undirected graph, or one with in-edges",
    "triangles": "count the triangles of an undirected graph",
}
_SHOWN = {
    "bfs": {"reached": "count", "depth": "rounds"},
    "cc": {"components": "count"},
    "sssp": {"reached": "count", "rounds": "rounds"},
    "pagerank": {"iterations": "rounds", "change": "change"},
    "triangles": {"triangles": "count"},
}
"""Names to report, and the attributes of the result with their values."""
_WRITTEN = {
    "bfs": ("level", "the levels (int64; -1: not reached)"),
    "cc": ("label", "the smallest vertex of each component (int64)"),
    "sssp": ("distance", "the distances (the largest int64 or inf: no path)"),
    "pagerank": ("rank", "the ranks (float64)"),
}
"""The column of values that ``--out`` writes, and their description."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``graph`` and its commands."""
    verbs = add_group(commands, "graph", "convert, generate and traverse graphs")
    functions = {"convert": make, "generate": make, "info": info}
    parsers = {name: add_command(verbs, name, functions.get(name, traverse), text) for name, text in _COMMANDS.items()}

    def option(names: str, option: str, text: str, **options: Any) -> None:
        for name in names.split():
            parsers[name].add_argument(option, help=text, **options)

    flag: dict[str, Any] = {"action": "store_true"}
    option("convert", "source", "edge list, .csv with a header, MatrixMarket or SciPy .npz", metavar="EDGES")
    option("generate", "kind", "Kronecker or uniformly random graph", choices=("kron", "urand"))
    option("convert generate", "out", "folder of the graph, usually NAME.ww", metavar="OUT")
    option("convert", "--undirected", "store each edge in both directions, once", **flag)
    option("convert", "--vertices", "number of vertices, if the file does not state it", type=int, metavar="N")
    columns = "column names in the header of a .csv file"
    option("convert", "--columns", columns, type=split_names, metavar="SRC,DST[,WEIGHT]")
    option("convert", "--names", "vertices are names: number them, and keep the names", **flag)
    option("convert", "--renumber", "vertices are any integers: number them from 0", **flag)
    option("convert", "--weights", "weight type (default: as in the file)", choices=("int32", "float32", "none"))
    option("generate", "--scale", "2**N vertices (default: 16)", type=int, default=16, metavar="N")
    option("generate", "--degree", "edges generated per vertex (default: 16)", type=int, default=16, metavar="N")
    option("generate", "--seed", "seed of the generator (default: 0)", type=int, default=0, metavar="N")
    directed = "keep the edges as generated, in one direction"
    option("generate", "--directed", directed, action="store_false", dest="undirected")
    option("generate", "--weights", "random weights: 1 to 255, or above 0 up to 1", choices=("int32", "float32"))
    option("convert generate", "--in-edges", "also store the in-edges of each vertex, if the graph is directed", **flag)
    order = "vertices with most edges first, or in the order of their numbers (default: degree)"
    option("convert generate", "--order", order, choices=("degree", "given"), default="degree")
    option("convert generate", "--overwrite", "replace an existing graph", **flag)
    memory = "memory for sorting (default: half of the free memory)"
    option("convert generate", "--memory", memory, dest="memory_bytes", metavar="SIZE")

    option("info bfs cc sssp pagerank triangles", "graph", "folder of the graph", metavar="GRAPH")
    option("bfs sssp", "--source", "number or name of the first vertex", required=True, metavar="VERTEX")
    option("sssp", "--delta", "width of a bucket (default: from the weights)", type=float, metavar="WIDTH")
    option("pagerank", "--damping", "damping factor (default: 0.85)", type=float, default=0.85, metavar="D")
    tolerance = "stop if all ranks together change by less than T (default: 1e-6)"
    option("pagerank", "--tolerance", tolerance, type=float, default=1e-6, metavar="T")
    option("pagerank", "--iterations", "maximum number of rounds (default: 100)", type=int, default=100, metavar="N")
    for name, (_, text) in _WRITTEN.items():
        option(name, "--out", f"write {text} as .npy, or with the vertices as .csv", metavar="FILE")
    for name, parser in parsers.items():
        if name in functions:
            json_option(parser)
        else:
            run_options(parser)


def run_options(parser: argparse.ArgumentParser, cache: str | None = None) -> None:
    """Add the options of a traversal: device, tier, cache, and JSON output."""
    group = parser.add_argument_group("how to run")
    device_option(group)
    tiers = ("auto", "mapped", "storage", "host-cached", "host", "device")
    text = "where the edges are stored (default: mapped on the CPU without --cache and --page-size, else storage)"
    group.add_argument("--tier", choices=tiers, default="auto", help=text)
    cache_option(group, cache, cache or "256MiB")
    page_size_option(group, text="4KiB; 16KiB on the CPU with a cache of 16MiB or more")
    json_option(group)


def make(arguments: argparse.Namespace) -> int:
    """Convert a file of edges, or generate a graph."""
    import time

    from .. import graph as graphs

    output, started = output_of(arguments), time.perf_counter()
    not_passed = ("run", "command", "json", "handles_interrupt")
    options = {name: value for name, value in vars(arguments).items() if name not in not_passed}
    options["weights"] = False if arguments.weights == "none" else arguments.weights
    with output.progress() as report:
        graph = getattr(graphs, arguments.command.split()[-1])(**options, progress=report)
    output.result(str(graph.path), {**_description(graph), "seconds": time.perf_counter() - started})
    return 0


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
    values = {key: value for key, value in dataclasses.asdict(graph).items() if key != "path"}
    names = None if graph.names is None else str(graph.names.type)
    return {"graph": str(graph.path), **values, "names": names, "bytes_on_disk": graph.bytes_on_disk}


def traverse(arguments: argparse.Namespace) -> int:
    """Run an algorithm on a graph; report its result and its reads."""
    from .. import graph as graphs

    name = arguments.command.split()[-1]
    output, graph = output_of(arguments), graphs.Graph.open(arguments.graph)
    out = getattr(arguments, "out", None)
    target = None if out is None else new_file(out, "--out", (".npy", ".csv"))
    names = ("delta", "damping", "tolerance", "iterations")
    options = {key: getattr(arguments, key) for key in names if hasattr(arguments, key)}
    if name in ("bfs", "sssp"):
        options["source"] = graph.vertex(arguments.source)
    with output.progress() as report, open_graph(graph, arguments) as loaded:
        algorithm: Any = graphs.connected_components if name == "cc" else getattr(graphs, name)
        result = algorithm(loaded, **options, progress=report)
        values = {key: getattr(result, attribute) for key, attribute in _SHOWN[name].items()}
        values |= run_values(loaded, result.seconds, result.stats)
    if "source" in options:
        values["source"] = options["source"] if graph.names is None else arguments.source
    if target is not None:
        _write(target, graph, result.values, _WRITTEN[name][0])
        values["out"] = str(target)
    top = graph.top(result.values) if name == "pagerank" else []
    if top:
        values["top"] = [{"vertex": vertex, "rank": rank} for vertex, rank in top]
    output.result(f"{name} of {graph.path}", values, shown={"top": None})
    if top and not output.as_json:
        output.table("largest ranks", ("vertex", "rank"), [(str(vertex), f"{rank:.6g}") for vertex, rank in top])
    return 0


def _write(path: Path, graph: Graph, values: Any, name: str) -> None:
    """Write a value for each vertex to a ``.npy`` file, or with the names of vertices to a ``.csv`` file."""
    import csv

    import numpy as np

    from ..replacing import replacing, storage_full

    with storage_full(path), replacing(path) as part:
        if path.suffix == ".npy":
            with part.open("wb") as file:
                np.save(file, values)
            return
        with part.open("w", newline="", encoding="utf-8") as file:
            vertices = range(graph.vertices) if graph.names is None else graph.names.to_pylist()
            writer = csv.writer(file)
            writer.writerow(("vertex", name))
            writer.writerows(zip(vertices, values.tolist(), strict=True))


def open_graph(graph: Graph, arguments: argparse.Namespace) -> LoadedGraph:
    """Open a graph with the options of `run_options`."""
    from ..graph import LoadedGraph
    from ..targets import default_device

    device, options = arguments.device or default_device(), {"cache": arguments.cache, "page_size": arguments.page_size}
    is_mapped = arguments.tier == "auto" and device == "cpu" and options == {"cache": None, "page_size": None}
    stats = None if is_mapped or arguments.tier == "mapped" else "full"
    return LoadedGraph(graph, device=device, tier=arguments.tier, stats=stats, **options)


def run_values(loaded: LoadedGraph, seconds: float, stats: Statistics) -> dict[str, Any]:
    """Return the values that every traversal reports: configuration, time and reads."""
    graph, edges = loaded.graph, loaded.edges
    is_cached = edges.tier in ("storage", "host-cached")
    uncounted = () if is_cached else ("hits", "bytes_wanted", "io_amplification")
    counters = ("hits", "misses", "evictions", "bytes_read", "bytes_wanted", "io_amplification")
    return {
        "graph": str(graph.path),
        "vertices": graph.vertices,
        "edges": graph.edges,
        "seconds": seconds,
        "device": loaded.device,
        "tier": edges.tier,
        "medium": edges.medium.description,
        "emulated": edges.medium.emulated,
        "page_size": edges.cache.page_size,
        "cache_bytes": None if edges.tier == "mapped" else edges.cache.cache_bytes,
        "edge_bytes": edges.nbytes,
        # read before the run: offsets and first neighbors, and for the tiers in memory all edges
        "loaded_bytes": loaded.vertex_bytes + (0 if edges.tier in ("mapped", "storage") else edges.nbytes),
        **{name: None if name in uncounted else getattr(stats, name) for name in counters},
    }
