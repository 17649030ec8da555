"""`Job`: work in pieces, which service threads of the process carry out beside the caller.

A job is offered to the same threads that serve controllers (`warpwell.storage.service_pool`): they are started on
demand, end when nothing is left to do, and a forked child has none of them. Each piece is native code without the
interpreter lock for most of its time. A job that nobody waits for any more goes on; at the end of the program jobs are
cancelled, because memory to which native code writes must outlive it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable

from ... import errors
from ...storage import service_pool

_END_SECONDS = 5.0
"""Longest wait at the end of the program, for all jobs together."""

_live: set[Job] = set()


class Job:
    """Work in pieces, the first of which begins at once.

    Parameters
    ----------
    pieces : int
        1 or more.
    threads : int
        Most pieces that are carried out at a time.
    run : callable
        ``run(k)`` carries out piece `k`; after an exception no further piece begins.
    over : callable
        Is called once, by whoever ends the last piece, with the first exception or None; it raises nothing.
    here : bool
        Carry all out in this thread, before this returns.

    Attributes
    ----------
    error : BaseException or None
        The first one, when the job is over.
    cancelled : bool
        Whether `cancel` came before the end.
    """

    def __init__(
        self, pieces: int, threads: int, run: Callable[[int], None], over: Callable[[BaseException | None], None],
        *, here: bool = False,
    ) -> None:  # fmt: skip
        self.error: BaseException | None = None
        self.cancelled = False
        self._pieces, self._threads = pieces, threads
        self._run, self._over = run, over
        self._next, self._left = 0, pieces
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._process = os.getpid()
        self._seats = service_pool.Seats(self._wanted, self._serve, lambda: None)
        if here:
            self._serve(0)
            return
        _live.add(self)
        try:
            service_pool.current().offer(self._seats)
        except RuntimeError:  # no thread can be started where the interpreter ends
            self._serve(0)

    def __hash__(self) -> int:
        return id(self)

    @property
    def done(self) -> bool:
        """Whether the job is over."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to `timeout` seconds; return whether it is.

        Raises
        ------
        ForkError
            It goes on in the process that this one was forked from.
        """
        if self._process != os.getpid():
            raise errors.ForkError(
                f"this was begun in process {self._process}, which this one ({os.getpid()}) was forked from: "
                "begin it again here"
            )
        return self._done.wait(timeout)

    def cancel(self) -> bool:
        """Begin no further piece; return whether that came before the end."""
        if self._process != os.getpid() or self._done.is_set():
            return False
        self.cancelled = True
        self._skip(None)
        return True

    def _wanted(self) -> int:
        return min(self._threads, self._pieces) if self._next < self._pieces else 0

    def _serve(self, seat: int) -> None:
        while True:
            with self._lock:
                piece = self._next
                if piece >= self._pieces:
                    return
                self._next += 1
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
                self._over(self.error)
            finally:
                _live.discard(self)
                self._done.set()


def _end() -> None:
    """Cancel all jobs and wait for them; what a job that does not end writes to is kept for good."""
    deadline = time.monotonic() + _END_SECONDS
    for job in list(_live):
        job.cancel()
    for job in list(_live):
        if not job.wait(max(0.0, deadline - time.monotonic())):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))


atexit.register(_end)
os.register_at_fork(after_in_child=_live.clear)
