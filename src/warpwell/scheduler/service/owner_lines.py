"""`Lines`: messages to the owner, one after another for each client, and past those that take long for the others."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

from .protocol import Message


class Lines:
    """Takes messages at once where nothing is in their way; in a thread of their line where they take long.

    Importing a file of kernels, and compiling to count what a kernel does, take as long as their authors like. What
    comes after on the same line waits for it, in order; nobody else does. A line ends when nothing is left on it.

    Parameters
    ----------
    take : callable
        ``take(message)`` takes a message, in whatever thread.
    slow : callable
        ``slow(message)`` tells whether that may take long.
    """

    def __init__(self, take: Callable[[Message], None], slow: Callable[[Message], bool]) -> None:
        self._take = take
        self._slow = slow
        self._lock = threading.Lock()
        self._lines: dict[str, deque[Message]] = {}

    def put(self, line: str, message: Message) -> bool:
        """Take a message that belongs to a line, now or later; tell whether it is taken."""
        with self._lock:
            waits = self._lines.get(line)
            if waits is not None:
                waits.append(message)
                return False
            if self._slow(message):
                self._lines[line] = deque([message])
                threading.Thread(target=self._work, args=(line,), name=f"warpwell-line-{line}", daemon=True).start()
                return False
        self._take(message)
        return True

    def _work(self, line: str) -> None:
        waits = self._lines[line]
        while True:
            try:
                self._take(waits[0])
            except Exception:  # those behind it must not wait for ever
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            with self._lock:
                waits.popleft()
                if not waits:
                    del self._lines[line]
                    return
