"""`Dispatcher`: the only thread that uses a core and its executor. Other threads send it calls.

The thread sleeps in ``Executor.wait`` while a task runs or an event is due, and otherwise until another thread sends a
call. It exits after `close` when all tasks have ended, or when the device or the policy fails: then every unfinished
task fails with that error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from .. import errors
from .._check import checked_seconds
from .._future import require_same_process
from .core import Core
from .executor import Executor
from .handle import ENDED, Handle, failure_of
from .task import Job, Request, State

_logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 10.0
"""Time that a cancelling close waits for running blocks, and that any close waits for a policy that could launch a task
but does not. After that, the close abandons the tasks. Chosen, not fitted."""

MAX_CALLS = 1024
"""Maximum number of calls of other threads between two steps of the core."""

Reply = queue.SimpleQueue[tuple[Any, BaseException | None]]
"""Queue for a result or an error. Not a `Future`: Ctrl-C can leave its lock held by the waiting thread."""

Call = tuple[Callable[[], Any], Reply | None]
"""A function that another thread sends, and the queue for its result; None if that thread does not wait."""

_live: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


class Watchdog:
    """Detects stuck tasks by their block counts.

    A task is stuck if it has a running block, and starts and ends no block for `seconds`. A task that compiles or has
    no running block is not stuck. An unmodified kernel reports no progress until it ends, so it never counts as
    stuck. Time in which the process was stopped does not count.

    Parameters
    ----------
    seconds : float or None
        None: no task counts as stuck.

    Attributes
    ----------
    due : float or None
        Time of the next check while a task runs.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds = None if seconds is None else checked_seconds(seconds, "stuck_after")
        self.due = None if seconds is None else 0.0
        self._last_look = 0.0
        # Weak keys: after the last task no check follows, and its arguments must not stay alive.
        self._progress: weakref.WeakKeyDictionary[Job, tuple[tuple[int, int], float]] = weakref.WeakKeyDictionary()

    def check(self, running: Iterable[Job], executor: Executor) -> list[Job]:
        """Return the stuck tasks, each once; an empty list before `due`."""
        now = executor.now()
        if self.seconds is None or self.due is None or now < self.due:
            return []
        self.due = now + self.seconds / 4
        last_progress, self._progress = self._progress, weakref.WeakKeyDictionary()
        last_look, self._last_look = self._last_look, now
        if now - last_look >= self.seconds:  # The process was stopped: its kernels may not have run, either.
            last_progress.clear()
        stuck = []
        for job in running:
            if job.placement is not None and job.placement.plain:
                continue
            done, claimed = executor.progress(job), executor.claimed(job)
            if claimed <= done:
                continue
            counts, since = last_progress.get(job, ((-1, -1), now))
            if counts != (done, claimed):
                since = now
            if now - since >= self.seconds:
                stuck.append(job)
            else:
                self._progress[job] = ((done, claimed), since)
        return stuck

    def error(self, job: Job) -> errors.StallError:
        """Return the error of a stuck task."""
        return errors.StallError(
            f"task {job.task.name!r} began no block and ended none for {self.seconds:g} s, with {job.done} of "
            f"{job.task.blocks} done: a thread of its kernel waits or loops forever (if its blocks take that long, "
            "make the scheduler with a larger stuck_after=)",
            kernel=job.task.name,
            seconds=self.seconds,
        )


class Dispatcher:
    """Runs a core in its own thread.

    Parameters
    ----------
    make : callable
        Returns the core. The new thread calls it, because a GPU context belongs to a thread.
    watchdog : Watchdog

    Attributes
    ----------
    failure : BaseException or None
        The error of the device or the policy that ended the thread.

    Raises
    ------
    Exception
        `make` raised it.
    """

    def __init__(self, make: Callable[[], Core], watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._process = os.getpid()
        self._closing = False
        self._closed = False
        self._refuses = False
        self._steps_again = False
        self._give_up: float | None = None
        self._idle_since: float | None = None
        self.failure: BaseException | None = None
        self.core: Core
        ready: Reply = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(make, ready), name="warpwell-scheduler", daemon=True)
        try:
            self._thread.start()
            _reply_of(ready)
        except KeyboardInterrupt:
            self.retire()
            raise
        _live.add(self)

    # -- for other threads ---------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the dispatcher's thread and return its result.

        Raises
        ------
        ClosedError, SchedulerError, ForkError
            The thread has exited, or this process is a fork without the thread.
        """
        self.require_process()
        if threading.current_thread() is self._thread:
            self._steps_again = True
            return function()
        reply: Reply = queue.SimpleQueue()
        if not self._send(function, reply):
            raise self._closed_error()
        value: T = _reply_of(reply)
        return value

    def submit(self, request: Request, handles: list[Handle], after: Sequence[Future[Any]]) -> None:
        """Submit a request. It arrives after all of `after` have succeeded.

        Raises
        ------
        ClosedError
            The scheduler is closed.
        TaskMemoryError, QuotaError, SchedulerError, ForkError
            The request was rejected.
        """
        try:
            if threading.get_ident() == self._thread.ident or not self.core.welcomes(request):
                self.call(lambda: self._submit(request, handles, after))
                return
            # Do not wait for the thread: it is slow while other threads hold the interpreter lock.
            self.require_process()
            if not self._send(functools.partial(self._submit_later, request, handles, after), is_submission=True):
                raise self._closed_error()
        except KeyboardInterrupt:
            # The caller gets no handles, so these tasks must not run.
            self._send(lambda: self._cancel_all(handles))
            raise

    def cancel(self, handle: Handle) -> bool:
        """See `Handle.cancel`."""
        try:
            return self.call(lambda: self._cancel(handle))
        except (errors.ClosedError, errors.SchedulerError):
            return handle.cancelled()

    def state_of(self, handle: Handle) -> State:
        """Return the state of a task; RUNNING until its future is complete."""
        job = handle.job
        if job is None:
            return State.WAITING
        return State.RUNNING if job.state in ENDED else job.state

    def close(
        self,
        *,
        cancel: bool = False,
        patience: float = PATIENCE,
        timeout: float | None = None,
        left: list[Handle] | None = None,
    ) -> bool:
        """Reject new tasks, run accepted tasks to their end (or cancel them), and end the thread.

        Parameters
        ----------
        cancel : bool
        patience, timeout : float
            Seconds that cancelled tasks have to leave, and seconds to wait for the thread.
        left : list of Handle, optional
            Receives the handles of the cancelled tasks.

        Returns
        -------
        bool
            Whether the thread has ended within `timeout` seconds; False if called in that thread.
        """
        if self._process != os.getpid():
            return True  # a forked child: the parent owns the thread
        with self._gate:
            self._refuses = True
        self._send(lambda: self._close(cancel, patience, [] if left is None else left))
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def retire(self) -> None:
        """Ask the thread to close, without waiting. Safe to call from the garbage collector."""
        if self._process == os.getpid():
            self._calls.put((lambda: self._close(False, PATIENCE, []), None))

    def _send(self, function: Callable[[], Any], reply: Reply | None = None, is_submission: bool = False) -> bool:
        """Send a call to the thread; return False if the thread has exited, or `close` has refused the submission."""
        with self._gate:
            if self._closed or (is_submission and self._refuses):
                return False
            self._calls.put((function, reply))
        self.core.executor.wake()
        return True

    def require_process(self) -> None:
        """Raise ForkError in a process that was forked from the process of the dispatcher."""
        require_same_process(self._process, "this scheduler")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _main(self, make: Callable[[], Core], ready: Reply) -> None:
        try:
            self.core = make()
            self.core.ended = []
        except BaseException as error:  # `__init__` raises it
            self._closed = True
            ready.put((None, error))
            return
        ready.put((None, None))
        del ready
        try:
            self._run()
        except BaseException as error:  # reported to all waiting threads
            self.failure = error
        with self._gate:
            self._closed = True
        self._fail_all(self.failure)
        if isinstance(self.failure, errors.TaskLostError):
            return  # a lost device cannot be closed: closing would wait for it forever
        try:
            self.core.executor.close()
        except Exception as error:
            self.failure = self.failure or error

    def _run(self) -> None:
        core, executor = self.core, self.core.executor
        lingers = False
        while True:
            self._steps_again = False
            self._execute_calls()
            times = [core.step()]
            self._settle()
            if core.running:
                for job in self._watchdog.check(core.running, executor):
                    self._abandon(job, self._watchdog.error(job))
                times.append(self._watchdog.due)
            if self._closing:
                if not (core.busy or core.blocked):
                    return
                times.append(self._expire_tasks(times[0]))
            if self._steps_again or not self._calls.empty():
                continue
            due = min((t for t in times if t is not None), default=None)
            if core.running or due is not None:
                executor.wait(due)
                lingers = executor.linger > 0
            elif lingers:
                executor.wait(executor.now() + executor.linger)
                lingers = not self._calls.empty()
            else:
                self._execute(*self._calls.get())
                lingers = executor.linger > 0

    def _execute_calls(self) -> None:
        """Execute the calls that other threads have sent so far. Only this thread removes calls from the queue."""
        for _ in range(min(MAX_CALLS, self._calls.qsize())):
            self._execute(*self._calls.get())

    def _execute(self, function: Callable[[], Any], reply: Reply | None) -> None:
        """Execute a call and send its result."""
        try:
            value = function()
        except BaseException as error:
            if reply is None:
                raise
            reply.put((None, error))
        else:
            if reply is not None:
                reply.put((value, None))
        if self.core.ended:
            self._settle()

    def _settle(self) -> None:
        """Complete the futures of tasks that have ended."""
        core = self.core
        ended, core.ended = core.ended or [], []
        for job in ended:
            # the executor of a lost task raises in `poll`
            self._steps_again |= isinstance(job.error, errors.TaskLostError)
            _complete_future(job, job.error, cancelled=job.state is State.CANCELLED)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, handles: list[Handle], after: Sequence[Future[Any]]) -> None:
        """Accept a request. It arrives after all of `after` have succeeded."""
        if self._closing:
            raise self._closed_error()
        pending = [future for future in after if not future.done() or failure_of(future) is not None]
        request.arrival = self.core.executor.now()
        jobs = self.core.submit(request, pending)
        for handle, job in zip(handles, jobs, strict=True):
            handle.job = job
            if not handle.done():
                job.handle = handle
        for handle, job in zip(handles, jobs, strict=True):
            if handle.done():  # it was cancelled before it was accepted
                self.core.cancel(job)
        for future in pending:
            future.add_done_callback(lambda f: self._send(lambda: self._released(jobs[0], f)))

    def _submit_later(self, request: Request, handles: list[Handle], after: Sequence[Future[Any]]) -> None:
        """Accept a request of a submitter that does not wait: an error fails the handles."""
        try:
            self._submit(request, handles, after)
        except BaseException as error:
            for handle in handles:
                if not handle.done():
                    handle.settle(error)

    def _released(self, job: Job, future: Future[Any]) -> None:
        """Release a request that waited for a future, or cancel the request if the future failed."""
        if failure_of(future) is None:
            self.core.release(future)
            return
        rule = "cancelled before it" if future.cancelled() else "failed before it"
        earlier = future.job if isinstance(future, Handle) and future._runner is self else None
        if self.core.cancel(job, {"rule": rule, "by": None if earlier is None else earlier.number}):
            self._settle()

    def _cancel(self, handle: Handle) -> bool:
        if handle.done():
            return handle.cancelled()
        job = handle.job
        if job is None:  # the submission is still in the queue
            self._calls.put((lambda: self._cancel(handle), None))
            return True
        if job.state is State.RUNNING and not self.core.may_leave(job):
            return False
        is_requested = self.core.cancel(job)
        self._settle()
        return handle.cancelled() if handle.done() else is_requested

    def _cancel_all(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            if not handle.done() and handle.job is not None:
                self._cancel(handle)

    def _close(self, cancel: bool, patience: float, left: list[Handle]) -> None:
        self._closing = True
        if cancel:
            if self._give_up is None:
                self._give_up = self.core.executor.now() + patience
            left += self._pending()
            self._cancel_all(left)

    def _pending(self) -> list[Handle]:
        """Return the handles of all accepted, unfinished tasks."""
        return [job.handle for job in self.core.jobs if job.handle is not None]

    def _expire_tasks(self, due: float | None) -> float | None:
        """While closing: fail tasks that will never run, and abandon tasks that do not leave in time."""
        core, now = self.core, self.core.executor.now()
        if core.running or self._steps_again or not core.busy or (due is not None and core.admission.barred):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if self._idle_since is not None and (due is None or now >= self._idle_since + PATIENCE):
            for job in core.waiting:
                error = errors.SchedulerError(
                    f"task {job.task.name!r} waited, and policy {core.policy.name!r} launched nothing more when the "
                    "scheduler was closed: choose another policy, or check its tenant's quota",
                    task=job.task.name,
                )
                core.cancel(job)
                _complete_future(job, error)
            self._steps_again = True
            return None
        if self._give_up is not None and now >= self._give_up:
            for job in list(core.running):
                error = errors.SchedulerError(
                    f"task {job.task.name!r} was still running when the scheduler was closed: its results are "
                    "not valid",
                    task=job.task.name,
                )
                self._abandon(job, error)
            self._give_up = None
        idle = None if self._idle_since is None else self._idle_since + PATIENCE
        return min((t for t in (self._give_up, idle) if t is not None), default=None)

    def _abandon(self, job: Job, error: BaseException) -> None:
        try:
            self.core.executor.abandon(job, error)
        except errors.TaskLostError:
            _complete_future(job, error)
            raise
        self._steps_again = True

    def _fail_all(self, failure: BaseException | None) -> None:
        """Fail every unfinished task before the thread exits, so that no thread waits for it."""
        self._closing = True  # reject submissions of callbacks: no thread would run them
        with contextlib.suppress(Exception):  # a log of the user may itself be the failure
            self.core.write_out()
        self._settle()
        for handle in self._pending():
            if handle.done():
                continue  # the callback of an earlier handle has cancelled this task
            lost = errors.TaskLostError(
                f"task {handle.task.name!r} was lost: its scheduler failed ({failure}); submit it to a new scheduler",
                task=handle.task.name,
            )
            lost.__cause__ = failure
            handle.settle(lost)
        while not self._calls.empty():
            function, reply = self._calls.get()
            if reply is not None:
                reply.put((None, self._closed_error()))
            elif isinstance(function, functools.partial):
                function()  # no thread waits for this submission: fail its handles

    def _closed_error(self) -> errors.WarpwellError:
        if self.failure is None:
            return errors.ClosedError("the scheduler is closed: create a new one")
        error = errors.SchedulerError(f"the scheduler has failed ({self.failure}): create a new one")
        error.__cause__ = self.failure
        return error


def _complete_future(job: Job, error: BaseException | None, cancelled: bool = False) -> None:
    """Complete the future of a job, unless it is complete."""
    handle, job.handle = job.handle, None
    if handle is not None:
        handle.settle(error, cancelled=cancelled and error is None)


def _reply_of(reply: Reply) -> Any:
    """Wait for the reply to a call, and return its value or raise its error."""
    value, error = reply.get()
    if error is not None:
        raise error
    return value


@atexit.register
def _at_exit() -> None:
    # Compiled code must not write to memory that the interpreter has freed.
    for dispatcher in list(_live):
        left: list[Handle] = []
        dispatcher.close(cancel=True, patience=1.0, timeout=3.0, left=left)
        lost = sum(not handle.done() or failure_of(handle) is not None for handle in left)
        # after an exception of the program, the lost tasks are expected
        if lost and not hasattr(sys, "last_type"):
            _logger.error(
                "warpwell: %d tasks of a scheduler were cancelled, because the program ended first: call its "
                "close(), or use it in a with statement",
                lost,
            )
