"""`Channel`: the application's end of a stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from .. import errors
from .agent.protocol import WINDOW_BYTES, WINDOW_CALLS
from .transport.milestone import LOOK, limit

KEPT = 16
"""Failures of a stream that are kept for the next synchronization; later ones are counted."""


class Channel:
    """The application's end of a stream: the number of its last call, what is under way, and what failed.

    Parameters
    ----------
    number : int
        The stream's; 0 is the default one's of each device.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0
        self.failures: list[errors.RemoteError] = []
        self.dropped = 0
        self._lock = threading.RLock()  # for `with`: Ctrl-C may come between a Condition's acquire and the block
        self._changed = threading.Condition(self._lock)
        self._done = 0
        self._bytes = 0
        self._costs: deque[tuple[int, int]] = deque()
        self._heir: Channel | None = None

    @property
    def full(self) -> bool:
        """Whether a call has to wait until earlier ones are done."""
        return self.sequence - self._done >= WINDOW_CALLS or self._bytes >= WINDOW_BYTES

    def next(self, cost: int) -> int:
        """Return the number of a new call with which `cost` bytes go (the connection's lock is held)."""
        self.sequence += 1
        if cost:
            with self._lock:
                self._bytes += cost
                self._costs.append((self.sequence, cost))
        return self.sequence

    def back(self, sequence: int) -> None:
        """Take back what a call counts for that was not sent. Its number is not used again."""
        with self._lock:
            while self._costs and self._costs[-1][0] >= sequence:
                self._bytes -= self._costs.pop()[1]

    def done(self, sequence: int) -> None:
        """Note that calls up to a number are over."""
        with self._lock:
            self._done = max(self._done, sequence)
            while self._costs and self._costs[0][0] <= sequence:
                self._bytes -= self._costs.popleft()[1]
            self._changed.notify_all()

    def wait_for_room(self, check: Callable[[], None], whom: str) -> None:
        """Wait until `whom` has run enough of the calls that are under way; ``check()`` raises once it never will."""
        bound = limit()
        end = time.monotonic() + bound
        with self._lock:
            while self.full:
                self._changed.wait(LOOK)
                check()
                if time.monotonic() > end:
                    raise errors.StallError(
                        f"waited {bound:g} s for {whom} to run some of {self.sequence - self._done} calls",
                        seconds=bound,
                    )

    def keep(self, failure: errors.RemoteError) -> None:
        """Keep a failure for the next synchronization."""
        with self._lock:
            if self._heir is not None:
                self._heir.keep(failure)
            elif len(self.failures) < KEPT:
                self.failures.append(failure)
            else:
                self.dropped += 1

    def forget(self, failure: BaseException) -> None:
        """Do not raise a failure again that was raised elsewhere."""
        with self._lock:
            self.failures = [f for f in self.failures if f is not failure]
            if self._heir is not None:
                self._heir.forget(failure)

    def leave_to(self, heir: Channel) -> None:
        """Let another raise what failed and will fail here: nobody synchronizes this one any more."""
        with self._lock:
            self._heir = heir
            failures, self.failures = self.failures, []
            heir.dropped += self.dropped
        for failure in failures:
            heir.keep(failure)

    def raise_kept(self) -> None:
        """Raise the first failure since the last time; the others are named in its notes."""
        if not self.failures:
            return
        with self._lock:
            failures, self.failures = self.failures, []
            dropped, self.dropped = self.dropped, 0
        if not failures:
            return
        first, *others = failures
        for other in others:
            first.add_note(f"then: {other}")
        if dropped:
            first.add_note(f"and {dropped} more")
        raise first
