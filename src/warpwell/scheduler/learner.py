"""`Learner`: the analyzer of a service's owner: it says what tasks are like, and learns from the log."""

from __future__ import annotations

import threading
from typing import Any

from .events import Event
from .task import Profile, Task

_MOST = 4096
_ENDS = ("stop", "end", "fail", "cancel", "lost")


class Learner:
    """Profiles for tasks that come without one; the times of those that ran alone make the next ones better.

    It is asked in the thread that submits, and taught in the one that reads the log.

    Parameters
    ----------
    analyzer : Analyzer, optional
        By default one with an empty history, which is not saved.
    """

    def __init__(self, analyzer: Any = None) -> None:
        if analyzer is None:
            from .analyzer import Analyzer

            analyzer = Analyzer()
        self._analyzer = analyzer
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._running: set[int] = set()
        self._tasks: dict[int, Task] = {}

    def __call__(self, task: Task) -> Profile:
        """Return what is believed of a task."""
        with self._lock:
            profile: Profile = self._analyzer(task)
            return profile

    def see(self, event: Event, task: Task | None) -> None:
        """Take in an event of the log, and the task that it is about, where that is known."""
        if event.kind == "launch":
            self._running.add(event.task)
        elif event.kind in _ENDS:
            self._running.discard(event.task)
        if task is not None:
            self._tasks[event.task] = task
        self._events.append(event)
        if self._running and len(self._events) < _MOST:
            return
        # the device is idle: what ran alone has no neighbours before or after this
        with self._lock:
            if not self._running:
                self._analyzer.learn(self._events, self._tasks)
        self._events.clear()
        self._tasks = {n: t for n, t in self._tasks.items() if n in self._running}
