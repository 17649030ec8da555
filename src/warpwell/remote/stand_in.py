"""`RemoteResource`: the program's proxy for an object on an agent that must be closed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import errors
from ..pool import Remote

Self = TypeVar("Self", bound="RemoteResource")
P = ParamSpec("P")
T = TypeVar("T")


class RemoteResource(Remote):
    """A `Remote` for an object that must be closed: a context manager that closes the object on its agent.

    An object that is never closed is released when its proxy is garbage-collected.
    """

    name = ""
    closed = False

    def _wait_until_open(self, describe: Callable[..., Any]) -> Any:
        """Wait until the object is open, and return ``describe(object)``, which the agent calls."""
        try:
            return self.device.call(describe, self).get()
        except errors.RemoteError:
            # the channel keeps the failure of the opening, too, but the next synchronization must not raise it again
            channel = self.device.default_stream.channel
            for failure in [f for f in channel.failures if f.call == f"making of {self.path!r}"]:
                channel.remove_failure(failure)
            raise

    @property
    def handle(self) -> int:
        """The handle of the object on its agent.

        Raises
        ------
        ClosedError
            The object was closed.
        """
        if self.closed:
            raise errors.ClosedError(f"{self.name!r} on device {self.device.index} is closed: open it again")
        return super().handle

    def close(self) -> None:
        """Close the object (idempotent). It stays open while a launch in another stream uses it.

        Raises
        ------
        RemoteError
            Closing failed; call `close` again.
        DeviceLostError
            The device was lost, with all data that had not reached storage. The object counts as closed.
        """
        self._close_with("close")

    def _close_with(self, method: str, **options: Any) -> None:
        if self.closed:
            return
        if self.device.lost is None:
            try:
                self.call(method, **options).get()
            except errors.DeviceLostError:
                self.closed = True
                raise
            self.free()
        self.closed = True

    def free(self) -> None:
        """Free the object without closing it; prefer `close`."""
        super().free()
        self.closed = True

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def forwarded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method for a proxy that calls `method` of the object on the agent, and waits for the result."""

    @functools.wraps(method)
    def call(self: Remote, /, *args: P.args, **options: P.kwargs) -> T:
        keywords: dict[str, Any] = dict(options)
        result: T = self.call(method.__name__, *args, **keywords).get()
        return result

    return call
