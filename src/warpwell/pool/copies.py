"""Copies as the application calls them: to a device, from a device, between two; and large arguments of calls."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import uninterrupted
from .agent.code import dumps
from .agent.large_arrays import flat, is_large
from .agent.protocol import INLINE, WINDOW_BYTES, Op, new_id
from .agent.staged import give_up
from .caller import AgentConnection
from .channel import Channel
from .host_memory import Pinned, is_pinned, memory_of
from .reply import Reply
from .transport.bulk import Region, Transfer
from .transport.milestone import limit

MAX_PRIVATE_BYTES = 8 << 20
"""Arrays of at most this size are copied before they are sent, so that the call need not wait for the transfer."""

MAX_PRIVATE_ARGUMENT_BYTES = WINDOW_BYTES // 2
"""The same for arguments of calls."""

MIN_SHARED_BYTES = 4096
"""Smaller arrays in pinned memory are sent, which is as fast as sharing them."""


def upload(connection: AgentConnection, channel: Channel, handle: int, source: NDArray[Any]) -> None:
    """Copy an array to a buffer. It may change after this returns, or after the stream's copy if it is pinned."""
    nbytes = source.nbytes
    if (shared := _shared_with(connection, source)) is not None:
        connection.post(channel, Op.WRITE_LENT, handle, *shared, nbytes=nbytes)
        return
    if nbytes <= INLINE:
        connection.post(channel, Op.WRITE, handle, source.tobytes(), cost=nbytes)
        return
    array = np.ascontiguousarray(source)
    is_private = array is not source and not np.may_share_memory(array, source)
    if not is_private and not is_pinned(source) and nbytes <= MAX_PRIVATE_BYTES:
        array, is_private = array.copy(), True
    with BulkCopy(connection, channel) as bulk:
        cost = nbytes if is_private else 0
        bulk.put(array, Op.WRITE_BULK, handle, cost=cost, nbytes=nbytes - cost, keep=True)
        if not is_private and not is_pinned(source):
            bulk.finish()


def download(connection: AgentConnection, channel: Channel, handle: int, out: NDArray[Any]) -> None:
    """Copy a buffer to an array of its shape and dtype, and wait for the copy."""
    nbytes, description = out.nbytes, f"a copy from {connection.label}"

    def wait(reply: Reply) -> Any:
        reply.wait(description)
        channel.raise_kept()
        return reply.get(description)

    if (shared := _shared_with(connection, out)) is not None:
        reply = connection.ask(channel, Op.READ_LENT, handle, Reply, *shared, nbytes=nbytes)
        try:
            reply.wait(description)
        except BaseException:
            _cancel_shared(connection, reply)
            raise
        wait(reply)
    elif nbytes <= INLINE:
        data = wait(connection.ask(channel, Op.READ, handle, Reply, nbytes=nbytes))
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)
    else:
        array = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        with BulkCopy(connection, channel) as bulk:
            wait(bulk.get(array, Op.READ_BULK, handle, nbytes=nbytes))
            bulk.finish()
        if array is not out:
            out[...] = array


def between_agents(
    source: tuple[AgentConnection, int],
    destination: tuple[AgentConnection, int],
    nbytes: int,
    source_channel: Channel | None,
    destination_channel: Channel | None,
) -> None:
    """Copy a buffer to a buffer of another device of the same transport, without waiting.

    The destination pulls the data; see ``pool/agent/copies.py``.

    Parameters
    ----------
    source, destination : (AgentConnection, int)
        The devices and the handles of the buffers.
    nbytes : int
    source_channel, destination_channel : Channel or None
        The streams that order the copy, at least one.
    """
    (origin, source_handle), (to, destination_handle) = source, destination
    for connection, channel in ((origin, source_channel), (to, destination_channel)):
        connection.check()
        if channel is not None and channel.full:
            connection.wait_for_room(channel)
    number, tag, plan = new_id(), to.caller.tags.new(origin.rank, to.rank), tuple(to.transfers.plan(nbytes))
    pulling = (destination_handle, number, origin.rank, tag, plan, _may_write(origin, to))
    # With both locks: if two streams had copies in different orders, each would wait for the other. A device would wait
    # forever for a call that Ctrl-C has prevented.
    one, two = (origin, to) if origin.rank < to.rank else (to, origin)
    with uninterrupted(), one.lock, two.lock:
        _post(origin, source_channel, Op.SOURCE, source_handle, number, to.rank, destination_channel is None)
        try:
            _post(to, destination_channel, Op.PULL, *pulling, nbytes=nbytes)
        except BaseException:
            _give_up_at(origin, number)
            raise


def _post(connection: AgentConnection, channel: Channel | None, op: Op, *operands: Any, nbytes: int = 0) -> None:
    if channel is None:
        connection.tell(op, *operands, stream=-1)
    else:
        connection.post_locked(channel, op, *operands, nbytes=nbytes)


def _may_write(source: AgentConnection, destination: AgentConnection) -> bool:
    """Return whether one device's agent may try to write to another's memory, instead of sending."""
    return (
        destination.transfers.direct
        and destination.transport.lends
        and (source.host, source.target) == (destination.host, destination.target)
    )


def _give_up_at(connection: AgentConnection, number: int) -> None:
    """Have an agent give a copy up, unless the agent is lost."""
    with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
        connection.tell(Op.CANCEL, number)


# -- pinned arrays that the agent reads and writes itself ----------------------------------------------------------


def _shared_with(connection: AgentConnection, array: NDArray[Any]) -> tuple[int, int] | None:
    """Return the number of an array's memory and the array's offset, if the agent can reach the memory itself.

    The first time, the agent has to map it.
    """
    memory = memory_of(array) if array.nbytes > MIN_SHARED_BYTES else None
    if memory is None or not array.flags.c_contiguous or not connection.transport.lends:
        return None
    if connection not in memory.reached:
        memory.reached[connection] = connection.host == socket.gethostname() and _share(connection, memory)
    return (memory.number, int(array.ctypes.data) - memory.address) if memory.reached[connection] else None


def _share(connection: AgentConnection, memory: Pinned) -> bool:
    reply = connection.ask(None, Op.SHARE, Reply, memory.number, memory.path, len(memory.memory))
    try:
        reply.get(f"{connection.label} to map an array of the application")
    except errors.RemoteError:
        return False  # another user, or another host with the same name: the data are sent
    return True


def _cancel_shared(connection: AgentConnection, reply: Reply) -> None:
    """Stop an agent from writing to an array; wait a little for a copy in progress."""
    if connection.lost is None and not reply.done:
        _give_up_at(connection, reply.number)
        with contextlib.suppress(errors.StallError):
            reply.wait("a copy that was given up", 1.0)


# -- bulk data -----------------------------------------------------------------------------------------------------


class BulkCopy:
    """Bulk data between the application and a device, in a stream's order; a block that ends early cancels the copy.

    Ctrl-C cannot interrupt the start of a copy: an agent would wait for data that are never sent. If a block ends early
    later, both sides cancel the copy, and the agent does not report it.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
    """

    def __init__(self, connection: AgentConnection, channel: Channel) -> None:
        self._connection, self._channel = connection, channel
        self._reply: Reply | None = None
        self._transfer: Transfer | None = None

    def put(self, source: NDArray[Any], op: Op, handle: int, *operands: Any, **counts: Any) -> Reply:
        """Start to send an array, and have the agent receive it (see `AgentConnection.ask` for `counts`)."""
        ends = self._connection.transport.rank, self._connection.rank
        return self._start(self._connection.transport.put, ends, source, op, handle, *operands, **counts)

    def get(self, out: NDArray[Any], op: Op, handle: int, **counts: Any) -> Reply:
        """Have the agent send, into an array."""
        ends = self._connection.rank, self._connection.transport.rank
        return self._start(self._connection.transport.get, ends, out, op, handle, **counts)

    def _start(
        self,
        move: Callable[[int, int, Region], Transfer],
        ends: tuple[int, int],
        array: NDArray[Any],
        op: Op,
        handle: int,
        *operands: Any,
        **counts: Any,
    ) -> Reply:
        connection, channel, tags = self._connection, self._channel, self._connection.caller.tags
        plan = connection.transfers.plan(array.nbytes)
        while self._reply is None:
            if channel.full:
                connection.wait_for_room(channel)  # outside of the block: Ctrl-C ends the wait
            with uninterrupted():
                if channel.full:
                    continue  # other threads have used the room
                connection.check()
                tag = tags.new(*ends)
                try:
                    self._transfer = move(connection.rank, tag, Region.over(array, chunk=plan.chunk))
                except errors.DeviceLostError as error:
                    connection.gone(str(error))
                tags.begun(*ends, self._transfer)
                sent = (op, handle, Reply, tag, tuple(plan), *operands)
                self._reply = connection.ask(channel, *sent, transfer=self._transfer, **counts)
        return self._reply

    def finish(self) -> None:
        """Wait for the data. A copy that was refused ends, too; its failure is kept, or raised by its reply."""
        transfer, reply = self._transfer, self._reply
        assert transfer is not None and reply is not None
        start = time.perf_counter()
        try:
            transfer.wait(transfer.chunks, limit())
        except errors.DeviceLostError:
            self._connection.gone(transfer.reason)
        except errors.PoolError:
            if not reply.done:
                raise
        finally:
            if reply.counted is not None:
                reply.counted[2] += time.perf_counter() - start

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
            give_up(self._transfer)  # in any case: nothing may use the array after this


class Arguments:
    """The arguments of one call of a device, as a block around it: a block that ends early frees the arrays it sent.

    Large arrays are sent as bulk data, before the call that takes them.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
        The stream whose order the arrays follow, before the call.
    handle_of : callable
        Returns the handle of an object that is on the device, None for anything else.
    """

    def __init__(self, connection: AgentConnection, channel: Channel, handle_of: Callable[[Any], int | None]) -> None:
        self._connection, self._channel, self._on_device = connection, channel, handle_of
        self._arrays: dict[int, tuple[int, NDArray[Any]]] = {}

    def pack(self, value: Any) -> tuple[bytes, tuple[int, ...]]:
        """Send the large arrays in a value; return the pickled value and the handles in it."""
        data, handles = dumps(value, self._handle_of)
        for handle, array in self._arrays.values():
            self._send(handle, array)
        return data, handles

    def _handle_of(self, value: Any) -> int | None:
        if not is_large(value):
            return self._on_device(value)
        if id(value) not in self._arrays:
            self._arrays[id(value)] = new_id(), value
        return self._arrays[id(value)][0]

    def _send(self, handle: int, array: NDArray[Any]) -> None:
        data, description = flat(array)
        is_private = not np.may_share_memory(data, array)
        if not is_private and data.nbytes <= MAX_PRIVATE_ARGUMENT_BYTES:
            data, is_private = data.copy(), True
        with BulkCopy(self._connection, self._channel) as bulk:
            cost = data.nbytes if is_private else 0
            bulk.put(data, Op.ARGUMENT, handle, description, cost=cost, nbytes=data.nbytes - cost)
            if not is_private:
                bulk.finish()

    def __enter__(self) -> Arguments:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # no call takes the arrays
            for handle, _array in self._arrays.values():
                self._connection.finalizer(handle)
