"""``warpwell graph info``: what a graph on disk holds."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ...graph import Graph
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Print what a graph holds, and its degrees."""
    graph = Graph.open(arguments.graph)
    degrees = graph.degrees()
    values = described(graph) | {
        "largest_degree": int(degrees.max(initial=0)),
        "mean_degree": graph.edges / max(graph.vertices, 1),
        "vertices_without_edges": int(np.count_nonzero(degrees == 0)),
    }
    Output(arguments.json).result(str(graph.path), values)
    return 0


def described(graph: Graph) -> dict[str, Any]:
    """Return what a graph's description says."""
    return {
        "graph": str(graph.path),
        "source": graph.source,
        "vertices": graph.vertices,
        "edges": graph.edges,
        "undirected": graph.undirected,
        "destinations": graph.destinations,
        "weights": graph.weights,
        "in_edges": graph.in_edges,
        "bytes_on_disk": graph.bytes_on_disk,
    }
