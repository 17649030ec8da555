"""`Agent`: serves one device to one program: receives calls and queues them in the lanes of their streams."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ... import errors
from ..transport.transport import Transport
from . import arguments, copies, spare, stream_calls
from .code import LoadedCode
from .lane import Lane
from .memory import BufferView, SkippedError
from .protocol import Op, unpack, unpack_dtype
from .runtime import Runtime
from .state import HANDLERS, AgentState, call_name, handles

DRAIN_SECONDS = 2.0
"""Time that lanes have for queued calls after GOODBYE."""

HANDLER_MODULES = (arguments, copies, spare, stream_calls)
"""The other modules whose functions are in `HANDLERS`."""


class Agent(AgentState):
    """One device of a pool.

    The main loop only waits for messages. Lanes, which are the threads of streams, and deferred calls do all work that
    takes time.

    Parameters
    ----------
    transport : Transport
    runtime : Runtime
        The operations of the device; of the CPU until a `SpareDevice` joins.
    spare_device : SpareDevice, optional
    """

    def __init__(self, transport: Transport, runtime: Runtime, spare_device: spare.SpareDevice | None = None) -> None:
        super().__init__(transport, runtime)
        self.spare = spare_device
        self.counts: dict[str, int] = {}
        self.programs: Callable[[], list[dict[str, Any]]] = list
        """Returns the CUDA programs that this agent's process also serves."""

    def run(self) -> None:
        """Serve until the program sends GOODBYE or is lost."""
        self.runtime.enter()
        self.transport.on_lost(functools.partial(copies.peer_lost, self))
        try:
            while not self.stopped:
                got = self.transport.receive(0.5)
                if got is None:
                    # CUDA programs of other hosts use the communicator, even if the program has executed another one
                    if self.application in self.transport.lost() and self.cuda is None:
                        break
                    continue
                peer, message = got
                op, *operands = unpack(message)
                self._dispatch(peer, op, operands)
                got = message = operands = None  # type: ignore[assignment]
        except errors.ClosedError:
            pass  # the owner of the transport closed it
        finally:
            self._end()

    def _dispatch(self, peer: int, op: int, operands: list[Any]) -> None:
        handler = HANDLERS.get(op)
        name = Op(op).name if op in Op._value2member_map_ else str(op)
        if handler is None:
            raise errors.PoolError(
                f"rank {self.transport.rank} has no handler for the message {name} of rank {peer}: use one version of "
                "Warpwell on all hosts"
            )
        self.counts[name] = self.counts.get(name, 0) + 1
        if op >= Op.SIGNAL:
            handler(self, peer, *operands)
            return
        try:
            handler(self, *operands)
        except Exception as error:  # a call that cannot be queued fails like a call that has run
            failure = error
            self.later(lambda: self.failed(operands[0], operands[1], name.lower(), 0, failure))

    def info(self) -> dict[str, Any]:
        """Return the properties of the device, and the state of the agent."""
        free, total = self.runtime.memory_info()
        lanes = {
            n: {"calls": lane.calls, "waiting": lane.waiting, "doing": call_name(lane.doing) if lane.doing else ""}
            for n, lane in list(self.lanes.items())
        }
        views = [v for v in list(self.handles.values()) if isinstance(v, BufferView)]
        held = {id(v.memory): v.memory.nbytes for v in views if v.memory.block is not None}
        info = {**self.runtime.info(), "target": self.runtime.target, "joined": True}
        info |= {"host": socket.gethostname(), "pid": os.getpid(), "python": sys.version.split()[0]}
        info |= {"free": free, "total": total, "held": sum(held.values()), "buffers": len(self.handles)}
        info |= {"calls": dict(self.counts), "lanes": lanes, "copies": len(self.incoming) + len(self.outgoing)}
        info |= {"shared": self.sharing.count(), "unreachable": self.sharing.unreachable()}
        info |= {"transport": self.transport.statistics(), "programs": self.programs()}
        return info if self.spare is None else {**info, **self.spare.info()}

    def _end(self) -> None:
        end = time.monotonic() + DRAIN_SECONDS
        lanes = [*self.lanes.values(), *self.helpers]
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.thread.join(max(0.0, end - time.monotonic()))
        self.stopped = True
        self.deferred.end()
        self.sharing.end()
        for released in list(self.reservations.values()):
            released.set()
        self.handles.clear()
        if self.spare is not None:  # this process may continue, to serve CUDA programs that claim the GPU themselves
            self.spare.release()


# -- calls that are completed at once ----------------------------------------------------------------------------------


@handles(Op.VIEW)
def view(
    agent: Agent, _s: int, _q: int, handle: int, base: int, offset: int, dtype: Any, shape: Any, strides: Any
) -> None:
    """Create another array in the memory of a buffer."""
    base_view = agent.view(base)
    agent.handles[handle] = BufferView(base_view.memory, base_view.offset + offset, unpack_dtype(dtype), shape, strides)


@handles(Op.FREE)
def free(agent: Agent, _s: int, _q: int, handle: int) -> None:
    """Remove an object. Its memory is freed after the calls that use it."""
    last = [agent.handles.pop(handle, None)]
    agent.events.pop(handle, None)
    if isinstance(last[0], stream_calls.ServiceObject):  # the object's finalizer may take long
        agent.helper().put(0, "end of an object", 0, 0, lambda lane: last.clear())


@handles(Op.CODE)
def code(agent: Agent, _s: int, _q: int, key: str, name: str, data: bytes) -> None:
    """Store a kernel or a function."""
    agent.codes[key] = LoadedCode(name, data)


@handles(Op.CODE_END)
def code_end(agent: Agent, _s: int, _q: int, key: str) -> None:
    """Remove a kernel or a function."""
    agent.codes.pop(key, None)


@handles(Op.STREAM)
def stream(agent: Agent, number: int, _q: int, priority: int) -> None:
    """Create a stream."""
    agent.lanes[number] = Lane(agent, number, priority)


@handles(Op.STREAM_END)
def stream_end(agent: Agent, number: int, _q: int) -> None:
    """Close a stream after its calls."""
    lane = agent.lanes.pop(number, None)
    if lane is not None:
        lane.end()


@handles(Op.INFO)
def info(agent: Agent, _s: int, _q: int, reply: int) -> None:
    """Reply with the properties of the device."""
    agent.later(lambda: agent.answer(reply, "info", agent.info))


@handles(Op.CANCEL)
def cancel(agent: Agent, _s: int, _q: int, number: int) -> None:
    """Cancel a copy, the bulk data of a request, or a reservation."""
    if number in agent.reservations:
        agent.reservations[number].set()
    copy = agent.bulk.get(number) or agent.outgoing.pop(number, None)
    if copy is not None:
        copy.fail(SkippedError(errors.PoolError("the program cancelled the copy")))
    for answer in agent.answers.pop(number, ()):
        answer.cancel()


@handles(Op.CUDA)
def cuda(agent: Agent, peer: int, *message: Any) -> None:
    """Handle a message of the communicator."""
    if agent.cuda is not None:
        agent.cuda(peer, *message)


@handles(Op.GOODBYE)
def goodbye(agent: Agent, _s: int, _q: int) -> None:
    """End the agent."""
    agent.stopped = True


def start(agent: Agent, name: str) -> threading.Thread:
    """Run an agent in a thread of this process. If the agent fails, the program loses the device for that reason."""

    def run() -> None:
        try:
            agent.run()
        except errors.PoolError as error:
            agent.transport.close_reason = str(error)
            agent.transport.close()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
