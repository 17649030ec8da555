"""`Reply`: what an agent will answer to a request; `Answer`: a result whose large arrays travel as bulk data."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from .. import errors
from .agent.code import loads
from .agent.large_arrays import shaped
from .agent.protocol import new_id
from .channel import Channel
from .transport.bulk import Region, Transfer
from .transport.milestone import limit
from .transport.transport import Transport


class Reply:
    """What an agent will answer to a request.

    Attributes
    ----------
    transfer : Transfer or None
        Cancelled where the request is refused.
    done : bool
        Whether the answer is there.
    """

    __slots__ = ("_calls", "_came", "channel", "counted", "done", "error", "number", "transfer", "value")

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
        self._calls: list[Callable[[], None]] = []

    def come(self, value: Any, error: BaseException | None) -> None:
        """Answer, once."""
        self.value, self.error, self.done = value, error, True
        self._came.release()
        if error is not None and self.transfer is not None:
            self.transfer.cancel()  # who waits for it asks whether there is an answer that tells more
        self._notify()

    def when_come(self, call: Callable[[], None]) -> None:
        """Call ``call()`` once when the answer is there, in the thread that receives: it must not wait."""
        self._calls.append(call)
        if self.done:
            self._notify()

    def _notify(self) -> None:
        while self._calls:
            try:
                self._calls.pop()()  # one step: only one thread gets a call
            except IndexError:
                return
            except Exception:  # the thread that receives all answers continues
                traceback.print_exc()

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


class Answer:
    """A result with large arrays, which are on their way.

    Parameters
    ----------
    transport : Transport
    rank : int
        The agent's.
    gone : callable
        ``gone(reason)`` notes that the agent is gone, and raises.
    data : bytes
        The result without the arrays.
    numbers : sequence of int
        Which array stands at each place of the result.
    about : sequence
        Of each array: tag, chunk, and what `shaped` needs.

    Raises
    ------
    MemoryError
        There is no room for the arrays.
    DeviceLostError
    """

    def __init__(
        self, transport: Transport, rank: int, gone: Callable[[str], NoReturn], data: bytes, numbers: Any, about: Any
    ) -> None:
        self._data, self._numbers = data, numbers
        self._gone = gone
        memories = [np.empty(nbytes, np.uint8) for _, _, nbytes, *_ in about]
        self._arrays = [shaped(memory, *shape) for memory, (_, _, _, *shape) in zip(memories, about, strict=True)]
        self._transfers: list[Transfer] = [
            transport.get(rank, tag, Region.over(memory, chunk=chunk))
            for memory, (tag, chunk, *_) in zip(memories, about, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Whether the arrays are there, or will never be."""
        return all(transfer.status for transfer in self._transfers)

    def get(self, timeout: float | None) -> Any:
        """Wait for the arrays, and return the result."""
        end = time.monotonic() + limit(timeout)
        for transfer in self._transfers:
            try:
                transfer.wait(transfer.chunks, max(0.0, end - time.monotonic()))
            except errors.DeviceLostError:
                self._gone(transfer.reason)
        return loads(self._data, [self._arrays[k] for k in self._numbers])
