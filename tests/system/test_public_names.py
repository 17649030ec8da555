"""The package's public names: imported when they are used, all of them there, and few."""

import ast
import importlib
import operator
import subprocess
import sys
from pathlib import Path

import pytest
from tools import api_snapshot, house

import warpwell as ww
from warpwell import errors, gpu

SOURCE = Path(ww.__file__)


def declared() -> dict[str, str]:
    """The origin of each name for type checkers: the imports under TYPE_CHECKING."""
    block, _ = (n for n in ast.parse(SOURCE.read_text()).body if isinstance(n, ast.If))
    return {
        alias.asname or alias.name: f"{node.module or ''}.{alias.name}".lstrip(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_and_their_types_agree() -> None:
    assert sorted(declared()) == sorted({*ww.__all__, "open"} - {"errors"}) == sorted(ww._HOMES)
    assert set(ww.__all__) <= set(dir(ww))
    for name, path in declared().items():
        module, _, inside = path.rpartition(".")
        assert getattr(ww, name) is getattr(importlib.import_module(f"warpwell.{module}".rstrip(".")), inside), name


def test_wrong_names_are_found_by_who_checks_types() -> None:
    """A module with a `__getattr__` has every name for them."""
    for path in (SOURCE, SOURCE.parent / "pool" / "__init__.py"):
        body = ast.parse(path.read_text()).body
        assert not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body)


def test_what_a_prompt_offers() -> None:
    """Before the first use of a name, and nothing that the module itself imports."""
    code = "import warpwell as ww; a = dir(ww); b = dir(ww.pool); print(*a); print(*b)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    for line, names in zip(done.stdout.splitlines(), ([*ww.__all__, "open"], ww.pool.__all__), strict=True):
        assert {name for name in line.split() if not name.startswith("__")} == set(names)
        assert {"__doc__", "__name__", "__all__"} <= set(line.split())


FIRST_USE = """
import operator, sys
for name in sys.argv[1:]:
    for module in [module for module in sys.modules if module.partition(".")[0] == "warpwell"]:
        del sys.modules[module]
    import warpwell
    operator.attrgetter(name)(warpwell)
"""


def test_folders_that_the_documentation_names_are_there_from_the_start() -> None:
    """Each name is the first one that is used after an import of the package."""
    names = ["drives.Drive", "gpu.grid", "graph.bfs", "storage.Striped"]
    done = subprocess.run([sys.executable, "-c", FIRST_USE, *names], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'numpy'"):
        operator.attrgetter("numpy")(ww)


def test_star_imports_do_not_shadow_built_ins() -> None:
    names: dict[str, object] = {}
    exec("from warpwell import *", names)
    assert {"open", "map"}.isdisjoint(names) and names["gpu"] is gpu
    assert ww.open is not open and gpu.map is not map


CORE_ROOMS = {"targets", "nvme", "queues", "storage", "drives", "cache", "array"}
MAX_CORE_NAMES = 60
"""Limit of issue 31 for `CORE_ROOMS`, errors, `warpwell` itself and `warpwell.gpu`."""


def core_names() -> list[str]:
    """Return the public names that `MAX_CORE_NAMES` limits.

    A name of `warpwell` counts if a core room defines it, an exception if a core room makes one, and the base of all
    exceptions. A module counts by its names.
    """
    found = [f"gpu.{name}" for name in api_snapshot.public_names("warpwell.gpu")]
    for name in api_snapshot.public_names("warpwell"):
        definition = api_snapshot.resolve("warpwell", name)
        assert definition is not None
        if definition.node is not None and definition.module.split(".")[1] in CORE_ROOMS:
            found.append(name)
    for room in sorted(CORE_ROOMS & {module.split(".")[-1] for module in api_snapshot.PACKAGES}):
        found += [f"{room}.{name}" for name in api_snapshot.public_names(f"warpwell.{room}")]
    made = {"WarpwellError"}
    for module in house.modules():
        if module.folder in CORE_ROOMS or module.path.parent == house.ROOT:
            made |= {house.called_name(node) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    return found + [f"errors.{name}" for name in errors.__all__ if name in made]


def test_the_core_has_few_public_names() -> None:
    names = core_names()
    assert {"open", "gpu.grid", "storage.RamMedium", "drives.Drive", "errors.IndexRangeError"} <= set(names)
    assert {"turn", "errors.TurnTimeoutError"}.isdisjoint(names)
    assert len(names) <= MAX_CORE_NAMES, names
