"""Compiled code on disk: what it is kept under."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from warpwell.targets.compiled import cache_key

SOURCE = "import warpwell as ww\n@ww.device\ndef twice(v):\n    return {} * v\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(name: str, factor: int) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(SOURCE.format(factor))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.twice

    return load


def test_equal_kernels_of_two_modules_are_kept_apart(load: Any) -> None:
    # Numba imports a function's module when it loads its code, and the other module may not be there
    one = cache_key(load("one_module", 2))
    assert one is not None and one == cache_key(load("one_module", 2))
    assert one != cache_key(load("one_module", 3))
    assert one != cache_key(load("other_module", 2))
