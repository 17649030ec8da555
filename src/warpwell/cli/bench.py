"""``warpwell bench``: the benchmarks of a checkout."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from ..errors import ArgumentError, MissingFileError

FOLDER = Path(__file__).parents[3] / "benchmarks"


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark or all of them, each as a program of its own; return its exit code."""
    if not FOLDER.is_dir():
        raise MissingFileError(
            "benchmarks are not part of the installed package: get the sources of Warpwell, and run "
            "`make bench` or `warpwell bench` in them",
            path=FOLDER,
        )
    scripts = {path.stem: text for path in sorted(FOLDER.glob("*.py")) if (text := _runs(path))}
    if arguments.list:
        for name, text in scripts.items():
            print(f"{name:14s} {text}")
        return 0
    if arguments.name is not None and arguments.name not in scripts:
        raise ArgumentError(f"there is no benchmark {arguments.name!r}: choose one of {', '.join(scripts)}")
    chosen = list(scripts) if arguments.name is None else [arguments.name]
    codes = [subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *arguments.arguments]) for name in chosen]
    return max(codes, key=abs, default=0)


def _runs(path: Path) -> str | None:
    """Return the first line of a script's docstring; None for a module that is no script."""
    source = path.read_text(encoding="utf-8")
    if "__main__" not in source:
        return None
    return (ast.get_docstring(ast.parse(source)) or path.stem).splitlines()[0]
