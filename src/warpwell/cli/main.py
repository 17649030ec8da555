"""``main``: parses the arguments of ``warpwell``, runs the command, and reports its errors.

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
from .bench import arguments as bench_arguments
from .drive import arguments as drive_arguments
from .graph import arguments as graph_arguments
from .interrupt import INTERRUPTED, end_soon, leave, say
from .kv import arguments as kv_arguments
from .pool import arguments as pool_arguments
from .sched import arguments as sched_arguments
from .table import arguments as table_arguments

BAD_INPUT = 2
BROKEN_PIPE = 141

_OWN = ("pool.run", "pool.notebook")
"""Modules of commands whose programs handle Ctrl-C themselves."""

_DESCRIPTION = "Arrays on storage, many times larger than memory, that kernels in Python read on demand."


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``warpwell`` with these arguments (of the process by default); return the exit code.

    0 is success, 1 what ``kv verify`` or ``table check`` found damaged, 2 bad input (a message on stderr says what to
    do), 130 an interrupt; ``run`` ends with the code of its program.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by who started this (`>&-`); no file of ours may get its number
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
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

    demo = command(commands, "demo", "demo", "search a graph larger than the cache, query a table, train on its rows")
    demo.add_argument("--scale", type=int, default=17, metavar="N", help="2**N vertices (default 17)")
    demo.add_argument("--out", default="demo.png", metavar="FILE", help="file of the picture (default demo.png)")
    graph_arguments.how_to_run(demo, cache="1MiB")

    info = command(commands, "info", "info", "show devices, versions, and how to install what is missing")
    json_option(info)

    graph_arguments.add(commands)
    kv_arguments.add(commands)
    table_arguments.add(commands)
    sched_arguments.add(commands, load=sched)
    pool_arguments.add(commands)
    drive_arguments.add(commands)

    bench_arguments.add(commands)
    return parser
