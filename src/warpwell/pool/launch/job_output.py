"""The output of the processes of a job, and the input of the program.

`MpiexecOutput` forwards the output of agents; `AgentOutput` forwards it to the kernel of a notebook, which shows it in
a cell; `standard_input` is the stdin of the program.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_RULES = {b"-" * 60, b"-" * 74}
_MPIEXEC_WORDS = (b"prterun", b"mpiexec", b"mpirun", b"PRTE", b"PMIx", b"PMIX", b"MPI_", b"Open MPI")
_NOISE = re.compile(rb"\[warn\] Epoll|Abort is in progress|\[[^\]]+:\d+\] (pmix|PMIX|prte|PRTE)")
_SETTLE_SECONDS = 0.5
_MAX_LINES = 40

FOLDER = "WARPWELL_POOL_OUTPUT"
"""Variable that names the folder of the pipes of `AgentOutput`."""
_DESCRIPTORS = (1, 2)
_CHUNK = 65536


class MpiexecOutput:
    """Forwards the output of agents, and stores the messages of mpiexec itself, for example about exited processes.

    Parameters
    ----------
    streams : sequence of (binary file, int)
        Pipes to which mpiexec writes, and the descriptor to which the text of each pipe is forwarded.

    Attributes
    ----------
    targets : dict
        The descriptors that replace others.
    """

    def __init__(self, streams: Sequence[tuple[IO[bytes], int]]) -> None:
        self.targets: dict[int, int] = {}
        self._messages: list[bytes] = []
        self._threads = [
            threading.Thread(target=self._read, args=pair, name="warpwell output", daemon=True) for pair in streams
        ]
        for thread in self._threads:
            thread.start()

    def messages(self) -> str:
        """Return the messages of mpiexec as the end of an error message."""
        messages = self._messages if len(self._messages) <= _MAX_LINES else [*self._messages[:_MAX_LINES], b"..."]
        text = b"\n".join(messages).decode(errors="replace").strip()
        return f"\noutput of mpiexec:\n{text}" if text else ""

    def settle(self) -> None:
        """Wait at most 0.5 s for text that has not arrived."""
        for thread in self._threads:
            thread.join(_SETTLE_SECONDS)

    def _read(self, stream: IO[bytes], target: int) -> None:
        block: list[bytes] | None = None  # mpiexec prints its messages between two rules
        for line in stream:
            if line.strip() in _RULES:
                if block is None:
                    block = []
                    rule = line
                    continue
                if any(word in text for text in block for word in _MPIEXEC_WORDS):
                    self._messages += [text.rstrip() for text in block]
                else:
                    self._write(target, rule, *block, line)
                block = None
            elif block is not None:
                block.append(line)
            elif _NOISE.match(line):
                self._messages.append(line.rstrip())
            else:
                self._write(target, line)
        if block is not None:
            self._write(target, rule, *block)

    def _write(self, target: int, *texts: bytes) -> None:
        write(self.targets.get(target, target), b"".join(texts))


class AgentOutput:
    """Two pipes from the launcher to the kernel of a notebook, in the job's folder.

    Jupyter's kernel captures the descriptors 1 and 2 of its own process, so the text must be written there. The
    supervisor does not forward it, because the kernel may not read for a while.

    Parameters
    ----------
    folder : str or Path
        The job's folder, which is removed with the pipes.
    """

    def __init__(self, folder: str | Path) -> None:
        self._paths = {number: Path(folder) / f"output-{number}" for number in _DESCRIPTORS}

    def make(self) -> None:
        """Make the pipes."""
        for path in self._paths.values():
            os.mkfifo(path, 0o600)

    def writers(self) -> dict[int, int]:
        """Return the descriptors that replace 1 and 2. The notebook's kernel has opened the other ends."""
        found = {}
        for number, path in self._paths.items():
            found[number] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # raises instead of waiting if no process reads
            os.set_blocking(found[number], True)
        return found

    def show(self) -> None:
        """Start to write the text to the descriptors of this process."""
        for number, path in self._paths.items():
            # also open for writing, because a pipe without a writer returns end of file
            ends = os.open(path, os.O_RDWR), number
            threading.Thread(target=_show, args=ends, name="warpwell output", daemon=True).start()


def _show(reading: int, target: int) -> None:
    while data := os.read(reading, _CHUNK):
        write(target, data)


def write(target: int, data: bytes) -> None:
    """Write all data to a descriptor; drop the data if no process reads it."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


@contextlib.contextmanager
def standard_input() -> Iterator[int]:
    """Yield the descriptor from which the program reads.

    It is the stdin of this process, unless that is a terminal: the program is not in the foreground of the terminal, so
    the kernel would stop it when it reads. In that case, this process reads lines and writes them to a pipe.
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
    threading.Thread(target=_copy_terminal, args=(writing,), name="warpwell stdin", daemon=True).start()
    try:
        yield reading
    finally:
        os.close(reading)


def _copy_terminal(writing: int) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, _CHUNK):
            os.write(writing, data)
    with contextlib.suppress(OSError):
        os.close(writing)
