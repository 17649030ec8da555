"""Search a graph that is much larger than the cache, query a table, and train on its rows.

``python examples/demo/demo.py --help`` lists the options; ``make demo`` runs it. It needs the extra ``demo``. Results
are compared with SciPy's and NumPy's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ahead
import numpy as np
import vertex_table
from numpy.typing import NDArray
from rich.syntax import Syntax

from warpwell._check import extra
from warpwell.cache import Statistics, format_size
from warpwell.cli._common import Output, Parser, execute, new_file, output_of
from warpwell.cli.graph import open_graph, run_options, run_values
from warpwell.errors import ArgumentError, WarpwellError
from warpwell.graph import Graph, LoadedGraph, bfs, connected_components, generate
from warpwell.targets import default_device

_CODE = """\
import numpy as np
import warpwell as ww
from warpwell import gpu

@ww.kernel
def in_degree(edges, degree):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(degree, edges[i], 1)

with ww.open(path, cache=cache, device=device) as edges:  # nothing is loaded
    degree = np.zeros(vertices, np.int64)
    in_degree[edges.size](edges, degree)
"""
"""The demo prints and runs this code."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo with these arguments (of the process by default); return the exit code."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=int, default=17, metavar="N", help="2**N vertices (default 17)")
    parser.add_argument("--out", default="demo.png", metavar="FILE", help="file of the plot (default demo.png)")
    run_options(parser, cache="1MiB")
    parser.set_defaults(command="demo")
    return execute(run, parser.parse_args(argv), own_process=argv is None)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    output = output_of(arguments)
    picture = new_file(arguments.out, "--out", (".png", ".svg", ".pdf"))
    missing = [name for name in ("scipy", "matplotlib", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"the demo needs {' and '.join(missing)}: install {extra('demo')}")
    started = time.perf_counter()
    temporary = tempfile.TemporaryDirectory(prefix="warpwell-demo-")
    with temporary as name, ahead.compiling(arguments.device or default_device()):
        folder = Path(name)
        with output.progress() as report:
            graph = generate("kron", arguments.scale, folder / "kron.ww", progress=report)
        _print_step(
            output,
            f"made {graph.source}: {graph.vertices:,} vertices, {graph.edges:,} edges "
            f"({format_size(graph.edges_path.stat().st_size)})",
        )
        offsets, destinations = graph.load()
        source = int(np.argmax(np.diff(offsets)))
        runs: dict[str, dict[str, Any]] = {}
        with output.progress() as report, open_graph(graph, arguments) as loaded:
            search = bfs(loaded, source, progress=report)
            runs["bfs"] = _run_values(loaded, search.seconds, search.stats)
        # Opened again for an empty cache, because code that evicts pages would have to be compiled.
        with output.progress() as report, open_graph(graph, arguments) as loaded:
            components = connected_components(loaded, progress=report)
            runs["cc"] = _run_values(loaded, components.seconds, components.stats)
            device = loaded.device
        runs["bfs"] |= {"source": source, "reached": search.count, "depth": search.rounds}
        runs["cc"] |= {"components": components.count}
        _print_step(output, "checking both against SciPy ...")
        _check(graph, source, search.values, components.values)
        degree = _run_code(graph, arguments.cache, device)
        if not np.array_equal(graph.original(degree), np.bincount(destinations, minlength=graph.vertices)):
            raise WarpwellError("the in-degrees differ from NumPy's: please report this with `warpwell info`")
        _print_step(output, "writing a table with a row for each vertex; a query, and training on its rows ...")
        path, columns = vertex_table.write(folder, graph, search.values)
        runs["query"] = vertex_table.query(path, columns)
        runs["training"] = vertex_table.learn(path, graph, columns)
        _draw(picture, runs, search.values)
    values = {
        "verified": True,
        "picture": str(picture),
        "total_seconds": time.perf_counter() - started,
        **runs,
    }
    if arguments.json:
        output.result("demo", values)
        return 0
    _print(output, runs)
    output.screen.print("\nLevels and components equal SciPy's. The same for arrays of your own, in a few lines:\n")
    output.screen.print(Syntax(_CODE, "python", background_color="default"))
    output.screen.print(f"picture: {picture} ({values['total_seconds']:.0f} s in all)")
    return 0


def _print_step(output: Output, text: str) -> None:
    if not output.as_json:
        output.screen.print(text)


def _run_values(loaded: LoadedGraph, seconds: float, stats: Statistics) -> dict[str, Any]:
    values = run_values(loaded, seconds, stats)
    del values["graph"]  # a temporary folder
    return values


def _check(graph: Graph, source: int, levels: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
    """Compare with SciPy."""
    from scipy.sparse import csgraph, csr_matrix

    offsets, destinations = graph.load()
    matrix = csr_matrix((np.ones(graph.edges, np.int8), destinations, offsets), shape=(graph.vertices,) * 2)
    distances = csgraph.shortest_path(matrix, unweighted=True, indices=source)
    expected = np.where(np.isinf(distances), -1, distances).astype(np.int64)
    count, groups = csgraph.connected_components(matrix, directed=False)
    smallest = np.full(count, graph.vertices)
    np.minimum.at(smallest, groups, np.arange(graph.vertices))
    for name, found, reference in (("levels", levels, expected), ("components", labels, smallest[groups])):
        if not np.array_equal(found, reference):
            raise WarpwellError(f"the {name} differ from SciPy's: please report this with `warpwell info`")


def _run_code(graph: Graph, cache: str, device: str) -> NDArray[np.int64]:
    names: dict[str, Any] = {"path": graph.edges_path, "cache": cache, "device": device, "vertices": graph.vertices}
    exec(compile(_CODE, "<demo>", "exec"), names)
    degree: NDArray[np.int64] = names["degree"]
    return degree


def _print(output: Output, runs: dict[str, dict[str, Any]]) -> None:
    first = runs["bfs"]
    title = (
        f"{first['medium'].split()[0]} -> cache of {format_size(first['cache_bytes'])}, pages of "
        f"{first['page_size']} B -> kernels on {first['device']}, tier {first['tier']}"
    )
    rows = {
        "found": lambda r: f"{r['reached']:,} reached, depth {r['depth']}" if "depth" in r else f"{r['components']:,}",
        "time": lambda r: f"{r['seconds']:.2f} s",
        "edges on storage": lambda r: format_size(r["edge_bytes"]),
        "edges over cache": lambda r: f"{r['edge_bytes'] / r['cache_bytes']:.0f} times",
        "wanted": lambda r: _size(r["bytes_wanted"]),
        "read": lambda r: _size(r["bytes_read"]),
        "read over wanted": lambda r: _number(r["io_amplification"], ".2f"),
        "hits": lambda r: _number(r["hits"], ","),
        "misses": lambda r: _number(r["misses"], ","),
        "evictions": lambda r: _number(r["evictions"], ","),
    }
    output.table(
        title,
        ("", "breadth-first search", "components"),
        [(name, cell(runs["bfs"]), cell(runs["cc"])) for name, cell in rows.items()],
    )
    query, training = runs["query"], runs["training"]
    output.screen.print(
        f"\nquery: {query['rows']} of the table's rows, their features equal NumPy's: wanted "
        f"{_size(query['bytes_wanted'])} and read {_size(query['bytes_read'])} of {_size(query['table_bytes'])}, in "
        f"{query['seconds']:.2f} s\ntraining: {training['steps']} steps of {training['batch_size']} vertices and their "
        f"sampled neighbors in {training['seconds']:.2f} s, loss {training['losses'][0]:.3f} to "
        f"{training['losses'][-1]:.3f}: from storage and from memory the same, bit for bit"
    )


def _size(nbytes: int | None) -> str:
    return "not counted" if nbytes is None else format_size(nbytes)


def _number(value: float | None, form: str) -> str:
    return "not counted" if value is None else format(value, form)


def _draw(path: Path, runs: dict[str, dict[str, Any]], levels: NDArray[np.int64]) -> None:
    """Draw the vertices of each level; bytes on storage, wanted and read; and losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right, last) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    counts = np.bincount(levels[levels >= 0])
    left.bar(np.arange(counts.size), counts, color="#4477aa")
    left.set(xlabel="level", ylabel="vertices", title="breadth-first search", yscale="log")
    left.set_xticks(np.arange(counts.size))
    bars = [
        ("edges on storage", runs["bfs"]["edge_bytes"], "#999999"),
        ("cache", runs["bfs"]["cache_bytes"], "#999999"),
    ]
    for key, name in (("bfs", "BFS"), ("cc", "components")):
        bars.append((f"{name}: wanted", runs[key]["bytes_wanted"] or 0, "#228833"))
        bars.append((f"{name}: read", runs[key]["bytes_read"], "#ee6677"))
    query = runs["query"]
    bars.append(("table", query["table_bytes"], "#999999"))
    bars += [("query: wanted", query["bytes_wanted"], "#228833"), ("query: read", query["bytes_read"], "#ee6677")]
    names, sizes, colours = zip(*reversed(bars), strict=True)
    drawn = right.barh(names, [n / 2**20 for n in sizes], color=colours)
    right.bar_label(drawn, [format_size(n) for n in sizes], padding=3)
    right.margins(x=0.25)
    right.set(xlabel="MiB", title="pages read on demand")
    last.plot(runs["training"]["losses"], color="#4477aa")
    last.set(xlabel="step", ylabel="loss", title="training on rows from storage")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
