"""Handle: what a submitted task will have become, like a future of `concurrent.futures`."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import TYPE_CHECKING

from .. import errors
from .task import Job, State, Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Handle(Future[None]):
    """A task that was submitted. It is a `concurrent.futures.Future`, so ``wait`` and ``as_completed`` take it.

    `result` returns None once the task has ended, and raises what its device code latched, what kept it from running,
    or ``CancelledError``. Callbacks run in the thread of the scheduler: they may submit and cancel, and must not wait.

    Attributes
    ----------
    task : Task
    job : Job or None
        The scheduler's record: times, blocks done, preemptions. None while it waits for what it comes `after`.
    """

    def __init__(self, dispatcher: Dispatcher, task: Task) -> None:
        super().__init__()
        self.task = task
        self.job: Job | None = None
        self._dispatcher = dispatcher
        self._process = os.getpid()

    @property
    def state(self) -> State:
        """Where the task is. Where it has ended, `result` returns at once."""
        if self.done():
            if self.cancelled():
                return State.CANCELLED
            return State.DONE if self.exception() is None else State.FAILED
        job = self.job
        if job is None:
            return State.WAITING
        # an end is an end when those who wait for it have been told
        return State.RUNNING if job.state in ENDED else job.state

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, `timeout` seconds at most.

        Raises
        ------
        ArgumentError
            `timeout` is no number of seconds, or not finite.
        TimeoutError
            It has not ended in time. It goes on.
        CancelledError
            It was cancelled, or a task that it came after did not end well.
        KernelError
            What device code latched, or, as a `StallError`, that the task was stuck.
        TaskLostError
            The device or its process is gone.
        ForkError
            This process was forked from the scheduler's, and the task had not ended: nobody runs it here.
        """
        self._require_owner()
        return super().result(_seconds(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, `timeout` seconds at most, and return what `result` would raise, or None."""
        self._require_owner()
        return super().exception(_seconds(timeout))

    def running(self) -> bool:
        """Tell whether the task has a place on the device now."""
        return self.state in (State.RUNNING, State.STOPPING)

    def cancel(self) -> bool:
        """Ask for the end of the task.

        One that waits is cancelled now. One that runs leaves at the end of its blocks, and is cancelled then, or done,
        where those were its last ones. Later tasks of its request are cancelled with it.

        Returns
        -------
        bool
            False if it has ended otherwise, or runs whole, which nothing can stop.
        """
        if self.done():
            return self.cancelled()
        self._require_owner()
        return self._dispatcher.cancel(self)

    def _require_owner(self) -> None:
        if self._process != os.getpid() and not self.done():
            raise errors.ForkError(
                f"task {self.task.name!r} belongs to process {self._process} and this is {os.getpid()}, forked from "
                "it: wait for it there, or make a scheduler here"
            )

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Tell everybody who waits (the scheduler's thread, once)."""
        if cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)


def _seconds(timeout: float | None) -> float | None:
    """Return a time to wait; none, and less, is to look once."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float) and timeout <= 0:
        return 0.0
    return errors.checked_seconds(timeout, "timeout")
