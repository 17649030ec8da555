"""`open_descriptors`: the open files of a process. `until_closed`: wait until no file is open that was not before."""

from __future__ import annotations

import contextlib
import gc
import os

from .until import until

Descriptors = set[tuple[int, str]]
"""Numbers and names of open files. A number of a closed file that another file got is a difference, too."""


def open_descriptors(process: int | None = None) -> Descriptors:
    """Return the open files of a process, by default of this one; here without those of unreachable objects."""
    if process is None:
        gc.collect()
    folder = f"/proc/{process or 'self'}/fd"
    found = set()
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, which was open while it was listed
            found.add((int(number), os.readlink(f"{folder}/{number}").removesuffix(" (deleted)")))
    return found


def until_closed(before: Descriptors, process: int | None = None) -> None:
    """Wait until a process has only files open that it had open before: threads may still close others."""
    new: Descriptors = set()

    def is_closed() -> bool:
        new.clear()
        new.update(open_descriptors(process) - before)
        return not new

    try:
        until(is_closed)
    except AssertionError as error:
        raise AssertionError(f"still open: {sorted(new)}") from error
