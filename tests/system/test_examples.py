"""Every example runs to its end, where it checks itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = {"graphsage": ("torch", "torch_geometric")}
"""Requirements of examples that the tests' environment may lack."""


@pytest.mark.slow  # `make docs-test` runs them
@pytest.mark.parametrize(
    "script",
    [path for path in sorted(EXAMPLES.glob("*/*.py")) if path.parent.name != "demo"],  # see test_demo.py
    ids=lambda path: path.stem,
)
def test_example(script: Path, tmp_path: Path) -> None:
    for library in LARGE.get(script.stem, ()):
        pytest.importorskip(library)
    assert len(script.read_text().splitlines()) < 100
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr


def test_an_example_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('not here')")
    script = EXAMPLES / "digits_from_store" / "digits_from_store.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "needs scikit-learn" in done.stderr and "pip install" in done.stderr
