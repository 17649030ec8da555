"""`Outbox`: an agent's thread for answers that belong to no lane, and for events that the device comes to."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .timed_queue import TimedQueue

if TYPE_CHECKING:
    from .agent import Agent

_SHORTEST, _LONGEST = 20e-6, 1e-3


class Outbox:
    """Calls what it is given, in order, or as soon as the device has come to a mark.

    Marks are asked in turn, and none is waited for: one may only be reached after another one was told of.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._queue: TimedQueue[Any] = TimedQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # finalizers put, too

    def put(self, call: Callable[[], None], mark: Any = None) -> None:
        """Have `call` called, after `mark` if there is one."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="warpwell outbox", daemon=True)
                    self._thread.start()
        self._queue.put((call, mark))

    def end(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _work(self) -> None:
        runtime = self._agent.runtime
        runtime.enter()
        marks: list[tuple[Callable[[], None], Any]] = []
        nap = _SHORTEST
        while True:
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=nap if marks else None)
                if item is None:
                    return
                marks.append(item)
                nap = _SHORTEST
            waiting = []
            for call, mark in marks:
                if self._agent.stopped:
                    continue  # nobody is there to be told
                if mark is None or self._reached(mark):
                    self._call(call)
                else:
                    waiting.append((call, mark))
            nap = _SHORTEST if len(waiting) < len(marks) else min(2 * nap, _LONGEST)
            marks = waiting

    @staticmethod
    def _call(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # others wait for what comes after it
            traceback.print_exc()

    def _reached(self, mark: Any) -> bool:
        try:
            return self._agent.runtime.reached(mark)
        except Exception:  # a device that failed comes to nothing: its lanes tell
            return True
