"""The parsers of ``warpwell``, for the page of its commands and for the tests of all pages."""

import argparse
from collections.abc import Iterator

from warpwell.cli.main import build_parser


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``warpwell`` with all its commands."""
    return build_parser()


def commands(under: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, and of the commands below them."""
    for action in under._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                if any(isinstance(below, argparse._SubParsersAction) for below in each._actions):
                    yield from commands(each)
                else:
                    yield each
