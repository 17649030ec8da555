"""`Chatter`: what mpiexec and the agents write to stderr; and the application's stdin."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import IO

_RULE = b"-" * 20
_SETTLE_SECONDS = 0.5


class Chatter:
    """Passes on what agents write, and keeps what mpiexec says about processes that ended, which it puts in rules.

    Parameters
    ----------
    stream : binary file
        The stderr of mpiexec.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept: list[bytes] = []
        self._thread = threading.Thread(target=self._read, name="warpwell stderr", daemon=True)
        self._thread.start()

    def said(self) -> str:
        """Return what mpiexec said, to stand at the end of a message."""
        text = b"".join(self._kept).decode(errors="replace").strip()
        return f"\nmpiexec said:\n{text}" if text else ""

    def settle(self) -> None:
        """Wait a moment for what is under way."""
        self._thread.join(_SETTLE_SECONDS)

    def _read(self) -> None:
        inside = False
        for line in self._stream:
            if line.startswith(_RULE):
                inside = not inside
            elif inside or line.startswith((b"[warn] Epoll", b"Abort is in progress")):
                self._kept.append(line)
            else:
                with contextlib.suppress(OSError):
                    os.write(2, line)


@contextlib.contextmanager
def standard_input() -> Iterator[int]:
    """Give the descriptor that the application reads from.

    It is the stdin of this process, unless that is a terminal: the application is not in the terminal's foreground,
    and would be stopped when it reads there. Lines are read here and piped then.
    """
    try:
        terminal = os.isatty(0)
        os.fstat(0)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        yield descriptor
        os.close(descriptor)
        return
    if not terminal:
        yield 0
        return
    reading, writing = os.pipe()
    threading.Thread(target=_copy, args=(writing,), name="warpwell stdin", daemon=True).start()
    try:
        yield reading
    finally:
        os.close(reading)


def _copy(writing: int) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 65536):
            os.write(writing, data)
    with contextlib.suppress(OSError):
        os.close(writing)
