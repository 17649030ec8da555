"""Measure the layout of the package: ``python -m tools.house [ROOT ...]``.

For each root, ``src/warpwell`` by default, it prints the code lines of Python and C by room as JSON. For the package it
adds import cycles, the largest folder, the longest functions, and class names that two modules share.
`tests/system/test_layout.py` checks the same measures against the rules of CONTRIBUTING.md. ``python -m tools.house
src/warpwell tests lab`` measures all code but the tools.

A line of Python counts if it holds a token and does not belong to a docstring, a comment or an import. A line of C
counts if it holds code.

Imports are read from the syntax tree at any depth: at the top, in functions, below ``TYPE_CHECKING``. A string that is
a module's full name (``"warpwell.remote.store"``, ``"warpwell.kv:open"``) counts as an import of that module.
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
from functools import cache, cached_property
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
C_SUFFIXES = (".c", ".h", ".cu", ".cuh")
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
    """One function; its decorators do not count as lines, but its docstring does."""

    line_count: int
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
        """Return the syntax tree, which is built on first use: collecting tests does not need it."""
        return ast.parse(self.text, str(self.path))

    @property
    def folder(self) -> str:
        """The room of the module: ``kv`` for ``kv/log/journal.py``, "" for a module at the top."""
        return _room(self.path, self.root)

    @cached_property
    def imports(self) -> list[Import]:
        """Return the imports of the module, at any depth, and the modules that its strings name."""
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
        """Return the number of lines, without docstrings, comments, imports and blank lines."""
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
        """Return the class names of the module."""
        return [node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield docstrings, including strings below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    if isinstance(part.value.value, str):
                        yield part.value


def modules(root: Path = ROOT) -> list[Module]:
    """Read every module of the package; a process reads and parses a file once until it changes."""
    return [_module(path, root, path.stat().st_mtime_ns) for path in sorted(root.rglob("*.py"))]


@cache
def _module(path: Path, root: Path, modified_ns: int) -> Module:
    return Module(path, root)


def called_name(call: ast.Call) -> str:
    """Return the name of a called function without its module or object, or "" for another expression."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def import_graph(found: list[Module]) -> dict[str, set[str]]:
    """Return the imports of each module inside the package."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        graph[module.name] = targets = set()
        for imported in module.imports:
            parts = imported.name.split(".")
            prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            target = next((name for name in prefixes if name in names), None)
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
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
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
    """Return the number of modules directly in each folder."""
    return Counter(module.path.parent.relative_to(module.root.parent).as_posix() for module in found)


def classes_of_one_name(found: list[Module]) -> dict[str, list[str]]:
    """Return class names that several modules use, with those modules."""
    users: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for name in module.classes:
            users[name].append(module.name)
    return {name: homes for name, homes in sorted(users.items()) if len(homes) > 1}


def c_code_lines(text: str) -> int:
    """Return the number of lines of C source that hold more than white space and comments."""
    source = _C_COMMENT_OR_TEXT.sub(_without_comment, text)
    return sum(bool(line.strip()) for line in source.splitlines())


_C_COMMENT_OR_TEXT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.DOTALL)


def _without_comment(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n") if match[0].startswith("/") else match[0]


def _room(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else ""


def lines_by_room(root: Path) -> dict[str, dict[str, int]]:
    """Return the code lines of Python and C below a folder, by room, with the sum as ``all``."""
    counts = {"python": Counter[str](), "c": Counter[str]()}
    for module in modules(root):
        counts["python"][module.folder or root.name] += module.code_lines
    for path in sorted(path for path in root.rglob("*") if path.suffix in C_SUFFIXES):
        counts["c"][_room(path, root) or root.name] += c_code_lines(path.read_text())
    return {language: dict(sorted(count.items())) | {"all": count.total()} for language, count in counts.items()}


def report(root: Path) -> dict[str, object]:
    """Return the sizes and the structure of the package."""
    found = modules(root)
    longest = sorted((f for m in found for f in m.functions), key=lambda f: -f.line_count)[:5]
    folder, files = files_by_folder(found).most_common(1)[0]
    return {
        "modules": len(found),
        "code_lines": lines_by_room(root),
        "circles": circles(import_graph(found)),
        "largest_folder": {"name": folder, "modules": files},
        "longest_functions": [f"{f.module}.{f.name}: {f.line_count}" for f in longest],
        "classes_of_one_name": classes_of_one_name(found),
    }


def main() -> None:
    """Print the report of the package, and the code lines of further folders."""
    parser = argparse.ArgumentParser(description="Print code lines by room, import cycles, and the largest parts.")
    parser.add_argument("roots", nargs="*", type=Path, default=[ROOT], metavar="ROOT", help="package, tests, lab")
    roots = [root.resolve() for root in parser.parse_args().roots]
    reports = [report(root) if root == ROOT else {"code_lines": lines_by_room(root)} for root in roots]
    named = {root.name: content for root, content in zip(roots, reports, strict=True)}
    print(json.dumps(named if len(roots) > 1 else reports[0], indent=2))


if __name__ == "__main__":
    main()
