"""Every example runs to its end, where it checks itself."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*/*.py")), ids=lambda path: path.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    assert len(script.read_text().splitlines()) < 100
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
