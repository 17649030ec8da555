"""`marked`: processes that were started, however indirectly, with a mark in their environment."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

MARK = "WARPWELL_TEST_RUN"


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has this mark, and which have not ended."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                if (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(path.name))
    return found


def command_of(pid: int) -> str:
    """Return the command of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def seconds_until_none_is_left(mark: str, limit: float) -> float:
    """Wait until no process has the mark; return how long that took.

    Raises
    ------
    AssertionError
        Some were left after `limit` seconds.
    """
    began = time.monotonic()
    while (left := marked(mark)) and time.monotonic() < began + limit:
        time.sleep(0.01)
    assert not left, f"left after {limit:g} s: {[command_of(pid) for pid in left]}"
    return time.monotonic() - began
