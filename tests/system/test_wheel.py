"""The wheel has no research code, the product does not know the lab, and the lab uses listed internal modules."""

import re
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from tools import api_snapshot, house

ROOT = Path(__file__).parents[2]
INTERNAL = ROOT / "lab" / "internal.txt"
MOVED = ("src/warpwell/cli/main.py", re.compile(r'"python -m lab [a-z ]+"'))
"""The file that tells users where commands went, and the form of these messages."""


def files_of(builder) -> set[str]:
    return {Path(each.distribution_path).as_posix() for each in builder.recurse_included_files()}


def test_wheel_has_the_package_only() -> None:
    files = files_of(WheelBuilder(str(ROOT)))
    assert len(files) > 300 and "warpwell/__init__.py" in files
    assert {name.partition("/")[0] for name in files} == {"warpwell"}
    missing = {f"warpwell/{path.relative_to(house.ROOT).as_posix()}" for path in house.ROOT.rglob("*.py")} - files
    assert not missing


def test_source_distribution_has_lab_and_tests() -> None:
    files = files_of(SdistBuilder(str(ROOT)))
    assert {"lab/__main__.py", "tests/conftest.py", "src/warpwell/__init__.py"} <= files


def mentions_of_lab(text: str) -> list[str]:
    """Return the lines that contain the word `lab`, in code, strings, comments or docstrings."""
    return [line.strip() for line in text.splitlines() if re.search(r"\blab\b", line)]


def test_product_does_not_name_the_lab() -> None:
    wrong = []
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in (".py", ".c", ".h", ".cu", ".toml"):
            text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
            text = MOVED[1].sub("", text) if name == MOVED[0] else text
            wrong += [f"{name}: {line}" for line in mentions_of_lab(text)]
    assert not wrong, "\n".join(wrong)


def test_mentions_of_lab_are_found() -> None:
    assert mentions_of_lab('from lab.media import Latency\nslab = 1\n"lab.link:EmulatedLink"\nlabel') == [
        "from lab.media import Latency",
        '"lab.link:EmulatedLink"',
    ]


def test_lab_does_not_import_tests() -> None:
    wrong = [m.name for m in house.modules(ROOT / "lab") for i in m.imports if i.name.partition(".")[0] == "tests"]
    assert not wrong, "move what the lab needs out of tests/harness"


def test_lab_imports_listed_internal_modules_only() -> None:
    """``warpwell.storage`` is public, and ``warpwell.storage.medium`` is internal."""
    internal_modules = {module.name for module in house.modules()}
    used = set()
    for module in house.modules(ROOT / "lab"):
        for imported in module.imports:
            parts = imported.name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            target = next((prefix for prefix in prefixes if prefix in internal_modules), "")
            is_public = target in api_snapshot.PACKAGES or target.startswith("warpwell.testing.")
            if target.count(".") > 1 and not is_public:
                used.add(target)
    listed = INTERNAL.read_text(encoding="utf-8").split()
    assert listed == sorted(listed)
    assert not used - set(listed), f"import from a public module, not from {sorted(used - set(listed))}"
    assert not set(listed) - used, f"delete from {INTERNAL.name}: {sorted(set(listed) - used)}"
