"""`Answer`: results of calls whose large arrays go as bulk data, beside the message that tells of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..copy.plan import CHUNK
from ..transport.milestone import limit
from ..transport.region import Region
from ..transport.transport import Transfer
from .code import dumps, loads
from .protocol import Op, pack_dtype, unpack_dtype

if TYPE_CHECKING:
    from .agent import Agent
    from .caller import Connection

LARGE = 256 << 10
"""Bytes of an array from which it goes by itself: smaller ones are there as soon within the message."""



def is_large(thing: Any) -> bool:
    """Tell whether something is an array that goes by itself."""
    return type(thing) is np.ndarray and thing.nbytes > LARGE and not thing.dtype.hasobject


def flat(array: NDArray[Any]) -> tuple[NDArray[Any], tuple[Any, ...]]:
    """Return an array as contiguous bytes, not copied where they are, and what `shaped` needs besides."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    whole = np.ascontiguousarray(array.T if fortran else array)
    return whole, (array.nbytes, pack_dtype(array.dtype), array.shape, fortran, array.flags.writeable)


def shaped(memory: NDArray[np.uint8], dtype: Any, shape: Any, fortran: bool, writeable: bool) -> NDArray[Any]:
    """Return the array whose bytes have come."""
    array = np.ndarray(shape, unpack_dtype(dtype), memory, order="F" if fortran else "C")
    array.flags.writeable = writeable
    return array


def answer(agent: Agent, reply: int, result: Any) -> Callable[[], None]:
    """Begin to send a result; return what tells the application that it is there."""
    parts: dict[int, tuple[int, NDArray[Any]]] = {}

    def number_of(thing: Any) -> int | None:
        return parts.setdefault(id(thing), (len(parts), thing))[0] if is_large(thing) else None

    data, numbers = dumps(result, number_of)
    if not parts:
        return lambda: agent.tell(Op.REPLY, reply, data)
    about, transfers = [], []
    for _, array in parts.values():
        whole, shape = flat(array)
        if np.may_share_memory(whole, array):
            whole = whole.copy()  # later calls may change the array while it is sent
        tag = agent.tags.new(agent.transport.rank, agent.application)
        chunk = min(CHUNK, whole.nbytes)
        transfers.append(agent.transport.put(agent.application, tag, _region(whole, chunk)))
        agent.tags.begun(agent.transport.rank, agent.application, transfers[-1])
        about.append((tag, chunk, *shape))
    agent.answers = {n: ts for n, ts in agent.answers.items() if not all(t.done for t in ts)}
    agent.answers[reply] = transfers
    return lambda: agent.tell(Op.ANSWER, reply, data, numbers, about)


class Answer:
    """A result with large arrays, which are on their way."""

    def __init__(self, connection: Connection, data: bytes, numbers: Any, about: Any) -> None:
        """Begin to receive them. Raises `MemoryError`, `DeviceLostError`."""
        self._data, self._numbers = data, numbers
        self._connection = connection
        memories = [np.empty(nbytes, np.uint8) for _, _, nbytes, *_ in about]
        self._arrays = [shaped(memory, *shape) for memory, (_, _, _, *shape) in zip(memories, about, strict=True)]
        self._transfers: list[Transfer] = [
            connection.transport.get(connection.rank, tag, _region(m, chunk))
            for m, (tag, chunk, *_) in zip(memories, about, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Whether they are there, or will never be."""
        return all(transfer.status for transfer in self._transfers)

    def get(self, timeout: float | None) -> Any:
        """Wait for the arrays, and return the result."""
        end = time.monotonic() + limit(timeout)
        for transfer in self._transfers:
            try:
                transfer.wait(transfer.chunks, max(0.0, end - time.monotonic()))
            except errors.DeviceLostError:
                self._connection.lost = self._connection.lost or transfer.reason
                self._connection.check()
                raise
        return loads(self._data, [self._arrays[k] for k in self._numbers])


def answered(connection: Connection, number: int, *operands: Any) -> tuple[Any, BaseException | None]:
    """Return what a reply is given for an `ANSWER`, which is received in any case: its sender waits for that."""
    try:
        return Answer(connection, *operands), None
    except BaseException as error:  # no room here, or the agent is gone
        with contextlib.suppress(Exception):
            connection.finalizer(number, Op.CANCEL)
        return None, error


def _region(array: NDArray[Any], chunk: int) -> Region:
    return Region(int(array.ctypes.data), array.nbytes, chunk, None, array)
