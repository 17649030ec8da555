"""`Milestone`: an event with a value; `limit`: the default timeout of the pool."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ... import errors
from ..._settings import settings

ALIVE_CHECK_SECONDS = 0.25
"""Interval, in seconds, at which a waiting thread checks that the process it depends on is alive."""


def limit(timeout: float | None = None) -> float:
    """Return `timeout`, or if it is None, ``WARPWELL_POOL_STALL`` seconds (default: an hour).

    The timeout bounds waits for events that never happen. The loss of a device ends a wait much earlier.
    """
    return settings.pool_stall_seconds if timeout is None else timeout


class Milestone:
    """An event that happens once, with a value, or fails once. Any thread may call the methods.

    Attributes
    ----------
    value : object
    failure : BaseException or None
    done : bool
        Whether the event has happened or failed.
    """

    __slots__ = ("_arrived", "_calls", "_unset", "done", "failure", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.failure: BaseException | None = None
        self.done = False
        self._calls: list[Callable[[Milestone], None]] = []
        self._unset = [None]  # `pop` is atomic, so that only one thread sets the event
        self._arrived = threading.Lock()  # open once the event is set; much cheaper to create than an `Event`
        self._arrived.acquire()

    def set(self, value: object = None) -> None:
        """Set the event with `value`, unless it is set."""
        self._end(value, None)

    def fail(self, failure: BaseException) -> None:
        """Set the event with a failure, unless it is set."""
        self._end(None, failure)

    def when_set(self, call: Callable[[Milestone], None]) -> None:
        """Call ``call(self)`` once, in the thread that sets the event, or now if it is set. It must not block."""
        self._calls.append(call)
        if self.done:
            self._run_calls()

    def wait(self, event: str, timeout: float | None = None, alive: Callable[[], None] | None = None) -> None:
        """Wait until the event is set, or has failed.

        Parameters
        ----------
        event : str
            Name of the event for the message of `StallError`.
        timeout : float, optional
            Seconds; by default `limit`.
        alive : callable, optional
            Raises if the process that sets the event has exited; called once at the start, then every 0.25 s.

        Raises
        ------
        StallError
            The event was not set in time.
        """
        bound = limit(timeout)
        end = time.monotonic() + bound
        while not self.done:
            if alive is not None:
                alive()  # at once: hundreds of calls may wait in sequence for a process that has exited
            left = end - time.monotonic()
            self._sleep(min(max(left, 0.0), threading.TIMEOUT_MAX if alive is None else ALIVE_CHECK_SECONDS))
            if left <= 0 and not self.done:
                advice = "; WARPWELL_POOL_STALL sets this limit" if timeout is None else ""
                raise errors.StallError(f"waited {bound:g} s for {event}{advice}", seconds=bound)

    def get(self, event: str, timeout: float | None = None, alive: Callable[[], None] | None = None) -> Any:
        """Wait as `wait` does; return the value, or raise the failure."""
        if not self.done:
            self.wait(event, timeout, alive)
        if self.failure is not None:
            raise self.failure
        return self.value

    def _sleep(self, seconds: float) -> None:
        try:
            self._arrived.acquire(timeout=seconds)
        finally:
            if self.done:  # release it for other waiters; Ctrl-C may have interrupted `acquire`
                with contextlib.suppress(RuntimeError):
                    self._arrived.release()

    def _end(self, value: object, failure: BaseException | None) -> None:
        try:
            self._unset.pop()
        except IndexError:
            return
        self.value, self.failure, self.done = value, failure, True
        self._arrived.release()
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            try:
                self._calls.pop(0)(self)  # `pop` is atomic, so that only one thread runs a call
            except IndexError:
                return
            except Exception:  # the thread that set the event continues
                traceback.print_exc()
