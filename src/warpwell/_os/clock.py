"""The clock of timeouts: monotonic time, plus an offset that only tests change.

Without ``WARPWELL_TEST_CLOCK``, `monotonic`, `monotonic_ns` and `sleep` are those of `time`, and the offset stays 0.
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

_path = os.environ.get("WARPWELL_TEST_CLOCK")
_offset = ctypes.c_int64()
_advancing = threading.Lock()


class Waitable(Protocol):
    """An object whose state stays after `wait` has returned True, such as `threading.Event`."""

    def wait(self, timeout: float | None = None) -> bool: ...


def _map(path: str) -> ctypes.c_int64:
    """Return the offset word in a file that other processes may map too."""
    with open(path, "r+b") as file:
        return ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), 8))


def offset_address() -> int:
    """Return the address of the offset in nanoseconds, for compiled code."""
    return ctypes.addressof(_offset)


def _monotonic() -> float:
    return time.monotonic() + _offset.value * 1e-9


def _monotonic_ns() -> int:
    return time.monotonic_ns() + _offset.value


def _sleep(seconds: float) -> None:
    until = _monotonic() + seconds
    while (left := until - _monotonic()) > 0:
        time.sleep(min(left, SLICE_SECONDS))


def _wait(waitable: Waitable, seconds: float | None = None) -> bool:
    until = None if seconds is None else _monotonic() + seconds
    while not waitable.wait(SLICE_SECONDS if until is None else at_most(max(0.0, until - _monotonic()))):
        if until is not None and _monotonic() >= until:
            return False
    return True


def at_most(seconds: float) -> float:
    """Return the timeout for one wait of a loop that checks its condition and its deadline after each wait."""
    return min(seconds, SLICE_SECONDS) if _path else seconds


def wait(waitable: Waitable, seconds: float | None = None) -> bool:
    """Wait for an event, at most for `seconds`; return whether it is set."""
    return _wait(waitable, seconds) if _path else waitable.wait(seconds)


def advance(seconds: float) -> None:
    """Let time pass, in all processes that map the file of ``WARPWELL_TEST_CLOCK``.

    Raises
    ------
    RuntimeError
        The variable was not set when this process started.
    """
    if not _path:
        raise RuntimeError("the clock cannot be advanced: set WARPWELL_TEST_CLOCK before warpwell is imported")
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    with _advancing:
        _offset.value += round(seconds * 1e9)


monotonic = time.monotonic
monotonic_ns = time.monotonic_ns
sleep = time.sleep
if _path:
    _offset = _map(_path)
    monotonic, monotonic_ns, sleep = _monotonic, _monotonic_ns, _sleep  # type: ignore[assignment]
