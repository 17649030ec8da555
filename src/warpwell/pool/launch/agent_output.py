"""`AgentOutput`: takes what agents write from the launcher to a notebook's kernel, which shows it in a cell.

A kernel of Jupyter reads the descriptors 1 and 2 of its own process, so what shall be seen must be written in there.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from .terminal import write

FOLDER = "WARPWELL_POOL_OUTPUT"
"""Variable that says where the pipes are."""

_DESCRIPTORS = (1, 2)
_CHUNK = 65536


class AgentOutput:
    """Two pipes in a folder: not the lifeline, since nobody may have time to read them for a while.

    Parameters
    ----------
    folder : str or Path
        Of the job: they go with it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._paths = {number: Path(folder) / f"output-{number}" for number in _DESCRIPTORS}

    def make(self) -> None:
        """Make the pipes."""
        for path in self._paths.values():
            os.mkfifo(path, 0o600)

    def writers(self) -> dict[int, int]:
        """Return a descriptor to write to in place of 1, and of 2; the other end is open already."""
        found = {}
        for number, path in self._paths.items():
            found[number] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # raises where nobody reads, does not wait
            os.set_blocking(found[number], True)
        return found

    def show(self) -> None:
        """Write what comes to the descriptors of this process, from now on."""
        for number, path in self._paths.items():
            # to write, too: without a writer, which comes later, it would be at its end
            threading.Thread(target=_copy, args=(os.open(path, os.O_RDWR), number), name="warpwell output",
                             daemon=True).start()  # fmt: skip


def _copy(reading: int, target: int) -> None:
    while data := os.read(reading, _CHUNK):
        write(target, data)
