"""Handle: the future of a submitted task or request."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol

from .. import errors
from .._check import checked_seconds
from .._future import Future
from .task import Job, State, Task

_logger = logging.getLogger("concurrent.futures")

ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Runner(Protocol):
    """The interface of the scheduler behind a handle: of this process, of a pool, or of a service."""

    def cancel(self, handle: Any) -> bool:
        """Request the end of a task that has not ended; return False if it cannot be stopped."""

    def state_of(self, handle: Any) -> State:
        """Return the state of a task that has not ended."""


class TaskFuture(Future):
    """The future of a task, on any scheduler. ``concurrent.futures.wait`` and ``asyncio.wrap_future`` accept it.

    Attributes
    ----------
    name : str
        Name of the task.
    """

    def __init__(self, runner: Runner, name: str) -> None:
        super().__init__(f"task {name!r}")
        self.name = name
        self._runner = runner
        self._cancelled = False

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self._state == "FINISHED"  # also in a forked process

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        return self._cancelled and self.done()

    @property
    def state(self) -> State:
        """The state of the task. If it has ended, `result` returns at once."""
        if self.done():
            if self.cancelled():
                return State.CANCELLED
            return State.DONE if self.exception() is None else State.FAILED
        return self._runner.state_of(self)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds.

        Raises
        ------
        ArgumentError
            `timeout` is not a finite number of seconds.
        TimeoutError
            The task has not ended in time; it continues.
        CancelledError
            The task was cancelled, or a task before it (`after`) did not succeed.
        KernelError
            Device code latched an error, or (`StallError`) the task was stuck.
        TaskLostError
            The device or its process died.
        ServiceError
            The service that runs it died, or did not answer for some seconds.
        ForkError
            This process was forked from the one that submitted the task, and the task had not ended: it does not run
            here.
        """
        super().result(_seconds(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds, and return the error of `result`, or None."""
        error = super().exception(_seconds(timeout))
        if self._cancelled:
            raise CancelledError
        return error

    def running(self) -> bool:
        """Return whether the task has a place on the device now."""
        return self.state in (State.RUNNING, State.STOPPING)

    def cancel(self) -> bool:
        """Request the end of the task.

        A waiting task is cancelled at once. A running task stops at the end of its current blocks; it is then
        cancelled, or done if they were its last ones. Later tasks of its request are cancelled with it.

        Returns
        -------
        bool
            False if the task has already ended, or runs whole and cannot be stopped.
        """
        if self.done():
            return self.cancelled()
        self.require_process()
        return self._runner.cancel(self)

    def require_process(self) -> None:
        """Raise in a process that was forked from the one that submitted the task, unless it has ended."""
        if self._process != os.getpid() and not self.done():
            raise errors.ForkError(
                f"task {self.name!r} belongs to process {self._process} and this is {os.getpid()}, forked from it: "
                "wait for it there, or make a scheduler here"
            )

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Set the outcome, once, and notify all waiting threads."""
        self._cancelled = cancelled
        if cancelled:
            self.set_exception(CancelledError())
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn(self)`` at the end, or immediately if the task has ended. Exceptions are logged."""
        super().add_done_callback(functools.partial(_call, fn))

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            self.require_process()
            super()._wait(timeout)


class Handle(TaskFuture):
    """A submitted task, or a request of several. `concurrent.futures.wait` and `asyncio.wrap_future` accept it.

    `result` returns None once the task has ended, and raises its latched error, the error that prevented it from
    running, or ``CancelledError``. Callbacks run in the scheduler's thread: they may submit and cancel, and must not
    wait.

    Attributes
    ----------
    task : Task
        Of a request, its last task.
    job : Job or None
        The scheduler's record: times, completed blocks, preemptions. None until its thread has accepted the task.
    """

    def __init__(self, runner: Runner, task: Task) -> None:
        super().__init__(runner, task.name)
        self.task = task
        self.job: Job | None = None


class RequestHandle(TaskFuture):
    """The future of a request of several tasks: done when all have ended, with the first error.

    Attributes
    ----------
    handles : tuple of TaskFuture
        Of its tasks, in order.
    """

    def __init__(self, name: str, handles: Sequence[TaskFuture]) -> None:
        super().__init__(_Tasks(), name)
        self.handles = tuple(handles)
        self._ends = itertools.count(1)  # one step of the interpreter: tasks may end in several threads
        for handle in self.handles:
            handle.add_done_callback(self._ended)

    def _ended(self, _: TaskFuture) -> None:
        if next(self._ends) == len(self.handles):
            error = next((e for h in self.handles if not h.cancelled() and (e := h.exception()) is not None), None)
            self.settle(error, cancelled=error is None and any(handle.cancelled() for handle in self.handles))


class _Tasks:
    """The runner of a request, whose tasks have runners of their own."""

    def cancel(self, request: RequestHandle) -> bool:
        """Cancel the first task that can be cancelled; the later ones are cancelled with it."""
        return any(handle.cancel() for handle in request.handles if not handle.done())

    def state_of(self, request: RequestHandle) -> State:
        """Return the state of the first task that has not ended."""
        return next((handle.state for handle in request.handles if not handle.done()), State.RUNNING)


def _call(function: Callable[[Any], object], future: Any) -> None:
    """Call a callback. A thread of the scheduler survives everything that it raises."""
    try:
        function(future)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C
        _logger.exception("exception calling callback for %r", future)


def _seconds(timeout: float | None) -> float | None:
    """Return a time to wait; 0 and less mean not to wait."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float) and timeout <= 0:
        return 0.0
    return checked_seconds(timeout, "timeout")
