"""`Event`: a point in a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from .. import errors
from ..errors.options import checked_timeout
from .agent.channel import Channel
from .agent.protocol import Op
from .agent.reply import Reply
from .ids import new_id

if TYPE_CHECKING:
    from .device import Device
    from .stream import Stream


class Event:
    """A point in a stream of a device, for which streams of every device and the application can wait.

    Parameters
    ----------
    device : Device
    timing : bool
        Whether ``later - earlier`` is asked for.

    Attributes
    ----------
    recorded : bool
        Whether it stands for a point yet.
    """

    def __init__(self, device: Device, timing: bool = True) -> None:
        self._handle = 0
        self.device = device
        self.timing = timing
        self.recorded = False
        self._channel: Channel | None = None
        self._freed = device.connection.finalizer
        self._handle = new_id()

    @property
    def handle(self) -> int:
        """The number by which its agent knows it."""
        return self._handle

    def record(self, stream: Stream | None = None) -> None:
        """Let it stand for the point behind everything that a stream of its device was given."""
        stream = self.device.default_stream if stream is None else stream
        if getattr(stream, "device", self.device) is not self.device:
            raise errors.ArgumentError(
                f"the event is of device {self.device.index}, and the stream of device {stream.device.index}"
            )
        self._channel = self.device.channel(stream)
        self.device.connection.post(self._channel, Op.RECORD, self._handle, self.timing)
        self.recorded = True

    @property
    def done(self) -> bool:
        """Whether the stream has come so far; true for an event that was not recorded."""
        if not self.recorded:
            return True
        return bool(self._ask(Op.REACHED, self._handle).get(self._what))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the stream has come so far; raises as `Stream.synchronize`."""
        timeout = checked_timeout(timeout)
        if self.recorded:
            reply = self._ask(Op.UNTIL, self._handle)
            reply.wait(self._what, timeout)
            assert self._channel is not None
            self._channel.raise_kept()
            reply.get(self._what)

    def elapsed(self, earlier: Event) -> float:
        """Return the seconds between `earlier` and this event of the same device; waits for both."""
        if checked(earlier).device is not self.device:
            raise errors.ArgumentError("the clocks of two devices differ: ask for events of one", name="earlier")
        if not (self.recorded and earlier.recorded and self.timing and earlier.timing):
            raise errors.ArgumentError("both events must have been recorded, and made with timing=True")
        return float(self._ask(Op.ELAPSED, self._handle, earlier._handle).get(self._what))

    def __sub__(self, earlier: Event) -> float:
        """Return the milliseconds since `earlier`."""
        return 1e3 * self.elapsed(earlier) if isinstance(earlier, Event) else NotImplemented

    @property
    def _what(self) -> str:
        return f"an event of {self.device.connection.label}"

    def _ask(self, op: Op, *operands: int) -> Reply:
        return self.device.connection.ask(None, op, *operands, Reply)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an event stays with its device")

    def __del__(self) -> None:
        handle = getattr(self, "_handle", 0)
        if handle:
            self._freed(handle)


def checked(thing: Any, wanted: str = "an event") -> Event:
    """Return an event; raise `ArgumentError` for anything else."""
    if not isinstance(thing, Event):
        raise errors.ArgumentError(f"{thing!r:.60}: give {wanted} of a device", name="event")
    return thing
