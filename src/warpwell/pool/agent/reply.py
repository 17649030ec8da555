"""`Reply`: what an agent will answer to a request."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ... import errors
from ..ids import new_id
from ..transport.milestone import limit
from ..transport.transport import Transfer

if TYPE_CHECKING:
    from .channel import Channel


class Reply:
    """What an agent will answer to a request.

    Attributes
    ----------
    transfer : Transfer or None
        Cancelled where the request is refused.
    done : bool
        Whether the answer is there.
    """

    __slots__ = ("_came", "_told", "channel", "counted", "done", "error", "number", "transfer", "value")

    def __init__(self, channel: Channel | None = None) -> None:
        self.number = new_id()
        self.done = False
        self.counted: list[float] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.transfer: Transfer | None = None
        self.channel = channel
        self._came = threading.Lock()
        self._came.acquire()
        self._told: Callable[[], None] | None = None

    def come(self, value: Any, error: BaseException | None) -> None:
        """Answer, once."""
        self.value, self.error, self.done = value, error, True
        self._came.release()
        if error is not None and self.transfer is not None:
            self.transfer.cancel()  # who waits for it asks whether there is an answer that tells more
        if (told := self._told) is not None:
            self._told = None
            try:
                told()
            except Exception:  # the thread that all answers come by goes on
                traceback.print_exc()

    def when_come(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when the answer is there, perhaps twice, in the thread that receives: it must not wait."""
        self._told = call
        if self.done and self._told is not None:
            self._told = None
            call()

    def wait(self, what: str, timeout: float | None = None) -> None:
        """Wait for the answer, of either kind. Raises `StallError`."""
        if not self.done:
            self._wait(what, limit(timeout))

    def _wait(self, what: str, bound: float) -> None:
        begun = time.perf_counter()
        try:
            self._came.acquire(timeout=min(max(bound, 0.0), threading.TIMEOUT_MAX))
        finally:
            if self.done:  # for the next one who waits; Ctrl-C may have come with the answer
                with contextlib.suppress(RuntimeError):
                    self._came.release()
        if self.counted is not None:
            self.counted[2] += time.perf_counter() - begun
        if not self.done:
            raise errors.StallError(f"waited {bound:g} s for {what}", seconds=bound)

    def get(self, what: str, timeout: float | None = None) -> Any:
        """Wait for the answer, and return it or raise."""
        self.wait(what, timeout)
        if self.error is not None:
            raise self.error
        return self.value
