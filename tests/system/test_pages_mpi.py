"""Blocks of pages that say that they need agents run under ``warpwell run``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.pages import AGENTS, blocks, name, pages_with, program
from tests.harness.until import HANG_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(AGENTS), ids=name)
def test_examples_that_need_agents_run_beside_some(page: Path, tmp_path: Path) -> None:
    needed = [block for block in blocks(page, "python") if block.needs in (None, AGENTS)]
    (tmp_path / "page.py").write_text(program(needed))
    command = [sys.executable, "-m", "warpwell", "run", "--agents", "2", "--target", "cpu", "page.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"WARPWELL_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
