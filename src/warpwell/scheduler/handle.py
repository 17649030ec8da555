"""Handle: the future of a submitted task, like those of `concurrent.futures`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from .. import errors
from .._check import checked_seconds
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
    # of the garbage collector where thousands of tasks wait. It has no lock: who holds one when Ctrl-C comes, as in
    # `concurrent.futures.wait`, would keep the thread that ends tasks from all of them.
    _live_state = "PENDING"
    _result = _exception = None
    _looks: dict[int, str] | None = None
    _own_waiters: list[Any] | None = None
    _own_callbacks: list[Any] | None = None

    def __init__(self, runner: Runner, name: str) -> None:
        self.name = name
        self._runner = runner
        self._process = os.getpid()

    def _made(self, name: str, make: Callable[[], Any]) -> Any:
        return self.__dict__.setdefault(name, make())  # one step: threads get the same

    @property
    def _state(self) -> str:  # type: ignore[override]
        """How it is, for `concurrent.futures`."""
        looks = self._looks
        return self._live_state if not looks else looks.get(threading.get_ident(), self._live_state)

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        return _Look(self)

    @property
    def _waiters(self) -> Any:  # type: ignore[override]
        return _Waiters(self)

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self._live_state in _OVER

    def cancelled(self) -> bool:
        """Return whether the task was cancelled."""
        return self._live_state in _CANCELLED

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
        if self._live_state == "FINISHED" and self._exception is None:
            return None
        self._await(seconds)
        if self._live_state == "FINISHED" and self._exception is None:
            return None  # most do, and make nothing for it
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
        event = self._made("_event", _Event)
        until = math.inf if seconds is None else time.monotonic() + seconds
        # `settle` looks for an event behind the end, so one of both sees the other
        while not self.done():
            left = min(_LOOK, until - time.monotonic())
            if left <= 0:
                return
            event.wait(left)

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
        self._live_state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
        self._tell()

    def _tell(self) -> None:
        """Notify all waiting threads, now that it has ended."""
        event = self.__dict__.pop("_event", None)
        if event is not None:
            event.set()
        # Who comes adds itself first and looks at the end then, so one of both sees the other.
        if self._own_waiters is not None:
            self._tell_waiters()
        if self._own_callbacks is not None:
            self._invoke_callbacks()

    def _tell_waiters(self) -> None:
        """Tell those of `concurrent.futures` who wait for several, each once, whatever thread does it."""
        for waiter in _taken(self._own_waiters):
            if self.cancelled():
                waiter.add_cancelled(self)
            elif self._exception is None:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Have ``fn(self)`` called at the end; now, if the task has ended."""
        self._made("_own_callbacks", list).append(fn)
        if self.done():
            self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        """Make the calls, each once; what one raises is logged, as `Future` does, and ends no thread of a scheduler."""
        for callback in _taken(self._own_callbacks):
            try:
                callback(self)
            except BaseException as error:
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise  # Ctrl-C comes there alone
                _logger.exception("exception calling callback for %r", self)


class _Event:
    """As that of `threading`, but whom Ctrl-C interrupts keeps nobody from it: `set` waits for no lock."""

    __slots__ = ("_gate", "_set")

    def __init__(self) -> None:
        self._set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        self._set = True
        with contextlib.suppress(RuntimeError):  # it is open
            self._gate.release()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else time.monotonic() + timeout
        mine = False
        while not self._set:
            left = min(_LOOK, until - time.monotonic())
            if left <= 0:
                return False
            mine = self._gate.acquire(timeout=left)
        if mine:
            self.set()  # for the next who waits; one whom Ctrl-C keeps from it costs the others a look
        return True


class _Look:
    """What `concurrent.futures` takes for the condition of a future while it looks at it and comes to wait.

    It keeps nobody from anything. The thread sees how the future was when it began to look, whatever happens meanwhile.
    """

    __slots__ = ("_future",)

    def __init__(self, future: TaskFuture) -> None:
        self._future = future

    def acquire(self) -> None:
        future = self._future
        future._made("_looks", dict)[threading.get_ident()] = future._live_state

    def release(self) -> None:
        assert self._future._looks is not None
        self._future._looks.pop(threading.get_ident(), None)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> None:
        """Return: who asks has waited (`TaskFuture._await`)."""


class _Waiters:
    """The list of those of `concurrent.futures` who wait for a future and others."""

    __slots__ = ("_future",)

    def __init__(self, future: TaskFuture) -> None:
        self._future = future

    def append(self, waiter: Any) -> None:
        future = self._future
        if future._state in _OVER:
            return  # it saw that, and does not wait for this one
        if type(waiter.event) is not _Event:
            waiter.event = _Event()  # who comes holds all of the futures: none has set the other one
        future._made("_own_waiters", list).append(waiter)
        if future.done():
            future._tell_waiters()

    def remove(self, waiter: Any) -> None:
        with contextlib.suppress(ValueError):  # it was told
            (self._future._own_waiters or []).remove(waiter)


def _taken(entries: list[Any] | None) -> Iterator[Any]:
    """Take entries out of a list, which other threads may do, too."""
    while entries:
        try:
            yield entries.pop(0)
        except IndexError:
            return


_logger = logging.getLogger("concurrent.futures")

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
    return checked_seconds(timeout, "timeout")
