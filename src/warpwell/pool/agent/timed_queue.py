"""`TimedQueue`: a queue whose `get` keeps to its timeout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """First in, first out; for one thread that takes.

    Until Python 3.13, ``queue.SimpleQueue.get(timeout=...)`` sleeps for ever where the timeout ends between its two
    looks at the lock: with timeouts of microseconds, on a busy machine, it comes to that within minutes.
    ``queue.Queue.put`` cannot be called by signal handlers and finalizers, which may interrupt it. This can.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Lock()  # open when something may have come
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Append an item; never waits."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is open
            self._bell.release()

    def get(self, timeout: float | None = None) -> T:
        """Return the first item; raise `queue.Empty` where none came for `timeout` seconds, by default never."""
        end = 0.0 if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = -1.0 if timeout is None else max(0.0, end - time.monotonic())
            if not self._bell.acquire(timeout=left):
                with contextlib.suppress(IndexError):  # it may have come with the end of the time
                    return self._items.popleft()
                raise Empty
