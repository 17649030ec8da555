"""Spans while their frame changes hands: no violation without a fault, and each planted fault is found."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.harness.models.adversary import Violation
from tests.harness.models.span_model import SpanModel

from warpwell.array.spans import buffers, calls, words
from warpwell.targets import load_relaxed

RUNS = 1000


def violation(seed: int) -> str | None:
    """Run one interleaving; return what it violated."""
    try:
        SpanModel(seed).check()
    except Violation as error:
        return str(error)
    return None


def no_fence(scope: int) -> None:
    """Order nothing."""


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Any]]] = {
    "no-fence": ("words", lambda patch: patch.setattr(words, "fence", no_fence)),
    "no-fence-buffers": ("buffers", lambda patch: patch.setattr(buffers, "fence", no_fence)),
    "first-look-relaxed": ("words", lambda patch: patch.setattr(words, "load_acquire", load_relaxed)),
    "no-second-look": ("words", lambda patch: patch.setattr(words, "IDENTITY", 0)),
    "no-second-look-buffers": ("buffers", lambda patch: patch.setattr(words, "IDENTITY", 0)),
}


@pytest.mark.parametrize("form", ["words", "buffers"])
def test_no_violation(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BUFFERED", {"interp"} if form == "buffers" else set())
    assert [v for v in map(violation, range(60)) if v] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, plant = FAULTS[name]
    monkeypatch.setattr(calls, "BUFFERED", {"interp"} if form == "buffers" else set())
    plant(monkeypatch)
    assert next(filter(None, map(violation, range(RUNS))), None), f"not found in {RUNS} interleavings"
