"""`Channel`: the program's side of a stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from .. import errors
from .agent.protocol import WINDOW_BYTES, WINDOW_CALLS
from .transport.milestone import ALIVE_CHECK_SECONDS, limit

MAX_FAILURES = 16
"""Number of failures of a stream that the next synchronization reports; later ones are only counted."""


class Channel:
    """The program's side of a stream: the number of the last call, the calls in flight, and the failures.

    Any thread may call the methods, except as noted.

    Parameters
    ----------
    number : int
        Number of the stream; 0 is the default stream of each device.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0
        self.failures: list[errors.RemoteError] = []
        self._dropped = 0
        self._lock = threading.RLock()  # for `with`: Ctrl-C may interrupt a Condition between acquiring and the block
        self._changed = threading.Condition(self._lock)
        self._done = 0
        self._bytes = 0
        self._sizes: deque[tuple[int, int]] = deque()
        self._target: Channel | None = None

    @property
    def is_full(self) -> bool:
        """Whether the calls in flight exhaust the window, so that the next call must wait."""
        return self.sequence - self._done >= WINDOW_CALLS or self._bytes >= WINDOW_BYTES

    def add_call(self, nbytes: int) -> None:
        """Add a call with the next number and a payload of `nbytes`. The caller holds the connection's lock."""
        self.sequence += 1
        if nbytes:
            with self._lock:
                self._bytes += nbytes
                self._sizes.append((self.sequence, nbytes))

    def cancel_call(self, sequence: int) -> None:
        """Release the payload of a call that was not sent. Its number is not reused."""
        with self._lock:
            while self._sizes and self._sizes[-1][0] >= sequence:
                self._bytes -= self._sizes.pop()[1]

    def complete_calls(self, sequence: int) -> None:
        """Record that the calls up to number `sequence` have completed."""
        with self._lock:
            self._done = max(self._done, sequence)
            while self._sizes and self._sizes[0][0] <= sequence:
                self._bytes -= self._sizes.popleft()[1]
            self._changed.notify_all()

    def wait_for_credit(self, check: Callable[[], None], device: str) -> None:
        """Wait until the window has space for a call.

        Parameters
        ----------
        check : callable
            Raises if the agent is lost; called every 0.25 s.
        device : str
            Name of the device for the message of `StallError`.
        """
        bound = limit()
        end = time.monotonic() + bound
        with self._lock:
            while self.is_full:
                self._changed.wait(ALIVE_CHECK_SECONDS)
                check()
                if time.monotonic() > end:
                    raise errors.StallError(
                        f"waited {bound:g} s for {device} to complete some of {self.sequence - self._done} calls",
                        seconds=bound,
                    )

    def add_failure(self, failure: errors.RemoteError) -> None:
        """Store a failure for the next synchronization."""
        with self._lock:
            if self._target is not None:
                self._target.add_failure(failure)
            elif len(self.failures) < MAX_FAILURES:
                self.failures.append(failure)
            else:
                self._dropped += 1

    def remove_failure(self, failure: BaseException) -> None:
        """Remove a failure that was raised elsewhere."""
        with self._lock:
            self.failures = [f for f in self.failures if f is not failure]
            if self._target is not None:
                self._target.remove_failure(failure)

    def redirect_failures(self, target: Channel) -> None:
        """Move all past and future failures to another channel, because this stream was closed."""
        with self._lock:
            self._target = target
            failures, self.failures = self.failures, []
            target._dropped += self._dropped
        for failure in failures:
            target.add_failure(failure)

    def raise_failures(self) -> None:
        """Raise the first failure since the last call; its notes name the others."""
        if not self.failures:
            return
        with self._lock:
            failures, self.failures = self.failures, []
            dropped, self._dropped = self._dropped, 0
        if not failures:
            return
        first = failures[0]
        for failure in failures[1:]:
            first.add_note(f"then: {failure}")
        if dropped:
            first.add_note(f"and {dropped} more")
        raise first
