"""Ranges for a profiler with the package nvtx, which a stub module replaces here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell import _trace

NVTX = """
import contextlib
open_ranges, shown = [], []

@contextlib.contextmanager
def annotate(message, domain):
    assert domain == "warpwell"
    open_ranges.append(message)
    shown.append("/".join(open_ranges))
    try:
        yield
    finally:
        open_ranges.remove(message)
"""

PROGRAM = """
import numpy as np, nvtx, warpwell as ww

@ww.kernel
def double(a):
    a[ww.gpu.grid(1)] *= 2

a = ww.create("a.npy", 100, np.int64, device="cpu", tier="storage", cache="64KiB")
double[100](a)
a.flush()
a.prefetch(0, 100).result()
a.close()
print(*sorted({name.split("/")[-1] for name in nvtx.shown}))
assert not nvtx.open_ranges
"""


def test_launches_and_maintenance_of_caches_are_ranges(tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text(NVTX)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert {"launch", "flush", "prefetch"} <= set(done.stdout.split())


def test_without_the_package_a_function_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "nvtx", None)
    assert _trace.traced("name")(len) is len
