"""`Result`: what a function that was called on a device returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import code
from .channel import Channel
from .reply import Reply


class Result:
    """The result of `Device.call`, or of a method of a remote object, which may not be there yet.

    It is there when everything is done that the function left in its stream. A failure is raised by `get`, or by the
    next synchronization of the stream if that comes first.
    """

    def __init__(self, reply: Reply, channel: Channel, what: str) -> None:
        self._reply = reply
        self._channel = channel
        self._what = what

    @property
    def done(self) -> bool:
        """Whether it is there."""
        return self._reply.done

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when it is there, perhaps twice, in a thread of the pool's: it must not wait."""
        self._reply.when_come(call)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Raises
        ------
        RemoteError
            The function raised, which is ``__cause__`` where it can be had; the traceback is in ``remote_traceback``.
        DeviceLostError, StallError
        """
        try:
            return code.loads(self._reply.get(self._what, timeout))
        except BaseException as error:
            self._channel.forget(error)
            raise
