"""Copies by the program: to a device, from a device, between two devices; large arguments of calls."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import uninterrupted
from .agent.code import Code, dumps
from .agent.large_arrays import flat, is_large
from .agent.protocol import INLINE, WINDOW_BYTES, Op, new_id
from .agent.staged import cancel_and_wait
from .caller import AgentConnection
from .channel import Channel
from .host_memory import Pinned, memory_of
from .reply import Reply
from .transport.bulk import Region, Transfer
from .transport.milestone import limit

MAX_PRIVATE_BYTES = 8 << 20
"""Arrays of at most this size are copied before they are sent, so that the call need not wait for the transfer."""

MAX_PRIVATE_ARGUMENT_BYTES = WINDOW_BYTES // 2
"""The same for arguments of calls."""

CopySide: TypeAlias = tuple[AgentConnection, int, Channel | None]

MIN_SHARED_BYTES = 4096
"""Smaller arrays in pinned memory are sent, which is as fast as sharing them."""


def upload(connection: AgentConnection, channel: Channel, handle: int, source: NDArray[Any]) -> None:
    """Copy an array to a buffer.

    The array may be modified after this returns; pinned memory only after the stream has reached the copy.
    """
    nbytes = source.nbytes
    if (shared := _shared_with(connection, source)) is not None:
        connection.post(channel, Op.WRITE, handle, shared, nbytes=nbytes)
        return
    if nbytes <= INLINE:
        connection.post(channel, Op.WRITE, handle, source.tobytes(), cost=nbytes)
        return
    array = np.ascontiguousarray(source)
    is_private = array is not source and not np.may_share_memory(array, source)
    must_wait = not is_private and memory_of(source) is None
    if must_wait and nbytes <= MAX_PRIVATE_BYTES:
        array, is_private, must_wait = array.copy(), True, False
    with BulkCopy(connection, channel) as bulk:
        cost = nbytes if is_private else 0
        bulk.start(array, Op.WRITE_BULK, handle, cost=cost, nbytes=nbytes - cost, keep=True)
        if must_wait:
            bulk.finish()


def download(connection: AgentConnection, channel: Channel, handle: int, out: NDArray[Any]) -> None:
    """Copy a buffer to an array of its shape and dtype, and wait for the copy."""
    nbytes, description = out.nbytes, f"a copy from {connection.label}"
    if (shared := _shared_with(connection, out)) is not None or nbytes <= INLINE:
        reply = connection.request(channel, Op.READ, handle, Reply, shared, nbytes=nbytes)
        try:
            data = reply.get_after_failures(channel, description)
        except BaseException:
            if shared is not None:
                _cancel_shared(connection, reply)
            raise
        if shared is None:
            out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)
    else:
        array = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        with BulkCopy(connection, channel) as bulk:
            reply = bulk.start(array, Op.READ_BULK, handle, outgoing=False, nbytes=nbytes)
            reply.get_after_failures(channel, description)
            bulk.finish()
        if array is not out:
            out[...] = array


def between_agents(source: CopySide, destination: CopySide, nbytes: int) -> None:
    """Start a copy of a buffer to a buffer of another device of the same transport.

    The destination pulls the data; see ``pool/agent/copies.py``.

    Parameters
    ----------
    source, destination : (AgentConnection, int, Channel or None)
        The device, the handle of the buffer, and the stream that orders the copy on this side; at least one side has
        a stream.
    nbytes : int
    """
    (origin, source_handle, source_channel), (to, destination_handle, destination_channel) = source, destination
    for connection, channel in ((origin, source_channel), (to, destination_channel)):
        connection.check()
        if channel is not None and channel.is_full:
            connection.wait_for_credit(channel)
    number, tag, plan = new_id(), to.caller.tags.new(origin.rank, to.rank), tuple(to.transfers.plan(nbytes))
    pulling = (destination_handle, number, (origin.rank, tag, plan, _may_write(origin, to)))
    # Both locks give the copies one order on both devices; otherwise two streams could wait for each other. Ctrl-C must
    # not separate the two calls, because one device would wait forever for the other.
    first, second = (origin, to) if origin.rank < to.rank else (to, origin)
    with uninterrupted(), first.lock, second.lock:
        _post(origin, source_channel, Op.SOURCE, source_handle, number, to.rank, destination_channel is None)
        try:
            _post(to, destination_channel, Op.PULL, *pulling, nbytes=nbytes)
        except BaseException:
            _cancel_on(origin, number)
            raise


def _post(connection: AgentConnection, channel: Channel | None, op: Op, *operands: Any, nbytes: int = 0) -> None:
    if channel is None:
        connection.send(op, *operands, stream=-1)
    else:
        connection.post_locked(channel, op, *operands, nbytes=nbytes)


def _may_write(source: AgentConnection, destination: AgentConnection) -> bool:
    """Return whether the agent of `source` may write to the memory of `destination` instead of sending."""
    return (
        destination.transfers.direct
        and destination.transport.can_share_memory
        and (source.host, source.target) == (destination.host, destination.target)
    )


def _cancel_on(connection: AgentConnection, number: int) -> None:
    """Cancel a copy on an agent, unless the agent is lost."""
    with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
        connection.send(Op.CANCEL, number)


# -- pinned arrays that the agent accesses directly ----------------------------------------------------------------


def _shared_with(connection: AgentConnection, array: NDArray[Any]) -> tuple[int, int] | None:
    """Return the number of an array's memory and the array's offset in bytes, or None if the agent cannot map it."""
    memory = memory_of(array) if array.nbytes > MIN_SHARED_BYTES else None
    if memory is None or not array.flags.c_contiguous or not connection.transport.can_share_memory:
        return None
    if connection not in memory.mapped:
        memory.mapped[connection] = connection.host == socket.gethostname() and _share(connection, memory)
    return (memory.number, int(array.ctypes.data) - memory.address) if memory.mapped[connection] else None


def _share(connection: AgentConnection, memory: Pinned) -> bool:
    reply = connection.request(None, Op.SHARE, Reply, memory.number, memory.path, len(memory.memory))
    try:
        reply.get(f"{connection.label} to map an array of the program")
    except errors.RemoteError:
        return False  # another user, or another host with the same name
    return True


def _cancel_shared(connection: AgentConnection, reply: Reply) -> None:
    """Stop an agent from writing to an array; wait at most 1 s for a copy in progress."""
    if connection.lost is None and not reply.done:
        _cancel_on(connection, reply.number)
        with contextlib.suppress(errors.StallError):
            reply.wait("a cancelled copy", 1.0)


# -- bulk data -----------------------------------------------------------------------------------------------------


class BulkCopy:
    """Context manager for bulk data between the program and a device, in a stream's order.

    Ctrl-C cannot interrupt the start of a copy, because the agent would wait for data that is never sent. If the block
    raises after the start, both sides cancel the copy, and the agent does not report a failure.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
    """

    def __init__(self, connection: AgentConnection, channel: Channel) -> None:
        self._connection, self._channel = connection, channel
        self._reply: Reply | None = None
        self._transfer: Transfer | None = None

    def start(
        self, array: NDArray[Any], op: Op, handle: int, *operands: Any, outgoing: bool = True, **counts: Any
    ) -> Reply:
        """Start to send an array to the agent, or to receive it. See `AgentConnection.request` for `counts`."""
        connection, channel, tags = self._connection, self._channel, self._connection.caller.tags
        plan = connection.transfers.plan(array.nbytes)
        memory, peer = Region.over(array, chunk=plan.chunk), connection.rank
        while self._reply is None:
            if channel.is_full:
                connection.wait_for_credit(channel)  # outside of the block, so that Ctrl-C ends the wait
            with uninterrupted():
                if channel.is_full:
                    continue  # other threads have used the credit
                connection.check()
                try:
                    transfer = self._transfer = tags.start(connection.transport, peer, memory, outgoing=outgoing)
                except errors.DeviceLostError as error:
                    connection.raise_lost(str(error))
                call = (op, handle, Reply, transfer.tag, tuple(plan), *operands)
                self._reply = connection.request(channel, *call, **counts)
                self._reply.cancel_on_failure(transfer)
        return self._reply

    def finish(self) -> None:
        """Wait for the data, or for the failure of the request, which the reply raises or the channel keeps."""
        transfer, reply = self._transfer, self._reply
        assert transfer is not None and reply is not None
        start = time.perf_counter()
        try:
            transfer.wait(transfer.chunks, limit())
        except errors.DeviceLostError:
            self._connection.raise_lost(transfer.reason)
        except errors.PoolError:
            if not reply.done:
                raise
        finally:
            if reply.counters is not None:
                reply.counters[2] += time.perf_counter() - start

    def __enter__(self) -> BulkCopy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._transfer is None:
            return
        self._transfer.cancel()
        try:
            if self._reply is not None and self._connection.lost is None and not self._reply.done:
                _cancel_on(self._connection, self._reply.number)
        finally:
            cancel_and_wait(self._transfer)  # MPI must not access the array after this


class Arguments:
    """Context manager for the arguments of one call of a device. If its block raises, the arrays it sent are freed.

    Large arrays are sent as bulk data before the call. The agent receives a `Code` as a `LoadedCode`.

    Parameters
    ----------
    connection : AgentConnection
    channel : Channel
        The stream of the call.
    handle_of : callable
        Returns the handle of an object on the device, None for any other object.
    """

    def __init__(self, connection: AgentConnection, channel: Channel, handle_of: Callable[[Any], int | None]) -> None:
        self._connection, self._channel, self._on_device = connection, channel, handle_of
        self._arrays: dict[int, tuple[int, NDArray[Any]]] = {}

    def pack(self, value: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Send the large arrays in a value. Return the pickled value and the handles in it."""
        data, handles = dumps(value, self._handle_of)
        for handle, array in self._arrays.values():
            self._send(handle, array)
        return data, handles

    def _handle_of(self, value: Any) -> int | str | None:
        if isinstance(value, Code):
            self._connection.ensure_code(value)
            return value.key
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
            bulk.start(data, Op.ARGUMENT, handle, description, cost=cost, nbytes=data.nbytes - cost)
            if not is_private:
                bulk.finish()

    def __enter__(self) -> Arguments:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # no call takes the arrays
            for handle, _array in self._arrays.values():
                self._connection.free_later(handle)
