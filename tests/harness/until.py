"""`until`: wait for what other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Return True as soon as a condition holds; raise AssertionError where that takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            raise AssertionError(f"it did not come in {seconds:g} s")
        time.sleep(0.01)
    return True
