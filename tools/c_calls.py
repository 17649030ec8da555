"""List C files that call each other in a cycle: ``python -m tools.c_calls [--update]``.

The sources of a program are the files of a folder whose names share the part in front of the first underscore:
``layer.c``, ``layer_copy.c``. A file depends on the files that define the functions it calls. A static function belongs
to its file only. Functions that are passed by address are not calls.

``tests/system/c_cycles.json`` lists the calls that close cycles: caller's file, called file, functions. The list may
only shrink. ``--update`` removes what no longer occurs; it refuses to add to it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools import house

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "system" / "c_cycles.json"
FOLDERS = ("src/warpwell/driver/native", "lab/driver")

Calls = dict[str, dict[str, list[str]]]
"""Names of called functions, by the caller's file and the called file."""

_IGNORED = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M
)
_TOKEN = re.compile(r"[A-Za-z_]\w*|[(){};]")
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
    """Return the calls between files that are part of a cycle."""
    programs: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.glob("*.c")):
            programs[folder, path.stem.partition("_")[0]].append(path)
    found: Calls = {}
    for paths in programs.values():
        found |= _cycles(paths)
    return found


def _cycles(paths: list[Path]) -> Calls:
    defined = {path.name: list(functions(path.read_text())) for path in paths}
    homes = {f.name: file for file, inside in defined.items() for f in inside if not f.is_static}
    edges: dict[str, dict[str, set[str]]] = {file: defaultdict(set) for file in defined}
    for file, inside in defined.items():
        own = {function.name for function in inside}
        for name in set().union(*(function.calls for function in inside)) - own:
            if name in homes:
                edges[file][homes[name]].add(name)
    groups = house.circles({file: set(targets) for file, targets in edges.items()})
    return {
        file: {target: sorted(edges[file][target]) for target in sorted(edges[file]) if target in group}
        for group in groups
        for file in group
    }


def _flat(calls: Calls) -> set[tuple[str, str, str]]:
    return {
        (file, target, name) for file, targets in calls.items() for target, names in targets.items() for name in names
    }


def problems(found: Calls, record: Calls) -> list[str]:
    """Return a line for each difference from the recorded calls."""
    new, old = _flat(found), _flat(record)
    messages = [f"{file} calls {name} of {target}, which closes a cycle" for file, target, name in sorted(new - old)]
    messages += [
        f"{file} does not call {name} of {target} in a cycle; run python -m tools.c_calls --update"
        for file, target, name in sorted(old - new)
    ]
    return messages


def shrunk(found: Calls, record: Calls) -> Calls:
    """Return the recorded calls without those that do not occur."""
    remaining: Calls = {}
    for file, target, name in sorted(_flat(found) & _flat(record)):
        remaining.setdefault(file, {}).setdefault(target, []).append(name)
    return remaining


def main() -> int:
    """Print differences from the recorded calls, or update them; return 1 if calls would have to be added."""
    parser = argparse.ArgumentParser(prog="python -m tools.c_calls", description=main.__doc__)
    parser.add_argument("--update", action="store_true", help="remove calls that do not occur")
    update = parser.parse_args().update
    found = cycles(ROOT / folder for folder in FOLDERS)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else found
    if update:
        record = shrunk(found, record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    messages = problems(found, record)
    print("\n".join(messages) or f"{len(_flat(found))} calls close cycles, all of them recorded")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
