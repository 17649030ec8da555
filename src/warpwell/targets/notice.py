"""`compiling`: a line where that takes long, so that nobody takes it for a hang; and Ctrl-C at its end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from .uninterrupted import uninterrupted

SECONDS = 1.0
"""Compilations that take no longer say nothing."""

enabled = not os.environ.get("WARPWELL_QUIET")
"""Whether to say anything; the command line has notices of its own."""

_said = False


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Say on standard error, once a process, that `name` is being compiled, if that takes over a second.

    An interrupt is raised when it is done: see `uninterrupted`.
    """
    with uninterrupted(), _saying(name):
        yield


@contextlib.contextmanager
def _saying(name: str) -> Iterator[None]:
    if not enabled or _said:
        yield
        return
    timer = threading.Timer(SECONDS, _say, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(name: str) -> None:
    global _said
    if _said or sys.stderr is None:
        return
    _said = True
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(
            f"warpwell: compiling {name}, and what else is new; on the CPU it is kept on disk for the next time "
            "(WARPWELL_QUIET=1 hides this line) ...\n"
        )
        sys.stderr.flush()
