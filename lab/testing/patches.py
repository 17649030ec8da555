"""Planted faults in files, as patches without line numbers.

A patch begins with a line ``# TITLE`` and may have more such lines. A hunk begins with ``@@ LOCATION`` and has lines
with ``-``, ``+`` or a space, as in a unified diff. An empty line and ``#`` begin the next patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hunk:
    """The lines `old` of a location (a file or function), which a patch replaces by `new`."""

    location: str
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """A patch: its title, the other lines of its head, and its hunks."""

    title: str
    notes: tuple[str, ...]
    hunks: tuple[Hunk, ...]


def read_patches(path: Path) -> tuple[Patch, ...]:
    """Read the patches of a file."""
    return tuple(map(_patch, path.read_text().removeprefix("# ").split("\n\n# ")))


def _patch(text: str) -> Patch:
    head, *hunks = text.split("\n@@ ")
    title, *notes = (line.removeprefix("# ") for line in head.splitlines())
    return Patch(title, tuple(notes), tuple(_hunk(*hunk.splitlines()) for hunk in hunks))


def _hunk(location: str, *changes: str) -> Hunk:
    old, new = ("".join(f"{line[1:]}\n" for line in changes if line[:1] in signs) for signs in (" -", " +"))
    return Hunk(location, old, new)
