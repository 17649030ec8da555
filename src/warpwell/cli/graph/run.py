"""``warpwell graph bfs`` and ``warpwell graph cc``."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ...cache import Statistics
from ...errors import ArgumentError
from ...graph import Graph, LoadedGraph, bfs, connected_components
from ...graph.algorithms.components import require_undirected
from ...graph.algorithms.search import require_vertex
from ...graph.npy import storage_full
from ...replacing import replacing
from ...targets import default_device
from ..arguments import new_file
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Traverse a graph and report what was read."""
    output = Output(arguments.json)
    graph = Graph.open(arguments.graph)
    if arguments.command == "bfs":
        require_vertex(arguments.source, graph.vertices)
    else:
        require_undirected(graph)
    name = arguments.out
    if name is not None and not name.endswith(".npy"):
        raise ArgumentError(f"--out {name}: results are written as NumPy arrays: give a name that ends in .npy")
    target = None if name is None else new_file(name, "--out")
    with output.progress() as report, open_graph(graph, arguments) as loaded:
        found: dict[str, Any]
        if arguments.command == "bfs":
            search = bfs(loaded, arguments.source, progress=report)
            seconds, stats, vertex_data = search.seconds, search.stats, search.levels
            found = {"source": search.source, "reached": search.reached, "depth": search.depth}
        else:
            components = connected_components(loaded, progress=report)
            seconds, stats, vertex_data = components.seconds, components.stats, components.labels
            found = {"components": components.components}
        values = {"command": arguments.command, **found, **describe(loaded, seconds, stats)}
    if target is not None:
        with storage_full(target), replacing(target) as part, part.open("wb") as file:
            np.save(file, vertex_data)
        values["out"] = str(target)
    output.result(f"{arguments.command} of {graph.path}", values)
    return 0


def open_graph(graph: Graph, arguments: argparse.Namespace) -> LoadedGraph:
    """Open a graph with the options of `how_to_run`."""
    device = arguments.device or default_device()
    asked = arguments.cache is not None or arguments.page_size is not None
    mapped = arguments.tier == "mapped" or (arguments.tier == "auto" and device == "cpu" and not asked)
    return LoadedGraph(
        graph, device=device, tier=arguments.tier, cache=arguments.cache, page_size=arguments.page_size,
        stats=None if mapped else "full",
    )  # fmt: skip


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
