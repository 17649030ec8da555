"""`CallResult`: the future of a function that was called on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .._check import checked_timeout
from .agent import code
from .channel import Channel
from .reply import Answer, Reply


class CallResult:
    """The future of `Device.call`, or of a method of a remote object.

    It is done when all work that the function put into its stream is done. A failure is raised by `get`, or by the
    next synchronization of the stream if that comes first.
    """

    def __init__(self, reply: Reply, channel: Channel, what: str) -> None:
        self._reply = reply
        self._channel = channel
        self._what = what
        self._loaded: tuple[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether the result has arrived."""
        value = self._reply.value
        return self._reply.done and (value.done if isinstance(value, Answer) else True)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call()`` once, when the result is there or its large arrays are on their way.

        A thread of the pool calls it, so it must not wait.
        """
        self._reply.when_come(call)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it: the same object each time.

        Raises
        ------
        RemoteError
            The function raised. Its exception is ``__cause__`` if it could be sent; its traceback is
            ``remote_traceback``.
        DeviceLostError, StallError
        """
        timeout = checked_timeout(timeout)
        try:
            if self._loaded is None:
                begun = time.monotonic()
                value = self._reply.get(self._what, timeout)
                if isinstance(value, Answer):
                    left = None if timeout is None else timeout - (time.monotonic() - begun)
                    self._loaded = (value.get(left),)
                else:
                    self._loaded = (code.loads(value),)
            return self._loaded[0]
        except BaseException as error:
            self._channel.forget(error)
            raise
