"""numba-cuda's own tests of its driver part, through layer, ring and worker on the fake driver."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import Servers, serve

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "data" / "numba_cudadrv.txt"
MIN_PASSED = 202
"""How many pass on a fake driver alone, as a trial found before there was a layer."""


def missing() -> list[str]:
    """Return what numba-cuda's tests need and is not installed."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (nvidia.submodule_search_locations or [] if nvidia else [])]
    linker = any(True for folder in folders for _ in folder.glob("*/lib/libnvJitLink.so*"))
    modules = [name for name in ("filecheck", "cffi") if importlib.util.find_spec(name) is None]
    return modules + ([] if linker else ["nvidia-nvjitlink"])


def listed() -> dict[str, str]:
    """Return test -> reason why it does not pass."""
    found, reason = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            reason = line.strip("[]")
        elif line and not line.startswith("#"):
            found[line] = reason
    return found


def outcomes(server: Servers, output: Path) -> dict[str, str]:
    """Run all tests in a process that is a client of the server."""
    command = [sys.executable, "-m", "tests.harness.driver.numba_tests", str(output)]
    done = subprocess.run(command, env=server.environ(), cwd=ROOT, timeout=HANG_SECONDS, capture_output=True, text=True)
    assert output.exists(), done.stderr[-3000:]
    found: dict[str, str] = json.loads(output.read_text())
    return found


SWITCHES = """
import numpy as np
from numba import cuda
for i in range(10_000):
    cuda.select_device(i % 2)
    assert cuda.current_context().device.id == i % 2
arrays = []
for device in range(2):
    cuda.select_device(device)
    arrays.append(cuda.to_device(np.full(4, device)).copy_to_host().tolist())
print(arrays)
"""


def test_numba_selects_devices_ten_thousand_times() -> None:
    pytest.importorskip("numba.cuda")
    with serve(2, driver=build.build().fake) as server:
        command = [sys.executable, "-c", SWITCHES]
        done = subprocess.run(command, env=server.environ(), timeout=HANG_SECONDS, capture_output=True, text=True)
    assert done.stdout == "[[0, 0, 0, 0], [1, 1, 1, 1]]\n", done.stderr


CLOSES = """
import numpy as np
from numba import cuda
array = cuda.to_device(np.arange(4))
print(array.copy_to_host().tolist())
cuda.close()
"""


def test_numba_closes_its_contexts() -> None:
    pytest.importorskip("numba.cuda")
    with serve(1, driver=build.build().fake) as server:
        command = [sys.executable, "-c", CLOSES]
        done = subprocess.run(command, env=server.environ(), timeout=HANG_SECONDS, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[0, 1, 2, 3]\n", 0), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"numba-cuda's tests need {', '.join(missing())}")
def test_numbas_tests_pass_but_for_a_list(tmp_path: Path) -> None:
    with serve(2, driver=build.build().fake) as server:
        found = outcomes(server, tmp_path / "outcomes.json")
    listed_tests = listed()
    bad = {name: outcome for name, outcome in found.items() if outcome != "passed"}
    assert not {name: bad[name] for name in bad.keys() - listed_tests.keys()}
    # A listed test that passes would hide the next failure of that test.
    too_much = {name for name in listed_tests if name not in bad and listed_tests[name] != "computes"}
    assert not too_much, "these pass, or are no more: take them from the list"
    assert sum(outcome == "passed" for outcome in found.values()) >= MIN_PASSED
    assert len(found) == 267
