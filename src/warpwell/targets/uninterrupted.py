"""`uninterrupted`: keeps Ctrl-C until a compiler is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt of the main thread raise at the end of the block, seconds later at most.

    LLVM calls Python back while it compiles. What is raised there is printed and forgotten: the program would go on as
    if nobody had pressed a key. Other threads are never interrupted, and signals that Python does not handle are left
    as they are.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            previous(signal.SIGINT, came[0])
