"""Locks of files between processes (flock), with a timeout; the system frees them when their process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .clock import clock

TIMEOUT_SECONDS = 30.0


@contextlib.contextmanager
def file_lock(path: Path, timeout: float = TIMEOUT_SECONDS) -> Iterator[bool]:
    """Hold the lock of a file during the block, and yield whether it is held.

    The block also runs without the lock: after the timeout, because the process that has it may be stopped, or if the
    file cannot be created. Threads of a process exclude each other, too.

    Parameters
    ----------
    path : Path
        The lock's file, which is not removed.
    timeout : float
        Seconds.
    """
    descriptor, held = -1, False
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_for_lock(path, create=True)
        held = lock_descriptor(descriptor, clock.monotonic() + timeout)
    try:
        yield held
    finally:
        if descriptor >= 0:
            if held:
                unlock_descriptor(descriptor)
            os.close(descriptor)


def open_for_lock(path: Path, *, create: bool = False) -> int:
    """Open a file so that it can be locked: for writing if possible, because NFS locks only files open for writing."""
    try:
        return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except PermissionError:  # another user's file
        return os.open(path, os.O_RDONLY)


def lock_descriptor(descriptor: int, deadline: float) -> bool:
    """Lock an open file or folder; return False if another process has the lock until the deadline (`clock.monotonic`).

    Raises
    ------
    OSError
        The file system has no locks.
    """
    pause = 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if clock.monotonic() >= deadline:
                return False
        clock.sleep(pause)
        pause = min(2 * pause, 0.05)


def unlock_descriptor(descriptor: int) -> None:
    """Free a lock, also if a process that was forked in the meantime has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
