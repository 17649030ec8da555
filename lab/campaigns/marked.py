"""Find the processes that inherited a mark in their environment, and their files in anonymous memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

MARK = "WARPWELL_TEST_RUN"


def marked(mark: str, folder: str | Path | None = None) -> list[int]:
    """Return the ids of the running processes with this mark in their environment, in the order of their start.

    Ids do not have this order, because the kernel uses small ones again after the largest.

    Parameters
    ----------
    mark : str
        Value of `MARK`.
    folder : path, optional
        Value of ``TMPDIR`` that also marks a process, because workers do not get Warpwell's variables.
    """
    found = []
    marks = {f"{MARK}={mark}".encode(), *([] if folder is None else [f"TMPDIR={folder}".encode()])}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks & set((path / "environ").read_bytes().split(b"\0")):
                fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.append((int(fields[19]), int(path.name)))
    return [pid for _, pid in sorted(found)]


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process: T if it is stopped, X if it has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def command_of(pid: int) -> str:
    """Return the command of a process, or "" if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def seconds_until_none_is_left(mark: str, limit: float, folder: str | Path | None = None) -> float:
    """Wait until no process has the mark; return the seconds that this took.

    Raises
    ------
    AssertionError
        Processes with the mark are still running after `limit` seconds.
    """
    began = time.monotonic()
    while (left := marked(mark, folder)) and time.monotonic() < began + limit:
        time.sleep(0.01)
    assert not left, f"left after {limit:g} s: {[f'{pid} {command_of(pid)}' for pid in left]}"
    return time.monotonic() - began


def memory_files(pids: list[int] | None = None) -> set[tuple[int, str]]:
    """Return inode and name of each file in anonymous memory that processes have open; by default all processes.

    Only descriptors count: a process with a mapping and without a descriptor keeps the file only until it exits.
    """
    found = set()
    for pid in [int(n) for n in os.listdir("/proc") if n.isdecimal()] if pids is None else pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(entry.path)
                    if name.startswith("/memfd:"):
                        found.add((entry.stat().st_ino, name))
    return found
