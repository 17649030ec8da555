"""`Caller` and `AgentConnection`: the program's side of calls: number and send them, bound what is under way."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import errors
from .._os import uninterrupted
from .agent.code import Code
from .agent.protocol import Op, pack, unpack, unpack_failure
from .channel import Channel
from .reply import Answer, Reply
from .transport.bulk import Transfer
from .transport.tags import Tags
from .transport.transport import Transport
from .tuning import Tuning

_LOOK, _LATEST = 0.05, 1.0
"""Seconds between looks at who was lost; and until requests to them fail where messages never pause."""


class AgentConnection:
    """The application's end of one agent.

    Parameters
    ----------
    caller : Caller
    rank : int

    Attributes
    ----------
    index : int
        The device's place among the application's devices; the rank until that is known.
    label : str
        What the device is called in messages.
    host, target : str
        What the agent has told of itself; unset until then.
    transfers : Tuning
        How copies to and from the device are cut.
    lost, forked : str or None
        Why the agent is gone; and that it is the parent process's.
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
        self.ending: list[Reply] = []
        self._codes: dict[str, int] = {}
        self._sent: weakref.WeakSet[Code] = weakref.WeakSet()
        self.counts: dict[str, list[float]] = {}
        self.caller = caller
        self.transfers = Tuning()
        self.host = self.target = ""

    def check(self) -> None:
        """Raise `DeviceLostError` if the agent is gone, `ForkError` if it is the parent process's."""
        if self.lost is not None:
            self.gone(self.lost)

    def gone(self, reason: str) -> NoReturn:
        """Note that the agent is gone, and raise what `check` raises; an earlier reason stays."""
        self.lost = self.lost or reason
        if self.forked is not None:
            raise errors.ForkError(self.forked)
        raise errors.DeviceLostError(f"{self.label} is gone: {self.lost}", device=self.index) from None

    def post(self, channel: Channel, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0) -> int:
        """Send a call, and do not wait for it.

        Parameters
        ----------
        channel, op, *operands
        cost : int
            Bytes that go with it and stay in memory until it is done.
        nbytes : int
            Bytes that it moves besides, for those who count.

        Returns
        -------
        int
            Its number in the stream.
        """
        if channel.full:
            self.wait_for_room(channel)
        with self.lock:
            return self.post_locked(channel, op, *operands, cost=cost, nbytes=nbytes)

    def wait_for_room(self, channel: Channel) -> None:
        """Wait until not too much of a stream is under way."""
        begun = time.perf_counter()
        channel.wait_for_room(self.check, self.label)
        entry = self.counts.setdefault("ROOM", [0, 0, 0.0])
        entry[0] += 1
        entry[2] += time.perf_counter() - begun

    def post_locked(self, channel: Channel, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0) -> int:
        """`post`, for who holds the lock: two connections' to make calls of both in one order for all."""
        self.check()
        sequence = channel.sequence + 1
        message = pack(op.value, channel.number, sequence, *operands)
        try:
            channel.next(cost)
            self._count(op, cost + nbytes)
            self._send(message)
        except BaseException:  # Ctrl-C, or a peer that takes nothing: no answer will give this room back
            channel.back(sequence)
            raise
        return sequence

    def tell(self, op: Op, *operands: Any, stream: int = 0) -> None:
        """Send what is done as soon as it arrives, beside all streams."""
        with self.lock:
            self.check()
            self._count(op, 0)
            self._send(pack(op.value, stream, 0, *operands))

    def ask(
        self,
        channel: Channel | None,
        op: Op,
        *operands: Any,
        cost: int = 0,
        nbytes: int = 0,
        transfer: Transfer | None = None,
        keep: bool = False,
    ) -> Reply:
        """Send a request: `post` or, with no channel, `tell`, with a ``{reply}`` among the operands.

        Parameters
        ----------
        channel, op
        *operands
            The class `Reply` stands for the place of the request's number.
        cost, nbytes : int
        transfer : Transfer, optional
            Cancelled if the request is refused.
        keep : bool
            Whether a failure is also kept for the next synchronization.
        """
        reply = Reply(channel if keep else None)
        reply.transfer = transfer
        number = reply.number
        sent = [number if operand is Reply else operand for operand in operands]
        self.caller.replies[number] = (self.rank, reply)
        try:
            if channel is None:
                self.tell(op, *sent)
            else:
                self.post(channel, op, *sent, cost=cost, nbytes=nbytes)
        except BaseException:
            self.caller.replies.pop(number, None)
            raise
        if self.lost is not None:  # just now: nobody else would answer
            self.caller.fail(self.rank)
        reply.counted = self.counts[op.name]
        return reply

    def ensure(self, code: Code) -> None:
        """See that the agent has a kernel or function: each is sent once, and dropped when it is gone here."""
        if code in self._sent:
            return
        with self.lock:
            if code not in self._sent:
                if code.key not in self._codes:
                    self.tell(Op.CODE, code.key, code.name, code.data)
                self._codes[code.key] = self._codes.get(code.key, 0) + 1
                self._sent.add(code)
                weakref.finalize(code, self.caller.freed.put, (self, Op.CODE_END, code.key)).atexit = False

    def drop(self, key: str) -> None:
        """Note that a kernel or function is gone; the last one of its content is dropped on the agent."""
        with self.lock:
            self._codes[key] -= 1
            if not self._codes[key]:
                del self._codes[key]
                self.tell(Op.CODE_END, key)

    def end_stream(self, number: int) -> None:
        """End a stream behind what it was given; what fails in it is left to the default one."""
        channel = self.channels.get(number)
        if channel is None:
            return
        reply = Reply()
        self.caller.replies[reply.number] = (self.rank, reply)
        with uninterrupted(), self.lock:
            self.post_locked(channel, Op.SYNCHRONIZE, reply.number)
            self.channels.pop(number, None)
            self.tell(Op.STREAM_END, stream=number)
            # a synchronization of the device waits for it too
            self.ending = [r for r in self.ending if not r.done] + [reply]
        channel.leave_to(self.channels[0])

    def finalizer(self, handle: int, op: Op = Op.FREE) -> None:
        """Have an object freed, from a finalizer, which must not wait for anything, nor look for what a module had."""
        self.caller.freed.put((self, op, handle))

    def stream_finalizer(self, number: int, op: Op = Op.STREAM_END) -> None:
        """Have a stream ended, from a finalizer."""
        self.caller.freed.put((self, op, number))

    def _send(self, message: bytes) -> None:
        """Send, for who holds the lock. It is reentrant, but a message in the middle of another is none."""
        if self._sending:
            raise errors.PoolError(
                f"a signal handler called {self.label} in the middle of another call: let it set a flag, and "
                "make the call outside of the handler"
            )
        try:
            self._sending = True
            self.transport.send(self.rank, message)
        except (errors.DeviceLostError, errors.ClosedError) as error:
            self.gone(str(error))
        finally:
            self._sending = False

    def _count(self, op: Op, nbytes: int) -> None:
        entry = self.counts.get(op.name)
        if entry is None:
            entry = self.counts[op.name] = [0, 0, 0.0]
        entry[0] += 1
        entry[1] += nbytes


class Caller:
    """Receives what agents answer, for all devices of a transport.

    Parameters
    ----------
    transport : Transport
        The application's.
    agents : sequence of int, optional
        Which of its peers are agents; by default all.
    """

    def __init__(self, transport: Transport, agents: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.replies: dict[int, tuple[int, Reply]] = {}
        ranks = transport.peers if agents is None else agents
        self.connections = {rank: AgentConnection(self, rank) for rank in ranks}
        # a put from a finalizer, which may interrupt anything, is all that a SimpleQueue is made for
        self.freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = False
        self._gone: deque[tuple[int, float]] = deque()  # who was lost, and until when answers are still taken
        self.tags = Tags()
        self._threads = [
            threading.Thread(target=work, name=f"warpwell {name}", daemon=True)
            for name, work in (("replies", self._receive), ("frees", self._free))
        ]
        transport.on_lost(self._lost)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say goodbye to all agents, and stop."""
        if self.closed:
            return
        self.closed = True
        for connection in self.connections.values():
            try:
                if connection.lost is None:
                    connection.tell(Op.GOODBYE)
            except (errors.PoolError, errors.ClosedError, errors.StallError):
                pass  # it is gone, which is what was to be told
            connection.lost = connection.lost or "the pool was closed"
        self.freed.put(None)
        self.transport.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
        for rank in self.connections:
            self.fail(rank)

    def fail(self, rank: int) -> None:
        """Answer all requests to an agent that is gone."""
        connection = self.connections[rank]
        for number, (asked, _) in list(self.replies.items()):
            if asked == rank and (found := self.replies.pop(number, None)) is not None:
                said = f"{connection.label} is gone: {connection.lost}"
                found[1].come(None, errors.DeviceLostError(said, device=connection.index))

    def _lost(self, rank: int, reason: str) -> None:
        connection = self.connections.get(rank)
        if connection is None:
            return  # the communicator, of which the program's CUDA calls tell
        connection.lost = connection.lost or reason
        self._gone.append((rank, time.monotonic() + _LATEST))

    def _receive(self) -> None:
        while not self.closed:
            try:
                got = self.transport.receive(0.0 if self._gone else _LOOK)
            except errors.ClosedError:
                break
            if got is not None:
                op, *operands = unpack(got[1])
                self._take(self.connections[got[0]], op, *operands)
            # what they had answered before is taken where nothing waits any more
            while self._gone and (got is None or time.monotonic() > self._gone[0][1]):
                self.fail(self._gone.popleft()[0])
        for rank, _ in list(self._gone):  # a copy: the transport's thread appends
            self.fail(rank)

    def _take(self, connection: AgentConnection, op: int, number: int, *operands: Any) -> None:
        if op == Op.DONE:
            if (channel := connection.channels.get(number)) is not None:
                channel.done(operands[0])
            return
        if op == Op.FAILED:
            _sequence, call, failure = operands
            channel = connection.channels.get(number) or connection.channels[0]
            channel.keep(unpack_failure(failure, call, connection.label))
            return
        value: Any = None
        error: BaseException | None = None
        if op == Op.ANSWER:
            value, error = self._answer(connection, number, *operands)
        elif op == Op.REPLY:
            value = operands[0]
        _, reply = self.replies.pop(number, (0, None))
        if reply is not None:
            if op == Op.REFUSED:
                call, failure, earlier = operands
                error = unpack_failure(failure, call, connection.label)
                if reply.channel is not None and not earlier:
                    reply.channel.keep(error)
            reply.come(value, error)

    def _answer(
        self, connection: AgentConnection, number: int, *operands: Any
    ) -> tuple[Answer | None, BaseException | None]:
        """Begin to receive the arrays of a result, which is done in any case: the agent waits for that."""
        try:
            return Answer(self.transport, connection.rank, connection.gone, *operands), None
        except BaseException as error:  # no room here, or the agent is gone
            with contextlib.suppress(Exception):
                connection.finalizer(number, Op.CANCEL)
            return None, error

    def _free(self) -> None:
        while True:
            item = self.freed.get()
            if item is None:
                return
            connection, op, number = item
            try:
                if op in (Op.FREE, Op.CANCEL):
                    connection.tell(op, number)
                elif op == Op.CODE_END:
                    connection.drop(number)
                else:
                    connection.end_stream(number)
            except (errors.PoolError, errors.ClosedError, errors.StallError):
                pass  # a device that is gone holds nothing
            item = connection = None
