"""The parsers of ``warpwell``, for the page of its commands and for the tests of all pages."""

import argparse
from collections.abc import Iterator
from typing import Any
from unittest import mock


class _Caught(Exception):
    """Carries the parser out of ``main``."""


def parser() -> argparse.ArgumentParser:
    """Return the parser that ``warpwell`` uses, with those of all its commands."""
    from warpwell.cli import main

    def parse_args(self: argparse.ArgumentParser, *_: Any) -> None:
        raise _Caught(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
        try:
            main(["sched"])  # the commands of sched are loaded only where they are named
        except _Caught as caught:
            found: argparse.ArgumentParser = caught.args[0]
            return found
    raise RuntimeError("warpwell.cli.main parsed no arguments")


def commands(under: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, and of the commands below them."""
    for action in under._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                if any(isinstance(below, argparse._SubParsersAction) for below in each._actions):
                    yield from commands(each)
                else:
                    yield each
