"""`ChunkedTask`: work in chunks, for I/O threads and the caller; `WorkerGroup`: the threads of an array.

A group carries out chunks of its tasks in order, at most `limit` at a time. So each array has a few threads, however
many tasks are started, and an array whose storage does not answer does not delay other arrays. The threads are the I/O
threads of the process (`warpwell.storage.io_threads`), which start on demand and exit when they are idle. A task
continues even if no caller refers to it. At the end of the program, tasks are cancelled, because native code writes to
their memory.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from ... import errors
from ..._future import Future
from ..._os import Interrupts, clock, interruptible
from ...storage import WorkerSlots, current_io_threads

_INTERRUPTED_SECONDS = 1.0
"""Longest wait after Ctrl-C for chunks in other threads, which write to memory of the caller."""
_EXIT_SECONDS = 5.0
"""Longest wait for all tasks at the end of the program."""

_running: set[ChunkedTask] = set()


class WorkerGroup:
    """Carries out the tasks of one array on I/O threads.

    Parameters
    ----------
    limit : int
        Maximum number of chunks at a time.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._tasks: deque[ChunkedTask] = deque()
        self._busy = 0
        self._slots = WorkerSlots(self._count_slots, self._serve, lambda: None)

    def add(self, task: ChunkedTask) -> None:
        """Carry out a task after the earlier ones; in this thread if the interpreter exits and starts no thread."""
        with self.lock:
            self._tasks.append(task)
        try:
            current_io_threads().submit(self._slots)
        except RuntimeError:
            self._serve(0)

    def remove(self, task: ChunkedTask) -> None:
        """Remove a task without waiting chunks from the queue."""
        with self.lock:
            if task in self._tasks and not task.waiting:
                self._tasks.remove(task)

    def _count_slots(self) -> int:
        with self.lock:
            return min(self._limit, self._busy + sum(task.waiting for task in self._tasks))

    def _serve(self, slot: int) -> None:
        while True:
            with self.lock:
                while self._tasks and not self._tasks[0].waiting:
                    self._tasks.popleft()
                if not self._tasks:
                    return
                task, chunk = self._tasks[0], self._tasks[0].take_chunk()
                self._busy += 1
            try:
                task.carry_out(chunk)
            finally:
                with self.lock:
                    self._busy -= 1


class ChunkedTask(Future):
    """Work in chunks, which starts after the earlier tasks of its group.

    Parameters
    ----------
    chunks : int
        1 or more.
    run : callable
        ``run(k)`` carries out chunk `k`. After an exception, which becomes the exception of the task, no chunk starts.
    group : WorkerGroup or None
        Without a group, all chunks are carried out here, before this returns.
    work : str
        Name of the work, for messages.
    result : object, optional
        Result of the task; default: what `run` returned last.
    finished : callable, optional
        Is called once before the task is done; raises nothing.
    stop : callable, optional
        Lets chunks that are carried out return soon, and takes no lock; `cancel` and Ctrl-C call it.
    help : bool
        The caller carries out chunks as well, and all of them are done when this returns.

    Attributes
    ----------
    error : BaseException or None
        The first exception of a chunk so far.
    """

    def __init__(
        self,
        chunks: int,
        run: Callable[[int], Any],
        group: WorkerGroup | None,
        *,
        work: str = "task",
        result: Any = None,
        finished: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
        help: bool = False,
    ) -> None:
        super().__init__(work)
        self.error: BaseException | None = None
        self._cancelled = False
        self._value = result
        self._run, self._finished, self._stop = run, finished, stop
        self._chunks = self._left = chunks
        self._next = 0
        self._lock = threading.Lock() if group is None else group.lock
        with interruptible(stop) as interrupts:  # Ctrl-C must not lose a chunk, or a task before the group has it
            _running.add(self)
            if group is not None:
                group.add(self)
            if group is None or help:
                self._carry_out_here(interrupts)
                if group is not None:
                    group.remove(self)

    def _carry_out_here(self, interrupts: Interrupts) -> None:
        """Carry out chunks until all are done; after Ctrl-C none starts."""
        while not interrupts.raised:
            with self._lock:
                if not self.waiting:
                    break
                chunk = self.take_chunk()
            self.carry_out(chunk)
        deadline = math.inf
        while not self.done() and clock.monotonic() < deadline:  # the group has started chunks
            if interrupts.raised and deadline == math.inf:
                self.cancel()
                deadline = clock.monotonic() + _INTERRUPTED_SECONDS
            concurrent.futures.wait([self], 0.05)

    @property
    def waiting(self) -> int:
        """Number of chunks that have not started."""
        return self._chunks - self._next

    def take_chunk(self) -> int:
        """Return the next chunk to carry out; the caller holds the lock of the group."""
        self._next += 1
        return self._next - 1

    def carry_out(self, chunk: int) -> None:
        """Carry out a chunk."""
        try:
            value = self._run(chunk)
            if value is not None:
                self._value = value
        except BaseException as error:  # `result` raises it; it must not end an I/O thread
            self._skip(error)
        self._count(1)

    def cancel(self) -> bool:
        if self._process != os.getpid() or self.done():
            return False
        with interruptible(lambda: None):  # Ctrl-C must not lose the chunks that are skipped
            with self._lock:
                if not self._left:
                    return False
                self._cancelled = True
            self._skip(None)
            self._stop()
        return True

    def _skip(self, error: BaseException | None) -> None:
        with self._lock:
            skipped, self._next = self._chunks - self._next, self._chunks
            self.error = self.error or error
        if skipped:
            self._count(skipped)

    def _count(self, chunks: int) -> None:
        with self._lock:
            self._left -= chunks
            last = self._left == 0
        if not last:
            return
        if self._cancelled and self.error is None:
            self.error = errors.ClosedError(f"the {self._work} was cancelled: start it again")
        try:
            self._finished()
        finally:
            _running.discard(self)
            value, self._value = self._value, None
            if self.error is None:
                self.set_result(value)
            else:
                self.set_exception(self.error)


def in_order(
    calls: Iterable[Callable[[], Any]], group: WorkerGroup | None, max_ahead: int = 4
) -> Generator[Any, None, None]:
    """Yield the results of functions in their order, while the threads of a group call the next ones.

    Parameters
    ----------
    calls : iterable of callables
    group : WorkerGroup or None
        Without a group, each function is called when its result is due.
    max_ahead : int
        Maximum number of functions that are called ahead; at the beginning fewer.
    """
    started: deque[ChunkedTask] = deque()
    ahead = 0
    try:
        for call in calls:
            started.append(ChunkedTask(1, lambda _, call=call: call(), group))  # type: ignore[misc]
            if len(started) > ahead:
                yield started[0].result()
                started.popleft()
                ahead = min(ahead + 1, max_ahead)
        while started:
            yield started[0].result()
            started.popleft()
    finally:
        for task in started:
            task.cancel()
        for task in started:
            task.exception()


def _cancel_all() -> None:
    """Cancel all tasks and wait for them; memory to which a task still writes stays allocated."""
    tasks = list(_running)
    for task in tasks:
        task.cancel()
    for unfinished in concurrent.futures.wait(tasks, _EXIT_SECONDS).not_done:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(unfinished))


atexit.register(_cancel_all)
_owned: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def owned(owner: Any, name: str, make: Callable[[], Any]) -> Any:
    """Return a named object of an array or another owner. It is created once, and lives as long as the owner."""
    with _making:
        objects = _owned.setdefault(owner, {})
        if name not in objects:
            objects[name] = make()
        return objects[name]


def worker_group(owner: Any, limit: int, name: str = "workers") -> WorkerGroup:
    """Return the group of an array or another owner, which lives as long as the owner."""
    group: WorkerGroup = owned(owner, name, lambda: WorkerGroup(limit))
    return group


def _after_fork() -> None:
    global _owned, _making
    _running.clear()  # they continue in the parent
    _owned, _making = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
