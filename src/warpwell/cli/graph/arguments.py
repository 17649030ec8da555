"""The arguments of ``warpwell graph``."""

from __future__ import annotations

import argparse

from ..arguments import Commands, command, json_option


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``graph`` and its commands."""
    graph = commands.add_parser("graph", help="convert, generate and traverse graphs")
    verbs = graph.add_subparsers(metavar="COMMAND", required=True)

    convert = command(verbs, "convert", "graph.make", "convert a file of edges")
    convert.add_argument("edges", metavar="EDGES", help="edge list, .csv with a header, MatrixMarket or SciPy .npz")
    convert.add_argument("out", metavar="OUT", help="folder of the graph, usually NAME.ww")
    convert.add_argument("--undirected", action="store_true", help="store each edge in both directions, once")
    convert.add_argument("--vertices", type=int, metavar="N", help="number of vertices, if the file does not state it")
    convert.add_argument("--columns", metavar="SRC,DST[,WEIGHT]", help="names of columns in the header of a .csv file")
    _make_options(convert, "none")

    generate = command(verbs, "generate", "graph.make", "generate a graph of the GAP benchmark")
    generate.add_argument("kind", choices=("kron", "urand"))
    generate.add_argument("out", metavar="OUT", help="folder of the graph, usually NAME.ww")
    generate.add_argument("--scale", type=int, default=16, metavar="N", help="2**N vertices (default 16)")
    generate.add_argument("--degree", type=int, default=16, metavar="N", help="edges made per vertex (default 16)")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.add_argument("--directed", action="store_true", help="keep the edges as generated, in one direction")
    _make_options(generate)

    info = command(verbs, "info", "graph.info", "print what a graph holds")
    info.add_argument("graph", metavar="GRAPH")
    json_option(info)

    search = command(verbs, "bfs", "graph.run", "breadth-first search")
    search.add_argument("graph", metavar="GRAPH")
    search.add_argument("--source", type=int, required=True, metavar="VERTEX")
    search.add_argument("--out", metavar="FILE.npy", help="write the levels (int64; -1: not reached)")
    how_to_run(search)

    components = command(verbs, "cc", "graph.run", "connected components of an undirected graph")
    components.add_argument("graph", metavar="GRAPH")
    components.add_argument("--out", metavar="FILE.npy", help="write each vertex's smallest connected vertex (int64)")
    how_to_run(components)

    paths = command(verbs, "sssp", "graph.run", "shortest paths from a vertex, over weights")
    paths.add_argument("graph", metavar="GRAPH")
    paths.add_argument("--source", type=int, required=True, metavar="VERTEX")
    paths.add_argument("--delta", type=float, metavar="WIDTH", help="of a bucket (default: by the weights)")
    paths.add_argument("--out", metavar="FILE.npy", help="write the distances (largest int64, or inf: no path)")
    how_to_run(paths)

    ranks = command(verbs, "pagerank", "graph.run", "PageRank of an undirected graph, or one with in-edges")
    ranks.add_argument("graph", metavar="GRAPH")
    ranks.add_argument("--damping", type=float, default=0.85, metavar="D", help="default 0.85")
    ranks.add_argument(
        "--tolerance",
        type=float,
        default=1e-6,
        metavar="T",
        help="end once all ranks together change by less (default 1e-6)",
    )
    ranks.add_argument("--iterations", type=int, default=100, metavar="N", help="at most (default 100)")
    ranks.add_argument("--out", metavar="FILE.npy", help="write the ranks (float64)")
    how_to_run(ranks)

    count = command(verbs, "triangles", "graph.run", "count the triangles of an undirected graph")
    count.add_argument("graph", metavar="GRAPH")
    how_to_run(count)


def how_to_run(parser: argparse.ArgumentParser, cache: str | None = None) -> None:
    """Add the options of a traversal: device, tier, cache."""
    group = parser.add_argument_group("how to run")
    group.add_argument("--device", choices=("cpu", "cuda", "interp"), help="default: cuda if there is a GPU")
    group.add_argument(
        "--tier",
        choices=("auto", "mapped", "storage", "host-cached", "host", "device"),
        default="auto",
        help="where the edges live (default auto: mapped on the cpu if neither --cache nor --page-size "
        "is given, else storage)",
    )
    group.add_argument("--cache", default=cache, metavar="SIZE", help=f"of the cache (default {cache or '256MiB'})")
    group.add_argument(
        "--page-size", type=int, metavar="BYTES", help="default 4096; on the cpu 16384 if the cache has 16 MiB or more"
    )
    json_option(group)


def _make_options(parser: argparse.ArgumentParser, *more: str) -> None:
    parser.add_argument(
        "--weights",
        choices=("int32", "float32", *more),
        help="weights of the edges (default: those of the file)"
        if more
        else "give edges random weights: 1 to 255, or above 0 up to 1",
    )
    parser.add_argument("--in-edges", action="store_true", help="of a directed graph, also store what ends in a vertex")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing graph")
    parser.add_argument("--memory", metavar="SIZE", help="memory for sorting (default: half of the free memory)")
    json_option(parser)
