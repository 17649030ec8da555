"""Facts about the machine that a result names, and whether other programs kept it busy."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The checkout."""

BUSY_SHARE = 0.15
"""Share of all cores: a run is busy if other programs used more, or if the load before it was higher."""


def _cpu_model() -> str:
    try:
        facts_of_cores = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in facts_of_cores if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def gpus() -> list[str]:
    """Return the names of the GPUs, by the driver's library alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(100)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for device in range(count.value):
        driver.cuDeviceGetName(name, len(name), device)
        found.append(name.value.decode())
    return found


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "unknown")


def facts() -> dict[str, Any]:
    """Return the CPU, GPUs, kernel, and versions of Python and the libraries that compile and compute."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
    }
    names = gpus()
    if names:
        found |= {
            "gpu": names[0],
            "gpus": len(names),
            "driver": _driver_version(),
            "numba_cuda": _version("numba-cuda"),
        }
    return found


def commit(root: Path = ROOT) -> tuple[str, bool]:
    """Return the abbreviated commit of a checkout and whether it has uncommitted changes; "unknown" without Git.

    ``WARPWELL_COMMIT`` names the commit of a copy without the repository's history.
    """
    if name := os.environ.get("WARPWELL_COMMIT"):
        return name, False
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=root, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False
    return name, bool(status.strip())


def _cpu_seconds() -> tuple[float, float]:
    """Return the seconds that all cores have worked, and those that the hypervisor took."""
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Load:
    """The share of the machine that other programs use, from the creation of the object on."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), _cpu_seconds(), _own_seconds()

    def is_busy(self) -> bool:
        """Return True if other programs, or the hypervisor, took more than `BUSY_SHARE` of the cores."""
        start, (busy, steal), own = self._start
        (busy_now, steal_now), own_now = _cpu_seconds(), _own_seconds()
        elapsed = max(1e-3, time.perf_counter() - start)
        foreign = (busy_now - busy) - (own_now - own) + (steal_now - steal)
        return foreign / elapsed > BUSY_SHARE * (os.cpu_count() or 1)


def is_loaded() -> bool:
    """Return True if the load of the last minute, or the CPU pressure of the last ten seconds, is high.

    To be asked before anything is measured: afterwards the measurement itself is part of both.
    """
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        return True
    try:
        line = Path("/proc/pressure/cpu").read_text().split("\n", 1)[0]
        return float(line.split("avg10=")[1].split()[0]) > 10.0
    except (OSError, IndexError, ValueError):
        return False
