"""List the public names of Warpwell with their signatures, and compare them with the committed list.

``python -m tools.api_snapshot`` prints a diff and exits with status 1 if the source and ``tests/system/public_api.txt``
differ; ``--update`` rewrites that file. The source is parsed, not imported: the list is the same with every version of
Python and does not depend on Numba or CUDA.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SNAPSHOT = ROOT / "tests" / "system" / "public_api.txt"

PACKAGES = (
    "warpwell",
    "warpwell.drives",
    "warpwell.errors",
    "warpwell.gpu",
    "warpwell.graph",
    "warpwell.kv",
    "warpwell.pool",
    "warpwell.remote",
    "warpwell.scheduler",
    "warpwell.scheduler.extend",
    "warpwell.storage",
    "warpwell.table",
    "warpwell.train",
)
"""Modules that have public names. Modules of ``warpwell.testing`` are added if they exist."""

SHOWN_DECORATORS = {"classmethod", "staticmethod", "contextmanager", "overload", "dataclass", "kernel", "device"}
SHOWN_SPECIAL_METHODS = {
    f"__{name}__"
    for name in "call getitem setitem delitem len iter next contains enter exit bool array dlpack del".split()
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | None


@dataclass(frozen=True)
class Found:
    """A top-level definition: the dotted module that contains it, its name there, and its syntax tree."""

    module: str
    name: str
    node: Definition


@functools.cache
def parse(module: str) -> ast.Module | None:
    """Return the syntax tree of a Warpwell module, or None if the file does not exist."""
    path = SOURCE.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"))
    return None


def is_package(module: str) -> bool:
    """Return True if the module is a folder."""
    return SOURCE.joinpath(*module.split("."), "__init__.py").is_file()


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield top-level statements, including those inside ``if`` and ``try`` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements(node.body)
            yield from statements(node.orelse)


def import_source(node: ast.ImportFrom, module: str) -> str:
    """Return the absolute module that a ``from`` import in `module` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package(module)]
    return ".".join([*parts, node.module] if node.module else parts)


@functools.cache
def bindings(module: str) -> dict[str, Found]:
    """Return what each top-level name of a module is bound to: a definition, or an import from Warpwell."""
    tree = parse(module)
    found: dict[str, Found] = {}
    for node in statements(tree.body if tree else ()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = Found(module, node.name, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = Found(module, node.target.id, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        found[name.id] = Found(module, name.id, node)
        elif isinstance(node, ast.ImportFrom) and import_source(node, module).split(".")[0] == "warpwell":
            for alias in node.names:
                found[alias.asname or alias.name] = Found(import_source(node, module), alias.name, None)
    return found


def resolve(module: str, name: str) -> Found | None:
    """Follow imports to the definition of a name; None if it is defined outside of Warpwell."""
    found = bindings(module).get(name)
    while found is not None and found.node is None:
        submodule = f"{found.module}.{found.name}"
        following = bindings(found.module).get(found.name)
        if following is None or following == found:
            return Found(submodule, "", None) if parse(submodule) else None
        found = following
    return found


def public_names(package: str) -> list[str]:
    """Return the names of ``__all__`` if it is a literal, otherwise all names without a leading underscore.

    Names of built-ins are public, too: ``__all__`` leaves them out for star imports.
    """
    for node in statements(parse(package).body):  # type: ignore[union-attr]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return sorted({*ast.literal_eval(node.value), *(bindings(package).keys() & vars(builtins).keys())})
            except ValueError:
                break
    return sorted(name for name in bindings(package) if not name.startswith("_"))


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the decorators that change how a definition is used."""
    names = [ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list]
    return "".join(f"@{name} " for name in names if name in SHOWN_DECORATORS)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, label: str) -> str:
    """Return a function on one line."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{decorators(node)}{kind} {label}({ast.unparse(node.args)}){returns}"


def bases_of(found: Found) -> list[tuple[str, Found | None]]:
    """Return the bases of a class: the text, and the definition if it is a class of Warpwell."""
    assert isinstance(found.node, ast.ClassDef)
    out: list[tuple[str, Found | None]] = []
    for base in found.node.bases:
        text = ast.unparse(base)
        target = resolve(found.module, text.split("[")[0].split(".")[-1])
        # a base outside of Warpwell may have the name of the class itself
        is_own = target is not None and isinstance(target.node, ast.ClassDef) and target.node is not found.node
        out.append((text, target if is_own else None))
    return out


def members(found: Found, label: str) -> dict[str, str]:
    """Return the public members of a class by name, including inherited names of Warpwell bases."""
    assert isinstance(found.node, ast.ClassDef)
    out: dict[str, str] = {}
    for _, base in reversed(bases_of(found)):
        if base is not None:
            out |= members(base, label)
    for node in statements(found.node.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name != "__init__" and node.name not in SHOWN_SPECIAL_METHODS:
                continue
            marks = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
            if marks & {"property", "cached_property"}:
                returns = f": {ast.unparse(node.returns)}" if node.returns else ""
                out[node.name] = f"property {label}.{node.name}{returns}"
            elif "setter" in marks:
                out[f"{node.name}="] = f"setter {label}.{node.name}"
            else:
                out[node.name] = signature(node, f"{label}.{node.name}")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_"):
                default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
                out[node.target.id] = f"field {label}.{node.target.id}: {ast.unparse(node.annotation)}{default}"
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    out[target.id] = f"value {label}.{target.id} = {ast.unparse(node.value)}"
    return out


def describe(package: str, name: str) -> list[str]:
    """Return the lines of one public name."""
    label, found = f"{package}.{name}", resolve(package, name)
    if found is None:
        return [f"name {label}"]
    if found.node is None:
        return [f"module {label}"]
    if isinstance(found.node, ast.ClassDef):
        # Private bases are flattened into the class, so that only their members count.
        bases = [text for text, base in bases_of(found) if base is None or not base.name.startswith("_")]
        head = f"{decorators(found.node)}class {label}" + (f"({', '.join(bases)})" if bases else "")
        return [head, *(f"    {text}" for _, text in sorted(members(found, name).items()))]
    if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [signature(found.node, label)]
    annotation = f": {ast.unparse(found.node.annotation)}" if isinstance(found.node, ast.AnnAssign) else ""
    return [f"value {label}{annotation}"]


def testing_modules() -> list[str]:
    """Return the modules of ``warpwell.testing``."""
    return sorted(f"warpwell.testing.{path.stem}" for path in (SOURCE / "warpwell/testing").glob("[!_]*.py"))


def names_of_testing(module: str) -> list[str]:
    """Return the public classes and functions that a module of ``warpwell.testing`` defines itself."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return sorted(
        name
        for name, found in bindings(module).items()
        if isinstance(found.node, definitions) and name[0] != "_" and not hasattr(builtins, name)
    )


def snapshot() -> tuple[str, int]:
    """Return the list as text, and the number of public names."""
    entries, count = [], 0
    for package in PACKAGES:
        if parse(package) is None:
            continue
        for name in public_names(package):
            entries += describe(package, name)
            count += 1
    for module in testing_modules():
        for name in names_of_testing(module):
            entries += describe(module, name)
            count += 1
    return "\n".join(entries) + "\n", count


def difference(old: str, new: str) -> str:
    """Return the unified diff of two lists, without context."""
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "source", "", "", 0, ""))


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.api_snapshot", description=__doc__.split("\n\n")[0])
    parser.add_argument("--update", action="store_true", help="rewrite the committed list")
    options = parser.parse_args(argv)
    text, count = snapshot()
    if options.update:
        SNAPSHOT.write_text(text, encoding="utf-8")
        print(f"{count} public names written to {SNAPSHOT.relative_to(ROOT)}")
        return 0
    diff = difference(SNAPSHOT.read_text(encoding="utf-8"), text)
    print(diff or f"{count} public names, none changed")
    return bool(diff)


if __name__ == "__main__":
    sys.exit(main())
