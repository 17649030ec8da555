"""The pages of README.md and docs/, and the code blocks in them.

A block that cannot run everywhere has a line before it that names its requirements, for readers and tests:
``*Needs a GPU.*``
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lab" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

GPU = "a GPU"
SERVICE = "a service, as started above"
AGENTS = "two agents"
QEMU = "QEMU"
TORCH = "PyTorch"

_BLOCK = re.compile(
    r"^(?:\*Needs (?P<needs>[^*]+)\.\*\n\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text, its first line in the page, and its requirements."""

    language: str
    code: str
    line: int
    needs: str | None


def blocks(page: Path, language: str) -> list[Block]:
    """Return the blocks of a page that are in a language."""
    text = page.read_text()
    found = [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["needs"])
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def program(of: Iterable[Block]) -> str:
    """Return the blocks as one program, each at its line of the page."""
    text = ""
    for block in of:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.code
    return text


def pages_with(needs: str | None, language: str = "python") -> list[Path]:
    """Return the pages with a block that needs just this."""
    return [page for page in PAGES if any(block.needs == needs for block in blocks(page, language))]


def name(page: Path) -> str:
    """Return the page's path in the repository."""
    return str(page.relative_to(ROOT).with_suffix(""))
