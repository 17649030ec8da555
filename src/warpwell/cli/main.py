"""``main``: parses the arguments of ``warpwell`` and runs the command.

Nothing here imports NumPy or a compiler, so that ``--help`` answers at once. Commands import what they need.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from . import compile, drive, graph, info, kv, pool, sched, share, table
from ._common import Commands, Parser, add_command, execute

_PATHS = ("EDGES", "FILE", "FOLDER", "GRAPH", "LOG", "NEW", "OUT", "PATH", "SRC", "STORE", "TABLE")
"""Metavars of paths, without a suffix, for completion."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``warpwell`` with these arguments (of the process by default); return the exit code.

    0 is success, 1 damage that ``kv verify`` or ``table check`` found, 2 bad input (a message on stderr names the next
    step), 130 an interrupt; ``run`` returns the code of its program.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the parent process closed it (`>&-`); no other file may get its number
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
    arguments = build_parser().parse_args(argv)
    return execute(arguments.run, arguments, own_process=argv is None and not arguments.handles_interrupt)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``warpwell`` with all its commands."""
    parser = Parser(
        prog="warpwell",
        description="Arrays on storage, many times larger than memory, that Python kernels read on demand.",
    )
    parser.add_argument("--version", action="version", version=f"warpwell {sys.modules['warpwell'].__version__}")
    parser.set_defaults(handles_interrupt=False)
    commands: Commands[Any] = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (info, compile, graph, kv, table, sched, share, pool, drive):
        module.add(commands)
    _add_completion(commands)
    return parser


def _add_completion(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "completion",
        completion,
        "print a script that completes commands in a shell",
        "Print a script that completes the commands and options of warpwell in a shell. For bash, add this line to "
        '~/.bashrc: eval "$(warpwell completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads the script")


def completion(arguments: argparse.Namespace) -> int:
    """Print a completion script."""
    import shtab

    parser = build_parser()
    for action in _actions(parser):
        if isinstance(action.metavar, str) and action.metavar.partition(".")[0] in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
