"""The files, names and tests in the table of lab/sched/SOURCE.md exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "lab" / "sched" / "SOURCE.md"
CODE = (ROOT / "src/warpwell/scheduler", ROOT / "src/warpwell", ROOT)
TESTS = (ROOT / "tests", ROOT / "src")


def table() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return rows[2:]  # without the head and the line below it


@functools.cache
def names(path: Path) -> frozenset[str]:
    """Return the functions, classes and variables of a module, and the members of its classes as ``Class.name``."""

    def within(body: list[ast.stmt], before: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield before + node.name
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (before + target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{before}{node.name}.")
                for inner in ast.walk(node):  # attributes that its methods set
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        yield f"{before}{node.name}.{inner.attr}"

    return frozenset(within(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def problems(row: list[str]) -> list[str]:
    """Return the names in a row of the table that do not exist."""
    if len(row) != 3 or not row[0]:
        return [f"{row} is no row of three columns"]
    wrong = []
    for category, cell, folders in (("code", row[1], CODE), ("test", row[2], TESTS)):
        found = re.findall(r"`([\w/]+\.py)::([\w.]+)`", cell)
        if not found:
            wrong.append(f"{row[0]!r} names no {category}: {cell!r}")
        if len(found) != cell.count("`") // 2:
            wrong.append(f"{row[0]!r} names {category} that is not `file.py::name`: {cell!r}")
        for file, name in found:
            path = next((folder / file for folder in folders if (folder / file).is_file()), None)
            if path is None:
                wrong.append(f"{row[0]!r}: there is no file {file}")
            elif name not in names(path):
                wrong.append(f"{row[0]!r}: {file} has no {name}")
            elif category == "test" and not name.rpartition(".")[2].startswith(("test_", "Test")):
                wrong.append(f"{row[0]!r}: {name} is no test")
    return wrong


def test_all_that_the_table_names_is_there() -> None:
    rows = table()
    assert len(rows) > 30
    assert len({row[0] for row in rows}) == len(rows)
    assert not [each for row in rows for each in problems(row)]


GOOD = [
    "it",
    "`core.py::Core.step`, `core.py::Core`",
    "`scheduler/test_sched_source.py::test_what_is_gone_is_found`",
]


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        (1, "`core.py::Core.stride`", "core.py has no Core.stride"),
        (1, "`kern.py::Core.step`", "no file kern.py"),
        (1, "the core", "names no code"),
        (1, "`core.py::Core`, `Core.step`", "not `file.py::name`"),
        (2, "`scheduler/test_sched_source.py::test_what_was_renamed`", "has no test_what_was_renamed"),
        (2, "`scheduler/test_sched_source.py::problems`", "problems is no test"),
        (2, "", "names no test"),
    ],
)
def test_what_is_gone_is_found(column: int, cell: str, says: str) -> None:
    assert problems(GOOD) == []
    row = [*GOOD]
    row[column] = cell
    assert any(says in each for each in problems(row))
