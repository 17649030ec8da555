"""Graphs, captures, pools and rows through layer, ring and worker keep CUDA's promises; each area is one program."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.driver import faults, natives
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import Servers, serve

ROOT = Path(__file__).parents[2]
SECONDS = HANG_SECONDS
AREAS = (
    "context_checks",
    "graph_checks",
    "condition_checks",
    "capture_checks",
    "pool_checks",
    "row_checks",
    "hook_checks",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    """A server of two devices with little memory; operations take random times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_SEED", "7")
        with serve(2, driver=build.build().fake, quota=96 << 20) as server:
            yield server


def wrong(server: Servers, area: str, seconds: float = SECONDS) -> str:
    """Run the checks of an area; return what they say, nothing where all are right."""
    command = [sys.executable, "-m", "tests.harness.driver.checks", area]
    done = subprocess.run(
        command, env=server.environ(), cwd=ROOT, timeout=seconds, stdout=-1, stderr=-1, text=True, check=False
    )
    checks = importlib.import_module(f"tests.harness.driver.{area}").CHECKS
    right = [f"{check.__name__}: right" for check in checks]
    return "" if done.stdout.splitlines() == right else done.stdout + done.stderr


@pytest.mark.parametrize("area", AREAS)
def test_what_cuda_promises(server: Servers, area: str) -> None:
    if area == "hook_checks":
        pytest.importorskip("cuda.bindings")
    failures = wrong(server, area)
    assert not failures, failures


def test_managed_memory_is_for_programs_with_one_device(server: Servers) -> None:
    assert not (failures := wrong(server, "managed_checks")), failures
    with serve(1, driver=build.build().fake) as single:
        assert not (failures := wrong(single, "managed_checks")), failures


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.CHECKED)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    area, changes = faults.CHECKED[fault]
    monkeypatch.setenv("FAKE_SEED", "7")
    with natives.changed(changes, natives.QUICK) as planted:
        with serve(2, driver=planted.fake, quota=96 << 20) as server:
            try:
                assert wrong(server, area, 20)
            except subprocess.TimeoutExpired:
                pass  # some faults make calls wait without end
