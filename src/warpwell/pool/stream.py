"""`Stream`: an order of calls on a device of the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .. import errors
from ..errors.options import checked_timeout
from ..targets.uninterrupted import uninterrupted
from .agent.channel import Channel
from .agent.protocol import Op
from .agent.reply import Reply
from .copy.copying import in_order
from .event import Event, checked
from .ids import new_id

if TYPE_CHECKING:
    from .device import Device


class Stream:
    """Calls of a stream run in their order; those of different streams in any. ``device.stream()`` makes one.

    It is passed where a stream is taken: ``kernel[n, stream](...)``, ``buffer.copy_to_host(stream=stream)``. The
    default stream of a device waits for no other, nor they for it.

    Attributes
    ----------
    device : Device
    priority : int
        0 is the least.
    """

    def __init__(self, device: Device, priority: int = 0, *, channel: Channel | None = None) -> None:
        self.device = device
        self.priority = priority
        self._default = channel is not None
        self._ended = device.connection.stream_finalizer
        self._channel: Channel | None = channel
        if channel is None:
            channel = Channel(new_id())
            with uninterrupted(), device.connection.lock:  # who synchronizes the device finds a stream its agent knows
                device.connection.tell(Op.STREAM, priority, stream=channel.number)
                device.connection.channels[channel.number] = self._channel = channel

    @property
    def channel(self) -> Channel:
        """The application's end of it."""
        if self._channel is None:
            raise errors.ClosedError("the stream was closed")
        return self._channel

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything that the stream was given is done.

        Raises
        ------
        RemoteError
            One of the calls failed since the last time; the first one's is raised, the others are in its notes.
        DeviceLostError
            The device is gone.
        StallError
            It was not done after `timeout` seconds.
        """
        connection = self.device.connection
        what = f"a stream of {connection.label}"
        timeout = checked_timeout(timeout)
        reply = connection.ask(self.channel, Op.SYNCHRONIZE, Reply)
        reply.wait(what, timeout)
        self.channel.raise_kept()
        reply.get(what)

    def record(self, event: Event | None = None) -> Event:
        """Record an event behind everything that the stream was given, and return it.

        Parameters
        ----------
        event : Event, optional
            Of this device; a new one otherwise.
        """
        event = Event(self.device) if event is None else checked(event)
        event.record(self)
        return event

    def wait(self, other: Event | Stream) -> None:
        """Let later calls wait for an event, or for all that another stream was given, of any device.

        An event that was never recorded is waited for by nobody. One that is recorded again later stands for the point
        that it stood for at this call.
        """
        event = other.record() if isinstance(other, Stream) else checked(other, "an event, or a stream")
        if not event.recorded:
            return
        to, origin = self.device, event.device
        if to is origin:
            to.connection.post(self.channel, Op.WAIT, event.handle)
        elif to.caller is not origin.caller:
            event.synchronize()  # two pools know nothing of each other
        else:
            channel = self.channel
            if channel.full:
                channel.wait_for_room(to.connection)
            number = new_id()
            one, two = in_order(to.connection, origin.connection)
            with one.lock, two.lock:
                to.connection.check()
                origin.connection.tell(Op.NOTIFY, event.handle, number, to.connection.rank)
                to.connection.post_locked(channel, Op.AWAIT, number, origin.connection.rank)

    def close(self) -> None:
        """End the stream behind what it was given. Its failures are raised by the default stream from now on."""
        if self._default or self._channel is None:
            return
        if self.device.connection.lost is None:
            self.device.connection.end_stream(self._channel.number)
        self._channel = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        number = "closed" if self._channel is None else self._channel.number
        return f"<Stream {number} of device {self.device.index}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream stays with its device")

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None and not self._default:
            self._ended(channel.number)
