"""`own_runtime`: the package of a program that brings a CUDA runtime of its own, which does not work on pooled GPUs.

The program's files are read, not run: its own file, and what that imports from the program's folder. So the answer does
not depend on when or in which order something is imported, and holds for the program's children as well.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("torch", "cupy", "jax", "tensorflow")
"""Packages with NVIDIA's runtime linked into them, which asks the driver for private tables."""
_FILES = 200
"""So many files of a program are read at most."""
_BYTES = 1 << 20


def own_runtime(command: Sequence[str]) -> tuple[str, str] | None:
    """Return a file of a program and the package of `PACKAGES` that it imports, if there is one that is installed.

    Parameters
    ----------
    command : sequence of str
        A file and its arguments, or ``-m`` and a module, or ``-c`` and a text.
    """
    if command[0] == "-c":
        return _first([("-c", command[1].encode(), os.getcwd())], os.getcwd(), None)
    if command[0] == "-m":
        return _of_module(command[1])
    path = os.path.abspath(command[0])
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
    return _first(_read(os.path.join(path, "__main__.py") if os.path.isdir(path) else path), folder, None)


_File = tuple[str, bytes, str]
"""Path, text and folder of a file."""


def _of_module(name: str) -> tuple[str, str] | None:
    top = name.partition(".")[0]
    if top in PACKAGES:
        return f"-m {name}", top
    folder, alone = os.getcwd(), None
    if not _files(folder, name):
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            return None
        # of an installed package its own files are read, not those beside it
        folder, alone = str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]), top
    found = [each for path in [*_files(folder, name), *_files(folder, f"{name}.__main__")] for each in _read(path)]
    return _first(found, folder, alone)


def _first(waiting: list[_File], folder: str, alone: str | None) -> tuple[str, str] | None:
    """Search files and what they import from a folder, or from one package in it."""
    seen = {path for path, *_ in waiting}
    for path, text, own in waiting:  # it grows
        for name in _imports(text, own, folder):
            top = name.partition(".")[0]
            if top in PACKAGES and _installed(top):
                return os.path.basename(path), top
            for other in _files(folder, name) if alone in (None, top) else []:
                if other not in seen and len(seen) < _FILES:
                    seen.add(other)
                    waiting += _read(other)
    return None


def _imports(text: bytes, own: str, folder: str) -> Iterator[str]:
    """Yield the names of modules that a file imports, wherever in it; relative ones as seen from the folder."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the program itself will tell them
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = Path(own, *[".."] * (node.level - 1))
                parts = Path(os.path.relpath(above.resolve(), Path(folder).resolve())).parts
                base = ".".join([*parts, *filter(None, [base])])
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)


def _files(folder: str, name: str) -> list[str]:
    """Return the files in a folder that the import of a module runs."""
    parts = name.split(".")
    found = [os.path.join(folder, *parts[: k + 1], "__init__.py") for k in range(len(parts))]
    return [path for path in [*found, os.path.join(folder, *parts) + ".py"] if os.path.isfile(path)]


def _read(path: str) -> list[_File]:
    try:
        with open(path, "rb") as stream:
            text = stream.read(_BYTES + 1)
    except OSError:
        return []
    archive = text[:4] == b"PK\3\4"
    return [] if archive or len(text) > _BYTES else [(path, text, os.path.dirname(path))]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
