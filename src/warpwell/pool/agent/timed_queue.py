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

    Until Python 3.13, ``queue.SimpleQueue.get(timeout=...)`` may sleep forever if the timeout ends between its two
    looks at the lock: with timeouts of microseconds this happens within minutes on a busy machine.
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
        """Return the first item; raise `queue.Empty` if none comes within `timeout` seconds, by default never."""
        end = 0.0 if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = -1.0 if timeout is None else max(0.0, end - time.monotonic())
            if not self._bell.acquire(timeout=left):
                with contextlib.suppress(IndexError):  # it may have come with the end of the time
                    return self._items.popleft()
                raise Empty
