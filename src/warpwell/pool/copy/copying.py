"""Copies as the application asks for them: to a buffer, from one, and between two."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets.uninterrupted import uninterrupted
from ..agent.caller import Connection
from ..agent.protocol import INLINE, Op
from ..agent.reply import Reply
from ..ids import new_id
from ..pinned import is_pinned
from ..transport.milestone import limit
from ..transport.region import Region
from ..transport.transport import Transfer
from .copies import give_up
from .lent import lent_to

if TYPE_CHECKING:
    from ..buffer import Buffer
    from ..device import Device
    from ..stream import Stream

PRIVATE = 8 << 20
"""Arrays of at most so many bytes are copied first, so that the call need not wait until they are sent."""

TINY = 4096
"""Arrays of at most so many bytes are not lent: they are sent as fast."""


def upload(buffer: Buffer, source: NDArray[Any], stream: Stream | None) -> None:
    """Copy an array to a buffer. It may change when this returns; if it is pinned, when the stream is there."""
    device = buffer.device
    connection, channel, handle = device.connection, device.channel(stream), buffer.handle
    lent = lent_to(device, source) if buffer.nbytes > TINY else None
    if lent is None and buffer.nbytes <= INLINE:
        connection.post(channel, Op.WRITE, handle, source.tobytes(), cost=buffer.nbytes)
        return
    if lent is not None:
        connection.post(channel, Op.WRITE_LENT, handle, *lent, nbytes=buffer.nbytes)
        return
    whole = np.ascontiguousarray(source)
    own = whole is not source and not np.may_share_memory(whole, source)
    if not own and not is_pinned(source) and buffer.nbytes <= PRIVATE:
        whole, own = whole.copy(), True
    with Bulk(device, channel) as bulk:
        cost = buffer.nbytes if own else 0
        bulk.put(whole, Op.WRITE_BULK, handle, cost=cost, nbytes=buffer.nbytes - cost, keep=True)
        if not own and not is_pinned(source):
            bulk.finish()


def download(buffer: Buffer, out: NDArray[Any], stream: Stream | None) -> None:
    """Copy a buffer to an array, and wait for it."""
    device = buffer.device
    connection, channel, handle = device.connection, device.channel(stream), buffer.handle
    what = f"a copy from {connection.label}"
    lent = lent_to(device, out) if buffer.nbytes > TINY else None
    if lent is None and buffer.nbytes <= INLINE:
        reply = connection.ask(channel, Op.READ, handle, Reply, nbytes=buffer.nbytes)
        reply.wait(what)
        channel.raise_kept()
        out[...] = np.frombuffer(reply.get(what), buffer.dtype).reshape(buffer.shape)
    else:
        if lent is not None:
            reply = connection.ask(channel, Op.READ_LENT, handle, Reply, *lent, nbytes=buffer.nbytes)
            try:
                reply.wait(what)
            except BaseException:
                _give_up_lent(connection, reply)
                raise
            channel.raise_kept()
            reply.get(what)
            return
        direct = out.flags.c_contiguous
        into = out if direct else np.empty(buffer.shape, buffer.dtype)
        with Bulk(device, channel) as bulk:
            reply = bulk.get(into, Op.READ_BULK, handle, nbytes=buffer.nbytes)
            reply.wait(what)
            channel.raise_kept()
            reply.get(what)
            bulk.finish()
        if not direct:
            out[...] = into


def between(destination: Buffer, source: Buffer, stream: Stream | None) -> None:
    """Copy a buffer to another, of any device, and do not wait for it.

    The copy has its place in the order of `stream`, which is of either device. Without a stream it is in the default
    streams of both.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise errors.ArgumentError(
            f"the source is {source.dtype} {source.shape}, and the destination {destination.dtype} "
            f"{destination.shape}: they must be alike",
            name="source",
        )
    to, origin = destination.device, source.device
    if stream is not None and stream.device not in (to, origin):
        raise errors.ArgumentError(f"the stream is of device {stream.device.index}: use one of the buffers' devices")
    if to is origin:
        if destination.overlaps(source) and destination.nbytes:
            raise errors.ArgumentError("the source overlaps the destination: copy it elsewhere first", name="source")
        to.connection.post(to.channel(stream), Op.COPY, destination.handle, source.handle, nbytes=source.nbytes)
    elif to.caller is not origin.caller:
        # two pools know nothing of each other: through the application
        upload(destination, source.copy_to_host(stream=stream if stream and stream.device is origin else None),
               stream if stream and stream.device is to else None)  # fmt: skip
    elif destination.handle and source.handle and source.nbytes:
        _between_agents(destination, source, stream)
    elif stream is None:  # no data will hold either stream back until the other is there
        ends = to.default_stream.record(), origin.default_stream.record()
        to.default_stream.wait(ends[1])
        origin.default_stream.wait(ends[0])


def _between_agents(destination: Buffer, source: Buffer, stream: Stream | None) -> None:
    leading = source if stream is not None and stream.device is source.device else destination
    following = destination if leading is source else source
    first, second = leading.device.connection, following.device.connection
    channel = leading.device.channel(stream)
    other = second.channels[0] if stream is None else None
    number = new_id()
    tag = leading.device.caller.tag(source.device.connection.rank, destination.device.connection.rank)
    plan = tuple(destination.device.transfers.plan(source.nbytes))
    direct = _may_write(source.device, destination.device)
    lead = (leading.handle, number, leading is source, second.rank, tag, plan, direct and following.device.process)
    follow = (following.handle, number, following is source, first.rank, tag, plan, direct and leading.device.process)
    for room, connection in ((channel, first), (other, second)):
        if room is not None and room.full:
            room.wait_for_room(connection)
    # both at once: if the streams of two devices had copies in different orders, each would wait for the other
    one, two = in_order(first, second)
    with one.lock, two.lock:
        first.check()
        first.refuse(first.pairing or second.pairing)
        first.pairing = second.pairing = True
        try:
            if other is None:
                second.tell(Op.FOLLOW, *follow, stream=-1)
            else:
                second.post_locked(other, Op.FOLLOW, *follow)
            first.post_locked(channel, Op.LEAD, *lead, nbytes=source.nbytes)
        except BaseException:  # Ctrl-C, or one is gone: neither shall wait for a half that was not sent
            for connection in (second, first):
                with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
                    connection.tell(Op.CANCEL, number)
            raise
        finally:
            first.pairing = second.pairing = False


def _may_write(source: Device, destination: Device) -> bool:
    """Tell whether one device's agent may try to write to another's memory, instead of sending."""
    return (
        destination.transfers.direct
        and destination.connection.transport.lends
        and (source.host, source.target) == (destination.host, destination.target)
    )


def in_order(one: Connection, other: Connection) -> tuple[Connection, Connection]:
    """Return two connections in the order in which everybody takes their locks."""
    return (one, other) if one.rank < other.rank else (other, one)


def region(array: NDArray[Any], chunk: int) -> Region:
    """Return the region of a contiguous array."""
    return Region(int(array.ctypes.data), array.nbytes, chunk, None, array)


def _give_up_lent(connection: Connection, reply: Reply) -> None:
    """Have an agent leave an array alone that it was to write; wait a little for one that has begun."""
    if connection.lost is None and not reply.done:
        with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
            connection.tell(Op.CANCEL, reply.number)
            reply.wait("a copy that was given up", 1.0)


class Bulk:
    """Bulk data between the application and a device, in a stream's order; a block that ends early gives them up.

    Both sides are told to begin without an interruption between them: Ctrl-C there would leave an agent waiting for
    data that nobody sends. Whatever else ends the block early, both leave the copy alone, and the agent tells nobody.

    Parameters
    ----------
    device : Device
    channel : Channel
    """

    def __init__(self, device: Device, channel: Any) -> None:
        self._device, self._channel, self._connection = device, channel, device.connection
        self._reply: Reply | None = None
        self._transfer: Transfer | None = None

    def put(self, source: NDArray[Any], op: Op, handle: int, *more: Any, **counts: Any) -> Reply:
        """Begin to send an array, and tell the agent to take it (see `Connection.ask` for `counts`)."""
        ends = self._device.caller.transport.rank, self._connection.rank
        return self._begin(self._connection.transport.put, ends, source, op, handle, *more, **counts)

    def get(self, out: NDArray[Any], op: Op, handle: int, **counts: Any) -> Reply:
        """Tell the agent to send, into an array."""
        ends = self._connection.rank, self._device.caller.transport.rank
        return self._begin(self._connection.transport.get, ends, out, op, handle, **counts)

    def _begin(self, way: Callable[[int, int, Region], Transfer], ends: tuple[int, int], array: NDArray[Any], op: Op,
               handle: int, *more: Any, **counts: Any) -> Reply:  # fmt: skip
        connection, caller = self._connection, self._device.caller
        plan = self._device.transfers.plan(array.nbytes)
        while self._reply is None:
            if self._channel.full:
                connection.wait_for_room(self._channel)  # as long as it takes, and it can be interrupted
            with uninterrupted():
                if self._channel.full:
                    continue  # other threads were faster
                connection.check()
                tag = caller.tag(*ends)
                try:
                    self._transfer = way(connection.rank, tag, region(array, plan.chunk))
                except errors.DeviceLostError as error:
                    connection.lost = connection.lost or str(error)
                    connection.check()
                    raise
                caller.tags.begun(*ends, self._transfer)
                self._reply = connection.ask(
                    self._channel, op, handle, Reply, tag, tuple(plan), *more, transfer=self._transfer, **counts
                )
        return self._reply

    def finish(self) -> None:
        """Wait for the data; a copy that was refused ends too, and its failure is kept or raised elsewhere."""
        transfer, reply, connection = self._transfer, self._reply, self._connection
        assert transfer is not None and reply is not None
        begun = time.perf_counter()
        try:
            transfer.wait(transfer.chunks, limit())
        except errors.DeviceLostError:
            connection.lost = connection.lost or transfer.reason
            connection.check()
        except errors.PoolError:
            if not reply.done:
                raise
        finally:
            if reply.counted is not None:
                reply.counted[2] += time.perf_counter() - begun

    def __enter__(self) -> Bulk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._transfer is None:
            return
        self._transfer.cancel()
        try:
            if self._reply is not None and self._connection.lost is None and not self._reply.done:
                with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
                    self._connection.tell(Op.CANCEL, self._reply.number)
        finally:
            give_up(self._transfer)  # whatever comes: nothing may touch the array any more
