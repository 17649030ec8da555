"""Arguments that commands share: ``program``, ``command`` and ``json_option``."""

from __future__ import annotations

import argparse
from typing import Any

Commands = argparse._SubParsersAction  # the type of add_subparsers(); argparse has no public name for it


class _Parser(argparse.ArgumentParser):
    """A parser whose commands say themselves what they do not know; the usage of all commands would not help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; what is not known ends the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def program(**options: Any) -> argparse.ArgumentParser:
    """Return a parser, which makes others like it of its commands."""
    return _Parser(**options)


def command(
    commands: Commands[argparse.ArgumentParser], name: str, module: str, text: str
) -> argparse.ArgumentParser:
    """Add a command whose work is `run` of a module of this folder."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(module=module, command=name)
    return parser


def json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress")
