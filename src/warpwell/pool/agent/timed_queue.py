"""`TimedQueue`: a queue with a reliable timeout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """A FIFO queue for one receiving thread.

    Until Python 3.13, ``queue.SimpleQueue.get(timeout=...)`` may sleep forever if the timeout ends between its two
    checks of the lock: with timeouts of microseconds, this happens within minutes on a busy machine.
    ``queue.Queue.put`` cannot be called by signal handlers and finalizers, which may interrupt it. This can.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Lock()  # open if an item may have arrived
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Append an item without waiting."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is open
            self._bell.release()

    def get(self, timeout: float | None = None) -> T:
        """Return the first item; raise `queue.Empty` if no item arrives within `timeout` seconds. Default: wait."""
        end = 0.0 if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            left = -1.0 if timeout is None else max(0.0, end - time.monotonic())
            if not self._bell.acquire(timeout=left):
                with contextlib.suppress(IndexError):  # an item may have arrived at the end of the timeout
                    return self._items.popleft()
                raise Empty
