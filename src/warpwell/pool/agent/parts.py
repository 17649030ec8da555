"""`Arguments`: large arrays among the arguments of a call go as bulk data, before the call that takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..copy import copies
from ..copy.copying import Bulk, region
from ..ids import new_id
from .answers import flat, is_large, shaped
from .code import dumps
from .protocol import WINDOW_BYTES, Op

if TYPE_CHECKING:
    from ..device import Device
    from .agent import Agent
    from .lane import Lane

PRIVATE = WINDOW_BYTES // 2
"""Arguments of at most so many bytes are copied first, so that the call need not wait until they are sent."""


class Arguments:
    """The arguments of one call of a device, as a block around it: one that ends early takes back what was sent.

    Parameters
    ----------
    device : Device
    channel : Channel
        The stream's: the arrays have their place in its order, before the call.
    """

    def __init__(self, device: Device, channel: Any) -> None:
        self._device, self._channel = device, channel
        self._parts: dict[int, tuple[int, NDArray[Any]]] = {}

    def pack(self, value: Any) -> tuple[bytes, tuple[int, ...]]:
        """Send the large arrays of a value; return it pickled, with the handles that stand in it."""
        data, handles = dumps(value, self._handle_of)
        for handle, array in self._parts.values():
            self._send(handle, array)
        return data, handles

    def _handle_of(self, thing: Any) -> int | None:
        if not is_large(thing):
            return self._device._handle_of(thing)
        known = self._parts.get(id(thing))
        if known is None:
            known = self._parts[id(thing)] = new_id(), thing
        return known[0]

    def _send(self, handle: int, array: NDArray[Any]) -> None:
        whole, about = flat(array)
        own = not np.may_share_memory(whole, array)
        if not own and whole.nbytes <= PRIVATE:
            whole, own = whole.copy(), True
        with Bulk(self._device, self._channel) as bulk:
            cost = whole.nbytes if own else 0
            bulk.put(whole, Op.ARGUMENT, handle, about, cost=cost, nbytes=whole.nbytes - cost)
            if not own:
                bulk.finish()

    def __enter__(self) -> Arguments:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # no call will take them
            for handle, _array in self._parts.values():
                self._device.connection.finalizer(handle)


class Part:
    """An array that has come, or will have, when the call runs that it belongs to."""

    def __init__(self) -> None:
        self.array: Any = None
        self.failure: BaseException | None = None

    def value(self, agent: Agent) -> Any:
        """Return the array, or raise why there is none."""
        if self.failure is not None:
            raise self.failure
        return self.array


def argument(agent: Agent, stream: int, sequence: int, handle: int, reply: int, tag: int, plan: Any,
             about: Any) -> None:  # fmt: skip
    """Receive an array that a later call of the stream takes."""
    part = agent.handles[handle] = Part()
    half = agent.bulk[reply] = copies.Half(agent.application)
    nbytes, *shape = about

    def run(lane: Lane) -> None:
        try:
            half.check()
            memory = np.empty(nbytes, np.uint8)
            copies.receive(agent.transport, agent.application, tag, region(memory, plan[0]), half.started)
            part.array = shaped(memory, *shape)
        except BaseException as error:
            part.failure = half.failure or error
            raise part.failure from None
        finally:
            agent.bulk.pop(reply, None)
        agent.tell(Op.REPLY, reply, None)

    agent.lane(stream).put(sequence, "copy of an argument", reply, nbytes, run)


def taken(agent: Agent, handles: Any) -> list[Any]:
    """Return what the handles of a call stand for. Arrays that came for it are its own from now on."""
    found = [agent.view(handle) for handle in handles]
    for handle, thing in zip(handles, found, strict=True):
        if isinstance(thing, Part):
            agent.handles.pop(handle, None)
    return found
