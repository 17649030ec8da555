"""The package's public names: imported when they are used, and all of them there."""

import ast
import importlib
import operator
import subprocess
import sys
from pathlib import Path

import pytest

import warpwell as ww

SOURCE = Path(ww.__file__)


def declared() -> dict[str, str]:
    """Where each name comes from, for whoever reads types: the imports under TYPE_CHECKING."""
    block, _ = (n for n in ast.parse(SOURCE.read_text()).body if isinstance(n, ast.If))
    return {
        alias.asname or alias.name: f"{node.module or ''}.{alias.name}".lstrip(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_and_their_types_agree() -> None:
    assert sorted(declared()) == sorted({*ww.__all__} - {"errors"}) == sorted(ww._HOMES)
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
    for line, names in zip(done.stdout.splitlines(), (ww.__all__, ww.pool.__all__), strict=True):
        assert {name for name in line.split() if not name.startswith("__")} == set(names)
        assert {"__doc__", "__name__", "__all__"} <= set(line.split())


@pytest.mark.parametrize("name", ["cache.Cache", "graph.bfs", "kv.key_words", "storage.Striped"])
def test_folders_that_the_documentation_names_are_there_from_the_start(name: str) -> None:
    code = f"import warpwell as ww; ww.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'numpy'"):
        operator.attrgetter("numpy")(ww)
