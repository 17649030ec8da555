"""`Chatter`: what mpiexec and the agents write; and the application's stdin."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

_RULES = {b"-" * 60, b"-" * 74}
_ITS_OWN = (b"prterun", b"mpiexec", b"mpirun", b"PRTE", b"PMIx", b"PMIX", b"MPI_", b"Open MPI")
_NOISE = re.compile(rb"\[warn\] Epoll|Abort is in progress|\[[^\]]+:\d+\] (pmix|PMIX|prte|PRTE)")
_SETTLE_SECONDS = 0.5
_LINES = 40


class Chatter:
    """Passes on what agents write, but keeps what mpiexec itself says, of processes that ended for example.

    Parameters
    ----------
    streams : sequence of (binary file, int)
        Where mpiexec writes, and the descriptor that it goes to.

    Attributes
    ----------
    targets : dict
        Descriptors that take the place of these.
    """

    def __init__(self, streams: Sequence[tuple[IO[bytes], int]]) -> None:
        self.targets: dict[int, int] = {}
        self._kept: list[bytes] = []
        self._threads = [
            threading.Thread(target=self._read, args=pair, name="warpwell output", daemon=True) for pair in streams
        ]
        for thread in self._threads:
            thread.start()

    def said(self) -> str:
        """Return what mpiexec said, to stand at the end of a message."""
        kept = self._kept if len(self._kept) <= _LINES else [*self._kept[:_LINES], b"..."]
        text = b"\n".join(kept).decode(errors="replace").strip()
        return f"\nmpiexec said:\n{text}" if text else ""

    def settle(self) -> None:
        """Wait a moment for what is under way."""
        for thread in self._threads:
            thread.join(_SETTLE_SECONDS)

    def _read(self, stream: IO[bytes], target: int) -> None:
        block: list[bytes] | None = None  # between two rules, as mpiexec's texts are
        for line in stream:
            if line.strip() in _RULES:
                if block is None:
                    block = []
                    rule = line
                    continue
                if any(word in text for text in block for word in _ITS_OWN):
                    self._kept += [text.rstrip() for text in block]
                else:
                    self._write(target, rule, *block, line)
                block = None
            elif block is not None:
                block.append(line)
            elif _NOISE.match(line):
                self._kept.append(line.rstrip())
            else:
                self._write(target, line)
        if block is not None:
            self._write(target, rule, *block)

    def _write(self, target: int, *lines: bytes) -> None:
        write(self.targets.get(target, target), b"".join(lines))


def write(target: int, data: bytes) -> None:
    """Write all of it to a descriptor; nothing where nobody reads any more."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


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
