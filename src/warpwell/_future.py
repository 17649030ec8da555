"""`Future`: the result of work in the background."""

from __future__ import annotations

import concurrent.futures
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures._base import FINISHED
from typing import Any

from . import errors
from ._check import checked_timeout
from ._os import clock, interruptible

SIGNAL_CHECK_SECONDS = 0.05
"""Longest uninterrupted wait. A signal that arrives while the thread is about to sleep does not wake it."""


def require_same_process(process: int, subject: str = "this") -> None:
    """Raise ForkError if `subject`, which was started in `process`, is used in a process that was forked from it."""
    if process != os.getpid():
        raise errors.ForkError(
            f"{subject} was started in process {process}, from which {os.getpid()} was forked: start it again here"
        )


class Future(concurrent.futures.Future[Any]):
    """The result of work in the background. The work continues even if no caller keeps this object.

    `concurrent.futures.wait`, `concurrent.futures.as_completed` and `asyncio.wrap_future` accept a future without
    `poll`. A future with `poll` is completed only by calls of its own methods.

    Parameters
    ----------
    work : str
        Name of the work, for messages: "gather of 3 rows of array 'a'".
    poll : callable, optional
        Takes the future and completes it if the work has finished; never blocks. The methods call it first, one thread
        at a time. Default: another thread calls `set_result` or `set_exception`.
    """

    def __init__(self, work: str, poll: Callable[[Future], None] | None = None) -> None:
        super().__init__()
        self._work, self._process = work, os.getpid()
        self._poll, self._polled = poll, poll is not None
        self._polling = threading.RLock()  # a finalizer may use the future while `poll` runs in the same thread
        self.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        return f"<Future: {self._work}, {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Return True if `result` returns, or raises, at once."""
        if self._process != os.getpid():
            return True
        if self._polled and self._state != FINISHED:
            with self._polling:
                poll, self._poll = self._poll, None
                try:
                    if poll is not None:
                        poll(self)
                finally:
                    if self._state != FINISHED:
                        self._poll = poll
        return self._state == FINISHED  # without a lock, which Ctrl-C could leave locked

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the work and return its result; may be called again.

        Ctrl-C raises here and ends the wait, but not the work: call `result` again, or `cancel`.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Raises
        ------
        TimeoutError
            The work takes longer than `timeout` seconds. It continues.
        ClosedError
            `cancel` stopped the work.
        ForkError
            This process was forked from the process that started the work.
        """
        self._wait(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the work, as `result`, and return its exception, or None."""
        self._wait(timeout)
        return super().exception()

    def cancel(self) -> bool:
        """Stop the work soon; return False if it has already ended or cannot be stopped.

        After that, call `result` before you use memory that the work may still use.
        """
        self.done()
        return False

    def _wait(self, timeout: float | None) -> None:
        timeout = checked_timeout(timeout)
        require_same_process(self._process)
        try:
            if self._polled:
                self._poll_until_done(timeout)
            elif self._state != FINISHED:
                self._wait_for_thread(timeout)
        except TimeoutError:
            advice = "wait longer" if type(self).cancel is Future.cancel else "wait longer, or cancel() it"
            raise TimeoutError(f"the {self._work} is not done after {timeout:g} s: {advice}") from None

    def _wait_for_thread(self, timeout: float | None) -> None:
        deadline = math.inf if timeout is None else clock.monotonic() + timeout
        with interruptible(lambda: None) as interrupts:  # raised in the wait, Ctrl-C may leave its condition locked
            while not (interrupts.raised and interrupts.outermost):
                try:
                    super().exception(clock.at_most(max(0.0, min(SIGNAL_CHECK_SECONDS, deadline - clock.monotonic()))))
                    return
                except TimeoutError:
                    if clock.monotonic() >= deadline:
                        raise

    def _poll_until_done(self, timeout: float | None) -> None:
        deadline = math.inf if timeout is None else clock.monotonic() + timeout
        polls = 0
        while not self.done():
            polls += 1
            if clock.monotonic() > deadline:
                raise TimeoutError
            if polls > 200:
                clock.sleep(min(20e-6 * (polls - 200), 1e-3))
