"""`Caller`: the application's side: numbers and sends calls, bounds what is under way, keeps what failed."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from .. import errors
from .code import Code
from .milestone import LOOK, limit
from .protocol import WINDOW_BYTES, WINDOW_CALLS, Op, pack, unpack, unpack_failure
from .transport import TAGS, Transfer, Transport

KEPT = 16
"""Failures of a stream that are kept for the next synchronization; later ones are counted."""

_LOOK, _LATEST = 0.05, 1.0
"""Seconds between looks at who was lost; and until requests to them fail where messages never pause."""

_ids = itertools.count(1)


def new_id() -> int:
    """Return a number for a buffer, a stream, an event or a request, which no other has in this process."""
    return next(_ids)


class Reply:
    """What an agent will answer to a request.

    Attributes
    ----------
    transfer : Transfer or None
        Cancelled where the request is refused.
    """

    __slots__ = ("_came", "_told", "channel", "counted", "error", "number", "transfer", "value")

    def __init__(self, channel: Channel | None = None) -> None:
        self.number = new_id()
        self.counted: list[float] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.transfer: Transfer | None = None
        self.channel = channel
        self._came = threading.Lock()
        self._came.acquire()
        self._told: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return not self._came.locked()

    def come(self, value: Any, error: BaseException | None) -> None:
        """Answer, once."""
        self.value, self.error = value, error
        if error is not None and self.transfer is not None:
            self.transfer.cancel()
        self._came.release()
        if (told := self._told) is not None:
            self._told = None
            told()

    def when_come(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when the answer is there, perhaps twice, in the thread that receives: it must not wait."""
        self._told = call
        if self.done and self._told is not None:
            self._told = None
            call()

    def wait(self, what: str, timeout: float | None = None) -> None:
        """Wait for the answer, of either kind. Raises `StallError`."""
        if self.done:
            return
        bound = limit(timeout)
        begun = time.perf_counter()
        came = self._came.acquire(timeout=min(bound, threading.TIMEOUT_MAX))
        if self.counted is not None:
            self.counted[2] += time.perf_counter() - begun
        if not came:
            raise errors.StallError(f"waited {bound:g} s for {what}", seconds=bound)
        self._came.release()

    def get(self, what: str, timeout: float | None = None) -> Any:
        """Wait for the answer, and return it or raise."""
        self.wait(what, timeout)
        if self.error is not None:
            raise self.error
        return self.value


class Channel:
    """The application's end of a stream: the number of its last call, what is under way, and what failed.

    Parameters
    ----------
    number : int
        The stream's; 0 is the default one's of each device.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0
        self.failures: list[errors.RemoteError] = []
        self.dropped = 0
        self._changed = threading.Condition()
        self._done = 0
        self._bytes = 0
        self._costs: deque[tuple[int, int]] = deque()
        self._heir: Channel | None = None

    @property
    def full(self) -> bool:
        """Whether a call has to wait until earlier ones are done."""
        return self.sequence - self._done >= WINDOW_CALLS or self._bytes >= WINDOW_BYTES

    def next(self, cost: int) -> int:
        """Return the number of a new call with which `cost` bytes go (the connection's lock is held)."""
        self.sequence += 1
        if cost:
            with self._changed:
                self._bytes += cost
                self._costs.append((self.sequence, cost))
        return self.sequence

    def done(self, sequence: int) -> None:
        """Note that calls up to a number are over."""
        with self._changed:
            self._done = max(self._done, sequence)
            while self._costs and self._costs[0][0] <= sequence:
                self._bytes -= self._costs.popleft()[1]
            self._changed.notify_all()

    def wait_for_room(self, connection: Connection) -> None:
        """Wait until not too much is under way."""
        bound = limit()
        end = time.monotonic() + bound
        with self._changed:
            while self.full:
                self._changed.wait(LOOK)
                connection.check()
                if time.monotonic() > end:
                    raise errors.StallError(
                        f"waited {bound:g} s for {connection.label} to run some of "
                        f"{self.sequence - self._done} calls",
                        seconds=bound,
                    )

    def keep(self, failure: errors.RemoteError) -> None:
        """Keep a failure for the next synchronization."""
        with self._changed:
            if self._heir is not None:
                self._heir.keep(failure)
            elif len(self.failures) < KEPT:
                self.failures.append(failure)
            else:
                self.dropped += 1

    def forget(self, failure: BaseException) -> None:
        """Do not raise a failure again that was raised elsewhere."""
        with self._changed:
            self.failures = [f for f in self.failures if f is not failure]
            if self._heir is not None:
                self._heir.forget(failure)

    def leave_to(self, heir: Channel) -> None:
        """Let another raise what failed and will fail here: nobody synchronizes this one any more."""
        with self._changed:
            self._heir = heir
            failures, self.failures = self.failures, []
            heir.dropped += self.dropped
        for failure in failures:
            heir.keep(failure)

    def raise_kept(self) -> None:
        """Raise the first failure since the last time; the others are named in its notes."""
        if not self.failures:
            return
        with self._changed:
            failures, self.failures = self.failures, []
            dropped, self.dropped = self.dropped, 0
        if not failures:
            return
        first, *others = failures
        for other in others:
            first.add_note(f"then: {other}")
        if dropped:
            first.add_note(f"and {dropped} more")
        raise first


class Connection:
    """The application's end of one agent.

    Parameters
    ----------
    caller : Caller
    rank : int
    """

    def __init__(self, caller: Caller, rank: int) -> None:
        self.rank = rank
        self.index = rank
        self.label = f"rank {rank}"
        # reentrant, because a signal handler may call a device while its thread is in a call
        self.lock = threading.RLock()
        self.lost: str | None = None
        self.transport = caller.transport
        self.channels: dict[int, Channel] = {0: Channel(0)}
        self.ending: list[Reply] = []
        self._codes: dict[str, int] = {}
        self._sent: weakref.WeakSet[Code] = weakref.WeakSet()
        self.counts: dict[str, list[float]] = {}
        self._caller = caller

    def check(self) -> None:
        """Raise `DeviceLostError` where the agent is gone."""
        if self.lost is not None:
            raise errors.DeviceLostError(f"{self.label} is gone: {self.lost}", device=self.index)

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
            begun = time.perf_counter()
            channel.wait_for_room(self)
            entry = self.counts.setdefault("ROOM", [0, 0, 0.0])
            entry[0] += 1
            entry[2] += time.perf_counter() - begun
        with self.lock:
            return self.post_locked(channel, op, *operands, cost=cost, nbytes=nbytes)

    def post_locked(self, channel: Channel, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0) -> int:
        """`post`, for who holds the lock: two connections' to make calls of both in one order for all."""
        self.check()
        sequence = channel.next(cost)
        self._count(op, cost + nbytes)
        self._send(pack(op.value, channel.number, sequence, *operands))
        return sequence

    def tell(self, op: Op, *operands: Any, stream: int = 0) -> None:
        """Send what is done as soon as it arrives, beside all streams."""
        with self.lock:
            self.check()
            self._count(op, 0)
            self._send(pack(op.value, stream, 0, *operands))

    def ask(self, channel: Channel | None, op: Op, *operands: Any, cost: int = 0, nbytes: int = 0,
            transfer: Transfer | None = None, keep: bool = False) -> Reply:  # fmt: skip
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
        self._caller.replies[number] = (self.rank, reply)
        try:
            if channel is None:
                self.tell(op, *sent)
            else:
                self.post(channel, op, *sent, cost=cost, nbytes=nbytes)
        except BaseException:
            self._caller.replies.pop(number, None)
            raise
        if self.lost is not None:  # just now: nobody else would answer
            self._caller.fail(self.rank)
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
                weakref.finalize(code, self._caller.freed.put, (self, Op.CODE_END, code.key)).atexit = False

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
        self._caller.replies[reply.number] = (self.rank, reply)
        with self.lock:
            self.post_locked(channel, Op.SYNCHRONIZE, reply.number)
            self.channels.pop(number, None)
            self.tell(Op.STREAM_END, stream=number)
        # a synchronization of the device waits for it too
        self.ending = [r for r in self.ending if not r.done] + [reply]
        channel.leave_to(self.channels[0])

    def finalizer(self, handle: int) -> None:
        """Have an object freed, from a finalizer, which must not wait for anything."""
        self._caller.freed.put((self, Op.FREE, handle))

    def stream_finalizer(self, number: int) -> None:
        """Have a stream ended, from a finalizer."""
        self._caller.freed.put((self, Op.STREAM_END, number))

    def _send(self, message: bytes) -> None:
        try:
            self.transport.send(self.rank, message)
        except (errors.DeviceLostError, errors.ClosedError) as error:
            self._gone(error)

    def _gone(self, error: Exception) -> NoReturn:
        self.lost = self.lost or str(error)
        raise errors.DeviceLostError(f"{self.label} is gone: {self.lost}", device=self.index) from None

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
        The application's; the agents are its peers.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.replies: dict[int, tuple[int, Reply]] = {}
        self.connections = {rank: Connection(self, rank) for rank in transport.peers}
        # a put from a finalizer, which may interrupt anything, is all that a SimpleQueue is made for
        self.freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = False
        self._gone: deque[tuple[int, float]] = deque()  # who was lost, and until when answers are still taken
        self._tags: dict[tuple[int, int], itertools.count[int]] = {}
        self._tag_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"warpwell {name}", daemon=True)
            for name, work in (("replies", self._receive), ("frees", self._free))
        ]
        transport.on_lost(self._lost)
        for thread in self._threads:
            thread.start()

    def tag(self, source: int, destination: int) -> int:
        """Return the tag of a new copy from one rank to another."""
        with self._tag_lock:
            return next(self._tags.setdefault((source, destination), itertools.count())) % TAGS

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
        connection = self.connections[rank]
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
        for rank, _ in self._gone:
            self.fail(rank)

    def _take(self, connection: Connection, op: int, number: int, *operands: Any) -> None:
        if op == Op.REPLY:
            found = self.replies.pop(number, None)
            if found is not None:
                found[1].come(operands[0], None)
        elif op == Op.DONE:
            if (channel := connection.channels.get(number)) is not None:
                channel.done(operands[0])
        elif op == Op.FAILED:
            _sequence, call, failure = operands
            channel = connection.channels.get(number) or connection.channels[0]
            channel.keep(unpack_failure(failure, call, connection.label))
        elif op == Op.REFUSED:
            call, failure, earlier = operands
            found = self.replies.pop(number, None)
            if found is not None:
                error = unpack_failure(failure, call, connection.label)
                if found[1].channel is not None and not earlier:
                    found[1].channel.keep(error)
                found[1].come(None, error)

    def _free(self) -> None:
        while True:
            item = self.freed.get()
            if item is None:
                return
            connection, op, number = item
            try:
                if op == Op.FREE:
                    connection.tell(op, number)
                elif op == Op.CODE_END:
                    connection.drop(number)
                else:
                    connection.end_stream(number)
            except (errors.PoolError, errors.ClosedError, errors.StallError):
                pass  # a device that is gone holds nothing
            item = connection = None
