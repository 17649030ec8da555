"""Pages of docs/how-to whose examples check themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize("page", ["devices-streams-events", "debug-with-interp"])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    text = (PAGES / f"{page}.md").read_text()
    (tmp_path / "page.py").write_text("".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout
