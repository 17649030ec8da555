"""The rules of CONTRIBUTING.md that a program can check: import direction, numba's place, module length."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "warpwell"

# A folder imports only from folders of a lower rank; folders of one rank not from each other.
RANKS = (
    ("errors",),
    ("targets", "nvme"),
    ("queues", "pool"),
    ("storage",),
    ("cache",),
    ("array",),
    ("graph", "kv", "scheduler"),
    ("testing",),
    ("cli",),
)
RANK = {folder: rank for rank, folders in enumerate(RANKS) for folder in folders}
COMPILERS = {"numba", "llvmlite", "cuda", "numba_cuda"}
MAX_LINES = 500

# warpwell/__init__.py and __main__.py gather everything and so stand above the order.
MODULES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or not p.name.startswith("__"))


def folder_of(path: Path) -> str:
    """The part of the package that a module belongs to: queues for queues/pair.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[int, str]]:
    """Every absolute module name that `path` imports at any depth, with its line."""
    package = ["warpwell", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_are_modules() -> None:
    assert MODULES


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_folder_imports_only_from_folders_below_it(path: Path) -> None:
    here = folder_of(path)
    assert here in RANK, f"{here} has no place in the order: give it one in RANKS and in CONTRIBUTING.md"
    wrong = []
    for line, module in imported(path):
        parts = module.split(".")
        if parts[0] != "warpwell" or (len(parts) > 1 and parts[1] == here):
            continue
        # `import warpwell` or a name out of it reaches everything at once.
        if len(parts) < 2 or RANK.get(parts[1], len(RANKS)) >= RANK[here]:
            wrong.append(f"{name(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in MODULES if folder_of(p) != "targets"], ids=name)
def test_only_targets_imports_the_compiler(path: Path) -> None:
    wrong = [f"{name(path)}:{line} imports {m}" for line, m in imported(path) if m.split(".")[0] in COMPILERS]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name(path)} has {lines} lines: is it two modules?"
