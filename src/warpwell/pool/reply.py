"""`Reply`: the future of an agent's reply; `ArrayReply`: a result with large arrays; `CallResult`: for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from .. import errors
from .._check import checked_timeout
from .agent.code import loads
from .agent.large_arrays import shaped
from .agent.protocol import new_id
from .channel import Channel
from .transport.bulk import Region, Transfer
from .transport.milestone import Milestone, limit
from .transport.transport import Transport


class Reply(Milestone):
    """The future of an agent's reply to one request.

    Parameters
    ----------
    channel : Channel, optional
        Keeps a failure for the next synchronization, too.

    Attributes
    ----------
    number : int
        Number of the request.
    counters : list of float or None
        Counters of the kind of request, for `Device.trace`; the third one is the time waited in seconds.
    """

    __slots__ = ("channel", "counters", "number")

    def __init__(self, channel: Channel | None = None) -> None:
        super().__init__()
        self.number = new_id()
        self.counters: list[float] | None = None
        self.channel = channel

    def cancel_on_failure(self, transfer: Transfer) -> None:
        """Cancel a transfer if the request fails. The waiting thread then raises the failure, which has the cause."""
        self.when_set(lambda _: None if self.failure is None else transfer.cancel())

    def get_after_failures(self, channel: Channel, description: str, timeout: float | None = None) -> Any:
        """Wait for the reply; raise failures of earlier calls of the stream first. Return the value."""
        self.wait(description, timeout)
        channel.raise_failures()
        return self.get(description)

    def wait(self, event: str, timeout: float | None = None, alive: Callable[[], None] | None = None) -> None:
        start = time.perf_counter()
        try:
            super().wait(event, timeout, alive)
        finally:
            if self.counters is not None:
                self.counters[2] += time.perf_counter() - start


class ArrayReply:
    """A result whose large arrays are received as bulk data.

    Parameters
    ----------
    transport : Transport
    rank : int
        Rank of the agent.
    raise_lost : callable
        ``raise_lost(reason)`` records that the agent is lost, and raises.
    data : bytes
        The pickled result without the arrays.
    numbers : sequence of int
        For each reference in `data`, the index of its array.
    descriptions : sequence of tuple
        Of each array: tag, chunk size, and the arguments of `shaped`.

    Raises
    ------
    MemoryError
        There is not enough memory for the arrays.
    DeviceLostError
        The agent is lost.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        raise_lost: Callable[[str], NoReturn],
        data: bytes,
        numbers: Sequence[int],
        descriptions: Sequence[Any],
    ) -> None:
        self._data, self._numbers = data, numbers
        self._raise_lost = raise_lost
        memories = [np.empty(nbytes, np.uint8) for _, _, nbytes, *_ in descriptions]
        self._arrays = [
            shaped(memory, *shape) for memory, (_, _, _, *shape) in zip(memories, descriptions, strict=True)
        ]
        self._transfers: list[Transfer] = [
            transport.get(rank, tag, Region.over(memory, chunk=chunk))
            for memory, (tag, chunk, *_) in zip(memories, descriptions, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Whether the transfer of each array has completed or failed."""
        return all(transfer.status for transfer in self._transfers)

    def get(self, timeout: float | None) -> Any:
        """Wait for the arrays for at most `timeout` seconds, and return the result."""
        end = time.monotonic() + limit(timeout)
        for transfer in self._transfers:
            try:
                transfer.wait(transfer.chunks, max(0.0, end - time.monotonic()))
            except errors.DeviceLostError:
                self._raise_lost(transfer.reason)
        return loads(self._data, [self._arrays[k] for k in self._numbers])


class CallResult:
    """The future of `Device.call`, or of a method of a remote object.

    The future is done when all work that the function put into its stream is done. `get` raises a failure, unless a
    synchronization of the stream has raised it before.
    """

    def __init__(self, reply: Reply, channel: Channel, description: str) -> None:
        self._reply = reply
        self._channel = channel
        self._description = description
        self._loaded: tuple[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether the result has arrived."""
        value = self._reply.value
        return self._reply.done and (value.done if isinstance(value, ArrayReply) else True)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call()`` once, when the result has arrived or its large arrays are in flight.

        A thread of the pool calls it, so it must not block.
        """
        self._reply.when_set(lambda _: call())

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it: the same object each time.

        Raises
        ------
        RemoteError
            The function raised an exception. The exception is the ``__cause__`` if it could be sent; its traceback is
            ``remote_traceback``.
        DeviceLostError
            The device was lost.
        StallError
            The result did not arrive within `timeout` seconds.
        """
        timeout = checked_timeout(timeout)
        try:
            if self._loaded is None:
                start = time.monotonic()
                value = self._reply.get(self._description, timeout)
                if isinstance(value, ArrayReply):
                    left = None if timeout is None else timeout - (time.monotonic() - start)
                    self._loaded = (value.get(left),)
                else:
                    self._loaded = (loads(value),)
            return self._loaded[0]
        except BaseException as error:
            self._channel.remove_failure(error)
            raise
