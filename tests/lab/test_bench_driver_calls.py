"""The benchmark of unmodified CUDA programs runs on the fake driver, and its sides are what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from lab.driver import build

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_costs_beside_native(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    command = [sys.executable, "-m", "lab.bench.driver_calls", "--quick", "--without-numba", "--json", str(out)]
    done = subprocess.run(
        [*command, "--driver", str(build.build().fake)], capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    costs = json.loads(out.read_text())["costs"]
    assert len(costs) > 30 and all(sides.keys() == {"native", "worker"} for sides in costs.values())
    started = costs["context and first allocation, ms"]  # a worker is a process that has to start
    assert started["worker"][0] > started["native"][0]
