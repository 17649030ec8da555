"""Arguments that commands share: ``command`` and ``json_option``."""

from __future__ import annotations

import argparse

Commands = argparse._SubParsersAction  # the type of add_subparsers(); argparse has no public name for it


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
