"""``warpwell graph bfs``, ``cc``, ``sssp``, ``pagerank`` and ``triangles``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from ...cache import Statistics
from ...errors import ArgumentError
from ...graph import Graph, LoadedGraph, bfs, connected_components, pagerank, sssp, triangles
from ...graph.algorithms.components import require_undirected
from ...graph.algorithms.pagerank import require_in_edges
from ...graph.algorithms.search import require_vertex
from ...graph.algorithms.shortest_paths import require_weights
from ...graph.npy import storage_full
from ...replacing import replacing
from ...targets import default_device
from ..arguments import new_file
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Traverse a graph and report what was read."""
    output = Output(arguments.json)
    graph = Graph.open(arguments.graph)
    name = getattr(arguments, "out", None)
    if name is not None and not name.endswith(".npy"):
        raise ArgumentError(f"--out {name}: results are written as NumPy arrays: give a name that ends in .npy")
    search, describe_result, check = _ALGORITHMS[arguments.command]
    check(graph, arguments)
    target = None if name is None else new_file(name, "--out")
    with output.progress() as report, open_graph(graph, arguments) as loaded:
        result = search(loaded, arguments, report)
        found, vertex_data = describe_result(result)
        values = {"command": arguments.command, **found, **describe(loaded, result.seconds, result.stats)}
    if target is not None:
        with storage_full(target), replacing(target) as part, part.open("wb") as file:
            np.save(file, vertex_data)
        values["out"] = str(target)
    output.result(f"{arguments.command} of {graph.path}", values)
    return 0


def _check_paths(graph: Graph, arguments: argparse.Namespace) -> None:
    require_weights(graph)
    require_vertex(arguments.source, graph.vertices)


# Of each command: the run, what of its result is printed and written, what is asked of the graph before.
_ALGORITHMS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[dict[str, Any], Any]], Callable[..., None]]] = {
    "bfs": (
        lambda loaded, a, report: bfs(loaded, a.source, progress=report),
        lambda r: ({"source": r.source, "reached": r.reached, "depth": r.depth}, r.levels),
        lambda graph, a: require_vertex(a.source, graph.vertices),
    ),
    "cc": (
        lambda loaded, a, report: connected_components(loaded, progress=report),
        lambda r: ({"components": r.components}, r.labels),
        lambda graph, a: require_undirected(graph),
    ),
    "sssp": (
        lambda loaded, a, report: sssp(loaded, a.source, delta=a.delta, progress=report),
        lambda r: ({"source": r.source, "reached": r.reached, "delta": r.delta, "rounds": r.rounds}, r.distances),
        _check_paths,
    ),
    "pagerank": (
        lambda loaded, a, report: pagerank(
            loaded, damping=a.damping, tolerance=a.tolerance, iterations=a.iterations, progress=report
        ),
        lambda r: ({"iterations": r.iterations, "change": r.change, "converged": r.converged}, r.ranks),
        lambda graph, a: require_in_edges(graph),
    ),
    "triangles": (
        lambda loaded, a, report: triangles(loaded, progress=report),
        lambda r: ({"triangles": r.triangles}, None),
        lambda graph, a: require_undirected(graph, "triangles"),
    ),
}


def open_graph(graph: Graph, arguments: argparse.Namespace) -> LoadedGraph:
    """Open a graph with the options of `how_to_run`."""
    device = arguments.device or default_device()
    asked = arguments.cache is not None or arguments.page_size is not None
    mapped = arguments.tier == "mapped" or (arguments.tier == "auto" and device == "cpu" and not asked)
    return LoadedGraph(
        graph,
        device=device,
        tier=arguments.tier,
        cache=arguments.cache,
        page_size=arguments.page_size,
        stats=None if mapped else "full",
    )


def describe(loaded: LoadedGraph, seconds: float, stats: Statistics) -> dict[str, Any]:
    """Return the figures that every traversal reports: how it ran, and what it read."""
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
        # what was read before the run: offsets, and for the tiers in memory all edges
        "loaded_bytes": 8 * (loaded.graph.vertices + 1) + (0 if edges.tier in ("mapped", "storage") else edges.nbytes),
        "hits": stats.hits if cached else None,
        "misses": stats.misses,
        "evictions": stats.evictions,
        "bytes_read": stats.bytes_read,
        "bytes_wanted": stats.bytes_wanted if cached else None,
        "io_amplification": stats.io_amplification if cached else None,
    }
