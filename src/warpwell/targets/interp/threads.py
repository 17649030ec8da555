"""`Interleaver`: the threads of the ``interp`` target, of which one runs at a time, in an order that a seed decides."""

from __future__ import annotations

import heapq
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from .weak_memory import ThreadView, WeakMemory

NS_PER_STEP = 1000
_OWN_NAMES = ("threads.py", "interpreter.py", "../primitives.py")
_OWN_FILES = {os.path.normpath(Path(__file__).parent / name) for name in _OWN_NAMES}
_LONGEST_GAP = 2000
_LAST_STEPS = 20_000
_NEVER = 1 << 62


class InterpStallError(RuntimeError):
    """The threads of an interpreted run took more steps than permitted: a deadlock, livelock or endless loop.

    The message names each thread and the file and line of its device code.
    """


class Thread:
    """One thread of a run."""

    __slots__ = ("body", "busy", "daemon", "fiber", "index", "name", "position", "priority", "view")

    def __init__(self, name: str, body: Callable[[], object], index: int, daemon: bool) -> None:
        self.name = name
        self.body = body
        self.fiber = greenlet(body)
        self.index = index
        self.daemon = daemon
        # Whether a daemon is in the middle of an operation that the next run needs.
        self.busy = False
        self.position = 0
        self.priority = 0
        self.view = ThreadView(0, 1)


def where(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is not the interpreter's own."""
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return "not started" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Interleaver:
    """Threads, logical time, and the choice of the next thread.

    Parameters
    ----------
    seed : int
        Decides everything; the same seed and program give the same run. It selects either a uniform choice at shared
        accesses, or priorities with a few random changes, as in Burckhardt and others: A Randomized Scheduler with
        Probabilistic Guarantees of Finding Bugs (2010); each finds bugs that the other does not.
    max_steps : int
        Steps after which a run is a stall.
    """

    memory: WeakMemory

    def __init__(self, seed: int, *, max_steps: int = 1_000_000) -> None:
        self.seed = int(seed)
        self.max_steps = max_steps
        self.steps = 0
        self.skipped = 0
        self.random = Random(self.seed)
        self.threads: list[Thread] = []
        self.thread: Thread
        self._priorities = self.random.random() < 0.4
        choices = (0.002, 0.01, 0.05) if self._priorities else (1.0, 0.3, 0.05)
        self._probability = self.random.choice(choices)
        self._next_switch = 0
        self._next_change = 0
        self._lowest = 0
        self._awake: list[Thread] = []
        self._asleep: list[tuple[int, int, Thread]] = []
        self._jumps = 0
        self._stores_at_jump = -1
        self._running = False
        self._stopping = False
        self._ending = False
        self._end_by = _NEVER

    @property
    def now(self) -> int:
        """Logical time in steps."""
        return self.steps + self.skipped

    def spawn(self, fn: Callable[..., object], *args: Any, name: str | None = None, daemon: bool = False) -> Thread:
        """Add a thread that calls ``fn(*args)`` in the next `run`.

        A daemon (a controller) is stopped when all others have ended; if it is `busy`, it may take some thousand more
        steps to finish.  Raises RuntimeError during a run.
        """
        if self._running:
            raise RuntimeError("spawn() before run(), not from a running thread")
        index = sum(t.daemon == daemon for t in self.threads)
        label = name or f"{getattr(fn, '__name__', 'thread')}-{len(self.threads)}"
        thread = Thread(label, lambda: fn(*args), index, daemon)
        self.threads.append(thread)
        return thread

    def _point(self) -> None:
        # A switch point, before every shared access.
        self.steps += 1
        if self.steps >= self._next_switch:
            self._switch()

    def _pause(self, steps: int) -> None:
        # Puts the running thread to sleep for about `steps` steps.
        self.steps += 1
        if steps and not self._stopping and self.steps <= self._end_by:
            self._remove(self.thread)
            wake = self.now + 1 + int(self.random.random() * 2 * steps)
            heapq.heappush(self._asleep, (wake, self.steps, self.thread))
        self._switch()

    def _switch(self) -> None:
        if self._stopping:
            return
        if self.steps > self._end_by:
            raise GreenletExit
        if self.steps > self.max_steps:
            raise InterpStallError(self._stall_report())
        chosen = self._pick()
        if chosen is not self.thread:
            self.thread = chosen
            chosen.fiber.switch()

    def _remove(self, thread: Thread) -> None:
        awake = self._awake
        last = awake.pop()
        if last is not thread:
            awake[thread.position] = last
            last.position = thread.position

    def _wake(self) -> None:
        thread = heapq.heappop(self._asleep)[2]
        thread.position = len(self._awake)
        self._awake.append(thread)

    def _pick(self) -> Thread:
        asleep, awake = self._asleep, self._awake
        while asleep and asleep[0][0] <= self.steps + self.skipped:
            self._wake()
        if not awake:
            self._jump()
        if not self._priorities:
            self._next_switch = self.steps + self._gap()
            return awake[int(self.random.random() * len(awake))]
        if self.steps >= self._next_change:
            self._lowest -= 1
            self.thread.priority = self._lowest
            self._next_change = self.steps + self._gap()
        chosen = max(awake, key=lambda t: t.priority)
        self._next_switch = self._next_change
        if asleep:
            self._next_switch = min(self._next_switch, asleep[0][0] - self.skipped)
        return chosen

    def _gap(self) -> int:
        if self._probability >= 1:
            return 1
        gap = 1 + int(math.log(1 - self.random.random()) / math.log(1 - self._probability))
        return min(gap, _LONGEST_GAP)

    def _jump(self) -> None:
        # All threads wait: time jumps to the first wake-up, and further if nothing was stored for long, so that waiting
        # for a time limit of a second takes few steps.
        stores = self.memory.stores
        self._jumps = self._jumps + 1 if stores == self._stores_at_jump else 0
        self._stores_at_jump = stores
        ahead = self._asleep[0][0] - self.now
        if self._jumps > 64:
            ahead = max(ahead, min(1 << min(self._jumps - 60, 14), 10_000))
        self.skipped += ahead
        while self._asleep and self._asleep[0][0] <= self.now:
            self._wake()

    def _run(self) -> None:
        """Run all threads; at the end, stop the daemons and drop all threads."""
        hub = getcurrent()
        threads = self.threads

        def begin(thread: Thread) -> None:
            # The recursion depth of a fiber begins with the depth of the first switch to it. So switch to it here, not
            # from inside of another thread: otherwise many threads would reach Python's limit.
            hub.switch()
            thread.body()

        order = self.random.sample(range(len(threads)), len(threads))
        for slot, thread in enumerate(threads):
            thread.fiber = greenlet(begin, hub)
            thread.fiber.switch(thread)
            thread.view = ThreadView(slot, len(threads))
            thread.position = slot
            thread.priority = order[slot]
        self._awake, self._asleep = list(threads), []
        self._next_change = self.steps + self._gap()
        self._lowest = 0
        self._stopping, self._running, self._ending = False, True, False
        self._end_by = _NEVER
        waiting = sum(not t.daemon for t in threads)
        self.thread = threads[0] if threads else Thread("none", lambda: None, 0, False)
        try:
            while waiting or any(t.busy and not t.fiber.dead for t in threads):
                self.thread = self._pick()
                self.thread.fiber.switch()
                # Only a thread that has ended returns here.
                self._remove(self.thread)
                waiting -= not self.thread.daemon
                if not waiting and not self._ending:
                    self._ending = True
                    self._end_by = min(self.steps + _LAST_STEPS, self.max_steps)
        except BaseException as error:
            error.add_note(f"interp: seed {self.seed}, step {self.steps}, thread {self.thread.name!r}")
            raise
        finally:
            self._stopping = True
            for thread in threads:
                if not thread.fiber.dead:
                    self.thread = thread
                    thread.fiber.throw(GreenletExit)
            self.threads = []
            self._running = False

    def _stall_report(self) -> str:
        report = [f"no end after {self.max_steps} steps (seed {self.seed}); the threads are at:"]
        for thread in self.threads:
            if thread.fiber.dead:
                position = "ended"
            else:
                position = where(sys._getframe() if thread is self.thread else thread.fiber.gr_frame)
            state = " (daemon)" if thread.daemon else ""
            report.append(f"  {thread.name}{state}: {position}")
        if foreign := self.memory.foreign_writes():
            report.append(f"  host code changed {foreign[0]:#x} during the run, unseen (use write_bytes)")
        return "\n".join(report)
