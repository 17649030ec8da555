"""`limit`: how long anything of the pool waits where nothing else is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ... import errors
from ..._settings import settings

LOOK = 0.25
"""Seconds between two looks at whether the wait has become pointless."""


def limit(timeout: float | None = None) -> float:
    """Return `timeout`, or ``WARPWELL_POOL_STALL`` seconds, by default an hour.

    A lost device ends a wait long before: this bounds waits for events that never happen.
    """
    return settings.pool_stall_seconds if timeout is None else timeout


class Milestone:
    """A point that something comes to, or fails to, once; others wait for it or are called."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[Milestone], None]] = []
        self.value: Any = None
        self.failure: BaseException | None = None

    @property
    def is_set(self) -> bool:
        """Whether it came or failed."""
        return self._event.is_set()

    def set(self, value: object = None) -> None:
        """Come to it."""
        self._end(value, None)

    def fail(self, failure: BaseException) -> None:
        """Fail to."""
        self._end(None, failure)

    def when_set(self, call: Callable[[Milestone], None]) -> None:
        """Call ``call(self)`` when it came or failed, at once if it has; by whoever sets it."""
        with self._lock:
            if not self._event.is_set():
                self._calls.append(call)
                return
        call(self)

    def wait(self, what: str, alive: Callable[[], None], timeout: float | None = None) -> Any:
        """Wait, and return the value; raise the failure, what ``alive()`` raises, or `StallError`."""
        if not self._event.is_set():
            bound = limit(timeout)
            end = time.monotonic() + bound
            alive()  # at once: hundreds of calls may wait, one after the other, for something that is gone
            while not self._event.wait(max(0.0, min(LOOK, end - time.monotonic()))):
                alive()
                if time.monotonic() >= end:
                    raise errors.StallError(f"waited {bound:g} s for {what}", seconds=bound)
        if self.failure is not None:
            raise self.failure
        return self.value

    def _end(self, value: object, failure: BaseException | None) -> None:
        with self._lock:
            if self._event.is_set():
                return
            self.value, self.failure = value, failure
            self._event.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call(self)
