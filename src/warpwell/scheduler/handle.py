"""Handle: the future of a submitted task, like those of `concurrent.futures`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from .. import errors
from .task import Job, State, Task

ENDED = (State.DONE, State.FAILED, State.CANCELLED)


class Runner(Protocol):
    """The interface of the scheduler behind a handle: of this process, of a pool, or of a service."""

    def cancel(self, handle: Any) -> bool:
        """Request the end of a task that has not ended; return False if it cannot be stopped."""

    def state_of(self, handle: Any) -> State:
        """Return the state of a task that has not ended."""


class TaskFuture(Future[None]):
    """The future of a task, on any scheduler.

    Attributes
    ----------
    name : str
        The task's.
    """

    # What a Future has to be waited for with is made when somebody does: it is most of a task's memory, and of the work
    # of the garbage collector where thousands of tasks wait. `result` and `exception` make nothing but a lock.
    _state = "PENDING"
    _result = _exception = None
    _own_condition: threading.Condition | None = None
    _own_waiters: list[Any] | None = None
    _own_callbacks: list[Any] | None = None

    def __init__(self, runner: Runner, name: str) -> None:
        self.name = name
        self._runner = runner
        self._process = os.getpid()

    def _made(self, name: str, make: Callable[[], Any]) -> Any:
        return self.__dict__.setdefault(name, make())  # one step: threads get the same

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        own = self._own_condition
        return self._made("_own_condition", threading.Condition) if own is None else own

    @property
    def _waiters(self) -> Any:  # type: ignore[override]
        own = self._own_waiters
        return self._made("_own_waiters", list) if own is None else own

    @property
    def _done_callbacks(self) -> Any:
        own = self._own_callbacks
        return self._made("_own_callbacks", list) if own is None else own

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self._state in _OVER

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        return self._state in _CANCELLED

    @property
    def state(self) -> State:
        """The state of the task. If it has ended, `result` returns at once."""
        if self.done():
            if self.cancelled():
                return State.CANCELLED
            return State.DONE if self.exception() is None else State.FAILED
        return self._runner.state_of(self)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, `timeout` seconds at most.

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
        seconds = _seconds(timeout)
        if self._state == "FINISHED" and self._exception is None:
            return None
        self._await(seconds)
        if self._state == "FINISHED" and self._exception is None:
            return None  # without a lock
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, `timeout` seconds at most, and return what `result` would raise, or None."""
        self._await(_seconds(timeout))
        return super().exception(0.0)

    def _await(self, seconds: float | None) -> None:
        """Return at the end, or after some seconds."""
        if self.done():
            return
        self.require_process()
        gate = self._made("_gate", _shut)
        until = None if seconds is None else time.monotonic() + seconds
        # `settle` looks for a gate behind the end, so one of both sees the other
        while not self.done():
            left = _LOOK if until is None else min(_LOOK, until - time.monotonic())
            if left <= 0:
                return
            if gate.acquire(timeout=left):
                gate.release()  # for the next who waits; one whom Ctrl-C keeps from it costs the others a look

    def running(self) -> bool:
        """Return whether the task has a place on the device now."""
        return self.state in (State.RUNNING, State.STOPPING)

    def cancel(self) -> bool:
        """Ask for the end of the task.

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
        """Notify all waiting threads (once)."""
        self._exception = error
        self._state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
        self._tell()

    def _tell(self) -> None:
        """Notify all waiting threads, now that it has ended."""
        gate = self.__dict__.pop("_gate", None)
        if gate is not None:
            gate.release()
        # Who comes to wait makes the condition first and looks at the state then, so one of both sees the other.
        if self._own_condition is not None:
            with self._condition:
                for waiter in self._waiters:
                    if self.cancelled():
                        waiter.add_cancelled(self)
                    elif self._exception is None:
                        waiter.add_result(self)
                    else:
                        waiter.add_exception(self)
                self._condition.notify_all()
            self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        """Make the calls; what one raises is logged, as `Future` does it, and ends no thread of a scheduler."""
        for callback in self._done_callbacks:
            try:
                callback(self)
            except BaseException as error:
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise  # Ctrl-C comes there alone
                _logger.exception("exception calling callback for %r", self)


_logger = logging.getLogger("concurrent.futures")


def _shut() -> threading.Lock:
    """Return a lock that is held, so that `settle`, which takes none, may open it as soon as it sees it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


_LOOK = 1.0
"""Seconds after which who waits looks for itself."""

_CANCELLED = ("CANCELLED", "CANCELLED_AND_NOTIFIED")
_OVER = ("FINISHED", *_CANCELLED)


class Handle(TaskFuture):
    """A task that was submitted. It is a `concurrent.futures.Future`, so ``wait`` and ``as_completed`` take it.

    `result` returns None once the task has ended, and raises its latched error, the error that prevented it from
    running, or ``CancelledError``. Callbacks run in the thread of the scheduler: they may submit and cancel, and must
    not wait.

    Attributes
    ----------
    task : Task
    job : Job or None
        The scheduler's record: times, blocks done, preemptions. None until its thread has taken the task in, and while
        it waits for what it comes `after`.
    """

    def __init__(self, runner: Runner, task: Task) -> None:
        super().__init__(runner, task.name)
        self.task = task
        self.job: Job | None = None


def _seconds(timeout: float | None) -> float | None:
    """Return a time to wait; 0 and less mean to look once."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float) and timeout <= 0:
        return 0.0
    return errors.checked_seconds(timeout, "timeout")
