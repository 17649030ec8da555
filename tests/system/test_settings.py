"""Environment variables: parsed and documented in one place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tools import house

from warpwell import errors
from warpwell._settings import Setting, Settings, reference, settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
READERS = {
    "_os/clock.py",
    "driver/environment.py",
    "driver/hook.py",
    "driver/server.py",
}
"""Modules that read variables of Warpwell themselves, apart from the pool; none may join them."""


def test_the_page_has_all_settings() -> None:
    assert PAGE.read_text().rstrip().endswith(reference())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("device", "interp", "interp"),
        ("cpu_threads", "3", 3),
        ("check", "1", True),
        ("check", "0", False),
        ("seed", "-4", -4),
        ("cache_folder", "/a/b", Path("/a/b")),
        ("read_gap_bytes", "4KiB", 4096),
        ("read_gap_bytes", "0", 0),
        ("socket", "/a/s", Path("/a/s")),
        ("turns_folder", "/a/t", "/a/t"),
        ("pool_stall_seconds", "0.5", 0.5),
        ("pool_silence_seconds", "10", 10.0),
        ("pool_chunk", "65536", 65536),
        ("pool_buffers", "2", 2),
        ("pool_pipeline", "0", False),
        ("pool_direct", "0", False),
    ],
)
def test_a_variable_is_read_at_each_access(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = vars(Settings)[name].variable
    monkeypatch.delenv(variable, raising=False)
    default = getattr(settings, name)
    monkeypatch.setenv(variable, text)
    assert getattr(settings, name) == value and type(getattr(settings, name)) is type(value)
    monkeypatch.setenv(variable, "")
    assert getattr(settings, name) == default


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("cpu_threads", ("0", "-1", "2.5", "x")),
        ("seed", ("x", "1.0")),
        ("check", ("yes", "2")),
        ("read_gap_bytes", ("much", "-1")),
    ],
)
def test_a_text_that_is_no_value_is_refused(name: str, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = vars(Settings)[name]
    for text in texts:
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(errors.ArgumentError, match=f"{setting.variable} is '{text}': give ") as refused:
            getattr(settings, name)
        assert refused.value.name == setting.variable


def test_settings_cannot_be_assigned() -> None:
    with pytest.raises(AttributeError, match=r"settings.device cannot be assigned: set WARPWELL_DEVICE in os.environ"):
        settings.device = "cpu"  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"settings.colour cannot be assigned$"):
        settings.colour = "red"  # type: ignore[attr-defined]


def test_other_modules_read_no_variables() -> None:
    names = [setting.variable for setting in vars(Settings).values() if isinstance(setting, Setting)]
    found = set()
    for path in house.ROOT.rglob("*.py"):
        text, module = path.read_text(), path.relative_to(house.ROOT).as_posix()
        text = re.sub(r'environ\["\w+"\] = ', "", text)  # ignore assignments, which are for another process
        if re.search(r"environ.*WARPWELL_", text) and not module.startswith("pool/"):
            found.add(module)
        if module != "_settings.py":
            assert not [name for name in names if f'environ.get("{name}' in text or f'environ["{name}' in text], module
    assert found <= READERS, found - READERS
