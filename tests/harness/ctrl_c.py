"""`interrupted_everywhere`: a call that Ctrl-C interrupts in the main thread, at each place in turn."""

from __future__ import annotations

import concurrent.futures._base
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from warpwell.scheduler import handle

FILES = {its.__file__ for its in (concurrent.futures._base, threading, handle)}


def interrupted_everywhere(function: Callable[[], object], then: Callable[[], object]) -> int:
    """Call a function until it returns, with Ctrl-C one step later each time, and `then` after each; return how often.

    Steps are those of modules that futures are made of.
    """
    at = 1
    while next(_interrupted(function, at)):
        then()
        at += 1
    return at


def _interrupted(function: Callable[[], object], at: int) -> Iterator[bool]:
    """Yield whether a call was interrupted at a step.

    CPython goes on to handle an exception whose `except` is left by one that a trace function raises. A generator keeps
    that to itself: it would be in `sys.exc_info` of all later tests.
    """
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
    came = False
    try:
        function()
    except TimeoutError:
        pass
    except (KeyboardInterrupt, RuntimeError):  # `threading` may find a lock released
        came = True
    finally:
        sys.settrace(before)
    yield came
