"""`interrupted_everywhere`: a call that Ctrl-C interrupts in the main thread, at each place in turn."""

from __future__ import annotations

import concurrent.futures._base
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from warpwell.scheduler import handle

FILES = {module.__file__ for module in (concurrent.futures._base, threading, handle)}


def interrupted_everywhere(function: Callable[[], object], then: Callable[[], object]) -> int:
    """Call `function` until it returns, with Ctrl-C one step later each time; return the number of calls.

    A step is a trace event in a module that implements futures. `then` is called after each interrupted call.
    """
    at = 1
    while next(_interrupted(function, at)):
        then()
        at += 1
    return at


def _interrupted(function: Callable[[], object], at: int) -> Iterator[bool]:
    """Yield whether a call was interrupted at a step.

    If a trace function raises inside an `except`, CPython continues to handle the first exception. In a generator, this
    state is local; elsewhere it would be in `sys.exc_info` of all later tests.
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
    is_interrupted = False
    try:
        function()
    except TimeoutError:
        pass
    except (KeyboardInterrupt, RuntimeError):  # RuntimeError: `threading` may find its lock already released
        is_interrupted = True
    finally:
        sys.settrace(before)
    yield is_interrupted
