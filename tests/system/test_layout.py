"""The rules of CONTRIBUTING.md that a program can check: imports, sizes, maps."""

import ast
import re
from pathlib import Path

import pytest
from tools import house

import warpwell

# A folder imports only from folders of a lower rank; folders of one rank not from each other.
RANKS = (
    ("_os", "errors"),
    (
        "_check",
        "_future",
        "_npy",
        "_ranges",
        "_settings",
        "_trace",
        "closing",
        "json_file",
        "libcuda",
        "registry",
        "replacing",
    ),
    ("process_end", "shared_file"),
    ("targets", "driver"),
    ("nvme", "pool"),
    ("queues",),
    ("storage",),
    ("drives",),
    ("cache",),
    ("array",),
    ("graph", "kv", "scheduler"),
    ("table",),
    ("train",),
    ("programs", "remote"),
    ("testing",),
    ("cli", "gpu"),
)
RANK = {folder: rank for rank, folders in enumerate(RANKS) for folder in folders}
COMPILERS = {"numba", "llvmlite", "cuda", "numba_cuda"}
MOST_FILES = 20
MOST_LINES = 80

MODULES = house.modules()
# warpwell/__init__.py and __main__.py gather everything and so stand above the order.
INSIDE = [module for module in MODULES if module.folder]


def name(module: house.Module) -> str:
    return module.path.relative_to(house.ROOT).as_posix()


def test_there_are_modules() -> None:
    assert len(INSIDE) > 100


def test_a_folder_imports_only_from_folders_below_it() -> None:
    wrong = []
    for module in INSIDE:  # one test for all modules, because starting a test takes longer than this check
        folder = module.folder
        assert folder in RANK, f"{folder} has no place in the order: give it one in RANKS and in CONTRIBUTING.md"
        for imported in module.imports:
            parts = imported.name.split(".")
            if parts[0] != "warpwell" or (len(parts) > 1 and parts[1] == folder):
                continue
            # `import warpwell`, or a name from it, imports all folders.
            if len(parts) < 2 or RANK.get(parts[1], len(RANKS)) >= RANK[folder]:
                wrong.append(f"{name(module)}:{imported.line} imports {imported.name}")
    assert not wrong, "\n".join(wrong)


def test_only_targets_imports_the_compiler() -> None:
    wrong = [
        f"{name(module)}:{imported.line} imports {imported.name}"
        for module in INSIDE
        if module.folder != "targets"
        for imported in module.imports
        if imported.name.split(".")[0] in COMPILERS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = house.circles(house.import_graph(MODULES))
    assert not found, "\n".join(" -> ".join(circle) for circle in found)


@pytest.mark.parametrize(("folder", "files"), sorted(house.files_by_folder(MODULES).items()))
def test_a_folder_is_small(folder: str, files: int) -> None:
    assert files <= MOST_FILES, f"{folder} has {files} modules: merge what belongs together, or make a folder inside"


def test_functions_are_short() -> None:
    long = [f for module in MODULES for f in module.functions if f.line_count > MOST_LINES]
    assert not long, "\n".join(f"{f.module}.{f.name} has {f.line_count} lines" for f in long)


@pytest.mark.parametrize("folder", sorted({module.path.parent for module in MODULES}), ids=lambda p: p.name)
def test_a_folder_maps_its_files(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    inside = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    inside += [path.name for path in folder.iterdir() if (path / "__init__.py").exists()]
    missing = [exported for exported in sorted(inside) if not re.search(rf"\b{re.escape(exported)}\b", text)]
    assert not missing, f"{folder.name}/__init__.py does not describe {', '.join(missing)}"


def test_shared_code_marks_no_timing_tests() -> None:
    """Marks of a class in the harness would be ignored: see `pytest_ignore_collect` in tests/conftest.py."""
    tests = Path(__file__).parents[1]
    shared = [*tests.glob("harness/**/*.py"), *(Path(warpwell.__file__).parent / "testing").glob("**/*.py")]
    assert len(shared) > 50 and not [path for path in shared if "mark.timing" in path.read_text()]


def test_the_rules_find_what_breaks_them(tmp_path: Path) -> None:
    root = tmp_path / "warpwell"
    (root / "kv").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "kv" / "__init__.py").write_text('"""Maps nothing."""\n')
    (root / "kv" / "one.py").write_text("if TYPE_CHECKING:\n    from .two import Two\n")
    (root / "kv" / "two.py").write_text("def f():\n    from . import three\n")
    (root / "kv" / "three.py").write_text('MODULE = "warpwell.kv.one:Two"\n' + "def g():\n" + "    x = 1\n" * 81)
    found = house.modules(root)
    assert house.circles(house.import_graph(found)) == [["warpwell.kv.one", "warpwell.kv.three", "warpwell.kv.two"]]
    assert house.files_by_folder(found)["warpwell/kv"] == 4
    assert [f.line_count for m in found for f in m.functions] == [82, 2] and sum(m.code_lines for m in found) == 85


def test_house_counts_lines_of_c_that_hold_code(tmp_path: Path) -> None:
    source = '#define X 1 /* one\n   two */\n// none\n\nchar *s = "/* text"; // x\nint c = \'"\'; /* " */\n'
    assert house.c_code_lines(source) == 3
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "x.c").write_text(source)
    assert house.lines_by_room(tmp_path) == {"python": {"all": 0}, "c": {"native": 3, "all": 3}}
