"""`end_soon`: one Ctrl-C ends a command within a second, whatever it does then."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ..replacing import remove, unfinished

INTERRUPTED = 130

PATIENCE = 0.6
"""Seconds that an interrupted command has to clear up."""


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder that is removed after the block, or when an interrupt ends the process in it."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        unfinished.add(folder)
        try:
            yield folder
        finally:
            unfinished.discard(folder)


def end_soon() -> None:
    """Watch for Ctrl-C: `PATIENCE` seconds after it this process ends, unless KeyboardInterrupt has ended it before.

    Python raises KeyboardInterrupt between two lines of its own code, so compiling, sorting or waiting for a device
    delays it. The files are then as after a kill: stores and graphs are whole, or not there.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="warpwell-interrupt", daemon=True).start()


def say() -> None:
    """Say that the command was interrupted."""
    print("warpwell: interrupted", file=sys.stderr, flush=True)


def leave() -> NoReturn:
    """End this process after an interrupt: run exit handlers, but free no objects, which may take seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def _watch(reading: int) -> None:
    while signal.SIGINT not in os.read(reading, 64):
        pass
    time.sleep(PATIENCE)
    for path in list(unfinished):
        remove(path)
    os.write(2, b"warpwell: interrupted\n")
    os._exit(INTERRUPTED)
