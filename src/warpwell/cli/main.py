"""``main``: parses the arguments of ``warpwell``, runs the command, and reports its errors.

Nothing here imports a compiler: ``warpwell --help`` answers at once. Commands import what they need.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from ..errors import WarpwellError
from .arguments import command, json_option, program
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

_MOVED = {
    "bench": "python -m lab bench",
    "demo": "make demo",
    "kv bench": "python -m lab bench kv",
    "drive bench": "python -m lab bench drive",
    "sched simulate": "python -m lab sched simulate",
    "sched run": "python -m lab sched run",
    "sched trace": "python -m lab sched trace",
    "sched fit": "python -m lab sched fit",
}
"""Commands that only a checkout has, and how they are run there."""

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
    for name in (" ".join(given[:1]), " ".join(given[:2])):
        if name in _MOVED:
            print(f"warpwell {name} moved: run `{_MOVED[name]}` in a checkout of Warpwell", file=sys.stderr)
            return BAD_INPUT
    arguments = _parser(sched=given[:1] == ["sched"]).parse_args(given)
    module = importlib.import_module(f".{arguments.module}", __package__)
    return execute(module.run, arguments, own_process=argv is None and arguments.module not in _OWN)


def execute(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, own_process: bool) -> int:
    """Run a command; report its errors on stderr, and return the exit code.

    Parameters
    ----------
    run : callable
        Takes the arguments and returns the exit code.
    arguments : Namespace
    own_process : bool
        Whether Ctrl-C ends this process. False if the caller goes on, or the command handles Ctrl-C itself.
    """
    if own_process:
        end_soon()
    try:
        code = run(arguments)
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
        if own_process:
            leave()
        return INTERRUPTED


def _complain(message: str) -> int:
    print(f"warpwell: error: {message}", file=sys.stderr)
    return BAD_INPUT


def _parser(sched: bool) -> argparse.ArgumentParser:
    parser = program(prog="warpwell", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"warpwell {sys.modules['warpwell'].__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    info = command(commands, "info", "info", "show devices, versions, and how to install what is missing")
    json_option(info)

    graph_arguments.add(commands)
    kv_arguments.add(commands)
    table_arguments.add(commands)
    sched_arguments.add(commands, load=sched)
    pool_arguments.add(commands)
    drive_arguments.add(commands)
    return parser
