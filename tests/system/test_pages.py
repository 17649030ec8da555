"""Pages: their commands exist, links lead somewhere, the reference has every public name, drawings are up to date."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.harness.pages import AGENTS, GPU, PAGES, QEMU, ROOT, SERVICE, TORCH, blocks, name

from lab.commands import COMMANDS as LAB

SUFFIXED = {f"test_x{suffix}.py" for suffix in ("", "_interp", "_cuda", "_ptx", "_mpi")}
"""Patterns of file names in CONTRIBUTING.md."""


def load(path: Path) -> ModuleType:
    """Import a file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return load(ROOT / "docs" / "site" / "parsers.py").parser()


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a page's shell blocks as words: one entry for each command of a line."""
    for block in blocks(page, "sh"):
        for number, line in enumerate(block.code.replace("\\\n", "").splitlines(), block.line):
            lexer = shlex.shlex(line, posix=False, punctuation_chars=";&|>")  # a quoted ">" stays in its quotes
            lexer.whitespace_split = True
            tokens = list(lexer)
            command: list[str] = []
            for word in [*tokens, ";"]:
                if word in (";", "&&", "|", ">"):
                    if command:
                        yield number, command
                    command = []
                else:
                    command += shlex.split(word, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_of_a_page_exist(
    page: Path, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line, (first, *arguments) in commands(page):
        if first == "warpwell":
            try:
                parser.parse_args(arguments)
            except SystemExit:
                pytest.fail(f"{name(page)}:{line}: {capsys.readouterr().err}")
        elif first == "make":
            assert set(arguments[:1]) <= targets, f"{name(page)}:{line}"
        elif first == "python" and arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), f"{name(page)}:{line}"
            if arguments[1] == "lab":
                assert {" ".join(arguments[2:3]), " ".join(arguments[2:4])} & {"", *LAB}, f"{name(page)}:{line}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_of_a_page_are_python_and_say_what_they_need(page: Path) -> None:
    text = page.read_text()
    found = blocks(page, "python")
    assert len(found) == len(re.findall(r"^ *```+ *\{?python", text, re.MULTILINE)), "a block that no test reads"
    for block in found:
        ast.parse(block.code)
        assert block.needs in (None, GPU, SERVICE, AGENTS, QEMU, TORCH)


@pytest.mark.parametrize("page", PAGES[:2], ids=name)
def test_links_outside_of_the_site_lead_somewhere(page: Path) -> None:
    """``make docs`` checks the links of pages in docs/."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings], target


@pytest.mark.parametrize(
    "module",
    ["", "drives", "errors", "gpu", "graph", "kv", "pool", "remote", "scheduler", "scheduler.extend", "storage"],
)
def test_the_reference_has_every_public_name(module: str) -> None:
    package = importlib.import_module(f"warpwell.{module}".rstrip("."))
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    sections = re.split(r"^\.\. currentmodule:: ", text, flags=re.MULTILINE)
    shown = {
        each
        for section in sections
        if section.startswith(f"{package.__name__}\n")
        for each in re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", section, re.MULTILINE)
    }
    if f".. automodule:: {package.__name__}\n" in text:
        return
    public = getattr(package, "__all__", None) or [each for each in vars(package) if each[0].isupper()]
    missing = {each for each in public if not isinstance(getattr(package, each), ModuleType)} - shown
    assert not missing - {"PENDING", "DRIVES"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_images_have_no_attributes(page: Path) -> None:
    # Neither the site nor GitHub reads them: the braces would be text under the image.
    assert re.findall(r"!\[[^\]]*\]\([^)]*\)\{[^}]*\}", page.read_text()) == []


def test_drawings_are_those_of_their_script() -> None:
    script = load(ROOT / "docs" / "drawings.py")
    folder = ROOT / "docs" / "drawings"
    assert {path.stem for path in folder.iterdir()} == set(script.PICTURES)
    for each, draw in script.PICTURES.items():
        assert (folder / f"{each}.svg").read_text() == draw().svg(), "run python -m docs.drawings"


@pytest.mark.parametrize("page", [each for each in PAGES if "results" not in each.parts], ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A page names files by the ends of their paths: `cache/access.py`, `dispatcher.py`."""
    files = [
        path for top in ("src", "lab", "tests", "tools", "docs", "examples") for path in (ROOT / top).rglob("*.py")
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text())) - {"app.py", "first.py", *SUFFIXED}
    missing = {each for each in named if not any(path.as_posix().endswith(f"/{each}") for path in files)}
    assert not missing
