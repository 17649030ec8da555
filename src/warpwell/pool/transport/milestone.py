"""`Milestone`: an event with a value; `limit`: the default timeout of the pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ... import errors
from ..._settings import settings

LOOK = 0.25
"""Interval, in seconds, at which a waiter checks that the process it depends on is alive."""


def limit(timeout: float | None = None) -> float:
    """Return `timeout`, or if it is None, ``WARPWELL_POOL_STALL`` seconds (default: an hour).

    It bounds waits for events that never happen. The loss of a device ends a wait much earlier.
    """
    return settings.pool_stall_seconds if timeout is None else timeout


class Milestone:
    """An event that happens once, with a value, or fails once. Any thread may call the methods.

    Attributes
    ----------
    value : object
    failure : BaseException or None
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[Milestone], None]] = []
        self.value: Any = None
        self.failure: BaseException | None = None

    @property
    def is_set(self) -> bool:
        """Whether the event has happened or failed."""
        return self._event.is_set()

    def set(self, value: object = None) -> None:
        """Set the event with `value`, unless it is set."""
        self._end(value, None)

    def fail(self, failure: BaseException) -> None:
        """Set the event with a failure, unless it is set."""
        self._end(None, failure)

    def when_set(self, call: Callable[[Milestone], None]) -> None:
        """Call ``call(self)`` in the thread that sets the event, or now if it is set."""
        with self._lock:
            if not self._event.is_set():
                self._calls.append(call)
                return
        call(self)

    def wait(self, event: str, alive: Callable[[], None], timeout: float | None = None) -> Any:
        """Wait for the event and return its value.

        Parameters
        ----------
        event : str
            Name of the event for the message of `StallError`.
        alive : callable
            Raises if the process that sets the event has exited; called once at the start, then every 0.25 s.
        timeout : float, optional
            Seconds; by default `limit`.

        Raises
        ------
        StallError
            The event was not set in time.
        """
        if not self._event.is_set():
            bound = limit(timeout)
            end = time.monotonic() + bound
            alive()  # at once: hundreds of calls may wait in sequence for a process that has exited
            while not self._event.wait(max(0.0, min(LOOK, end - time.monotonic()))):
                alive()
                if time.monotonic() >= end:
                    raise errors.StallError(f"waited {bound:g} s for {event}", seconds=bound)
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
