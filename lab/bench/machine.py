"""Facts about the machine that a result names, and whether other programs kept it busy."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
"""The checkout."""

BUSY_SHARE = 0.15
"""Share of all cores. If other programs use more, during a run or before it, the run is busy."""


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


def cpu_seconds() -> float | None:
    """Return the CPU seconds of all programs since the start, and of the hypervisor; None if they are unknown."""
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have exited."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Load:
    """Measures a block: the CPU seconds of this process and its children, and the cores that other programs used.

    Attributes
    ----------
    cores : int
    cpu_seconds : float
        Of this process and of children that have exited.
    other_cores : float
        Mean number of cores in use by other programs and by the hypervisor; 0 if /proc/stat cannot be read.
    """

    def __init__(self) -> None:
        self.cores = os.cpu_count() or 1
        self.cpu_seconds = self.other_cores = 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs used more than `BUSY_SHARE` of the cores."""
        return self.other_cores > BUSY_SHARE * self.cores

    def __enter__(self) -> Load:
        self._start = time.perf_counter(), own_seconds(), cpu_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        start, own, everyone = self._start
        elapsed = max(1e-3, time.perf_counter() - start)
        self.cpu_seconds = own_seconds() - own
        if everyone is not None and (now := cpu_seconds()) is not None:
            self.other_cores = max(0.0, (now - everyone - self.cpu_seconds) / elapsed)


def is_loaded(seconds: float = 2.0) -> bool:
    """Return True if other programs use the machine now, measured for some seconds in which this program waits.

    Call this before the first measurement of a series. The kernel's load averages do not suffice: they include the work
    of this program, or of the previous command, a minute ago.
    """
    with Load() as load:
        time.sleep(seconds)
    return load.busy
