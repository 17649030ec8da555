"""List C files that depend on each other in a cycle: ``python -m tools.c_calls [--update]``.

The sources of a program are the files of a folder whose names share the part in front of the first underscore:
``layer.c``, ``layer_copy.c``. A file depends on the files that define the functions it calls, directly or by an inline
function of a header, and the variables that headers declare as ``extern``. A static function belongs to its file only.
Functions that are passed by address are not calls.

``tests/system/c_cycles.json`` lists what closes cycles: dependent file, other file, names. The list may
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
    lines = _IGNORED.sub(" ", text).splitlines()
    defining = [line for line in lines if re.match(r"(?!extern|static|typedef)[A-Za-z_][^()=]*[;=]", line)]
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
