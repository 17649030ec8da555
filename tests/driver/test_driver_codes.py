"""Return codes of all calls of the driver layer with null, stale and wrong arguments, over the fake driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import serve

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "data" / "driver_codes.txt"
"""Codes by call and state: what ``python -m tests.harness.driver.codes`` prints."""


@pytest.mark.slow  # thousands of calls that wait for an answer
def test_calls_return_the_recorded_codes() -> None:
    with serve(2, driver=build.build().fake) as server:
        command = [sys.executable, "-m", "tests.harness.driver.codes"]
        done = subprocess.run(
            command, env=server.environ(), cwd=ROOT, timeout=2 * HANG_SECONDS, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout[-1000:]
    recorded = RECORD.read_text().splitlines()
    found = done.stdout.splitlines()
    assert [line for line in found if line not in recorded] == []
    assert [line for line in recorded if line not in found] == []
