"""List C files that depend on each other in a cycle: ``python -m tools.c_calls``.

The sources of a program are the files of a folder whose names share the part before the first underscore:
``layer.c``, ``layer_copy.c``. A file depends on the files that define the functions it calls, directly or by an inline
function of a header, and the variables that headers declare as ``extern``. A static function belongs to its file only.
Functions that are passed by address are not calls.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools import house

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/warpwell/driver/native", "lab/driver")

Calls = dict[str, dict[str, list[str]]]
"""Names of called functions, by the caller's file and the called file."""

_IGNORED = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M
)
_TOKEN = re.compile(r"[A-Za-z_]\w*|[(){};]")
_EXTERN = re.compile(r"^extern\s+[^;()]*?(\w+(?:\s*,\s*\w+)*)(?:\[[^;]*)?;", re.M)
_KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "do", "else", "case"}


@dataclass(frozen=True)
class Function:
    """A function with a body, and the names that it calls."""

    name: str
    is_static: bool
    calls: frozenset[str]


def functions(text: str) -> Iterator[Function]:
    """Yield the functions that a C file defines at its top level."""
    tokens = _TOKEN.findall(_IGNORED.sub(" ", text))
    name, is_static, position = "", False, 0
    while position < len(tokens):
        token = tokens[position]
        if token == "(":
            end = _closing(tokens, position)
            if end + 1 < len(tokens) and tokens[end + 1] == "{" and name:
                last = _closing(tokens, end + 1)
                body = tokens[end + 1 : last]
                called = {a for a, b in pairwise(body) if b == "(" and a not in _KEYWORDS}
                yield Function(name, is_static, frozenset(called - set("(){};")))
                end, name, is_static = last, "", False
            position = end
        elif token == "{":
            position = _closing(tokens, position)
        elif token == ";":
            name, is_static = "", False
        elif token == "static":
            is_static = True
        else:
            name = token
        position += 1


def _closing(tokens: list[str], start: int) -> int:
    """Return the position of the bracket that closes the one at `start`."""
    opening = tokens[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for position in range(start, len(tokens)):
        depth += (tokens[position] == opening) - (tokens[position] == closing)
        if not depth:
            return position
    return len(tokens) - 1


def cycles(folders: Iterable[Path]) -> Calls:
    """Return the functions and variables by which files depend on each other in a cycle."""
    programs: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.glob("*.c")):
            programs[folder, path.stem.partition("_")[0]].append(path)
    found: Calls = {}
    for paths in programs.values():
        found |= _cycles(paths)
    return found


def variables(text: str, declared: set[str]) -> set[str]:
    """Return the variables of `declared` that a C file defines."""
    source_lines = _IGNORED.sub(" ", text).splitlines()
    defining = [line for line in source_lines if re.match(r"(?!extern|static|typedef)[A-Za-z_][^()=]*[;=]", line)]
    return {name for line in defining for name in re.findall(r"\w+", line.split("=")[0])} & declared


def _cycles(paths: list[Path]) -> Calls:
    texts = {path.name: path.read_text() for path in paths}
    headers = [path.read_text() for path in sorted(paths[0].parent.glob("*.h"))]
    inlined = {function.name: function.calls for text in headers for function in functions(text)}
    declared = {name for text in headers for names in _EXTERN.findall(text) for name in re.findall(r"\w+", names)}
    defined = {file: list(functions(text)) for file, text in texts.items()}
    homes = {f.name: file for file, inside in defined.items() for f in inside if not f.is_static}
    homes |= {name: file for file, text in texts.items() for name in variables(text, declared)}
    edges: dict[str, dict[str, set[str]]] = {file: defaultdict(set) for file in defined}
    for file, inside in defined.items():
        own = {function.name for function in inside}
        called = set().union(*(function.calls for function in inside))
        called |= set().union(*(inlined[name] for name in called & inlined.keys()))
        used = set(re.findall(r"\w+", _IGNORED.sub(" ", texts[file]))) & declared
        for name in (called | used) - own:
            if homes.get(name, file) != file:
                edges[file][homes[name]].add(name)
    groups = house.circles({file: set(targets) for file, targets in edges.items()})
    return {
        file: {target: sorted(edges[file][target]) for target in sorted(edges[file]) if target in group}
        for group in groups
        for file in group
    }


def problems(found: Calls) -> list[str]:
    """Return a line for each function or variable by which a file depends on another one in a cycle."""
    return [
        f"{file} uses {name} of {target}, which closes a cycle"
        for file, targets in found.items()
        for target, names in targets.items()
        for name in names
    ]


def main() -> int:
    """Print the calls that close cycles; return 1 if there are any."""
    argparse.ArgumentParser(prog="python -m tools.c_calls", description=main.__doc__).parse_args()
    found = problems(cycles(ROOT / folder for folder in FOLDERS))
    print("\n".join(found) or "no cycles")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
