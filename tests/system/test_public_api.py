"""The public names and signatures equal the committed list."""

import ast

import pytest
from tools import api_snapshot


def test_public_api_equals_the_snapshot() -> None:
    text, _ = api_snapshot.snapshot()
    diff = api_snapshot.difference(api_snapshot.SNAPSHOT.read_text(encoding="utf-8"), text)
    assert not diff, f"{diff}\nif the change is intended, run: python -m tools.api_snapshot --update"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Give a function that writes modules and returns the lines of the snapshot."""
    monkeypatch.setattr(api_snapshot, "SOURCE", tmp_path)
    monkeypatch.setattr(api_snapshot, "PACKAGES", ("warpwell",))

    def snapshot(**modules: str) -> list[str]:
        for name, text in modules.items():
            path = tmp_path / "warpwell" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        api_snapshot.parse.cache_clear()
        api_snapshot.bindings.cache_clear()
        return api_snapshot.snapshot()[0].splitlines()

    yield snapshot
    api_snapshot.parse.cache_clear()
    api_snapshot.bindings.cache_clear()


def test_imports_are_followed_to_definitions(sources) -> None:
    signatures = sources(
        __init__="from .a import f as g\n__all__ = ['g']\n",
        a="from .b import f\n",
        b="def f(x: int, *, y: str = 'z') -> None: ...\n",
    )
    assert signatures == ["def warpwell.g(x: int, *, y: str='z') -> None"]


def test_private_bases_are_flattened(sources) -> None:
    signatures = sources(
        __init__="from .a import C\n",
        a="class _Base:\n    def m(self): ...\n    def _hidden(self): ...\nclass C(_Base, dict):\n    size: int = 3\n",
    )
    assert signatures == ["class warpwell.C(dict)", "    def C.m(self)", "    field C.size: int = 3"]


@pytest.mark.parametrize(
    "changed", ["def f(x, y): ...", "def f(x) -> int: ...", "def g(x): ...", "class f: ...", "def f(x=1): ..."]
)
def test_changes_are_found(sources, changed: str) -> None:
    ast.parse(changed)
    before = sources(__init__="def f(x): ...\n")
    assert sources(__init__=changed) != before
