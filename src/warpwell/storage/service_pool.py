"""ServicePool: the service threads of a process, which all its controllers share.

A controller with something to do is offered to the pool, and free threads take its seats, of which it has as many as
threads may serve it at once; each serves that controller alone until nothing is left to do there. Threads are started
on demand up to `MOST`; beyond that each controller is still served by one, so a medium that never answers delays nobody
else. A thread without a seat parks, and ends after a while.

No wake-up is lost: a thread looks for seats, and parks, under the lock under which controllers are offered. A
controller that was offered before the look is found by it; one that is offered later finds the thread parked and wakes
it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .._os import clock

MOST = 64
"""Up to so many threads controllers get more than one each."""

LINGER = 5.0
"""Seconds after which a parked thread ends."""


class Seats:
    """The seats of one controller.

    Parameters
    ----------
    wanted : callable
        Return how many threads it has work for now.
    serve : callable
        Serve the controller as the thread in the given seat; return when nothing is left to do.
    hurry : callable
        Let threads return at once when nothing is left to do, not after a while.
    """

    def __init__(self, wanted: Callable[[], int], serve: Callable[[int], None], hurry: Callable[[], None]) -> None:
        self.wanted = wanted
        self.serve = serve
        self.hurry = hurry
        self.taken: set[int] = set()


class ServicePool:
    """Threads that serve whatever is offered; one pool serves a process (`current`).

    Attributes
    ----------
    threads : int
        Threads that exist, parked ones included.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._left = threading.Condition(self._changed._lock)  # type: ignore[attr-defined]
        self._offered: list[Seats] = []
        self._parked = 0
        self._called = 0
        self._started = 0
        self.threads = 0

    @property
    def serving(self) -> int:
        """Number of threads that serve a controller."""
        with self._changed:
            return self.threads - self._parked

    def offer(self, seats: Seats) -> None:
        """Let threads serve a controller that has something to do: wake parked ones, start missing ones.

        Raises
        ------
        RuntimeError
            The system starts no thread, and none serves the controller.
        """
        with self._changed:
            if seats not in self._offered:
                self._offered.append(seats)
            missing = seats.wanted() - len(seats.taken)
            woken = max(0, min(missing, self._parked - self._called))
            self._called += woken
            self._changed.notify(woken)
            missing -= woken
            if missing > 0:
                missing -= self._leaving()
            new = min(missing, MOST - self.threads)
            if new < 1 and not woken and not seats.taken:
                new = 1
            for k in range(new):
                try:
                    self._start()
                except RuntimeError:
                    if k or woken or seats.taken:
                        return
                    self._offered.remove(seats)
                    raise

    def _leaving(self) -> int:
        """Return how many threads have nothing left to do where they are, and let them look elsewhere."""
        leaving = 0
        for seats in self._offered:
            spare = len(seats.taken) - seats.wanted()
            if spare > 0:
                seats.hurry()
                leaving += spare
        return leaving

    def withdraw(self, seats: Seats, seconds: float) -> bool:
        """Offer a controller no more, and wait until no thread serves it; return whether that came in time.

        Its `wanted` returns 0 from now on, and its threads were told to stop.
        """
        if self is not current():
            return True  # the threads are the parent's
        deadline = clock.monotonic() + seconds
        with self._changed:
            if seats in self._offered:
                self._offered.remove(seats)
            while seats.taken and clock.monotonic() < deadline:
                self._left.wait(clock.at_most(max(0.0, deadline - clock.monotonic())))
            return not seats.taken

    def _start(self) -> None:
        name = f"warpwell-service-{self._started}"
        threading.Thread(target=self._work, name=name, daemon=True).start()
        self._started += 1
        self.threads += 1

    def _work(self) -> None:
        seats: Seats | None = None
        seat = 0
        while True:
            with self._changed:
                if seats is not None:
                    seats.taken.discard(seat)
                    self._left.notify_all()
                lingered = False
                while (seats := self._find()) is None:
                    if lingered or self.threads > MOST:
                        self.threads -= 1
                        return
                    self._parked += 1
                    lingered = not self._changed.wait(LINGER)
                    self._parked -= 1
                    # a call may come as the wait ends by itself: either way it is answered by a look for seats
                    self._called = max(0, self._called - 1)
                seat = next(k for k in range(len(seats.taken) + 1) if k not in seats.taken)
                seats.taken.add(seat)
            seats.serve(seat)

    def _find(self) -> Seats | None:
        """Return the seats with the fewest threads of those that want more."""
        found = None
        for seats in list(self._offered):
            wanted = seats.wanted()
            if not wanted and not seats.taken:
                self._offered.remove(seats)
            elif len(seats.taken) < wanted and (found is None or len(seats.taken) < len(found.taken)):
                found = seats
        return found


_pool = ServicePool()


def current() -> ServicePool:
    """Return the pool of this process."""
    return _pool


def _after_fork() -> None:
    global _pool
    _pool = ServicePool()  # the child has none of the threads, and the old lock may be held by one of them


os.register_at_fork(after_in_child=_after_fork)
