"""ThreadSanitizer sees no data race in layer and worker, and sees one that is planted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.driver import races
from tests.harness.until import HANG_SECONDS

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """Run random programs under the sanitizer, at addresses that it knows; return their output."""
    if shutil.which("setarch") is None or races.library() is None:
        pytest.skip("needs setarch and a compiler with ThreadSanitizer")
    line = ["setarch", "-R", sys.executable, "-m", "tests.harness.driver.races", *arguments]
    return subprocess.run(line, cwd=ROOT, timeout=3 * HANG_SECONDS, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("limits", [[], ["--tight"]], ids=["", "tight"])
def test_the_thread_sanitizer_sees_no_race(limits: list[str]) -> None:
    assert run("--seeds", "0:40", *limits) == "40 programs are right\n"


@pytest.mark.slow
def test_the_thread_sanitizer_sees_a_planted_race() -> None:
    assert "data race" in run("--seeds", "0:10", "--planted")
