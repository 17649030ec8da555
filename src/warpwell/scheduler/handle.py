"""Handle: the future of a submitted task or request."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as StandardFuture
from typing import Any, Protocol

from .._check import checked_timeout
from .._future import Future, require_same_process
from .task import Job, State, Task

_logger = logging.getLogger("concurrent.futures")

ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Runner(Protocol):
    """The interface of the scheduler behind a handle: a scheduler of this process, of a pool, or of a service."""

    def cancel(self, handle: Any) -> bool:
        """Request the end of a task that has not ended; return False if the task cannot be stopped."""

    def state_of(self, handle: Any) -> State:
        """Return the state of a task that has not ended."""


class TaskFuture(Future):
    """The future of a task, on any scheduler. ``concurrent.futures.wait`` and ``asyncio.wrap_future`` accept it.

    Attributes
    ----------
    name : str
        Name of the task.
    after : sequence of futures
        The futures that must succeed before the task runs; empty once the task has ended.
    """

    after: Sequence[StandardFuture[Any]] = ()

    def __init__(self, runner: Runner, name: str) -> None:
        super().__init__(f"task {name!r}")
        self.name = name
        self._runner = runner
        self._cancelled = False

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self._state == "FINISHED"  # works in a forked process, too

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
        """Wait until the task has ended, at most `timeout` seconds.

        Raises
        ------
        ArgumentError
            `timeout` is negative, or not a finite number of seconds.
        TimeoutError
            The task has not ended in time; it continues.
        CancelledError
            The task was cancelled, or a future in `after` did not succeed. The error of that future is then the
            ``__cause__``.
        KernelError
            Device code latched an error, or (`StallError`) the task was stuck.
        TaskLostError
            The device or its process died.
        ServiceError
            The service that runs the task died, or did not answer for some seconds.
        ForkError
            The parent process submitted the task, and forked this process before the task had ended.
        """
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the task has ended, at most `timeout` seconds; return the error that `result` raises, or None."""
        error = super().exception(timeout)
        if self._cancelled and error is not None:
            raise CancelledError(*error.args) from error.__cause__  # `error` itself would keep callers' frames alive
        return error

    def running(self) -> bool:
        """Return whether the task is on the device now."""
        return self.state in (State.RUNNING, State.STOPPING)

    def cancel(self) -> bool:
        """Request the end of the task.

        A waiting task is cancelled at once. A running task stops at the end of its current blocks; it is then
        cancelled, or done if these were its last blocks. Later tasks of the same request are cancelled, too.

        Returns
        -------
        bool
            False if the task has already ended, or cannot be stopped because its kernel runs unmodified.
        """
        if self.done():
            return self.cancelled()
        self.require_process()
        return self._runner.cancel(self)

    def require_process(self) -> None:
        """Raise in a forked child of the process that submitted the task, unless the task has ended."""
        if not self.done():
            require_same_process(self._process, f"task {self.name!r}")

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Set the outcome, once, and notify all waiting threads."""
        self._cancelled = cancelled
        if cancelled:
            error = self._cancellation()
        self.after = ()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)

    def _cancellation(self) -> CancelledError:
        """Return the error of this cancelled task; its cause may be a future in `after` that did not succeed."""
        text = f"task {self.name!r} was cancelled"
        for earlier in self.after:
            cause = failure_of(earlier) if earlier.done() else None
            if cause is not None:
                name = f"task {earlier.name!r}" if isinstance(earlier, TaskFuture) else "a future in after="
                how = "was cancelled" if isinstance(cause, CancelledError) else f"failed ({cause!r})"
                error = CancelledError(f"{text}, because {name} {how}")
                error.__cause__ = cause
                return error
        return CancelledError(text)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn(self)`` at the end, or immediately if the task has ended. Exceptions are logged."""
        super().add_done_callback(functools.partial(_call, fn))

    def _wait(self, timeout: float | None) -> None:
        timeout = checked_timeout(timeout)
        if not self.done():
            self.require_process()
            super()._wait(timeout)


class Handle(TaskFuture):
    """A submitted task, or a request of several. `concurrent.futures.wait` and `asyncio.wrap_future` accept it.

    `result` returns None once the task has succeeded. Otherwise it raises the error that device code latched, the error
    that prevented the task from running, or ``CancelledError``. Callbacks run in the scheduler's thread: they may
    submit and cancel tasks, and must not wait.

    Attributes
    ----------
    task : Task
        The task; for a request, its last task.
    job : Job or None
        The scheduler's record: times, completed blocks, preemptions. None until its thread has accepted the task.
    """

    def __init__(self, runner: Runner, task: Task) -> None:
        super().__init__(runner, task.name)
        self.task = task
        self.job: Job | None = None


class RequestHandle(TaskFuture):
    """The future of a request of several tasks: done when all of them have ended; `result` raises the first error.

    Attributes
    ----------
    handles : tuple of TaskFuture
        The futures of the tasks, in order.
    """

    def __init__(self, name: str, handles: Sequence[TaskFuture]) -> None:
        super().__init__(_Tasks(), name)
        self.after = self.handles = tuple(handles)
        self._ends = itertools.count(1)  # one step of the interpreter, because tasks may end in several threads
        for handle in self.handles:
            handle.add_done_callback(self._ended)

    def _ended(self, _: TaskFuture) -> None:
        if next(self._ends) == len(self.handles):
            error = next((h.exception() for h in self.handles if h.state is State.FAILED), None)
            self.settle(error, cancelled=error is None and any(handle.cancelled() for handle in self.handles))


class _Tasks:
    """The runner of a request. Its tasks have runners of their own."""

    def cancel(self, request: RequestHandle) -> bool:
        """Cancel the first task that can be cancelled, and with it all later tasks."""
        return any(handle.cancel() for handle in request.handles if not handle.done())

    def state_of(self, request: RequestHandle) -> State:
        """Return the state of the first task that has not ended."""
        return next((handle.state for handle in request.handles if not handle.done()), State.RUNNING)


def failure_of(future: StandardFuture[Any]) -> BaseException | None:
    """Return the error of a future that is done (CancelledError if it was cancelled); None if it succeeded."""
    try:
        return future.exception()
    except CancelledError as error:
        return error.with_traceback(None)  # its frames keep the future alive, with its task and arrays


def _call(function: Callable[[Any], object], future: Any) -> None:
    """Call a callback. A thread of the scheduler survives every exception of the callback."""
    try:
        function(future)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # including Ctrl-C
        _logger.exception("exception calling callback for %r", future)
