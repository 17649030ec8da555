"""How many cores other programs use while an experiment runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

BUSY_PART = 0.15
"""Part of all cores from which the load of other programs can change a measurement."""


class LoadMeter:
    """Measures a block: CPU seconds of this process and its children, and cores that other programs used.

    Attributes
    ----------
    cores : int
    cpu_seconds : float
        Of this process and of children that have exited.
    other_cores : float
        Mean number of cores in use by other programs, time stolen by the hypervisor included; 0 if /proc/stat cannot be
        read.
    """

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        self.cpu_seconds = self.other_cores = 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs used a considerable part of the cores."""
        return self.other_cores > BUSY_PART * self.cores

    def __enter__(self) -> LoadMeter:
        self._began, self._own, self._all = time.monotonic(), own_seconds(), all_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = max(time.monotonic() - self._began, 1e-3)
        self.cpu_seconds = own_seconds() - self._own
        if self._all is not None and (now := all_seconds()) is not None:
            self.other_cores = max(0.0, (now - self._all - self.cpu_seconds) / seconds)


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have exited."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def all_seconds() -> float | None:
    """Return the CPU seconds of all programs of the machine since it started; None if they are unknown."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, steal = (int(word) for word in first[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
