"""Copies as the program asks for them: to a device, from one, between two; and large arguments of calls."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import uninterrupted
from ..agent.code import dumps
from ..agent.large_arrays import flat, is_large
from ..agent.protocol import INLINE, WINDOW_BYTES, Op, new_id
from ..caller import AgentConnection
from ..channel import Channel
from ..pinned import Pinned, is_pinned, memory_of
from ..reply import Reply
from ..transport.bulk import Region, Transfer
from ..transport.milestone import limit
from .pipelined import give_up

PRIVATE = 8 << 20
"""Arrays of at most so many bytes are copied first, so that the call need not wait until they are sent."""

PRIVATE_ARGUMENT = WINDOW_BYTES // 2
"""The same for arguments of calls."""

TINY = 4096
"""Arrays of at most so many bytes are not lent: they are sent as fast."""


def upload(connection: AgentConnection, channel: Channel, handle: int, source: NDArray[Any]) -> None:
    """Copy an array to a buffer. It may change when this returns; if it is pinned, when the stream is there."""
    nbytes = source.nbytes
    lent = _lent_to(connection, source) if nbytes > TINY else None
    if lent is None and nbytes <= INLINE:
        connection.post(channel, Op.WRITE, handle, source.tobytes(), cost=nbytes)
        return
    if lent is not None:
        connection.post(channel, Op.WRITE_LENT, handle, *lent, nbytes=nbytes)
        return
    whole = np.ascontiguousarray(source)
    own = whole is not source and not np.may_share_memory(whole, source)
    if not own and not is_pinned(source) and nbytes <= PRIVATE:
        whole, own = whole.copy(), True
    with BulkCopy(connection, channel) as bulk:
        cost = nbytes if own else 0
        bulk.put(whole, Op.WRITE_BULK, handle, cost=cost, nbytes=nbytes - cost, keep=True)
        if not own and not is_pinned(source):
            bulk.finish()


def download(connection: AgentConnection, channel: Channel, handle: int, out: NDArray[Any]) -> None:
    """Copy a buffer to an array of its shape and dtype, and wait for it."""
    nbytes = out.nbytes
    what = f"a copy from {connection.label}"
    lent = _lent_to(connection, out) if nbytes > TINY else None
    if lent is not None:
        reply = connection.ask(channel, Op.READ_LENT, handle, Reply, *lent, nbytes=nbytes)
        try:
            reply.wait(what)
        except BaseException:
            _give_up_lent(connection, reply)
            raise
        channel.raise_kept()
        reply.get(what)
    elif nbytes <= INLINE:
        reply = connection.ask(channel, Op.READ, handle, Reply, nbytes=nbytes)
        reply.wait(what)
        channel.raise_kept()
        out[...] = np.frombuffer(reply.get(what), out.dtype).reshape(out.shape)
    else:
        into = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        with BulkCopy(connection, channel) as bulk:
            reply = bulk.get(into, Op.READ_BULK, handle, nbytes=nbytes)
            reply.wait(what)
            channel.raise_kept()
            reply.get(what)
            bulk.finish()
        if into is not out:
            out[...] = into


def between_agents(
    source: tuple[AgentConnection, int],
    destination: tuple[AgentConnection, int],
    nbytes: int,
    leading: AgentConnection,
    channel: Channel,
    other: Channel | None,
) -> None:
    """Copy a buffer to one of another device of the same transport, and do not wait for it.

    Parameters
    ----------
    source, destination : (AgentConnection, int)
        The devices and the buffers' handles.
    nbytes : int
    leading : AgentConnection
        The one of the two in whose stream the copy has its place,
    channel : Channel
        and that stream.
    other : Channel, optional
        A stream of the other device that the copy has its place in, too.
    """
    (origin, source_handle), (to, destination_handle) = source, destination
    outgoing = leading is origin
    following = to if outgoing else origin
    handles = (source_handle, destination_handle) if outgoing else (destination_handle, source_handle)
    number = new_id()
    tag = leading.caller.tag(origin.rank, to.rank)
    plan = tuple(to.transfers.plan(nbytes))
    direct = _may_write(origin, to)
    lead = (handles[0], number, outgoing, following.rank, tag, plan, direct and following.process)
    follow = (handles[1], number, not outgoing, leading.rank, tag, plan, direct and leading.process)
    for room, connection in ((channel, leading), (other, following)):
        if room is not None and room.full:
            connection.wait_for_room(room)
    # both at once: if the streams of two devices had copies in different orders, each would wait for the other
    one, two = in_order(leading, following)
    with one.lock, two.lock:
        leading.check()
        leading.refuse(leading.pairing or following.pairing)
        leading.pairing = following.pairing = True
        try:
            if other is None:
                following.tell(Op.FOLLOW, *follow, stream=-1)
            else:
                following.post_locked(other, Op.FOLLOW, *follow)
            leading.post_locked(channel, Op.LEAD, *lead, nbytes=nbytes)
        except BaseException:  # Ctrl-C, or one is gone: neither shall wait for a half that was not sent
            for connection in (following, leading):
                _give_up_at(connection, number)
            raise
        finally:
            leading.pairing = following.pairing = False


def _may_write(source: AgentConnection, destination: AgentConnection) -> bool:
    """Return whether one device's agent may try to write to another's memory, instead of sending."""
    return (
        destination.transfers.direct
        and destination.transport.lends
        and (source.host, source.target) == (destination.host, destination.target)
    )


def in_order(one: AgentConnection, other: AgentConnection) -> tuple[AgentConnection, AgentConnection]:
    """Return two connections in the order in which everybody takes their locks."""
    return (one, other) if one.rank < other.rank else (other, one)


def _give_up_at(connection: AgentConnection, number: int) -> None:
    """Tell an agent to give a copy up; one that is gone needs no telling."""
    with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
        connection.tell(Op.CANCEL, number)


# -- pinned arrays that the agent reads and writes itself ----------------------------------------------------------


def _lent_to(connection: AgentConnection, array: NDArray[Any]) -> tuple[int, int] | None:
    """Return the number of an array's memory and the offset in it, if the agent can reach the memory itself.

    The first time, the agent is asked to map it.
    """
    memory = memory_of(array)
    if memory is None or not array.flags.c_contiguous or not connection.transport.lends:
        return None
    known = memory.reached.get(connection)
    if known is None:
        known = connection.host == socket.gethostname() and _share(connection, memory)
        memory.reached[connection] = known
    return (memory.number, int(array.ctypes.data) - memory.address) if known else None


def _share(connection: AgentConnection, memory: Pinned) -> bool:
    reply = connection.ask(None, Op.SHARE, Reply, memory.number, memory.path, len(memory.memory))
    try:
        reply.get(f"{connection.label} to map an array of the application")
    except errors.RemoteError:
        return False  # another user, or another host by the same name: it is sent, as all other arrays are
    return True


def _give_up_lent(connection: AgentConnection, reply: Reply) -> None:
    """Have an agent leave an array alone that it was to write; wait a little for one that has begun."""
    if connection.lost is None and not reply.done:
        with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
            connection.tell(Op.CANCEL, reply.number)
            reply.wait("a copy that was given up", 1.0)


# -- bulk data -----------------------------------------------------------------------------------------------------


class BulkCopy:
    """Bulk data between the application and a device, in a stream's order; a block that ends early gives them up.

    Both sides are told to begin without an interruption between them: Ctrl-C there would leave an agent waiting for
    data that nobody sends. Whatever else ends the block early, both leave the copy alone, and the agent tells nobody.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
    """

    def __init__(self, connection: AgentConnection, channel: Channel) -> None:
        self._connection, self._channel = connection, channel
        self._reply: Reply | None = None
        self._transfer: Transfer | None = None

    def put(self, source: NDArray[Any], op: Op, handle: int, *more: Any, **counts: Any) -> Reply:
        """Begin to send an array, and tell the agent to take it (see `AgentConnection.ask` for `counts`)."""
        ends = self._connection.transport.rank, self._connection.rank
        return self._begin(self._connection.transport.put, ends, source, op, handle, *more, **counts)

    def get(self, out: NDArray[Any], op: Op, handle: int, **counts: Any) -> Reply:
        """Tell the agent to send, into an array."""
        ends = self._connection.rank, self._connection.transport.rank
        return self._begin(self._connection.transport.get, ends, out, op, handle, **counts)

    def _begin(
        self,
        way: Callable[[int, int, Region], Transfer],
        ends: tuple[int, int],
        array: NDArray[Any],
        op: Op,
        handle: int,
        *more: Any,
        **counts: Any,
    ) -> Reply:
        connection, caller = self._connection, self._connection.caller
        plan = connection.transfers.plan(array.nbytes)
        while self._reply is None:
            if self._channel.full:
                connection.wait_for_room(self._channel)  # as long as it takes, and it can be interrupted
            with uninterrupted():
                if self._channel.full:
                    continue  # other threads were faster
                connection.check()
                tag = caller.tag(*ends)
                try:
                    self._transfer = way(connection.rank, tag, Region.over(array, chunk=plan.chunk))
                except errors.DeviceLostError as error:
                    connection.gone(str(error))
                caller.tags.begun(*ends, self._transfer)
                self._reply = connection.ask(
                    self._channel, op, handle, Reply, tag, tuple(plan), *more, transfer=self._transfer, **counts
                )
        return self._reply

    def finish(self) -> None:
        """Wait for the data; a copy that was refused ends too, and its failure is kept or raised elsewhere."""
        transfer, reply = self._transfer, self._reply
        assert transfer is not None and reply is not None
        begun = time.perf_counter()
        try:
            transfer.wait(transfer.chunks, limit())
        except errors.DeviceLostError:
            self._connection.gone(transfer.reason)
        except errors.PoolError:
            if not reply.done:
                raise
        finally:
            if reply.counted is not None:
                reply.counted[2] += time.perf_counter() - begun

    def __enter__(self) -> BulkCopy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._transfer is None:
            return
        self._transfer.cancel()
        try:
            if self._reply is not None and self._connection.lost is None and not self._reply.done:
                _give_up_at(self._connection, self._reply.number)
        finally:
            give_up(self._transfer)  # whatever comes: nothing may touch the array any more


class Arguments:
    """The arguments of one call of a device, as a block around it: one that ends early takes back what was sent.

    Large arrays among them are sent as bulk data, before the call that takes them.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
        The stream's: the arrays have their place in its order, before the call.
    handle_of : callable
        Returns the handle of an object that is on the device, None for anything else.
    """

    def __init__(self, connection: AgentConnection, channel: Channel, handle_of: Callable[[Any], int | None]) -> None:
        self._connection, self._channel, self._on_device = connection, channel, handle_of
        self._arrays: dict[int, tuple[int, NDArray[Any]]] = {}

    def pack(self, value: Any) -> tuple[bytes, tuple[int, ...]]:
        """Send the large arrays of a value; return it pickled, with the handles that stand in it."""
        data, handles = dumps(value, self._handle_of)
        for handle, array in self._arrays.values():
            self._send(handle, array)
        return data, handles

    def _handle_of(self, thing: Any) -> int | None:
        if not is_large(thing):
            return self._on_device(thing)
        known = self._arrays.get(id(thing))
        if known is None:
            known = self._arrays[id(thing)] = new_id(), thing
        return known[0]

    def _send(self, handle: int, array: NDArray[Any]) -> None:
        whole, about = flat(array)
        own = not np.may_share_memory(whole, array)
        if not own and whole.nbytes <= PRIVATE_ARGUMENT:
            whole, own = whole.copy(), True
        with BulkCopy(self._connection, self._channel) as bulk:
            cost = whole.nbytes if own else 0
            bulk.put(whole, Op.ARGUMENT, handle, about, cost=cost, nbytes=whole.nbytes - cost)
            if not own:
                bulk.finish()

    def __enter__(self) -> Arguments:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # no call will take them
            for handle, _array in self._arrays.values():
                self._connection.finalizer(handle)
