"""Threads: daemon threads that are started as needed and wait for the next call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Threads:
    """Daemon threads. Each call starts at once in a thread of its own; idle threads are used again.

    No call waits for another one, so a call that never returns only occupies its thread.

    Parameters
    ----------
    name : str
        Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False

    def run(self, *calls: Callable[[], object]) -> None:
        """Make each call in another thread. The calls must not raise.

        Raises
        ------
        RuntimeError
            Too few threads are idle, and Python is shutting down and starts no thread. No call is made.
        """
        with self._lock:
            while self._idle < len(calls):
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
                self._idle += 1
            # the place of a thread is taken before its call is in the queue, so no call waits for a busy one
            self._idle -= len(calls)
            for call in calls:
                self._calls.put(call)

    def close(self) -> None:
        """End the threads that wait, and each other one when its call returns."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            del call  # its objects must not live until the next call
            with self._lock:
                if self._closed:
                    return
                self._idle += 1
