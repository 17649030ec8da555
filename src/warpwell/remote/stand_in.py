"""`Remote` and `RemoteResource`: they stand in the application for objects that live on an agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import errors
from ..pool import AgentObject, CallResult, Device, Stream
from ..pool.copies import Arguments

Self = TypeVar("Self", bound="RemoteResource")
P = ParamSpec("P")
T = TypeVar("T")


class Remote(AgentObject):
    """Stands in the application for an object on an agent; ``device.create(...)`` makes both.

    Pass it to kernels in place of the object, if the object can be an argument (an array on storage can). Call methods
    of the object by name: ``remote.call("put", b"key", b"value")``.

    Attributes
    ----------
    device : Device
    path : str
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        self.path = path
        super().__init__(device, handle)

    @property
    def warpwell_place(self) -> Device:
        """The device on which launches with this argument run."""
        return self.device

    def call(self, method: str, *args: Any, stream: Stream | None = None, **options: Any) -> CallResult:
        """Call a method without waiting; buffers among the arguments arrive as arrays."""
        with Arguments(self.device.connection, self.device.channel(stream), self.device.handle_of) as arguments:
            data, handles = arguments.pack((args, options))
            return self._ask(method, handles, data, stream)

    def attribute(self, name: str) -> Any:
        """Wait for an attribute of the object, and return it."""
        return self._ask(f".{name}", (), b"", None).get()

    def _ask(self, name: str, handles: tuple[int, ...], data: bytes, stream: Stream | None) -> CallResult:
        return self.device.call_method(self, self.path, name, handles, data, stream)

    def __repr__(self) -> str:
        return f"<Remote {self.path} on device {self.device.index}>"


class RemoteResource(Remote):
    """A `Remote` that has to be closed: a context manager that closes the object on its agent.

    An object that is never closed is released when its stand-in is garbage-collected.
    """

    name = ""
    closed = False

    def opened(self, about: Callable[..., Any]) -> Any:
        """Wait until the object is open, and return ``about(object)``, which is called on the agent."""
        try:
            return self.device.call(about, self).get()
        except errors.RemoteError:
            # the failed opening is also kept for the next synchronization, which must not raise it again
            channel = self.device.default_stream.channel
            for failure in [f for f in channel.failures if f.call == f"making of {self.path!r}"]:
                channel.forget(failure)
            raise

    @property
    def handle(self) -> int:
        """The number under which the agent keeps the object.

        Raises
        ------
        ClosedError
            It was closed.
        """
        if self.closed:
            raise errors.ClosedError(f"{self.name!r} on device {self.device.index} is closed: open it again")
        return super().handle

    def close(self) -> None:
        """Close the object (idempotent). It stays open if a launch of another stream still uses it.

        Raises
        ------
        RemoteError
            Closing it failed; it may be closed again.
        DeviceLostError
            The device is lost, and with it everything that had not reached storage. The object counts as closed.
        """
        self._leave("close")

    def _leave(self, method: str, **options: Any) -> None:
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
        """Release the object without closing it; prefer `close`."""
        super().free()
        self.closed = True

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def forwarded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method for a stand-in: it calls `method` of the object on the agent, and waits for what that returns."""

    @functools.wraps(method)
    def call(self: Remote, /, *args: P.args, **options: P.kwargs) -> T:
        given: dict[str, Any] = dict(options)
        result: T = self.call(method.__name__, *args, **given).get()
        return result

    return call
