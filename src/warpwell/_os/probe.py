"""Probe in a child process whether the system allows a call: a sandbox may kill the caller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TIMEOUT = 10.0
"""Timeout of a child process in seconds."""


def probe(program: str) -> str | None:
    """Return None if a Python program exits with status 0 in a child process, else the reason why not.

    The program prints its reason.
    """
    if getattr(sys, "frozen", False) or not Path(sys.executable or ".").name.startswith("python"):
        return "no Python interpreter to probe it in a child process"
    command = [sys.executable, "-I", "-S", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"a child process could not probe it: {error}"
    if done.returncode < 0:
        return f"the system killed the process that probed it (signal {-done.returncode})"
    return None if done.returncode == 0 else done.stdout.strip() or "the process that probed it failed"
