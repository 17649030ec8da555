"""The calls of streams on an agent.

The main loop of the agent calls each function. It looks up the objects of the call, so that a later free does not
affect them, and queues the rest of the work in the lane of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from ... import errors, registry
from ..transport.milestone import Milestone
from . import code as codes
from . import staged
from .arguments import answer, copy_with_program, take_objects
from .lane import Lane
from .memory import BufferView, DeviceMemory, Missing, SkippedError
from .protocol import Op, pack_failure, unpack_arguments, unpack_dtype
from .state import AgentState, PendingCopy, handles


@handles(Op.ALLOCATE)
def allocate(agent: AgentState, stream: int, sequence: int, handle: int, nbytes: int, dtype: Any, shape: Any) -> None:
    """Create a buffer."""
    view = BufferView(DeviceMemory(agent.runtime, nbytes), 0, unpack_dtype(dtype), shape)
    agent.handles[handle] = view
    agent.lane(stream).put(sequence, "allocation", 0, 0, lambda lane: view.memory.allocate())


@handles(Op.FILL)
def fill(agent: AgentState, stream: int, sequence: int, handle: int, item: bytes) -> None:
    """Fill a buffer with an item."""
    view = agent.view(handle)

    def run(lane: Lane) -> None:
        address = view.address(agent.runtime, lane.stream)
        agent.runtime.fill(lane.stream, address, item, view.nbytes // max(1, len(item)))

    agent.lane(stream).put(sequence, "fill", 0, 0, run)


@handles(Op.WRITE)
def write(agent: AgentState, stream: int, sequence: int, handle: int, data: bytes | tuple[int, int]) -> None:
    """Copy bytes to a buffer, or an array that the program has shared: its memory and offset.

    The shared array must not change until the stream has reached the copy.
    """
    view = agent.view(handle)
    shared = None if isinstance(data, bytes) else (agent.view(data[0]), data[1])

    def run(lane: Lane) -> None:
        source = data if shared is None else shared[0].bytes[shared[1] : shared[1] + view.nbytes]
        agent.runtime.write(lane.stream, view.address(agent.runtime, lane.stream), source)
        if shared is not None and not agent.runtime.synchronous:
            # The program may drop its array, and with it the mapping, while the device still reads it.
            agent.later(lambda: shared and None, agent.runtime.mark(lane.stream, False))

    agent.lane(stream).put(sequence, "copy from the host", 0, len(data) if shared is None else 0, run)


@handles(Op.WRITE_BULK)
def write_bulk(agent: AgentState, stream: int, sequence: int, handle: int, reply: int, tag: int, plan: Any) -> None:
    """Copy bulk data of the application to a buffer."""
    view = agent.view(handle)

    def move(lane: Lane, copy: PendingCopy) -> None:
        staged.receive(agent, lane, view, agent.application, tag, plan, copy.started)

    copy_with_program(agent, stream, (sequence, "copy from the host", reply, view.nbytes), move)


@handles(Op.READ)
def read(
    agent: AgentState, stream: int, sequence: int, handle: int, reply: int, shared: tuple[int, int] | None
) -> None:
    """Copy a buffer to the program: in the reply, or into an array that the program has shared."""
    view = agent.view(handle)
    mapping, offset = (None, 0) if shared is None else (agent.view(shared[0]), shared[1])

    def move(lane: Lane, copy: PendingCopy) -> bytes | None:
        data = np.empty(view.nbytes, np.uint8) if mapping is None else mapping.bytes[offset : offset + view.nbytes]
        agent.runtime.read(lane.stream, data, view.address(agent.runtime, lane.stream))
        return data.tobytes() if mapping is None else None

    copy_with_program(agent, stream, (sequence, "copy to the host", reply, 0), move)


@handles(Op.READ_BULK)
def read_bulk(agent: AgentState, stream: int, sequence: int, handle: int, reply: int, tag: int, plan: Any) -> None:
    """Copy a buffer to the program as bulk data."""
    view = agent.view(handle)

    def move(lane: Lane, copy: PendingCopy) -> None:
        staged.send(agent, lane, view, agent.application, tag, plan, copy.started)

    copy_with_program(agent, stream, (sequence, "copy to the host", reply, 0), move)


@handles(Op.COPY)
def copy(agent: AgentState, stream: int, sequence: int, destination: int, source: int) -> None:
    """Copy between buffers of this device."""
    to, origin = agent.view(destination), agent.view(source)

    def run(lane: Lane) -> None:
        runtime = agent.runtime
        runtime.copy(lane.stream, to.address(runtime, lane.stream), origin.address(runtime, lane.stream), to.nbytes)

    agent.lane(stream).put(sequence, "copy", 0, 0, run)


@handles(Op.LAUNCH)
def launch(agent: AgentState, stream: int, sequence: int, key: str, configuration: Any, packed: Any) -> None:
    """Run a kernel."""
    loaded = agent.codes[key]
    arguments = unpack_arguments(packed, agent.view)

    def run(lane: Lane) -> None:
        values = [_value(agent, lane, v, kernel=True) for v in arguments]
        agent.runtime.launch(lane.stream, loaded.launch(configuration), values)

    agent.lane(stream).put(sequence, loaded, 0, 0, run)


@handles(Op.CALL)
def call(agent: AgentState, stream: int, sequence: int, key: str, reply: int, handles: Any, data: bytes) -> None:
    """Call a Python function."""
    loaded = agent.codes[key]
    objects = take_objects(agent, handles)

    def run(lane: Lane) -> None:
        arguments, options = codes.loads(data, _values(agent, lane, objects))
        result = agent.runtime.call(lane.stream, loaded.value, arguments, options)
        _answer_behind(agent, lane, reply, result)

    agent.lane(stream).put(sequence, f"call of {loaded.name!r}", reply, len(data), run)


def _answer_behind(agent: AgentState, lane: Lane, reply: int, result: Any) -> None:
    """Send a result after the work that its function has queued in the stream, because the program relies on that."""
    send = answer(agent, reply, result)
    if agent.runtime.synchronous:
        send()
    else:
        agent.later(send, agent.runtime.mark(lane.stream, False))


class ServiceObject:
    """An object of a service. It exists after its lane has created it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.made = Milestone()

    def value(self, agent: AgentState) -> Any:
        """Wait for the object, and return it."""
        try:
            return self.made.get(f"{self.path} to be made", alive=agent.alive())
        except BaseException as error:
            raise SkippedError(error) from None


@handles(Op.CREATE)
def create(agent: AgentState, stream: int, sequence: int, handle: int, path: str, handles: Any, data: bytes) -> None:
    """Create an object that stays on the agent."""
    held = agent.handles[handle] = ServiceObject(path)
    objects = take_objects(agent, handles)

    def run(lane: Lane) -> None:
        try:
            arguments, options = codes.loads(data, _values(agent, lane, objects))
            held.made.set(agent.runtime.call(lane.stream, registry.load(path), arguments, options))
        except BaseException as error:
            held.made.fail(error)
            raise

    agent.lane(stream).put(sequence, f"making of {path!r}", 0, len(data), run)


@handles(Op.METHOD)
def method(
    agent: AgentState, stream: int, sequence: int, handle: int, name: str, reply: int, handles: Any, data: bytes
) -> None:
    """Call a method of such an object, or read an attribute, whose name begins with a dot.

    If the method returns a `Future`, reply with its result when it is done.
    """
    held = agent.view(handle)
    objects = take_objects(agent, handles)

    def run(lane: Lane) -> None:
        value = held.value(agent)
        if name.startswith("."):
            result = getattr(value, name[1:])
        else:
            arguments, options = codes.loads(data, _values(agent, lane, objects))
            result = agent.runtime.call(lane.stream, getattr(value, name), arguments, options)
        if isinstance(result, Future):
            result.add_done_callback(lambda later: agent.later(lambda: _answer(agent, reply, called, later)))
        else:
            _answer_behind(agent, lane, reply, result)

    called = f"{name!r} of {held.path!r}" if isinstance(held, ServiceObject) else repr(name)
    agent.lane(stream).put(sequence, called, reply, len(data), run)


def _answer(agent: AgentState, reply: int, called: str, result: Future[Any]) -> None:
    """Reply with the result of a method that returned a future. Its lane has continued."""
    try:
        answer(agent, reply, result.result())()
    except BaseException as error:  # of any kind: the caller handles it
        agent.refuse(reply, called, error)


def _values(agent: AgentState, lane: Lane, objects: list[Any]) -> list[Any]:
    return [_value(agent, lane, item) for item in objects]


def _value(agent: AgentState, lane: Lane, item: Any, *, kernel: bool = False) -> Any:
    if isinstance(item, BufferView):
        return (item.argument if kernel else item.operand)(agent.runtime, lane.stream)
    return item.value(agent) if isinstance(item, ServiceObject | Missing | PendingCopy) else item


@handles(Op.GLOBAL)
def set_global(agent: AgentState, stream: int, sequence: int, key: str, name: str, handles: Any, data: bytes) -> None:
    """Set a global variable of a kernel."""
    loaded = agent.codes[key]
    label = f"global variable {name!r} of {loaded.name!r}"
    agent.lane(stream).put(sequence, label, 0, len(data), lambda lane: loaded.set_global(name, codes.loads(data)))


# -- events ------------------------------------------------------------------------------------------------------


@handles(Op.RECORD)
def record(agent: AgentState, stream: int, sequence: int, event: int, timing: bool) -> None:
    """Record an event. It replaces the point that the event had before."""
    milestone = agent.events[event] = Milestone()

    def run(lane: Lane) -> None:
        try:
            milestone.set(agent.runtime.mark(lane.stream, timing))
        except BaseException as error:
            milestone.fail(error)
            raise

    agent.lane(stream).put(sequence, "event", 0, 0, run)


@handles(Op.WAIT)
def wait(agent: AgentState, stream: int, sequence: int, event: int) -> None:
    """Wait for the last recorded point of an event of this device."""
    milestone = agent.events.get(event)

    def run(lane: Lane) -> None:
        if milestone is not None:
            mark = milestone.get(f"event {event}", alive=agent.alive())
            agent.runtime.after(lane.stream, mark)

    agent.lane(stream).put(sequence, "wait for an event", 0, 0, run)


@handles(Op.AWAIT)
def await_signal(agent: AgentState, stream: int, sequence: int, number: int, peer: int) -> None:
    """Wait for the signal of an event of another agent."""
    signal = agent.signal(number)

    def run(lane: Lane) -> None:
        try:
            signal.get(f"an event of rank {peer}", alive=agent.alive(peer))
        finally:
            agent.signals.pop(number, None)

    agent.lane(stream).put(sequence, "wait for an event of another device", 0, 0, run)


@handles(Op.SYNCHRONIZE)
def synchronize(agent: AgentState, stream: int, sequence: int, reply: int) -> None:
    """Reply when all previous calls of the stream are done."""

    def run(lane: Lane) -> None:
        agent.runtime.synchronize(lane.stream)
        agent.send(Op.REPLY, reply, None)

    agent.lane(stream).put(sequence, "synchronization", reply, 0, run)


@handles(Op.NOTIFY)
def notify(agent: AgentState, stream: int, sequence: int, event: int, number: int, peer: int) -> None:
    """Send another agent a signal when an event is reached."""

    def report(failure: BaseException | None) -> None:
        agent.send(Op.SIGNAL, number, None if failure is None else pack_failure(failure), to=peer)

    _when(agent, agent.events.get(event), report)


@handles(Op.SIGNAL)
def signal(agent: AgentState, peer: int, number: int, failure: Any) -> None:
    """Record that an event of another agent is reached, or has failed."""
    reached = agent.signal(number)
    if failure is None:
        reached.set()
    else:
        reached.fail(errors.PoolError(f"rank {peer}: {failure[0]}"))


@handles(Op.REACHED)
def reached(agent: AgentState, stream: int, sequence: int, event: int, reply: int) -> None:
    """Reply whether an event is reached, which holds for an event that was never recorded."""
    milestone = agent.events.get(event)

    def answer() -> None:
        done = milestone is None or (
            milestone.done and (milestone.failure is not None or agent.runtime.reached(milestone.value))
        )
        agent.send(Op.REPLY, reply, done)

    agent.later(answer)


@handles(Op.UNTIL)
def reply_when_reached(agent: AgentState, stream: int, sequence: int, event: int, reply: int) -> None:
    """Reply when an event is reached."""
    _when(agent, agent.events.get(event), lambda failure: agent.send(Op.REPLY, reply, None))


@handles(Op.ELAPSED)
def elapsed(agent: AgentState, stream: int, sequence: int, event: int, earlier: int, reply: int) -> None:
    """Reply with the seconds between two events when both are reached."""
    last, first = agent.events.get(event), agent.events.get(earlier)

    def answer(failure: BaseException | None) -> None:
        try:
            if failure is not None:
                raise failure
            assert last is not None and first is not None
            agent.send(Op.REPLY, reply, agent.runtime.elapsed(last.value, first.value))
        except BaseException as error:
            agent.refuse(reply, "elapsed time", error)

    _when(agent, first, lambda failure: _when(agent, last, answer) if failure is None else answer(failure))


def _when(agent: AgentState, milestone: Milestone | None, call: Callable[[BaseException | None], None]) -> None:
    """Make the deferred call ``call(failure)`` when the device has reached an event; at once if it is not recorded."""
    if milestone is None:
        agent.later(lambda: call(None))
    else:
        milestone.when_set(lambda m: agent.later(lambda: call(m.failure), None if m.failure else m.value))
