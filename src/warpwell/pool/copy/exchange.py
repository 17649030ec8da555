"""Copies between two agents, as each executes its half, and what the two tell each other meanwhile.

The leading half says GO when its stream has come to the copy. Data then go as bulk data of the transport; or, between
devices of one host, the sender writes them where they belong::

    receiver leads              sender leads
    GO, with an offer  -->      <--  GO
                                ROOM, with an offer  -->
    <--  FILLED                 <--  FILLED

A sender that cannot reach the receiver's memory says BULK instead, and both go the other way. Every offer is answered:
by FILLED, BULK, or LEFT where the copy failed; until then the receiver keeps the memory (`SharedMemory`), and a copy
that was given up holds up the receiver's stream, or old data would overwrite what a later call writes there.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ... import errors
from ..agent.handlers import handles
from ..agent.lane import Lane
from ..agent.memory import BufferView, GivenUpError, SkippedError
from ..agent.protocol import Op, pack_failure
from ..agent.state import AgentState, Half
from ..transport.milestone import limit
from .pipelined import copy_in, copy_out

FORGOTTEN = 4096
"""Failed halves of which it is remembered that the leading half may still say GO."""


@handles(Op.LEAD)
def lead(
    agent: AgentState,
    stream: int,
    sequence: int,
    handle: int,
    number: int,
    outgoing: bool,
    peer: int,
    tag: int,
    plan: Any,
    process: int,
) -> None:
    """Copy to or from another agent, in the order of a stream of this one."""
    view = agent.view(handle)
    half = agent.half(number, peer)

    def run(lane: Lane) -> None:
        gone = False
        offer = None
        try:
            agent.alive(peer)()
            view.memory.ready()
            if process:
                agent.runtime.synchronize(lane.stream)
                half.check()
                if not outgoing:
                    offer = _offer(agent, half, number, view, process)
            gone = True  # or nearly: whoever is told twice does not mind
            agent.tell(Op.GO, number, None, offer, to=peer)
            if outgoing and process:
                offer = half.room.wait(f"rank {peer} to start a copy", agent.alive(peer))
            if not _directly(agent, lane, view, half, number, outgoing, offer):
                _in_bulk(agent, lane, view, half, outgoing, tag, plan)
                if outgoing:
                    half.end.wait(f"rank {peer} to take a copy", agent.alive(peer))
                else:
                    agent.runtime.synchronize(lane.stream)
                    agent.tell(Op.END, number, None, to=peer)
            agent.halves.pop(number, None)
        except BaseException as error:
            _failed(agent, half, number, error, gone, leaves=outgoing and process > 0)
            if half.failure is not None:
                raise half.failure from None
            raise

    agent.lane(stream).put(sequence, "copy between devices", 0, 0, run)


@handles(Op.FOLLOW)
def follow(
    agent: AgentState,
    stream: int,
    sequence: int,
    handle: int,
    number: int,
    outgoing: bool,
    peer: int,
    tag: int,
    plan: Any,
    process: int,
) -> None:
    """Copy from or to another agent, when that one says so. What fails is told to it, and it tells the application."""
    view = agent.view(handle)
    half = agent.half(number, peer)

    def run(lane: Lane) -> None:
        try:
            offer = half.go.wait(f"rank {peer} to begin a copy", agent.alive(peer))
            if process:
                view.memory.ready()
                agent.runtime.synchronize(lane.stream)
                if not outgoing:
                    offer = _offer(agent, half, number, view, process)
                    agent.tell(Op.ROOM, number, offer, to=peer)
            if not _directly(agent, lane, view, half, number, outgoing, offer):
                _in_bulk(agent, lane, view, half, outgoing, tag, plan)
                if not outgoing:
                    agent.tell(Op.END, number, None, to=peer)
                elif stream >= 0:
                    # in the order of both streams: what comes here later, comes after what came there before
                    half.end.wait(f"rank {peer} to take a copy", agent.alive(peer))
            agent.halves.pop(number, None)
        except BaseException as error:
            _failed(agent, half, number, error, True, leaves=outgoing and process > 0)

    if stream >= 0:
        agent.lane(stream).put(sequence, "copy between devices", 0, 0, run)
    else:  # a thread only once there is something to do: there may be thousands of copies to come
        half.go.when_set(lambda _: agent.helper().put(sequence, "copy between devices", 0, 0, run))


def _offer(agent: AgentState, half: Half, number: int, view: BufferView, process: int) -> Any:
    """Return what the sender needs to write to a view, if it may."""
    offer = agent.sharing.offer(number, view, half.peer, process)
    half.offered = offer is not None
    return offer


def _directly(
    agent: AgentState, lane: Lane, view: BufferView, half: Half, number: int, outgoing: bool, offer: Any
) -> bool:
    """Have the data written where they belong; return False where they have to go in bulk."""
    if offer is None:
        return False
    if not outgoing:
        return bool(half.answer.wait(f"rank {half.peer} to send a copy", agent.alive(half.peer)))
    source = view.address(agent.runtime, lane.stream)
    try:
        neighbour, to = agent.sharing.open(half.peer, offer)
    except Exception:  # whatever it is: no way from GPU to GPU, another user, memory that cannot be had by others
        agent.tell(Op.BULK, number, half.peer in agent.sharing.unreachable(), to=half.peer)
        return False
    runtime = agent.runtime
    half.check()
    try:
        neighbour.put(lane.stream, to, source, view.nbytes)
        if not runtime.reach(runtime.mark(lane.stream, False), limit()):
            raise errors.StallError(f"a copy to another device took {limit():g} s", seconds=limit())
    except BaseException:
        with contextlib.suppress(Exception):  # of a device that has failed nothing writes any more
            runtime.synchronize(lane.stream)
        raise
    agent.tell(Op.FILLED, number, to=half.peer)
    return True


def _in_bulk(agent: AgentState, lane: Lane, view: BufferView, half: Half, outgoing: bool, tag: int, plan: Any) -> None:
    way = copy_out if outgoing else copy_in
    agent.move(way, lane, view, half.peer, tag, plan, half.started)
    if lane.number < 0:
        agent.runtime.synchronize(lane.stream)  # no stream of this device will


def _failed(agent: AgentState, half: Half, number: int, error: BaseException, gone: bool, *, leaves: bool) -> None:
    """Tell the other side of a failure that it does not know, and that this one writes no more.

    A receiver that was told of one waits until the sender has said that, too.
    """
    if half.offered and half.failure is not None:
        with contextlib.suppress(Exception):  # of one that is lost, or stands still, nothing is said
            half.silent.wait(f"rank {half.peer} to end a copy", agent.alive(half.peer))
    if not half.told_to_go:  # before it is forgotten, or a GO that comes now would make another half, which nobody ends
        agent.failed_halves[number] = None
        while len(agent.failed_halves) > FORGOTTEN:
            agent.failed_halves.popitem(last=False)
    agent.halves.pop(number, None)
    if half.failure is None:
        cause = error.cause if isinstance(error, SkippedError) else error
        agent.tell(Op.END if gone else Op.GO, number, pack_failure(cause), None, to=half.peer)
    if leaves:  # behind the end of the half: an offer that comes later is answered by whoever receives it
        agent.tell(Op.LEFT, number, to=half.peer)


@handles(Op.GO)
def go(agent: AgentState, peer: int, number: int, failure: Any, offer: Any) -> None:
    """Let this side begin: the leading one has, or has failed."""
    if number not in agent.halves and agent.failed_halves.pop(number, False) is None:
        _refuse(agent, peer, number, offer)
        return
    half = agent.half(number, peer)  # it may come before the application's message
    half.told_to_go = True
    if failure is None:
        half.go.set(offer)
    else:
        _fail(half, peer, failure)


@handles(Op.END)
def end(agent: AgentState, peer: int, number: int, failure: Any, _offer: Any = None) -> None:
    """Note that the receiver has the data, or that the other side has failed."""
    half = agent.halves.get(number)
    if half is None:
        return
    if failure is None:
        half.end.set()
    else:
        _fail(half, peer, failure)


@handles(Op.ROOM)
def room(agent: AgentState, peer: int, number: int, offer: Any) -> None:
    """Take the offer of a following receiver."""
    half = agent.halves.get(number)
    if half is None:
        _refuse(agent, peer, number, offer)
    else:
        half.room.set(offer)


@handles(Op.FILLED)
def filled(agent: AgentState, peer: int, number: int) -> None:
    """Note that the data are where they belong."""
    if (half := _answered(agent, number)) is not None:
        half.answer.set(True)


@handles(Op.BULK)
def bulk(agent: AgentState, peer: int, number: int, for_ever: bool) -> None:
    """Receive the data as bulk data: the sender cannot write to the memory that was offered."""
    half = _answered(agent, number)
    if for_ever:
        agent.sharing.refused(peer)
    if half is not None:
        half.answer.set(False)


@handles(Op.LEFT)
def left(agent: AgentState, peer: int, number: int) -> None:
    """Give a copy up: where its sender alone was told to, it says no more than this."""
    if (half := _answered(agent, number)) is not None:
        half.fail(GivenUpError(f"rank {peer} cancelled the copy"))


@handles(Op.RELEASE)
def release(agent: AgentState, peer: int, number: int) -> None:
    """Close a block of another agent's memory, which is to be freed."""
    agent.sharing.release(peer, number)


@handles(Op.RELEASED)
def released(agent: AgentState, peer: int, number: int) -> None:
    """Note that another agent has closed a block."""
    agent.sharing.released(peer, number)


def _answered(agent: AgentState, number: int) -> Half | None:
    """Note that the sender of a copy writes no more; return this side of the copy."""
    agent.sharing.answered(number)
    half = agent.halves.get(number)
    if half is not None:
        half.silent.set()
    return half


def _fail(half: Half, peer: int, failure: Any) -> None:
    said = str(failure[0])
    kind = GivenUpError if said.startswith(GivenUpError.__name__) else errors.PoolError
    half.fail(kind(f"rank {peer}: {said}"))


def _refuse(agent: AgentState, peer: int, number: int, offer: Any) -> None:
    if offer is not None:
        agent.later(lambda: agent.tell(Op.LEFT, number, to=peer))
