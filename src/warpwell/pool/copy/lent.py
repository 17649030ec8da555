"""Pinned arrays of the application that an agent on the same host reads and writes itself, so that nothing is sent.

The memory of `pinned_empty` is a file without a name. Where agent and application are processes of one user on one
host, the agent maps it too, page-locks it for its GPU, and the copy engine goes straight to the application's array.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..agent.handlers import handles
from ..agent.lane import Lane
from ..agent.protocol import Op, pack_failure
from ..agent.state import AgentState, Half


class MappedArray:
    """Memory of the application in this process.

    Parameters
    ----------
    path : str
    nbytes : int
    """

    def __init__(self, path: str, nbytes: int) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_size < nbytes:
                raise ValueError(f"{path} is not the application's array")
            self._memory = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._unlock: Any = None

    def lock(self, runtime: Any) -> None:
        """Page-lock it, where the device can."""
        self._unlock = runtime.page_lock(int(self.bytes.ctypes.data), self.bytes.nbytes)

    def __del__(self) -> None:
        if getattr(self, "_unlock", None) is not None:
            self._unlock()


@handles(Op.SHARE)
def share(agent: AgentState, _s: int, _q: int, reply: int, number: int, path: str, nbytes: int) -> None:
    """Map an array of the application."""

    def run(lane: Lane) -> None:
        try:
            mapping = MappedArray(path, nbytes)
            mapping.lock(agent.runtime)
        except Exception as error:
            agent.tell(Op.REFUSED, reply, "mapping of an array", pack_failure(error), False)
            return
        agent.handles[number] = mapping
        agent.tell(Op.REPLY, reply, None)

    agent.helper().put(0, "mapping of an array", 0, 0, run)


@handles(Op.WRITE_LENT)
def write_lent(agent: AgentState, stream: int, sequence: int, handle: int, number: int, offset: int) -> None:
    """Copy from an array of the application, which is lent until the stream is there."""
    view, mapping = agent.view(handle), agent.handles.get(number)

    def run(lane: Lane) -> None:
        data = _part(mapping, offset, view.nbytes)
        agent.runtime.write(lane.stream, view.address(agent.runtime, lane.stream), data, lent=True)
        if not agent.runtime.synchronous:
            # the application may drop its array, and this would end with it, while the device still reads it
            agent.later(lambda: mapping and None, agent.runtime.mark(lane.stream, False))

    agent.lane(stream).put(sequence, "copy from the host", 0, 0, run)


@handles(Op.READ_LENT)
def read_lent(agent: AgentState, stream: int, sequence: int, handle: int, reply: int, number: int, offset: int) -> None:
    """Copy to an array of the application."""
    view, mapping = agent.view(handle), agent.handles.get(number)
    half = agent.bulk[reply] = Half(agent.application)

    def run(lane: Lane) -> None:
        try:
            half.check()  # the application may have given it up: its array is its own again
            data = _part(mapping, offset, view.nbytes)
            agent.runtime.read(lane.stream, data, view.address(agent.runtime, lane.stream))
        finally:
            agent.bulk.pop(reply, None)
        agent.tell(Op.REPLY, reply, None)

    agent.lane(stream).put(sequence, "copy to the host", reply, 0, run)


def _part(mapping: MappedArray | None, offset: int, nbytes: int) -> NDArray[np.uint8]:
    if mapping is None:
        raise errors.PoolError("the application's array is not mapped here any more")
    return mapping.bytes[offset : offset + nbytes]
