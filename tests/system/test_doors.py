"""Other rooms import a room through its door, and doors are narrow; the exceptions may only shrink."""

import json

import pytest
from tools import doors, house

MODULES = house.modules()
RECORD = json.loads(doors.RECORD.read_text())


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> list[house.Module]:
    """Return a package with the doors of the real one; the other modules are empty."""
    root = tmp_path_factory.mktemp("copy") / "warpwell"
    for module in MODULES:
        path = root / module.path.relative_to(house.ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.text if path.name == "__init__.py" else "")
    return house.modules(root)


def problems_of(copy: list[house.Module], planted: str = "", text: str = "") -> list[str]:
    """Return the messages about a package with a planted module, without messages about missing exceptions."""
    modules = copy
    if planted:
        path = copy[0].root / planted
        before = path.read_text() if path.exists() else None
        path.write_text(text + "\n")
        modules = [*(module for module in copy if module.path != path), house.Module(path, copy[0].root)]
        path.unlink() if before is None else path.write_text(before)
    messages = doors.problems(doors.read(modules), RECORD)
    return [message for message in messages if "tools.doors --update" not in message]


def test_imports_end_at_doors_and_doors_are_narrow() -> None:
    found = doors.problems(doors.read(MODULES), RECORD)
    assert not found, "\n".join(found)


def test_the_copy_without_changes_has_no_problem(copy: list[house.Module]) -> None:
    assert problems_of(copy) == []


@pytest.mark.parametrize(
    "text",
    [
        "from ..nvme.wire import READ",
        "from warpwell.nvme.wire import READ",
        "import warpwell.nvme.wire",
        "from ..nvme import wire",
        "def f():\n    from ..nvme.wire import READ",
        "if TYPE_CHECKING:\n    from ..nvme.wire import READ",
        'NAME = "warpwell.nvme.wire:READ"',
    ],
)
def test_an_import_past_a_door_is_found(copy: list[house.Module], text: str) -> None:
    (line,) = problems_of(copy, "queues/planted.py", text)
    assert line.startswith("queues.planted imports nvme.wire") and "the door of nvme" in line


@pytest.mark.parametrize("text", ["from ..nvme import READ", "from .. import nvme", "from ..registry import ask"])
def test_imports_from_a_door_are_allowed(copy: list[house.Module], text: str) -> None:
    assert problems_of(copy, "queues/planted.py", text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from ..targets.primitives import fence", False),
        ("from ..targets.blocks import BlockLaunch", False),
        ("from ..targets.blocks import launch", True),
        ("from ..targets.blocks.launch import BlockLaunch", True),
        ("from ..queues import layout", False),
        ("from ..queues import pair", True),
    ],
)
def test_inner_doors_are_doors_and_modules_behind_them_are_not(
    copy: list[house.Module], text: str, found: bool
) -> None:
    assert len(problems_of(copy, "storage/planted.py", text)) == found


def test_a_door_that_is_too_wide_is_found(copy: list[house.Module]) -> None:
    door = f"__all__ = {[f'name{k}' for k in range(31)]}"
    assert problems_of(copy, "queues/__init__.py", door) == [
        "the door of queues exports 31 names; at most 30 are allowed"
    ]


def test_names_that_others_import_count_without_all(copy: list[house.Module]) -> None:
    names = ", ".join(f"name{k}" for k in range(31))
    (line,) = problems_of(copy, "remote/planted.py", f"from ..testing import {names}")
    assert line == "the door of testing exports 31 names; at most 30 are allowed"


def test_exceptions_that_do_not_occur_are_found_and_removed_but_none_is_added() -> None:
    found = doors.Doors({"kv.a": {"nvme.b.c", "nvme.b.d"}, "kv.new": {"array.x.y", "array.x.z"}}, {"nvme": 40}, set())
    record = {
        "imports": {"kv.a": ["nvme.b.c", "nvme.b.e"], "kv.deleted": ["array.x.y"], "cache.deleted": ["array.x.z"]},
        "widths": {"nvme": 41},
    }
    messages = doors.problems(found, record)
    assert "kv.a imports nvme.b.d; import it from the door of nvme" in messages
    assert "kv.a does not import nvme.b.e; run python -m tools.doors --update" in messages
    assert "the door of nvme exports 40 names, not 41; run python -m tools.doors --update" in messages
    # kv.new may have been kv.deleted: it takes over that exception
    assert doors.shrunk(found, record) == {
        "imports": {"kv.a": ["nvme.b.c"], "kv.new": ["array.x.y"]},
        "widths": {"nvme": 40},
    }
