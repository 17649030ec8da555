"""`until`: wait for other threads or processes."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable

HANG_SECONDS = 120.0
"""Limit of one wait in a test. It only ends hangs: a test that depends on its value is wrong."""


def until(condition: Callable[[], object], seconds: float = HANG_SECONDS) -> bool:
    """Wait until a condition holds and return True; after `seconds`, print all stacks and raise AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            faulthandler.dump_traceback(sys.__stderr__)
            raise AssertionError(f"the condition did not become true within {seconds:g} s")
        time.sleep(0.01)
    return True
