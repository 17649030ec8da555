"""`AgentConnection`: numbers and sends the program's calls to one agent; `Caller`: receives the messages of agents."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import closing, errors
from .._os import uninterrupted
from .agent.code import Code
from .agent.protocol import Op, pack, unpack, unpack_failure
from .channel import Channel
from .reply import ArrayReply, Reply
from .transport.transport import OVERHEAD, WINDOW, Tags, Transport
from .tuning import Tuning

_POLL_SECONDS = 0.05
"""Interval at which the receiving thread checks for lost agents."""

_MAX_UNRECEIVED = WINDOW // OVERHEAD
"""Maximum number of messages of one peer that wait for the receiving thread: each takes at least `OVERHEAD` bytes of
the window."""


class AgentConnection:
    """The program's side of the connection to one agent. Any thread may call the methods, except as noted.

    Parameters
    ----------
    caller : Caller
    rank : int
        Rank of the agent.

    Attributes
    ----------
    index : int
        Index of the device in the program; the rank until it is known.
    label : str
        Name of the device in messages.
    host, target : str
        Properties that the agent has reported; empty before that.
    transfers : Tuning
        Settings for copies to and from the device.
    lost : str or None
        Why the agent is lost.
    forked : str or None
        Set in a forked child process: the agent belongs to the parent.
    """

    def __init__(self, caller: Caller, rank: int) -> None:
        self.rank = rank
        self.index = rank
        self.label = f"rank {rank}"
        self.lock = threading.RLock()
        self._sending = False
        self.lost: str | None = None
        self.forked: str | None = None
        self.transport = caller.transport
        self.channels: dict[int, Channel] = {0: Channel(0)}
        self.closing: list[Reply] = []
        self._codes: dict[str, int] = {}
        self._sent: weakref.WeakSet[Code] = weakref.WeakSet()
        self.counts: dict[str, list[float]] = {}
        self.caller = caller
        self._hand_over = closing.hand_over
        self.transfers = Tuning()
        self.host = self.target = ""

    def check(self) -> None:
        """Raise `DeviceLostError` if the agent is lost, `ForkError` if it belongs to the parent process."""
        if self.lost is not None:
            self.raise_lost(self.lost)

    def raise_lost(self, reason: str) -> NoReturn:
        """Record why the agent is lost, unless a reason is recorded, and raise as `check` does."""
        self.lost = self.lost or reason
        if self.forked is not None:
            raise errors.ForkError(self.forked)
        raise errors.DeviceLostError(f"{self.label} is gone: {self.lost}", device=self.index) from None

    def post(self, channel: Channel, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0) -> None:
        """Send a call, which the agent runs in the order of its stream. It blocks only while the window is full.

        Parameters
        ----------
        channel : Channel
        op : Op
        *operands
        cost : int
            Size in bytes of the payload, which takes space in the window.
        nbytes : int
            Size in bytes of other data that the call moves, for statistics.
        """
        if channel.is_full:
            self.wait_for_credit(channel)
        with self.lock:
            self.post_locked(channel, op, *operands, cost=cost, nbytes=nbytes)

    def wait_for_credit(self, channel: Channel) -> None:
        """Wait until the stream's window has space for a call."""
        start = time.perf_counter()
        channel.wait_for_credit(self.check, self.label)
        entry = self.counts.setdefault("ROOM", [0, 0, 0.0])
        entry[0] += 1
        entry[2] += time.perf_counter() - start

    def post_locked(self, channel: Channel, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0) -> None:
        """`post` for a caller that holds the lock. With the locks of two agents, calls of both have one order."""
        self.check()
        sequence = channel.sequence + 1
        message = pack(op.value, channel.number, sequence, *operands)
        try:
            channel.add_call(cost)
            self._count(op, cost + nbytes)
            self._send_locked(message)
        except BaseException:  # Ctrl-C, or an agent that receives nothing: no reply will free this part of the window
            channel.cancel_call(sequence)
            raise

    def send(self, op: Op, *operands: Any, stream: int = 0) -> None:
        """Send a call that the agent runs on arrival, independently of all streams."""
        with self.lock:
            self.check()
            self._count(op, 0)
            self._send_locked(pack(op.value, stream, 0, *operands))

    def request(
        self, channel: Channel | None, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0, keep: bool = False
    ) -> Reply:
        """Send a request with `post`, or with `send` if `channel` is None, and return the future of its reply.

        Parameters
        ----------
        channel : Channel or None
        op : Op
        *operands
            The class `Reply` as an operand is replaced by the number of the request.
        cost, nbytes : int
            See `post`.
        keep : bool
            Whether the next synchronization raises a failure, too.
        """
        reply = Reply(channel if keep else None)
        number = reply.number
        packed = [number if operand is Reply else operand for operand in operands]
        self.caller.replies[number] = (self.rank, reply)
        try:
            if channel is None:
                self.send(op, *packed)
            else:
                self.post(channel, op, *packed, cost=cost, nbytes=nbytes)
        except BaseException:
            self.caller.replies.pop(number, None)
            raise
        # the loss was concurrent, so `Caller.fail` may have missed this request; a device that has left has answered it
        if self.lost is not None and self.caller.connections[self.rank] is self:
            self.caller.fail(self.rank)
        reply.counters = self.counts[op.name]
        return reply

    def ensure_code(self, code: Code) -> None:
        """Send a kernel or function unless the agent has it. The agent drops it after the last `Code` with its key."""
        if code in self._sent:
            return
        with self.lock:
            if code not in self._sent:
                if code.key not in self._codes:
                    self.send(Op.CODE, code.key, code.name, code.data)
                self._codes[code.key] = self._codes.get(code.key, 0) + 1
                self._sent.add(code)
                weakref.finalize(code, self.free_later, code.key, Op.CODE_END).atexit = False

    def release_code(self, key: str) -> None:
        """Count one `Code` less with this key; drop the key on the agent after the last one."""
        with self.lock:
            self._codes[key] -= 1
            if not self._codes[key]:
                del self._codes[key]
                self.send(Op.CODE_END, key)

    def close_stream(self, number: int) -> None:
        """Close a stream after its calls. The default stream reports their failures."""
        channel = self.channels.get(number)
        if channel is None:
            return
        reply = Reply()
        self.caller.replies[reply.number] = (self.rank, reply)
        with uninterrupted(), self.lock:
            self.post_locked(channel, Op.SYNCHRONIZE, reply.number)
            self.channels.pop(number, None)
            self.send(Op.STREAM_END, stream=number)
            # `Device.synchronize` waits for it, too
            self.closing = [r for r in self.closing if not r.done] + [reply]
        channel.redirect_failures(self.channels[0])

    def free_later(self, identifier: Any, op: Op = Op.FREE) -> None:
        """Free an object in another thread. Finalizers call this, so it must not block or use module globals."""
        self._hand_over(lambda: self._free(identifier, op))

    def _free(self, identifier: Any, op: Op) -> None:
        # a lost device holds no objects
        with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
            if op == Op.CODE_END:
                self.release_code(identifier)
            elif op == Op.STREAM_END:
                self.close_stream(identifier)
            else:
                self.send(op, identifier)

    def _send_locked(self, message: bytes) -> None:
        # the lock is reentrant, but a message inside another message would corrupt both
        if self._sending:
            raise errors.PoolError(
                f"a signal handler made a call to {self.label} in the middle of another call: set a flag there, and "
                "make the call outside of the handler"
            )
        try:
            self._sending = True
            self.transport.send(self.rank, message)
        except (errors.DeviceLostError, errors.ClosedError) as error:
            self.raise_lost(str(error))
        finally:
            self._sending = False

    def _count(self, op: Op, nbytes: int) -> None:
        entry = self.counts.get(op.name)
        if entry is None:
            entry = self.counts[op.name] = [0, 0, 0.0]
        entry[0] += 1
        entry[1] += nbytes


class Caller:
    """Receives the messages of all agents of a transport, in a thread.

    Parameters
    ----------
    transport : Transport
        The transport of the program.
    agents : sequence of int, optional
        Ranks of the agents; by default all peers.
    """

    def __init__(self, transport: Transport, agents: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.replies: dict[int, tuple[int, Reply]] = {}
        ranks = transport.peers if agents is None else agents
        self.connections = {rank: AgentConnection(self, rank) for rank in ranks}
        self.closed = False
        self._received = 0  # messages
        self._losses: deque[tuple[int, int]] = deque()  # lost agents, and values of `_received` at which requests fail
        self.tags = Tags()
        self._thread = threading.Thread(target=self._receive, name="warpwell replies", daemon=True)
        closing.ready()
        transport.on_lost(self._record_loss)
        self._thread.start()

    def reconnect(self, rank: int) -> None:
        """Replace the connection to an agent whose device has left; objects of that device refer to the old one."""
        connection = AgentConnection(self, rank)
        connection.index, connection.label = self.connections[rank].index, self.connections[rank].label
        self.connections[rank] = connection
        connection.lost = self.transport.lost().get(rank) or connection.lost  # after this, or a loss could be missed

    def close(self) -> None:
        """Send GOODBYE to all agents, close the transport, and fail the open requests."""
        if self.closed:
            return
        self.closed = True
        for connection in self.connections.values():
            with contextlib.suppress(errors.PoolError, errors.ClosedError, errors.StallError):
                if connection.lost is None:
                    connection.send(Op.GOODBYE)
            connection.lost = connection.lost or "the pool was closed"
        self.transport.close()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
        for rank in self.connections:
            self.fail(rank)

    def fail(self, rank: int) -> None:
        """Fail all open requests to a lost agent."""
        connection = self.connections[rank]
        for number, (receiver, _) in list(self.replies.items()):
            if receiver == rank:
                message = f"{connection.label} is gone: {connection.lost}"
                self._complete(number, None, errors.DeviceLostError(message, device=connection.index))

    def _complete(self, number: int, value: Any, error: BaseException | None) -> None:
        if (entry := self.replies.pop(number, None)) is not None:
            if error is None:
                entry[1].set(value)
            else:
                entry[1].fail(error)

    def _record_loss(self, rank: int, reason: str) -> None:
        connection = self.connections.get(rank)
        if connection is None:
            return  # the communicator: the program's CUDA calls report its loss
        connection.lost = connection.lost or reason
        self._losses.append((rank, self._received + _MAX_UNRECEIVED * len(self.transport.peers)))

    def _receive(self) -> None:
        while not self.closed:
            losses = len(self._losses)  # only for these, None means that the agent's messages have been received
            try:
                received = self.transport.receive(0.0 if losses else _POLL_SECONDS)
            except errors.ClosedError:
                break
            if received is not None:
                self._received += 1
                op, *operands = unpack(received[1])
                self._handle(self.connections[received[0]], op, *operands)
            # the replies that a lost agent had sent are received first, until there is no message
            while losses and (received is None or self._received >= self._losses[0][1]):
                self.fail(self._losses.popleft()[0])
                losses -= 1
        for rank, _ in list(self._losses):  # a copy, because the transport's thread appends
            self.fail(rank)

    def _handle(self, connection: AgentConnection, op: int, number: int, *operands: Any) -> None:
        if op == Op.REPLY:
            self._complete(number, operands[0], None)
        elif op == Op.ANSWER:
            self._complete(number, *self._receive_arrays(connection, number, *operands))
        elif op == Op.DONE:
            if (channel := connection.channels.get(number)) is not None:
                channel.complete_calls(operands[0])
        elif op == Op.FAILED:
            _sequence, call, failure = operands
            channel = connection.channels.get(number) or connection.channels[0]
            channel.add_failure(unpack_failure(failure, call, connection.label))
        elif op == Op.REFUSED and (entry := self.replies.pop(number, None)) is not None:
            call, failure, is_reported = operands
            error = unpack_failure(failure, call, connection.label)
            if entry[1].channel is not None and not is_reported:
                entry[1].channel.add_failure(error)
            entry[1].fail(error)

    def _receive_arrays(
        self, connection: AgentConnection, number: int, *operands: Any
    ) -> tuple[ArrayReply | None, BaseException | None]:
        try:
            return ArrayReply(self.transport, connection.rank, connection.raise_lost, *operands), None
        except BaseException as error:  # out of memory, or the agent is lost
            with contextlib.suppress(Exception):  # the agent waits until the arrays are received or cancelled
                connection.free_later(number, Op.CANCEL)
            return None, error
