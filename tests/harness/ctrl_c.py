"""`interrupted_everywhere`: a call that Ctrl-C interrupts in the main thread, at each place in turn."""

from __future__ import annotations

import concurrent.futures._base
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from warpwell.scheduler import handle, series

FILES = {its.__file__ for its in (concurrent.futures._base, threading, handle, series)}


def interrupted_everywhere(function: Callable[[], object], then: Callable[[], object]) -> int:
    """Call a function until it returns, with Ctrl-C one step later each time, and `then` after each; return how often.

    Steps are those of modules that futures are made of.
    """
    at = 1
    while _interrupted(function, at):
        then()
        at += 1
    return at


def _interrupted(function: Callable[[], object], at: int) -> bool:
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename in FILES:
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except TimeoutError:
        return False
    except (KeyboardInterrupt, RuntimeError):  # `threading` may find a lock released
        return True
    finally:
        sys.settrace(before)
    return False
