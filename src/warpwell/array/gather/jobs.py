"""`Job`: work in pieces, which service threads of the process carry out beside the caller; `Crew`, who does that.

The jobs of one array are a queue, which its crew takes pieces from in order, as many at a time as its limit says. So
however many are begun there are a few threads for each array, and an array whose medium is silent delays no other. The
threads are those that serve controllers (`warpwell.storage.io_threads`): they are started on demand, end when nothing
is left to do, and a forked child has none of them. A job that nobody waits for any more goes on; at the end of the
program jobs are cancelled, because memory to which native code writes must outlive it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ... import errors
from ..._os import clock
from ...storage import io_threads

_END_SECONDS = 5.0
"""Longest wait at the end of the program, for all jobs together."""

_live: set[Job] = set()


def require_begun_here(process: int) -> None:
    """Raise ForkError where what was begun in a process is asked for in one that was forked from it."""
    if process != os.getpid():
        raise errors.ForkError(
            f"this was begun in process {process}, which this one ({os.getpid()}) was forked from: begin it again here"
        )


class Crew:
    """Carries out the jobs of one array.

    Parameters
    ----------
    limit : int
        Most pieces at a time.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._jobs: deque[Job] = deque()
        self._busy = 0
        self._slots = io_threads.WorkerSlots(self._wanted, self._serve, lambda: None)

    def take_on(self, job: Job) -> None:
        """Carry out a job, after those that came before; here, if the interpreter ends and starts no thread."""
        with self.lock:
            self._jobs.append(job)
        try:
            io_threads.current().submit(self._slots)
        except RuntimeError:
            self._serve(0)

    def forget(self, job: Job) -> None:
        """Keep a job no longer of which no piece waits: no thread may come to see that."""
        with self.lock:
            if job in self._jobs and not job.waiting:
                self._jobs.remove(job)

    def _wanted(self) -> int:
        waiting = 0
        for job in tuple(self._jobs):
            waiting += job.waiting
            if waiting >= self._limit:
                break
        return min(self._limit, waiting + self._busy) if waiting else 0

    def _serve(self, seat: int) -> None:
        while True:
            with self.lock:
                while self._jobs and not self._jobs[0].waiting:
                    self._jobs.popleft()
                if not self._jobs:
                    return
                job, piece = self._jobs[0], self._jobs[0].take()
                self._busy += 1
            try:
                job.carry_out(piece)
            finally:
                with self.lock:
                    self._busy -= 1


class Job:
    """Work in pieces, which begins at once, or after jobs of its crew that came before.

    Parameters
    ----------
    pieces : int
        1 or more.
    run : callable
        ``run(k)`` carries out piece `k`; after an exception no further piece begins.
    over : callable
        Is called once, by whoever ends the last piece, before `wait` returns; it raises nothing.
    crew : Crew or None
        Who does it; None: all of it is done here, before this returns.
    here : bool
        The caller does pieces too, and this returns when all are done; the crew helps as soon as a thread of it runs.

    Attributes
    ----------
    error : BaseException or None
        The first one, when the job is over.
    cancelled : bool
        Whether `cancel` came before the end.
    """

    def __init__(
        self,
        pieces: int,
        run: Callable[[int], None],
        over: Callable[[], None],
        crew: Crew | None,
        *,
        here: bool = False,
    ) -> None:
        self.error: BaseException | None = None
        self.cancelled = False
        self._pieces = self._left = pieces
        self._run, self._over = run, over
        self._next = 0
        self._lock = threading.Lock() if crew is None else crew.lock
        self._done = threading.Event()
        self._process = os.getpid()
        _live.add(self)
        if crew is not None:
            crew.take_on(self)
        if crew is None or here:
            try:
                self._carry_out_here()
            finally:
                if crew is not None:
                    crew.forget(self)

    def _carry_out_here(self) -> None:
        """Carry out pieces beside the crew until all are done; after Ctrl-C no further one begins."""
        try:
            while True:
                with self._lock:
                    if not self.waiting:
                        break
                    piece = self.take()
                self.carry_out(piece)
            self._done.wait()  # for what the crew has begun
        except BaseException:
            self.cancel()
            self._done.wait(1.0)  # what it copies to should not be freed meanwhile
            raise

    def __hash__(self) -> int:
        return id(self)

    @property
    def done(self) -> bool:
        """Whether the job is over, or is another process's."""
        return self._process != os.getpid() or self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to `timeout` seconds; return whether it is.

        Raises
        ------
        ForkError
            It goes on in the process that this one was forked from.
        """
        require_begun_here(self._process)
        return self._done.wait(timeout)

    def cancel(self) -> bool:
        """Begin no further piece; return whether that came before the end."""
        if self._process != os.getpid() or self._done.is_set():
            return False
        self.cancelled = True
        self._skip(None)
        return True

    @property
    def waiting(self) -> int:
        """Pieces that have not begun."""
        return self._pieces - self._next

    def take(self) -> int:
        """Return a piece that has not begun, to `carry_out` (the crew's lock held)."""
        self._next += 1
        return self._next - 1

    def carry_out(self, piece: int) -> None:
        """Carry out a piece."""
        try:
            self._run(piece)
        except BaseException as error:  # raised by who waits; a service thread must not end by it
            self._skip(error)
        self._count(1)

    def _skip(self, error: BaseException | None) -> None:
        with self._lock:
            skipped, self._next = self._pieces - self._next, self._pieces
            if self.error is None:
                self.error = error
        if skipped:
            self._count(skipped)

    def _count(self, pieces: int) -> None:
        with self._lock:
            self._left -= pieces
            last = self._left == 0
        if last:
            try:
                self._over()
            finally:
                _live.discard(self)
                self._done.set()


def _end() -> None:
    """Cancel all jobs and wait for them; what a job that does not end writes to is kept for good."""
    deadline = clock.monotonic() + _END_SECONDS
    for job in list(_live):
        job.cancel()
    for job in list(_live):
        if not job.wait(max(0.0, deadline - clock.monotonic())):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))


atexit.register(_end)
_crews: weakref.WeakKeyDictionary[Any, Crew] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def crew_of(owner: Any, limit: int) -> Crew:
    """Return the crew of an array, for as long as `owner` lives."""
    with _making:
        found = _crews.get(owner)
        if found is None:
            found = _crews[owner] = Crew(limit)
        return found


def _after_fork() -> None:
    global _crews, _making
    _live.clear()  # they go on in the parent
    _crews, _making = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
