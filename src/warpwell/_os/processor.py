"""The name of this machine's processor."""

from __future__ import annotations

import contextlib
import functools
import platform


@functools.cache
def processor_name() -> str:
    """Return the name of the processor. (`platform.processor` starts a process for it.)"""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()
