"""Check that rooms of the package are imported through their doors: ``python -m tools.doors [--update]``.

A room is a folder directly in ``src/warpwell``, or a module there. Its door is its ``__init__``, which exports the
names that other rooms may use. An import that crosses a room boundary must end at a door:
``from ..cache import Cache``, not ``from ..cache.cache import Cache``. A door exports at most 30 names. Large rooms
have inner doors, too (`INNER_DOORS`): ``from ..targets.blocks import BlockLaunch``.

``tests/system/doors.json`` lists the exceptions, which may only shrink: deep imports by importing module, and the width
of each wider door. ``--update`` removes what no longer occurs from the list; it refuses to add to it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import house

RECORD = Path(__file__).parents[1] / "tests" / "system" / "doors.json"
MAX_NAMES = 30
"""Largest number of names that a door exports."""
WIDER_DOORS = {"targets": 60, "targets.primitives": 70}
"""Doors with another limit."""
INNER_DOORS = (
    "array.gather",
    "cache.layout",
    "nvme.controller",
    "nvme.identify",
    "nvme.status",
    "queues.layout",
    "scheduler.extend",
    "storage.commands",
    "targets.blocks",
    "targets.bus_error",
    "targets.compiler",
    "targets.gpu",
    "targets.primitives",
)
"""Packages and modules inside of rooms that are doors, too: a part of a room that only few other rooms use, the
primitives of device code, and the layouts of records: their names only make sense together."""


@dataclass
class Doors:
    """The imports that cross the boundaries of rooms.

    Attributes
    ----------
    deep : dict
        Names that bypass a door, by the importing module; both without the name of the package.
    widths : dict
        Number of names that each door exports.
    modules : set
        All modules.
    """

    deep: dict[str, set[str]]
    widths: dict[str, int]
    modules: set[str]

    @property
    def wide(self) -> dict[str, int]:
        """Widths that exceed the limit."""
        return {room: width for room, width in self.widths.items() if width > limit(room)}


def limit(room: str) -> int:
    """Return how many names a room may export."""
    return WIDER_DOORS.get(room, MAX_NAMES)


def read(modules: Iterable[house.Module]) -> Doors:
    """Read all imports of a package that cross the boundaries of its rooms."""
    by_name = {module.name: module for module in modules}
    package = min(by_name)
    exports = {
        door: exported(module)
        for name, module in by_name.items()
        if (door := name.partition(".")[2]) and ("." not in door or door in INNER_DOORS)
    }
    listed = {door: set(names) for door, (_, names) in exports.items()}
    deep: dict[str, set[str]] = defaultdict(set)
    for name, module in by_name.items():
        own_room = name.split(".")[1] if "." in name else ""
        for used in module.imports:
            parts = used.name.split(".")
            if parts[0] != package or len(parts) < 3 or parts[1] == own_room or parts[1] not in exports:
                continue
            door, inner_path = parts[1], parts[2:]
            if f"{door}.{inner_path[0]}" in exports:
                door, inner_path = f"{door}.{inner_path[0]}", inner_path[1:]
            if not inner_path:  # the inner door itself
                continue
            if f"{package}.{door}.{inner_path[0]}" in by_name and not (
                len(inner_path) == 1 and inner_path[0] in exports[door][0]
            ):
                deep[name.partition(".")[2] or "__init__"].add(".".join(parts[1:]))
            elif by_name[f"{package}.{door}"].path.name == "__init__.py" or "." in door:
                listed[door].add(inner_path[0])
    return Doors(dict(deep), {door: len(names) for door, names in listed.items()}, set(by_name))


def exported(door: house.Module) -> tuple[set[str], list[str]]:
    """Return the objects that a door binds, and the names in its ``__all__``.

    Submodules are not among the objects: a door that exports a submodule would let imports bypass it. If ``__all__`` is
    computed, it is assumed to have every public object. A module without a folder is a door without a limit.
    """
    bound: set[str] = set()
    listed: list[str] | None = None
    for node in _statements(door.tree.body):
        if isinstance(node, ast.ImportFrom):
            if node.module is None and node.level == 1:
                continue
            bound.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for name in targets if isinstance(name, ast.Name)}
            bound |= names
            if "__all__" in names and isinstance(node.value, (ast.List, ast.Tuple)):
                listed = [ast.literal_eval(item) for item in node.value.elts]
            elif "__all__" in names:
                listed = sorted(name for name in bound if not name.startswith("_"))
    return bound, [] if listed is None or door.path.name != "__init__.py" else listed


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those below ``if TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def problems(found: Doors, record: dict[str, Any]) -> list[str]:
    """Return a line for each difference from the recorded exceptions."""
    deep, wide = record["imports"], record["widths"]
    messages = []
    for module in sorted(deep.keys() | found.deep.keys()):
        old, new = set(deep.get(module, ())), found.deep.get(module, set())
        messages += [f"{module} imports {name}; import it from the door of {name.split('.')[0]}" for name in new - old]
        messages += [f"{module} does not import {name}; run python -m tools.doors --update" for name in old - new]
    for room in sorted(wide.keys() | found.wide.keys()):
        before, now = wide.get(room, limit(room)), found.widths.get(room, 0)
        if now > before:
            messages.append(f"the door of {room} exports {now} names; at most {before} are allowed")
        elif room in wide and now < before:
            messages.append(f"the door of {room} exports {now} names, not {before}; run python -m tools.doors --update")
    return messages


def shrunk(found: Doors, record: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded exceptions without those that do not occur.

    A module that is not recorded takes over the exceptions of modules of its room that were deleted: it was renamed.
    """
    deep, wide = record["imports"], record["widths"]
    deleted: dict[str, set[str]] = defaultdict(set)
    for module, names in deep.items():
        if not any(name.endswith(f".{module}") for name in found.modules) and module != "__init__":
            deleted[module.split(".")[0]].update(names)
    remaining = {
        module: sorted(names & (set(deep[module]) if module in deep else deleted[module.split(".")[0]]))
        for module, names in sorted(found.deep.items())
    }
    widths = {room: min(width, wide[room]) for room, width in sorted(found.wide.items()) if room in wide}
    return {"imports": {module: names for module, names in remaining.items() if names}, "widths": widths}


def main() -> int:
    """Print differences from the recorded exceptions, or update them; return 1 if exceptions would have to be added."""
    parser = argparse.ArgumentParser(prog="python -m tools.doors", description=main.__doc__)
    parser.add_argument("--update", action="store_true", help="remove exceptions that do not occur")
    update = parser.parse_args().update
    found = read(house.modules())
    if not RECORD.exists():
        everything = {module: sorted(names) for module, names in sorted(found.deep.items())}
        record = {"imports": everything, "widths": dict(sorted(found.wide.items()))}
    else:
        record = json.loads(RECORD.read_text())
    if update:
        record = shrunk(found, record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    messages = problems(found, record)
    print("\n".join(messages) or f"{sum(map(len, found.deep.values()))} imports bypass a door, all of them recorded")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
