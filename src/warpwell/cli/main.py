"""``main``: the arguments of ``warpwell``, and what it does about errors.

Nothing here imports a compiler: ``warpwell --help`` answers at once. Commands import what they need.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ..errors import WarpwellError
from .arguments import command, json_option, program
from .interrupt import INTERRUPTED, end_soon, leave, say
from .kv import arguments as kv_arguments
from .pool import arguments as pool_arguments
from .sched import arguments as sched_arguments

BAD_INPUT = 2
BROKEN_PIPE = 141

_OWN = ("pool.run", "pool.notebook", "bench")
"""Modules of commands whose programs see to Ctrl-C themselves."""

_DESCRIPTION = "Arrays on storage, many times larger than memory, that kernels in Python read on demand."


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``warpwell`` with these arguments (of the process by default); return the exit code.

    0 is success, 1 a store that ``kv verify`` found damaged, 2 bad input (a message on stderr says what to do),
    130 an interrupt; ``run`` ends with the code of its program.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser(sched=given[:1] == ["sched"]).parse_args(given)
    if argv is None and arguments.module not in _OWN:
        end_soon()
    try:
        code: int = importlib.import_module(f".{arguments.module}", __package__).run(arguments)
        sys.stdout.flush()
        return code
    except WarpwellError as error:
        return _complain(str(error))
    except BrokenPipeError:
        # whoever read the output has gone; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}{error.strerror or error}. Check the path and its permissions.")
    except MemoryError as error:
        return _complain(f"out of memory ({error}). Take a smaller --cache, a smaller input or --tier storage.")
    except KeyboardInterrupt:
        say()
        if argv is None and arguments.module not in _OWN:
            leave()
        return INTERRUPTED


def _complain(message: str) -> int:
    print(f"warpwell: error: {message}", file=sys.stderr)
    return BAD_INPUT


def _parser(sched: bool) -> argparse.ArgumentParser:
    parser = program(prog="warpwell", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"warpwell {sys.modules['warpwell'].__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = command(commands, "demo", "demo", "traverse a graph larger than the cache, checked against SciPy")
    demo.add_argument("--scale", type=int, default=17, metavar="N", help="2**N vertices (default 17)")
    demo.add_argument("--out", default="demo.png", metavar="FILE", help="where the picture goes (default demo.png)")
    _run_options(demo, cache="1MiB")

    info = command(commands, "info", "info", "show devices, versions, and what is missing and how to get it")
    json_option(info)

    graph = commands.add_parser("graph", help="convert, generate and traverse graphs")
    verbs = graph.add_subparsers(metavar="COMMAND", required=True)

    convert = command(verbs, "convert", "graph.make", "convert a file of edges")
    convert.add_argument("edges", metavar="EDGES", help="edge list, MatrixMarket or SciPy .npz; also compressed")
    convert.add_argument("out", metavar="OUT", help="folder of the graph, NAME.ww by custom")
    convert.add_argument("--undirected", action="store_true", help="store each edge in both directions, once")
    convert.add_argument("--vertices", type=int, metavar="N", help="vertices, where the file does not say so")
    _make_options(convert)

    generate = command(verbs, "generate", "graph.make", "generate a graph of the GAP benchmark")
    generate.add_argument("kind", choices=("kron", "urand"))
    generate.add_argument("out", metavar="OUT", help="folder of the graph, NAME.ww by custom")
    generate.add_argument("--scale", type=int, default=16, metavar="N", help="2**N vertices (default 16)")
    generate.add_argument("--degree", type=int, default=16, metavar="N", help="edges made per vertex (default 16)")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.add_argument("--directed", action="store_true", help="leave the edges as they are made")
    _make_options(generate)

    search = command(verbs, "bfs", "graph.run", "breadth-first search")
    search.add_argument("graph", metavar="GRAPH")
    search.add_argument("--source", type=int, required=True, metavar="VERTEX")
    search.add_argument("--out", metavar="FILE.npy", help="write the levels (int64; -1: not reached)")
    _run_options(search)

    components = command(verbs, "cc", "graph.run", "connected components of an undirected graph")
    components.add_argument("graph", metavar="GRAPH")
    components.add_argument("--out", metavar="FILE.npy", help="write each vertex's smallest connected vertex (int64)")
    _run_options(components)

    kv_arguments.add(commands)
    sched_arguments.add(commands, load=sched)
    pool_arguments.add(commands)

    bench = command(commands, "bench", "bench", "run the benchmarks of a checkout")
    bench.add_argument("--list", action="store_true", help="name them, and run none")
    bench.add_argument("name", nargs="?", metavar="NAME", help="which one; all if left out")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")
    return parser


def _run_options(parser: argparse.ArgumentParser, cache: str = "256MiB") -> None:
    group = parser.add_argument_group("how to run")
    group.add_argument("--device", choices=("cpu", "cuda", "interp"), help="default: cuda where there is a GPU")
    group.add_argument("--tier", choices=("storage", "host-cached", "host", "device"), default="storage",
                       help="where the edges live (default storage)")  # fmt: skip
    group.add_argument("--cache", default=cache, metavar="SIZE", help=f"of the page cache (default {cache})")
    group.add_argument("--page-size", type=int, default=4096, metavar="BYTES", help="default 4096")
    json_option(group)


def _make_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace a graph that is there")
    parser.add_argument("--memory", metavar="SIZE", help="for sorting (default half of what is free)")
    json_option(parser)
