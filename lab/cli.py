"""Parsers of the lab's commands, and the function that runs a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from warpwell.cli._common import Parser, execute


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for ``python -m lab NAME``.

    Parameters
    ----------
    name : str
        One word, or a group and a verb.
    description : str
        Effect of the command.
    """
    parser = Parser(prog=f"python -m lab {name}", description=description)
    parser.set_defaults(command=name)
    return parser


def run_command(run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Parse `argv` and run a command; report its errors as `warpwell` does.

    Ctrl-C ends the process within a second if it is ``python -m lab``.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return execute(run, parser.parse_args(argv), own_process=spec is not None and spec.name == "lab.__main__")
