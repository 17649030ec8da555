"""The arguments of ``warpwell sched``."""

from __future__ import annotations

import argparse
import importlib

from ..arguments import Commands

MODULES = ("explain", "serve", "turns")
"""Modules of its commands; each has `add`, which adds its arguments, and `run`."""


def add(commands: Commands[argparse.ArgumentParser], load: bool) -> None:
    """Add ``sched`` and its commands.

    Parameters
    ----------
    commands
    load : bool
        Whether its own commands will be looked at: their modules are imported only then.
    """
    sched = commands.add_parser("sched", help="share a device: simulate, run and explain schedulers")
    verbs = sched.add_subparsers(metavar="COMMAND", required=True)
    if load:
        for name in MODULES:
            importlib.import_module(f".{name}", __package__).add(verbs)
