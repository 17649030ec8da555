"""The picture of a log."""

import sys
from pathlib import Path

import pytest

from lab.sched.plot import draw
from warpwell import errors
from warpwell.scheduler.extend import Event, Log


def sample() -> Log:
    """Return a log of two tenants with a preemption."""
    log = Log()
    for event in (
        Event(0.0, "launch", 0, "mvt", "a"),
        Event(0.1, "launch", 1, "atax", "b"),
        Event(0.3, "preempt", 1, "atax", "b"),
        Event(0.4, "stop", 1, "atax", "b"),
        Event(1.0, "end", 0, "mvt", "a"),
    ):
        log.add(event)
    return log


def test_picture(tmp_path: Path) -> None:
    was_imported = "matplotlib.pyplot" in sys.modules
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        draw(sample(), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(errors.ArgumentError, match=r"name it \.png, \.svg or \.pdf"):
        draw(sample(), tmp_path / "a.nothing")
    with pytest.raises(errors.ArgumentError, match="the log has 0 launches"):
        draw(Log(), tmp_path / "b.png")
    assert was_imported or "matplotlib.pyplot" not in sys.modules  # pyplot would keep figures, and need a display
