"""Copies between two agents, which the destination pulls; and pinned arrays of the program.

When the stream of the destination has reached the copy, the destination sends WANT. When the stream of the source has
reached the copy, too, the source writes the data to the memory of the destination, or sends it as bulk data::

    source                      destination
                        <--     WANT, with an offer of memory
    writes;  SENT       -->
    (or SENT, bulk data -->)
                        <--     HAVE, unless the source has written the data

Each WANT is answered by SENT, also after failures. Until then, the destination keeps the memory (`PeerMemory`), and a
failed copy blocks its stream. Otherwise old data could overwrite the result of a later call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..transport.milestone import limit
from . import staged
from .lane import Lane
from .memory import BufferView, SkippedError
from .protocol import Op, pack_failure
from .runtime import Runtime
from .state import AgentState, IncomingCopy, OutgoingCopy, handles, lost_error

COPY = "copy between devices"

# -- the destination -----------------------------------------------------------------------------------------------


@handles(Op.PULL)
def pull(agent: AgentState, stream: int, sequence: int, handle: int, number: int, origin: tuple[Any, ...]) -> None:
    """Copy from another agent, in the order of a stream or, with -1, as soon as the source is ready."""
    peer, tag, plan, may_write = origin
    view, copy = agent.view(handle), IncomingCopy(peer)
    agent.incoming[number] = copy

    def want(lane: Lane | None) -> None:
        agent.alive(peer)()
        view.memory.ready()
        if lane is not None:
            agent.runtime.synchronize(lane.stream)
        copy.check()
        offer = agent.sharing.offer(number, view, peer) if may_write else None
        copy.offered, copy.is_wanted = offer is not None, True
        agent.send(Op.WANT, number, offer, tag, plan, to=peer)

    def run(lane: Lane) -> None:
        failure: BaseException | None = None
        is_written = False
        try:
            if stream >= 0:
                want(lane)
            copy.check()
            is_written = copy.offered and copy.answer.get(f"rank {peer} to send a copy", alive=agent.alive(peer))
            if not is_written:
                staged.receive(agent, lane, view, peer, tag, plan, copy.started)
        except BaseException as error:
            failure = copy.failure or error
        if not is_written:
            _report(agent, number, copy, failure)
        agent.incoming.pop(number, None)
        if failure is not None and stream >= 0:
            raise failure

    def want_early() -> None:
        try:
            want(None)
        except BaseException as error:
            copy.fail(error)
        # Use a thread only after the source has answered, because thousands of copies may be queued.
        copy.answer.when_set(lambda _: agent.helper().put(sequence, COPY, 0, 0, run))

    if stream >= 0:
        agent.lane(stream).put(sequence, COPY, 0, 0, run)
    elif isinstance(view, BufferView) and view.memory.block is not None:
        agent.later(want_early)
    else:  # an allocation may take long
        agent.helper().put(sequence, COPY, 0, 0, lambda lane: want_early())


def _report(agent: AgentState, number: int, copy: IncomingCopy, failure: BaseException | None) -> None:
    """Report the end of a copy to its source. Return after the source can no longer write."""
    cause = failure.cause if isinstance(failure, SkippedError) else failure
    agent.send(Op.HAVE, number, None if cause is None else pack_failure(cause), copy.is_wanted, to=copy.peer)
    if cause is not None and copy.offered:
        with contextlib.suppress(Exception):  # a lost source never answers
            copy.silent.wait(f"rank {copy.peer} to end a copy", alive=agent.alive(copy.peer))


@handles(Op.SENT)
def sent(agent: AgentState, peer: int, number: int, is_written: bool, unable: bool, failure: Any) -> None:
    """Record the answer of the source."""
    agent.sharing.answered(number, peer if unable else None)
    copy = agent.incoming.get(number)
    if copy is None:
        return
    if failure is None:
        copy.answer.set(is_written)
    else:
        copy.fail(errors.PoolError(f"rank {peer}: {failure[0]}"))
    copy.silent.set()


# -- the source ----------------------------------------------------------------------------------------------------


@handles(Op.SOURCE)
def source(
    agent: AgentState, stream: int, sequence: int, handle: int, number: int, peer: int, is_reported: bool
) -> None:
    """Send a copy after WANT, in the order of a stream; -1: of no stream."""
    view, copy = agent.view(handle), _outgoing(agent, number, peer, is_source=True)

    def run(lane: Lane) -> None:
        try:
            view.memory.ready()
            agent.runtime.synchronize(lane.stream)
            offer, tag, plan = copy.request.get(f"rank {peer} to take a copy", alive=agent.alive(peer))
            if offer is not None and _write(agent, lane, view, copy, offer):
                agent.send(Op.SENT, number, True, False, None, to=peer)
                copy.received.set()
            else:
                agent.send(Op.SENT, number, False, peer in agent.sharing.unreachable(), None, to=peer)
                staged.send(agent, lane, view, peer, tag, plan, copy.started)
                if stream >= 0:
                    copy.received.get(f"rank {peer} to take a copy", alive=agent.alive(peer))
        except BaseException as error:
            failure = copy.failure or error
            copy.request.when_set(lambda _: agent.later(lambda: _refuse(agent, number, peer, failure)))
            if is_reported:
                raise failure from None
        finally:
            copy.settled = True
            _forget(agent, number, copy)

    if stream >= 0:
        agent.lane(stream).put(sequence, COPY, 0, 0, run)
    else:
        copy.request.when_set(lambda _: agent.helper().put(sequence, COPY, 0, 0, run))


def _refuse(agent: AgentState, number: int, peer: int, failure: BaseException) -> None:
    cause = failure.cause if isinstance(failure, SkippedError) else failure
    agent.send(Op.SENT, number, False, False, pack_failure(cause), to=peer)


@handles(Op.WANT)
def want(agent: AgentState, peer: int, number: int, offer: Any, tag: int, plan: Any) -> None:
    """Record that the destination of a copy is ready."""
    _outgoing(agent, number, peer).request.set((offer, tag, plan))


def _write(agent: AgentState, lane: Lane, view: BufferView, copy: OutgoingCopy, offer: Any) -> bool:
    """Write a view to the memory that the destination offers. Return False if that is not possible."""
    runtime = agent.runtime
    address = view.address(runtime, lane.stream)
    with contextlib.ExitStack() as stack:
        try:
            access, to = stack.enter_context(agent.sharing.opened(copy.peer, offer))
        except Exception:  # no peer access between the GPUs, another user, memory that cannot be exported
            return False
        copy.check()
        try:
            access.put(lane.stream, to, address, view.nbytes)
            if not runtime.reach(runtime.mark(lane.stream, False), limit()):
                raise errors.StallError(f"a copy to another device exceeded {limit():g} s", seconds=limit())
        except BaseException:
            with contextlib.suppress(Exception):  # a failed device does not write any more
                runtime.synchronize(lane.stream)
            raise
    return True


@handles(Op.HAVE)
def have(agent: AgentState, peer: int, number: int, failure: Any, is_wanted: bool) -> None:
    """Record that the destination has the data, or has failed before or after WANT."""
    copy = agent.outgoing.get(number) if is_wanted else _outgoing(agent, number, peer)
    if copy is None:
        return  # the source has written the data
    if failure is None:
        copy.received.set()
    else:
        copy.fail(errors.PoolError(f"rank {peer}: {failure[0]}"))
    _forget(agent, number, copy)


def _outgoing(agent: AgentState, number: int, peer: int, *, is_source: bool = False) -> OutgoingCopy:
    """Return this side of a copy. The first message about the copy creates it."""
    copy = agent.outgoing.get(number)
    if copy is None:
        copy = OutgoingCopy(peer)
        reason = agent.transport.lost().get(peer)
        if reason is not None:
            copy.fail(lost_error(peer, reason))
        if reason is None or is_source:  # otherwise the calls of the program have completed, or fail by themselves
            agent.outgoing[number] = copy
    return copy


def _forget(agent: AgentState, number: int, copy: OutgoingCopy) -> None:
    """Remove a copy after the last message of the program and of the destination about it."""
    if copy.settled and copy.received.done:
        agent.outgoing.pop(number, None)


# -- both ----------------------------------------------------------------------------------------------------------


@handles(Op.RELEASE)
def release(agent: AgentState, peer: int, number: int) -> None:
    """Close a block of another agent, which will free it."""
    agent.sharing.release(peer, number)


@handles(Op.RELEASED)
def released(agent: AgentState, peer: int, number: int) -> None:
    """Record that another agent has closed a block."""
    agent.sharing.released(peer, number)


def peer_lost(agent: AgentState, peer: int, reason: str) -> None:
    """Fail all copies with a lost agent."""
    failure = lost_error(peer, reason)
    for incoming in list(agent.incoming.values()):
        if incoming.peer == peer:
            incoming.fail(failure)
    for number, outgoing in list(agent.outgoing.items()):
        if outgoing.peer == peer:
            outgoing.fail(failure)
            _forget(agent, number, outgoing)
    agent.sharing.lost(peer)


# -- pinned arrays of the program ----------------------------------------------------------------------------------


class MappedArray:
    """Memory of the program that this process has mapped, so that copies from and to it send no data.

    The memory of `pinned_empty` is a file without a name. If agent and program are processes of one user on one host,
    the agent maps the file and page-locks the memory for its GPU.

    Parameters
    ----------
    runtime : Runtime
        Page-locks the memory if the device can.
    path : str
    nbytes : int
    """

    def __init__(self, runtime: Runtime, path: str, nbytes: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size < nbytes:
                raise ValueError(f"{path} must have at least {nbytes} bytes")
            self._memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._unlock: Any = runtime.page_lock(int(self.bytes.ctypes.data), nbytes)

    def __del__(self) -> None:
        if getattr(self, "_unlock", None) is not None:
            self._unlock()


@handles(Op.SHARE)
def share(agent: AgentState, _s: int, _q: int, reply: int, number: int, path: str, nbytes: int) -> None:
    """Map an array of the program."""

    def run(lane: Lane) -> None:
        agent.handles[number] = MappedArray(agent.runtime, path, nbytes)
        agent.send(Op.REPLY, reply, None)

    agent.helper().put(0, "mapping of an array", reply, 0, run)
