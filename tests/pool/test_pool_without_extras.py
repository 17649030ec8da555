"""A program of one process uses its devices with only Warpwell's requirements installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.until import HANG_SECONDS

ROOT = Path(__file__).parents[2]
BLOCKED = "import sys\nfor name in ('mpi4py', 'cloudpickle', 'openmpi', 'cupy'): sys.modules[name] = None\n"
MORE = """
class Own(ValueError):
    pass

def fails(x):
    raise Own("on purpose")

device = ww.devices()[0]
assert device.call(lambda v: scale.block is None and v + 1, 1).get(60) == 2
try:
    device.call(fails, Own("an argument")).get(60)
except ww.errors.RemoteError as error:
    assert isinstance(error.__cause__, ValueError), error.__cause__
try:
    ww.pool.communicator()
except ImportError as error:
    assert "extra [mpi] (in a checkout: pip install -e '.[mpi]')" in str(error)
print("all", ww.current_device().index)
"""


def test_the_program_of_the_page_about_clusters_without_the_extra(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "use-a-cluster.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = next(text for text in programs if "ww.devices()" in text)
    (tmp_path / "app.py").write_text(BLOCKED + program + MORE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stdout) == (0, "all 0\n"), done.stderr
