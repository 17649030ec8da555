"""Large arrays among the arguments and results of calls, as an agent receives and sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transport.bulk import Region
from ..tuning import CHUNK
from .code import dumps
from .lane import Lane
from .large_arrays import flat, is_large, shaped
from .protocol import Op
from .staged import run
from .state import AgentState, PendingCopy, handles


class ArrivingArray:
    """An array that has arrived, or will have, when the call that it belongs to runs."""

    def __init__(self) -> None:
        self.array: Any = None
        self.failure: BaseException | None = None

    def value(self, agent: AgentState) -> Any:
        """Return the array; raise the error if it could not be received."""
        if self.failure is not None:
            raise self.failure
        return self.array


@handles(Op.ARGUMENT)
def argument(
    agent: AgentState, stream: int, sequence: int, handle: int, reply: int, tag: int, plan: Any, about: Any
) -> None:
    """Receive an array that a later call of the stream takes."""
    arriving = agent.handles[handle] = ArrivingArray()
    copy = agent.bulk[reply] = PendingCopy()
    nbytes, *shape = about

    def receive(lane: Lane) -> None:
        try:
            copy.check()
            memory = np.empty(nbytes, np.uint8)
            run(agent.transport.get(agent.application, tag, Region.over(memory, chunk=plan[0])), copy.started)
            arriving.array = shaped(memory, *shape)
        except BaseException as error:
            arriving.failure = copy.failure or error
            raise arriving.failure from None
        finally:
            agent.bulk.pop(reply, None)
        agent.tell(Op.REPLY, reply, None)

    agent.lane(stream).put(sequence, "copy of an argument", reply, nbytes, receive)


def taken(agent: AgentState, handles: Any) -> list[Any]:
    """Return the objects of the handles of a call, and forget the arrays among them that were sent for this call."""
    found = [agent.view(handle) for handle in handles]
    for handle, value in zip(handles, found, strict=True):
        if isinstance(value, ArrivingArray):
            agent.handles.pop(handle, None)
    return found


def answer(agent: AgentState, reply: int, result: Any) -> Callable[[], None]:
    """Begin to send a result; return the function that sends the reply with it to the application."""
    parts: dict[int, tuple[int, NDArray[Any]]] = {}

    def number_of(value: Any) -> int | None:
        return parts.setdefault(id(value), (len(parts), value))[0] if is_large(value) else None

    data, numbers = dumps(result, number_of)
    if not parts:
        return lambda: agent.tell(Op.REPLY, reply, data)
    about, transfers = [], []
    for _, array in parts.values():
        contiguous, shape = flat(array)
        if np.may_share_memory(contiguous, array):
            contiguous = contiguous.copy()  # later calls may change the array while it is sent
        tag = agent.tags.new(agent.transport.rank, agent.application)
        chunk = min(CHUNK, contiguous.nbytes)
        transfers.append(agent.transport.put(agent.application, tag, Region.over(contiguous, chunk=chunk)))
        agent.tags.reserve(agent.transport.rank, agent.application, transfers[-1])
        about.append((tag, chunk, *shape))
    for number, earlier in list(agent.answers.items()):  # a copy: other lanes answer meanwhile
        if all(transfer.done for transfer in earlier):
            agent.answers.pop(number, None)
    agent.answers[reply] = transfers
    return lambda: agent.tell(Op.ANSWER, reply, data, numbers, about)
