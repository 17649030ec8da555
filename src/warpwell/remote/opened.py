"""`Opened`: what stands for an object that an agent has opened, and that is to be closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import errors
from ..pool.services import Remote

Self = TypeVar("Self", bound="Opened")


class Opened(Remote):
    """A `Remote` with an end: a context manager that closes the object on its agent.

    One that is dropped without is released there.
    """

    name = ""
    closed = False

    def opened(self, about: Callable[..., Any]) -> Any:
        """Wait until the object is open, and return what ``about(object)`` says of it."""
        try:
            return self.device.call(about, self).get()
        except errors.RemoteError:
            # that it could not be opened is also kept for the next synchronization, which is not to tell it again
            channel = self.device.default_stream.channel
            for failure in [f for f in channel.failures if f.call == f"making of {self.path!r}"]:
                channel.forget(failure)
            raise

    @property
    def handle(self) -> int:
        """The number by which its agent knows it.

        Raises
        ------
        ClosedError
            It was closed.
        """
        if self.closed:
            raise errors.ClosedError(f"{self.name!r} on device {self.device.index} is closed: open it again")
        return super().handle

    def close(self) -> None:
        """Close the object (idempotent). Where a launch of another stream still uses it, it stays open.

        Raises
        ------
        RemoteError
            What closing it raised; it may be closed again.
        DeviceLostError
            The device is gone, and with it what had not reached storage. The object counts as closed.
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
        """Let the object go as it is; prefer `close`."""
        super().free()
        self.closed = True

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
