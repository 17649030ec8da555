"""The clock of timeouts: monotonic time, plus an offset that only tests change.

Without ``WARPWELL_TEST_CLOCK``, `clock` has the functions of `time`, and the offset stays 0.
The variable names a file of 8 bytes or more; processes that map the same file share the offset, and `advance` adds to
it, so that a timeout of any length expires at its next check. Code compiled for the CPU adds the same word to its clock
(`clock_ns`): one load, next to a system call.

An advance wakes no waiter, so no wake-up can be lost between a check and a wait. Instead, no wait lasts longer than
`SLICE_SECONDS` while the variable is set: `sleep` and `wait` check the clock again, and loops that wait for a condition
pass their timeout through `at_most`. Processes and forked children that share the file need nothing else. The offset
never decreases. It is read and written as one aligned word; one process at a time may advance it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import Protocol

SLICE_SECONDS = 0.01
"""Longest uninterrupted wait while tests can advance the clock."""


class Waitable(Protocol):
    """An object that stays set after `wait` has returned True, such as `threading.Event`."""

    def wait(self, timeout: float | None = None) -> bool: ...


class Clock:
    """The clock of the system."""

    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self._offset = ctypes.c_int64()

    @property
    def offset_address(self) -> int:
        """Address of the offset in nanoseconds, for compiled code."""
        return ctypes.addressof(self._offset)

    def sleep(self, seconds: float) -> None:
        """Suspend the calling thread."""
        time.sleep(seconds)

    def at_most(self, seconds: float) -> float:
        """Return the timeout for one wait of a loop that checks its condition and its deadline after each wait."""
        return seconds

    def wait(self, waitable: Waitable, seconds: float | None = None) -> bool:
        """Wait for an event, at most for `seconds`; return whether it is set."""
        return waitable.wait(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass, in all processes that map the file of ``WARPWELL_TEST_CLOCK``.

        Raises
        ------
        RuntimeError
            The variable was not set when this process started.
        """
        raise RuntimeError("the clock cannot be advanced: set WARPWELL_TEST_CLOCK before warpwell is imported")


class AdvancingClock(Clock):
    """A clock that tests advance. The file at `path` holds the offset."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._offset = ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), 8))
        self._advancing = threading.Lock()

    def monotonic(self) -> float:
        return time.monotonic() + self._offset.value * 1e-9

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self._offset.value

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0:
            time.sleep(self.at_most(left))

    def at_most(self, seconds: float) -> float:
        return min(seconds, SLICE_SECONDS)

    def wait(self, waitable: Waitable, seconds: float | None = None) -> bool:
        until = float("inf") if seconds is None else self.monotonic() + seconds
        while not waitable.wait(self.at_most(max(0.0, until - self.monotonic()))):
            if self.monotonic() >= until:
                return False
        return True

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        with self._advancing:
            self._offset.value += round(seconds * 1e9)


_path = os.environ.get("WARPWELL_TEST_CLOCK")
clock = AdvancingClock(_path) if _path else Clock()
