"""`compiling`: a line where that takes long, so that nobody takes it for a hang; and Ctrl-C at its end."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from .uninterrupted import uninterrupted

SECONDS = 1.0
"""Compilations that take no longer say nothing."""

enabled = True
"""Whether to say anything; the command line has notices of its own."""


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Say on standard error, if it is a terminal, that `name` is being compiled, once that takes over a second.

    An interrupt is raised when it is done: see `uninterrupted`.
    """
    with uninterrupted(), _saying(name):
        yield


@contextlib.contextmanager
def _saying(name: str) -> Iterator[None]:
    if not enabled or not sys.stderr.isatty():
        yield
        return
    text = f"warpwell: compiling {name} (kept on disk for the next time where it can be) ...\n"
    timer = threading.Timer(SECONDS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
