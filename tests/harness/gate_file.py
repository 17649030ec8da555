"""`gate_file`: a file that calls on devices wait for, with `wait_for_file`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def gate_file(folder: Path) -> Iterator[Path]:
    """Yield the path of a file to touch. It is touched at the end in any case: a failed test must not leave calls."""
    gate = folder / "gate"
    try:
        yield gate
    finally:
        gate.touch()


def wait_for_file(path: str) -> bool:
    """Wait until a file exists. Runs on a device."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return True
