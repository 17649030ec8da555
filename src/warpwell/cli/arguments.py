"""Arguments that commands share: ``program``, ``command``, ``json_option``, and ``new_file``, which checks one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MissingFileError

Commands = argparse._SubParsersAction  # the type of add_subparsers(); argparse has no public name for it


class _Parser(argparse.ArgumentParser):
    """A parser whose commands report unknown arguments with their own usage, not with that of `warpwell`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; end the program if one is unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def program(**options: Any) -> argparse.ArgumentParser:
    """Return a parser, which makes others like it of its commands."""
    return _Parser(**options)


def command(commands: Commands[argparse.ArgumentParser], name: str, module: str, text: str) -> argparse.ArgumentParser:
    """Add a command; the function `run` of a module of this folder does its work."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(module=module, command=name)
    return parser


def json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress")


def new_file(name: str, option: str) -> Path:
    """Return the path of a file to write, checked before any work is done.

    Parameters
    ----------
    name : str
    option : str
        The option that named it, for messages.

    Raises
    ------
    ArgumentError
        The path is a folder.
    MissingFileError
        The folder of the file does not exist.
    """
    path = Path(name)
    if not path.parent.is_dir():
        raise MissingFileError(f"{option} {name}: the folder {path.parent} does not exist: make it first", path=name)
    if path.is_dir():
        raise ArgumentError(f"{option} {name} is a folder: give the name of a file")
    return path
