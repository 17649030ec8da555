"""Service scenario: controllers submit slots to a pool of threads, which park and exit, under one interleaving.

The pool's code runs unchanged on locks and threads of a small scheduler, which switches threads at every lock and
between any two steps of a controller. Controllers are counters: commands announced, in flight and done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from warpwell.storage import io_threads

from .adversary import Violation

MAX_STEPS = 50_000
LONG = 1000
NEVER = 10 * LONG


class Scheduler:
    """Threads and the conditions that they wait for. One thread runs at a time, in an order that a seed selects."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.steps = self.now = 0
        self.bias = self.random.choice((0.5, 1, 1, 3))  # above 1, the first threads, which are users, run more often
        self.main = getcurrent()
        self.going: dict[greenlet, Callable[[], bool]] = {}

    def spawn(self, body: Callable[[], None]) -> None:
        self.going[greenlet(body, self.main)] = lambda: True

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let other threads run until this thread is chosen and `ready` is true."""
        thread = getcurrent()
        if thread is not self.main:
            self.going[thread] = ready
            self.main.switch()

    def run(self, ended: Callable[[], bool], waiting: Callable[[], bool]) -> None:
        """Run threads until `ended`. If all threads wait for a time, `waiting` must be false."""
        while not ended():
            able = [thread for thread, ready in self.going.items() if ready()]
            self.steps += 1
            self.now += 1
            if not able and self.now < NEVER:
                if waiting():
                    raise Violation("a controller waits, and all threads are parked")
                self.now += LONG
                continue
            if not able or self.steps > MAX_STEPS:
                raise Violation("no thread is ready" if not able else f"no end after {self.steps} steps")
            thread = able[int(len(able) * self.random.random() ** self.bias)]
            thread.switch()
            if thread.dead:
                del self.going[thread]


class Lock:
    """A lock of the scheduler's threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.held = scheduler, False

    def __enter__(self) -> None:
        self.scheduler.pause(lambda: not self.held)
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False
        self.scheduler.pause()


class Condition:
    """A condition of the scheduler's threads; a wait with a limit may end by itself at any time."""

    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self.scheduler, self._lock = scheduler, lock
        self.waiters: list[SimpleNamespace] = []

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, limit: float) -> bool:
        waiter = SimpleNamespace(called=False, tag=object())  # differs from all other waiters
        self.waiters.append(waiter)
        self._lock.held = False
        until = self.scheduler.now + self.scheduler.random.choice((3, 30, LONG))
        if limit > 1e6:
            until = MAX_STEPS + NEVER
        self.scheduler.pause(lambda: waiter.called or self.scheduler.now > until)
        if not waiter.called and self.scheduler.random.random() < 0.5:
            self.scheduler.pause()  # the wait is over, but a call may arrive before the lock is held again
        self.scheduler.pause(lambda: not self._lock.held)
        self._lock.held = True
        was_notified = waiter not in self.waiters
        if not was_notified:
            self.waiters.remove(waiter)
        return waiter.called and not (was_notified and self.scheduler.random.random() < 0.3)

    def notify(self, count: int = 1) -> None:
        for waiter in self.waiters[:count]:
            waiter.called = True
        del self.waiters[:count]

    def notify_all(self) -> None:
        self.notify(len(self.waiters))


class Controlled:
    """Model of a controller: the callbacks of its slots in the pool."""

    def __init__(self, model: ServiceModel, max_threads: int, silent: bool) -> None:
        self.model, self.max_threads, self.silent = model, max_threads, silent
        self.launches = self.announced = self.in_flight = self.inside = 0
        self.stopped = self.quiesced = False
        self.slots = io_threads.WorkerSlots(self.demanded_threads, self.serve, self.quiesce)

    def quiesce(self) -> None:
        self.quiesced = True

    def demanded_threads(self) -> int:
        if self.stopped:
            return 0
        if self.launches or self.announced:
            return self.max_threads
        return int(self.in_flight > 0)

    def serve(self, slot: int) -> None:
        pause = self.model.scheduler.pause
        self.inside += 1
        if self.inside > self.max_threads or not 0 <= slot < self.max_threads:
            raise Violation(f"{self.inside} threads serve a controller for {self.max_threads}, one in slot {slot}")
        idle = 0
        while not self.stopped and idle < (1 if self.quiesced else 4):
            pause()
            if self.announced and self.silent:
                # a medium that never answers, until the controller is closed
                pause(lambda: self.stopped)
            elif self.announced:
                self.announced -= 1
                self.in_flight += 1
                pause()
                self.in_flight -= 1
                idle = 0
            elif not self.launches and not (slot == 0 and self.in_flight):
                idle += 1
        self.inside -= 1
        pause()


class ServiceModel:
    """One run of the service scenario; see `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        random = Random(seed * 2 + 1)
        self.scheduler = self.run = Scheduler(seed)
        self.max_threads = random.choice((1, 2, 4))
        count = random.randint(1, 4)
        self.pool: io_threads.IOThreadPool
        silent, rounds = random.choice((0.2, 0.7)), random.choice((1, 2, 6))
        self.controllers = [
            Controlled(self, random.choice((1, 1, 2, 3)), silent=k > 0 and random.random() < silent)
            for k in range(count)
        ]
        self.users = 0
        self.waited_for = sum(not c.silent for c in self.controllers)
        self.closed = [random.random() < 0.4 for _ in range(count)]
        self.rounds = [random.randint(1, rounds) for _ in range(count)]
        self.wait_share = random.random()

    def _user(self, controller: Controlled, rounds: int, close: bool) -> None:
        """Launch repeatedly; some launches end at once and leave commands for the threads."""
        scheduler = self.scheduler
        for _ in range(scheduler.random.choice((0, 0, 30, 100))):
            scheduler.pause()
        for _ in range(rounds):
            scheduler.pause()
            controller.launches += 1
            controller.quiesced = False
            scheduler.pause()
            self.pool.submit(controller.slots)
            controller.announced += scheduler.random.randint(0, 3)
            scheduler.pause()
            if not controller.silent and scheduler.random.random() < self.wait_share:
                scheduler.pause(lambda: not controller.announced and not controller.in_flight)
            controller.launches -= 1
        if not controller.silent:
            scheduler.pause(lambda: not controller.announced and not controller.in_flight)
            self.waited_for -= 1
        else:
            scheduler.pause(lambda: not self.waited_for)  # blocks its threads until all other controllers were served
        if close or controller.silent:
            controller.stopped = True
            if not self.pool.remove(controller.slots, 1e9) or controller.inside:
                raise Violation(f"{controller.inside} threads serve a controller after it was removed")
        self.users -= 1

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        with pool_of(self.scheduler, self.max_threads) as self.pool:
            for controller, rounds, close in zip(self.controllers, self.rounds, self.closed, strict=True):
                self.users += 1
                self.scheduler.spawn(lambda c=controller, r=rounds, x=close: self._user(c, r, x))  # type: ignore[misc]
            self.scheduler.run(lambda: not self.users, self._unserved)
            # the remaining threads park and exit
            self.scheduler.now = 0
            self.scheduler.run(lambda: not self.pool.threads, self._unserved)
        return self.scheduler.steps

    def _unserved(self) -> bool:
        return any(c.announced and not c.stopped and not c.silent for c in self.controllers)


@contextlib.contextmanager
def pool_of(scheduler: Scheduler, max_threads: int) -> Iterator[io_threads.IOThreadPool]:
    """Replace the pool of the process by a pool of the scheduler's threads, for the block."""
    fakes: dict[str, Any] = {
        "threading": SimpleNamespace(
            Lock=lambda: Lock(scheduler),
            Condition=lambda lock: Condition(scheduler, lock),
            Thread=lambda target, **_: SimpleNamespace(start=lambda: scheduler.spawn(target)),
        ),
        "MAX_THREADS": max_threads,
    }
    originals = {name: getattr(io_threads, name) for name in (*fakes, "_pool")}
    try:
        for name, fake in fakes.items():
            setattr(io_threads, name, fake)
        io_threads._pool = io_threads.IOThreadPool()
        yield io_threads._pool
    finally:
        for name, original in originals.items():
            setattr(io_threads, name, original)
