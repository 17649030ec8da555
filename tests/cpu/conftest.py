"""Tests of the CPU run there on a machine with a GPU, too, and so do the programs that they start."""

import pytest


@pytest.fixture(autouse=True)
def cpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_DEVICE", "cpu")
