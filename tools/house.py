"""Measure the package as a house: ``python -m tools.house``.

It prints code lines by folder, circles of imports, the largest folder, the longest functions and class names that two
modules use. `tests/system/test_layout.py` checks the same figures against the rules of CONTRIBUTING.md.

Imports are read from the syntax tree, wherever they stand: at the top, in a function, below ``TYPE_CHECKING``. A string
that is a module's full name (``"warpwell.remote.store"``, ``"warpwell.kv:open"``) counts as an import of it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "warpwell"

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_MODULE = re.compile(r"warpwell(\.\w+)+(:\w+)?")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """One name that a module imports.

    Attributes
    ----------
    line : int
    name : str
        Absolute: ``warpwell.kv.store.Store``, or ``numba.types``.
    """

    line: int
    name: str


@dataclass(frozen=True)
class Function:
    """One function, with its decorators' lines left out and its docstring counted."""

    lines: int
    module: str
    name: str


class Module:
    """One file of the package.

    Parameters
    ----------
    path : Path
    root : Path
        Folder of the package.
    """

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path, self.root = path, root
        parts = path.relative_to(root.parent).with_suffix("").parts
        self.name = ".".join(parts).removesuffix(".__init__")
        self.package = ".".join(parts[:-1])
        self.text = path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Return its syntax tree, made when it is first asked for: tests are collected without."""
        return ast.parse(self.text, str(self.path))

    @property
    def folder(self) -> str:
        """The part of the package that the module belongs to: ``kv`` for ``kv/log/journal.py``, "" for the top."""
        parts = self.path.relative_to(self.root).parts
        return parts[0] if len(parts) > 1 else ""

    @cached_property
    def imports(self) -> list[Import]:
        """Return what the module imports, at any depth, and modules that its strings name."""
        texts = {id(node) for node in _docstrings(self.tree)}
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = self.package.split(".")
                start = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*start, *([node.module] if node.module else [])])
                found += [Import(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                if _MODULE.fullmatch(node.value):
                    found.append(Import(node.lineno, node.value.replace(":", ".")))
        return found

    @cached_property
    def code_lines(self) -> int:
        """Count lines that are no docstring, comment, import or blank line."""
        dropped: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for text in _docstrings(self.tree):
            dropped.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        used: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT:
                used.update(range(token.start[0], token.end[0] + 1))
        return len(used - dropped)

    @cached_property
    def functions(self) -> list[Function]:
        """Return every function and method, nested ones too."""
        return [
            Function((node.end_lineno or node.lineno) - node.lineno + 1, self.name, node.name)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]

    @cached_property
    def classes(self) -> list[str]:
        """Return the names of its classes."""
        return [node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield strings that stand for themselves: docstrings, also those below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    if isinstance(part.value.value, str):
                        yield part.value


def modules(root: Path = ROOT) -> list[Module]:
    """Read every module of the package."""
    return [Module(path, root) for path in sorted(root.rglob("*.py"))]


def import_graph(found: list[Module]) -> dict[str, set[str]]:
    """Return for each module of the package the modules of the package that it imports."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        graph[module.name] = targets = set()
        for one in module.imports:
            parts = one.name.split(".")
            known = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            target = next((name for name in known if name in names), None)
            if target is not None and target != module.name:
                targets.add(target)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def files_by_folder(found: list[Module]) -> Counter[str]:
    """Count the modules of each folder, without those of its sub-folders."""
    return Counter(module.path.parent.relative_to(module.root.parent).as_posix() for module in found)


def classes_of_one_name(found: list[Module]) -> dict[str, list[str]]:
    """Return class names that several modules use, with those modules."""
    users: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for name in module.classes:
            users[name].append(module.name)
    return {name: homes for name, homes in sorted(users.items()) if len(homes) > 1}


def report(root: Path) -> dict[str, object]:
    """Return the figures of the house as plain data."""
    found = modules(root)
    lines: Counter[str] = Counter()
    for module in found:
        lines[module.folder or "warpwell"] += module.code_lines
    longest = sorted((f for m in found for f in m.functions), key=lambda f: -f.lines)[:5]
    folder, files = files_by_folder(found).most_common(1)[0]
    return {
        "modules": len(found),
        "code_lines": dict(sorted(lines.items())) | {"all": sum(lines.values())},
        "circles": circles(import_graph(found)),
        "largest_folder": {"name": folder, "modules": files},
        "longest_functions": [f"{f.module}.{f.name}: {f.lines}" for f in longest],
        "classes_of_one_name": classes_of_one_name(found),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Print code lines, circles, and the longest parts of the package.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="folder of the package")
    print(json.dumps(report(parser.parse_args().root.resolve()), indent=2))


if __name__ == "__main__":
    main()
