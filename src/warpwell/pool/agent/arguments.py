"""Large arrays among the arguments and results of calls, as an agent receives and sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

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

Move: TypeAlias = Callable[[Lane, PendingCopy], bytes | None]
"""Copies data, and returns the value of the reply."""


def copy_with_program(agent: AgentState, stream: int, call: tuple[int, str, int, int], move: Move) -> PendingCopy:
    """Queue a copy that the program may cancel, and answer with the result of `move`.

    `call` is its sequence, name, reply and cost; see `Lane.put`.
    """
    copy, reply = PendingCopy(), call[2]
    agent.bulk[reply] = copy

    def run(lane: Lane) -> None:
        try:
            copy.check()
            result = move(lane, copy)
        except BaseException as error:
            copy.failure = copy.failure or error
            raise copy.failure from None
        finally:
            agent.bulk.pop(reply, None)
        agent.send(Op.REPLY, reply, result)

    agent.lane(stream).put(*call, run)
    return copy


@handles(Op.ARGUMENT)
def argument(
    agent: AgentState, stream: int, sequence: int, handle: int, reply: int, tag: int, plan: Any, description: Any
) -> None:
    """Receive an array that a later call of the stream takes."""
    nbytes, *shape = description

    def move(lane: Lane, copy: PendingCopy) -> None:
        memory = np.empty(nbytes, np.uint8)
        run(agent.transport.get(agent.application, tag, Region.over(memory, chunk=plan[0])), copy.started)
        copy.array = shaped(memory, *shape)

    copy = copy_with_program(agent, stream, (sequence, "copy of an argument", reply, nbytes), move)
    agent.handles[handle] = copy


def take_objects(agent: AgentState, handles: Any) -> list[Any]:
    """Return the objects of the handles of a call, and remove the arrays that were sent for this call."""
    objects = [agent.view(handle) for handle in handles]
    for handle, value in zip(handles, objects, strict=True):
        if isinstance(value, PendingCopy):
            agent.handles.pop(handle, None)
    return objects


def answer(agent: AgentState, reply: int, result: Any) -> Callable[[], None]:
    """Start to send a result; return the function that sends the reply to the program."""
    parts: dict[int, tuple[int, NDArray[Any]]] = {}

    def number_of(value: Any) -> int | None:
        return parts.setdefault(id(value), (len(parts), value))[0] if is_large(value) else None

    data, numbers = dumps(result, number_of)
    if not parts:
        return lambda: agent.send(Op.REPLY, reply, data)
    descriptions, transfers = [], []
    for _, array in parts.values():
        contiguous, shape = flat(array)
        if np.may_share_memory(contiguous, array):
            contiguous = contiguous.copy()  # later calls may change the array while it is sent
        chunk = min(CHUNK, contiguous.nbytes)
        memory = Region.over(contiguous, chunk=chunk)
        transfers.append(agent.tags.start(agent.transport, agent.application, memory, outgoing=True))
        descriptions.append((transfers[-1].tag, chunk, *shape))
    for number, earlier in list(agent.answers.items()):  # a copy: other lanes answer concurrently
        if all(transfer.done for transfer in earlier):
            agent.answers.pop(number, None)
    agent.answers[reply] = transfers
    return lambda: agent.send(Op.ANSWER, reply, data, numbers, descriptions)
