"""`end_soon`: one Ctrl-C ends a command within a second, whatever it is in the middle of."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130

PATIENCE = 0.6
"""Seconds in which a command that was interrupted may put things in order."""

_scratch: set[Path] = set()
_sockets: set[Path] = set()


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Give a temporary folder that is gone after the block, and when an interrupt ends the process before that."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        _scratch.add(folder)
        try:
            yield folder
        finally:
            _scratch.discard(folder)


def forget_socket(path: Path) -> None:
    """Remove a socket when an interrupt ends the process before its service could."""
    _sockets.add(path)


def end_soon() -> None:
    """Watch for Ctrl-C: `PATIENCE` seconds after it this process ends, if KeyboardInterrupt has not ended it before.

    Python raises that between two lines of its own, so whatever compiles, sorts or waits for the device holds it up.
    What is left of files then is what a killed process leaves: stores and graphs are whole, or not there.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="warpwell-interrupt", daemon=True).start()


def say() -> None:
    """Say that the command was interrupted."""
    print("warpwell: interrupted", file=sys.stderr, flush=True)


def leave() -> NoReturn:
    """End this process after an interrupt: in order, but without freeing all that it made, which may take seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def _watch(reading: int) -> None:
    while signal.SIGINT not in os.read(reading, 64):
        pass
    time.sleep(PATIENCE)
    graphs = sys.modules.get("warpwell.graph.folder")
    for folder in [*_scratch, *(graphs.unfinished if graphs is not None else ())]:
        shutil.rmtree(folder, ignore_errors=True)
    for socket in _sockets:
        socket.unlink(missing_ok=True)
    os.write(2, b"warpwell: interrupted\n")
    os._exit(INTERRUPTED)
