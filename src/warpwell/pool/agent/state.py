"""`AgentState`: what an agent holds and what its handlers use; `Half`: one side of a copy between agents."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

from ... import errors
from ..copy.direct import SharedMemory
from ..copy.pipelined import Started
from ..transport.bulk import Transfer
from ..transport.milestone import Milestone
from ..transport.tags import Tags
from ..transport.transport import Transport
from .code import LoadedCode
from .lane import DeferredCalls, Lane
from .memory import BufferView, Missing
from .protocol import Op, pack, pack_failure
from .runtime import Runtime


class Half:
    """One side of a copy between two agents. The leading side stands in a stream and says when to go.

    Parameters
    ----------
    peer : int
        The other side.

    Attributes
    ----------
    go, end : Milestone
        The leading half has begun, and what it offers; the receiving one is over.
    room, answer : Milestone
        What a following receiver offers; whether the sender has written there.
    silent : Milestone
        The sender writes no more, whatever became of the copy.
    told_to_go : bool
        Whether a following half was told to go.
    offered : bool
        Whether the sender may write.
    failure : BaseException or None
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.go = Milestone()
        self.end = Milestone()
        self.room = Milestone()
        self.answer = Milestone()
        self.silent = Milestone()
        self.told_to_go = False
        self.offered = False
        self.failure: BaseException | None = None
        self._transfer: Transfer | None = None

    def started(self, transfer: Transfer) -> None:
        """Note the transfer, which a failure of the other side cancels."""
        self._transfer = transfer
        if self.failure is not None:
            transfer.cancel()

    def check(self) -> None:
        """Raise the failure of the other side, if it has failed."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: BaseException) -> None:
        """Note that the other side failed or is gone: nothing that this one waits for will come."""
        self.failure = failure = self.failure or failure
        for awaited in (self.go, self.end, self.room, self.answer):
            awaited.fail(failure)
        if self._transfer is not None:
            self._transfer.cancel()


class AgentState:
    """One device of a pool, as the handlers of calls see it.

    Parameters
    ----------
    transport : Transport
    runtime : Runtime
        What executes.

    Attributes
    ----------
    application : int
        Rank of the process that is served.
    handles : dict
        Buffers, objects of services and arrays that arrive, by their number.
    halves : dict
        Copies with other agents that are under way.
    bulk : dict
        Copies with the application that are under way, by their request.
    answers : dict
        Large arrays of results that are under way, by their request.
    failed_halves : OrderedDict
        Copies that failed here before the leading half said GO.
    cuda : callable or None
        Takes what the communicator says of CUDA programs, by its rank; does not wait.
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
        self.halves: dict[int, Half] = {}
        self.bulk: dict[int, Half] = {}
        self.answers: dict[int, list[Transfer]] = {}
        self.tags = Tags(1)
        self.failed_halves: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.sharing = SharedMemory(self)
        self.lanes: dict[int, Lane] = {}
        self.helpers: list[Lane] = []
        self.idle: list[Lane] = []
        self.deferred = DeferredCalls(self)
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
        lane = Lane(self, -1)
        self.helpers.append(lane)
        return lane

    def view(self, handle: int) -> Any:
        """Return what a handle stands for: a `BufferView` or another object, or a `Missing`."""
        found = self.handles.get(handle)
        return Missing(handle) if found is None else found

    def tell(self, op: Op, *operands: Any, to: int | None = None) -> None:
        """Send a message, from a lane or a deferred call. A peer that is gone gets none, and that is no error."""
        try:
            self.transport.send(self.application if to is None else to, pack(int(op), *operands))
        except (errors.PoolError, errors.ClosedError, errors.StallError):
            pass  # a peer that is gone needs no answer, and its loss is told by the transport

    def failed(self, stream: int, sequence: int, call: Any, reply: int, error: BaseException) -> None:
        """Tell the application of a call that failed."""
        if reply:
            self.refuse(reply, call, error)
        else:
            self.tell(Op.FAILED, stream, sequence, call_name(call), pack_failure(error))

    def refuse(self, reply: int, call: Any, error: BaseException, *, earlier: bool = False) -> None:
        """Answer a request with a failure; `earlier` if the application was told of the failure before."""
        self.tell(Op.REFUSED, reply, call_name(call), pack_failure(error), earlier)

    def alive(self, peer: int | None = None) -> Callable[[], None]:
        """Return a function that raises once a wait (for something of `peer`) has become pointless."""

        def check() -> None:
            if self.stopped:
                raise errors.ClosedError("the agent ends")
            if peer is not None and peer in self.transport.lost():
                raise lost_error(peer, self.transport.lost()[peer])

        return check

    def move(
        self, way: Callable[..., None], lane: Lane, view: BufferView, peer: int, tag: int, plan: Any, started: Started
    ) -> None:
        """Move bulk data in or out (`copy_in`, `copy_out`), from a lane."""
        address = view.address(self.runtime, lane.stream)
        if view.nbytes:
            way(
                self.transport,
                self.runtime,
                lane.stream,
                peer,
                tag,
                plan,
                view.memory.block,
                address,
                view.nbytes,
                started,
            )

    def later(self, call: Callable[[], None], mark: Any = None) -> None:
        """Make a call from the thread of deferred calls, once the device has reached `mark`."""
        self.deferred.put(call, mark)

    def when_reached(self, milestone: Milestone, call: Callable[[BaseException | None], None]) -> None:
        """Make the deferred call ``call(failure)`` when the device has reached a recorded event."""
        milestone.when_set(lambda m: self.later(lambda: call(m.failure), None if m.failure else m.value))

    def half(self, number: int, peer: int) -> Half:
        """Return this side of a copy; whichever of its two messages comes first makes it."""
        half = self.halves.get(number)
        if half is None:
            half = self.halves[number] = Half(peer)
            if (reason := self.transport.lost().get(peer)) is not None:  # nobody else will tell it
                half.fail(lost_error(peer, reason))
        return half

    def copies_with(self, peer: int) -> list[Half]:
        """Return this agent's sides of the copies with another agent that are under way."""
        return [half for half in list(self.halves.values()) if half.peer == peer]

    def signal(self, number: int) -> Milestone:
        """Return the milestone that stands for an event of another agent."""
        return self.signals.setdefault(number, Milestone())


def lost_error(peer: int, reason: str) -> errors.DeviceLostError:
    """Return the error for a peer that is gone."""
    return errors.DeviceLostError(f"rank {peer} is gone: {reason}")


def call_name(call: Any) -> str:
    """Return what a call is called in errors: itself, or the launch of a kernel."""
    return call if isinstance(call, str) else f"launch of {call.name!r}"
