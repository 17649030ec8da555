"""`AgentState`: the state of an agent, which its handlers use; `PendingCopy`: one side of a copy in progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from ... import errors
from ..transport.bulk import Transfer
from ..transport.milestone import Milestone
from ..transport.transport import Tags, Transport
from .code import LoadedCode
from .lane import HELPER, DeferredCalls, Lane
from .memory import Missing
from .peer_memory import PeerMemory
from .protocol import Op, pack, pack_failure
from .runtime import Runtime

HANDLERS: dict[int, Callable[..., None]] = {}
"""The function that handles each operation: ``(agent, stream, sequence, *operands)`` for a call of the program, and
``(agent, peer, *operands)`` for a message of another agent. The main loop calls it, so it must not wait."""


def handles(op: Op) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers the handler of an operation."""

    def register(handler: Callable[..., None]) -> Callable[..., None]:
        if op in HANDLERS:
            raise ValueError(f"{op!r} has two handlers: {HANDLERS[op].__qualname__} and {handler.__qualname__}")
        HANDLERS[op] = handler
        return handler

    return register


class PendingCopy:
    """A copy that can be cancelled: by the program, or because the other side has failed or is lost.

    Attributes
    ----------
    failure : BaseException or None
        Why it was cancelled or has failed.
    array : ndarray or None
        The received array, if it is an argument of a later call.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.array: NDArray[Any] | None = None
        self._transfer: Transfer | None = None

    def started(self, transfer: Transfer) -> None:
        """Store the transfer, which `fail` cancels."""
        self._transfer = transfer
        if self.failure is not None:
            transfer.cancel()

    def check(self) -> None:
        """Raise the failure of the copy, if it has failed."""
        if self.failure is not None:
            raise self.failure

    def value(self, agent: AgentState) -> NDArray[Any] | None:
        """Return the received array; raise the failure of the copy."""
        self.check()
        return self.array

    def fail(self, failure: BaseException) -> None:
        """Cancel the copy; the first failure stays."""
        self.failure = self.failure or failure
        if self._transfer is not None:
            self._transfer.cancel()


class IncomingCopy(PendingCopy):
    """A copy that this agent pulls from another agent.

    Parameters
    ----------
    peer : int
        The sender.

    Attributes
    ----------
    answer : Milestone
        True if the sender has written the data, False if it sends bulk data.
    silent : Milestone
        Set when the sender has answered, successfully or not: it does not write any more.
    is_wanted, offered : bool
        Whether WANT was sent, and whether the sender may write to this agent's memory.
    """

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer
        self.answer = Milestone()
        self.silent = Milestone()
        self.is_wanted = self.offered = False

    def fail(self, failure: BaseException) -> None:
        super().fail(failure)
        self.answer.fail(failure)


class OutgoingCopy(PendingCopy):
    """A copy that another agent pulls from this agent.

    Parameters
    ----------
    peer : int
        The receiver.

    Attributes
    ----------
    request : Milestone
        Set when the destination is ready, with its offer, the tag and the plan.
    received : Milestone
        Set when the destination has the data.
    settled : bool
        Whether this side is done.
    """

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer
        self.request = Milestone()
        self.received = Milestone()
        self.settled = False

    def fail(self, failure: BaseException) -> None:
        super().fail(failure)
        self.request.fail(failure)
        self.received.fail(failure)


class AgentState:
    """One device of a pool, as the handlers of calls see it.

    Parameters
    ----------
    transport : Transport
    runtime : Runtime
        The operations of the device.

    Attributes
    ----------
    application : int
        Rank of the program.
    handles : dict
        Buffers, objects of services, and arrays that are received, by number.
    incoming, outgoing : dict
        Copies with other agents in progress, by number.
    bulk : dict
        Copies with the program in progress, by request.
    answers : dict
        Transfers of large arrays of results in progress, by request.
    spare : SpareDevice or None
        The device, if it joins and leaves. Before it has joined, `runtime` has no device memory.
    reservations : dict
        Events that end reservations of GPUs, by request.
    cuda : callable or None
        Handles messages of the communicator: its rank, then the operands. It does not wait.
    """

    application = 0

    def __init__(self, transport: Transport, runtime: Runtime) -> None:
        self.transport = transport
        self.runtime = runtime
        self.stopped = False
        self.handles: dict[int, Any] = {}
        self.codes: dict[str, LoadedCode] = {}
        self.events: dict[int, Milestone] = {}
        self.signals: dict[int, Milestone] = {}
        self.incoming: dict[int, IncomingCopy] = {}
        self.outgoing: dict[int, OutgoingCopy] = {}
        self.bulk: dict[int, PendingCopy] = {}
        self.answers: dict[int, list[Transfer]] = {}
        self.tags = Tags(1)
        self.sharing = PeerMemory(self)
        self.lanes: dict[int, Lane] = {}
        self.helpers: list[Lane] = []
        self.idle: list[Lane] = []
        self.deferred = DeferredCalls(self)
        self.spare: Any = None
        self.reservations: dict[int, threading.Event] = {}
        self.cuda: Callable[..., None] | None = None

    def lane(self, number: int) -> Lane:
        """Return the lane of a stream."""
        lane = self.lanes.get(number)
        if lane is None:
            lane = self.lanes[number] = Lane(self, number)
        return lane

    def helper(self) -> Lane:
        """Return a lane for one call that belongs to no stream of this device."""
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        lane = Lane(self, HELPER)
        self.helpers.append(lane)
        return lane

    def view(self, handle: int | str) -> Any:
        """Return the object of a handle: a `BufferView`, a `LoadedCode` or another object, or a `Missing`."""
        found = self.codes.get(handle) if isinstance(handle, str) else self.handles.get(handle)
        return Missing(handle) if found is None else found

    def send(self, op: Op, *operands: Any, to: int | None = None) -> None:
        """Send a message from a lane or a deferred call. Do nothing if the peer is lost."""
        try:
            self.transport.send(self.application if to is None else to, pack(int(op), *operands))
        except (errors.PoolError, errors.ClosedError, errors.StallError):
            pass  # the transport reports the loss

    def failed(self, stream: int, sequence: int, call: Any, reply: int, error: BaseException) -> None:
        """Report a failed call to the program."""
        if reply:
            self.refuse(reply, call, error)
        else:
            self.send(Op.FAILED, stream, sequence, call_name(call), pack_failure(error))

    def answer(self, reply: int, call: Any, run: Callable[[], Any]) -> None:
        """Answer a request with the result of ``run()``, or with its failure."""
        try:
            self.send(Op.REPLY, reply, run())
        except BaseException as error:  # of any kind: the program handles it
            self.refuse(reply, call, error)

    def refuse(self, reply: int, call: Any, error: BaseException, *, earlier: bool = False) -> None:
        """Answer a request with a failure. `earlier`: the failure was reported to the program before."""
        self.send(Op.REFUSED, reply, call_name(call), pack_failure(error), earlier)

    def alive(self, peer: int | None = None) -> Callable[[], None]:
        """Return a function that raises if the agent stops, or if `peer`, for which it waits, is lost."""

        def check() -> None:
            if self.stopped:
                raise errors.ClosedError("the agent ends")
            if peer is not None and peer in self.transport.lost():
                raise lost_error(peer, self.transport.lost()[peer])

        return check

    def later(self, call: Callable[[], None], mark: Any = None) -> None:
        """Make a call in the thread of deferred calls, after the device has reached `mark`."""
        self.deferred.put(call, mark)

    def signal(self, number: int) -> Milestone:
        """Return the milestone for an event of another agent."""
        return self.signals.setdefault(number, Milestone())


def lost_error(peer: int, reason: str) -> errors.DeviceLostError:
    """Return the error for a lost peer."""
    return errors.DeviceLostError(f"rank {peer} is gone: {reason}")


def call_name(call: Any) -> str:
    """Return the name of a call in errors."""
    return call if isinstance(call, str) else f"launch of {call.name!r}"
