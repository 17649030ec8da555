"""``warpwell graph convert`` and ``warpwell graph generate``."""

from __future__ import annotations

import argparse
import time
import warnings

from ...cache import parse_size
from ...graph import convert, generate
from ..output import Output
from .info import described


def run(arguments: argparse.Namespace) -> int:
    """Make a graph on disk."""
    output = Output(arguments.json)
    memory = None if arguments.memory is None else parse_size(arguments.memory, "memory")
    started = time.perf_counter()
    told: list[warnings.WarningMessage] = []
    with output.progress() as report:
        if arguments.command == "convert":
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", UserWarning)
                graph = convert(
                    arguments.edges,
                    arguments.out,
                    undirected=arguments.undirected,
                    vertices=arguments.vertices,
                    weights=False if arguments.weights == "none" else arguments.weights,
                    in_edges=arguments.in_edges,
                    columns=None if arguments.columns is None else arguments.columns.split(","),
                    memory_bytes=memory,
                    progress=report,
                    overwrite=arguments.overwrite,
                )
        else:
            graph = generate(
                arguments.kind,
                arguments.scale,
                arguments.out,
                degree=arguments.degree,
                seed=arguments.seed,
                undirected=not arguments.directed,
                weights=arguments.weights,
                in_edges=arguments.in_edges,
                memory_bytes=memory,
                progress=report,
                overwrite=arguments.overwrite,
            )
    for warning in told:
        output.notes.print(f"note: {warning.message}")
    output.result(
        str(graph.path),
        {"command": arguments.command} | described(graph) | {"seconds": time.perf_counter() - started},
    )
    return 0
