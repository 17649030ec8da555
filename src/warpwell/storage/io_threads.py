"""IOThreadPool: the I/O threads of a process, which serve all its controllers and chunked host work.

A controller with work is submitted to the pool, and free threads take its worker slots. The number of its slots is the
number of threads that may serve it at once. Each thread serves only that controller, until no work is left. Threads are
started on demand up to `MAX_THREADS`. Beyond that, each controller is still served by one thread, so a medium that
never answers does not delay other controllers. A thread without a slot parks, and exits after a while.

No wake-up is lost: a thread checks for slots, and parks, under the lock that is held to submit controllers. The check
finds a controller that was submitted before; a controller that is submitted later finds the thread parked and wakes it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from .._os import clock

logger = logging.getLogger(__package__)

MAX_THREADS = 64
"""Number of threads up to which a controller gets more than one thread."""

IDLE_TIMEOUT = 5.0
"""Seconds after which a parked thread exits."""


class WorkerSlots:
    """The worker slots of one controller.

    Parameters
    ----------
    count_needed : callable
        Return the number of threads for which the controller has work at the moment. Raises nothing.
    serve : callable
        Serve the controller as the thread in the given slot; return when nothing is left to do.
    quiesce : callable
        Let threads return as soon as no work is left, instead of after a while.
    """

    def __init__(
        self, count_needed: Callable[[], int], serve: Callable[[int], None], quiesce: Callable[[], None]
    ) -> None:
        self.count_needed = count_needed
        self.serve = serve
        self.quiesce = quiesce
        self.occupied: set[int] = set()


class IOThreadPool:
    """Threads that serve the submitted controllers; one pool serves a process (`current`).

    Attributes
    ----------
    threads : int
        Number of threads, parked ones included.
    """

    def __init__(self) -> None:
        # an interrupted `with` statement may leave a `Condition` locked, but not a `Lock`
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slot_freed = threading.Condition(self._lock)
        self._submitted: list[WorkerSlots] = []
        self._parked = 0
        self._woken = 0
        self._started = 0
        self.threads = 0

    @property
    def active_threads(self) -> int:
        """Number of threads that serve a controller."""
        with self._lock:
            return self.threads - self._parked

    def submit(self, slots: WorkerSlots) -> None:
        """Let threads serve a controller that has work: wake parked threads, start missing threads.

        Raises
        ------
        RuntimeError
            The system cannot start a thread, and no thread serves the controller.
        """
        with self._lock:
            if slots not in self._submitted:
                self._submitted.append(slots)
            missing = slots.count_needed() - len(slots.occupied)
            woken = max(0, min(missing, self._parked - self._woken))
            self._woken += woken
            self._changed.notify(woken)
            missing -= woken
            if missing > 0:
                missing -= self._quiesce_spare()
            new = min(missing, MAX_THREADS - self.threads)
            if new < 1 and not woken and not slots.occupied:
                new = 1
            for k in range(new):
                try:
                    self._start()
                except RuntimeError:
                    if k or woken or slots.occupied:
                        return
                    self._submitted.remove(slots)
                    raise

    def _quiesce_spare(self) -> int:
        """Let threads without work leave their controllers; return their number."""
        count = 0
        for slots in self._submitted:
            spare = len(slots.occupied) - slots.count_needed()
            if spare > 0:
                slots.quiesce()
                count += spare
        return count

    def remove(self, slots: WorkerSlots, seconds: float) -> bool:
        """Remove a controller, and wait until no thread serves it; return False if one still does after `seconds`.

        Before the call, its `count_needed` returns 0 and its threads were requested to stop.
        """
        if self is not current():
            return True  # the threads are the parent's
        deadline = clock.monotonic() + seconds
        with self._lock:
            if slots in self._submitted:
                self._submitted.remove(slots)
            while slots.occupied and clock.monotonic() < deadline:
                self._slot_freed.wait(clock.at_most(max(0.0, deadline - clock.monotonic())))
            return not slots.occupied

    def _start(self) -> None:
        name = f"warpwell-io-{self._started}"
        threading.Thread(target=self._work, name=name, daemon=True).start()
        self._started += 1
        self.threads += 1

    def _work(self) -> None:
        slots: WorkerSlots | None = None
        slot = 0
        while True:
            with self._lock:
                if slots is not None:
                    slots.occupied.discard(slot)
                    self._slot_freed.notify_all()
                timed_out = False
                while (slots := self._next_slots()) is None:
                    if timed_out or self.threads > MAX_THREADS:
                        self.threads -= 1
                        return
                    self._parked += 1
                    timed_out = not self._changed.wait(IDLE_TIMEOUT)
                    self._parked -= 1
                    # a wake-up may arrive as the wait times out: in both cases the thread checks for slots
                    self._woken = max(0, self._woken - 1)
                slot = next(k for k in range(len(slots.occupied) + 1) if k not in slots.occupied)
                slots.occupied.add(slot)
            try:
                slots.serve(slot)
            except Exception:  # an occupied slot without a thread would keep other threads from the client
                logger.exception("an I/O thread failed and continues with other work")

    def _next_slots(self) -> WorkerSlots | None:
        """Return the slots with the fewest threads among those that need more threads."""
        found = None
        for slots in list(self._submitted):
            needed = slots.count_needed()
            if not needed and not slots.occupied:
                self._submitted.remove(slots)
            elif len(slots.occupied) < needed and (found is None or len(slots.occupied) < len(found.occupied)):
                found = slots
        return found


_pool = IOThreadPool()


def current() -> IOThreadPool:
    """Return the pool of this process."""
    return _pool


def _after_fork() -> None:
    global _pool
    _pool = IOThreadPool()  # the threads exist only in the parent, and one of them may hold the old lock


os.register_at_fork(after_in_child=_after_fork)
