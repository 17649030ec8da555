"""`until`: wait for what other threads or processes do; `Stopwatch`: how long that took on a machine in use."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections.abc import Callable
from pathlib import Path

HANG_SECONDS = 120.0
"""Limit of one wait in a test. It only ends hangs: a test that depends on its value is wrong."""


def until(condition: Callable[[], object], seconds: float = HANG_SECONDS) -> bool:
    """Wait until a condition holds and return True; after `seconds`, print all stacks and raise AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            faulthandler.dump_traceback(sys.__stderr__)
            raise AssertionError(f"the condition did not become true within {seconds:g} s")
        time.sleep(0.01)
    return True


class Stopwatch:
    """Seconds since it was made, without those in which somebody here waited for a processor.

    At least a third of the seconds counts, so that what hangs is found on a machine in use, too. Where the kernel does
    not tell of the waits (`/proc/pressure/cpu`), all do.
    """

    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), _waited()

    @property
    def seconds(self) -> float:
        all_of_them = time.monotonic() - self._began
        return max(all_of_them - (_waited() - self._waited), all_of_them / 3)


def _waited() -> float:
    """Return the seconds, since the machine started, in which some process was ready and had no processor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0
