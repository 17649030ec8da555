"""CPU and wall seconds of the README's kernel, in a child process: from an empty compilation cache, then from it."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import machine
from .runner import Record, Setting, benchmark


def program() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (machine.ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def seconds(path: Path, cache: Path) -> tuple[float, float]:
    """Run a program with a cache folder; return CPU seconds of its processes and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"WARPWELL_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": str(cache / "cuda")}
    subprocess.run([sys.executable, str(path)], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


@benchmark("readme", figures=["cold", "warm"])
def run(setting: Setting, record: Record) -> None:
    """Measure both."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "readme.py"
        path.write_text(program(), encoding="utf-8")
        for state in ("cold", "warm"):
            cpu, wall = seconds(path, Path(folder) / "cache")
            record(f"{state}/cpu", cpu, "s", better="lower")
            record(f"{state}/wall", wall, "s", better="lower")
