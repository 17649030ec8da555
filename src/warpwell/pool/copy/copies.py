"""`copy_in` and `copy_out`: bulk data between a transport and device memory; `Half`: one side of a copy between agents.

These two functions go the plain way: all of the data into staging memory, then all of it on. An `Agent` takes others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..transport.bulk import LOST
from ..transport.milestone import Milestone, limit
from ..transport.region import Region
from ..transport.transport import Transfer, Transport

Started = Callable[[Transfer], None]


def copy_in(transport: Transport, runtime: Any, stream: Any, peer: int, tag: int, chunk: int, block: Any, to: int,
            nbytes: int, started: Started) -> None:  # fmt: skip
    """Receive bulk data into device memory; return when later work of the stream finds it there.

    Parameters
    ----------
    transport, runtime, stream
    peer, tag, chunk
        As the other side's.
    block : object
        The runtime's block, held until the transfer is over.
    to : int
        Address in it.
    nbytes : int
    started : callable
        Called with each transfer that was begun, so that somebody else can cancel it.
    """
    staging = runtime.staging(nbytes)
    if staging is None:
        _run(transport.get(peer, tag, Region(to, nbytes, chunk, None, block)), started)
        return
    _run(transport.get(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, None, staging)), started, runtime)
    runtime.write(stream, to, staging[:nbytes], lent=True)
    runtime.synchronize(stream)  # the staging memory goes


def copy_out(transport: Transport, runtime: Any, stream: Any, peer: int, tag: int, chunk: int, block: Any, source: int,
             nbytes: int, started: Started) -> None:  # fmt: skip
    """Send device memory, as earlier work of the stream leaves it; return when it may change again."""
    staging = runtime.staging(nbytes)
    if staging is None:
        runtime.synchronize(stream)
        _run(transport.put(peer, tag, Region(source, nbytes, chunk, None, block)), started)
        return
    runtime.read(stream, np.asarray(staging[:nbytes]), source)
    _run(transport.put(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, None, staging)), started, runtime)


def receive(transport: Transport, peer: int, tag: int, memory: Region, started: Started) -> None:
    """Receive bulk data into memory of this process."""
    _run(transport.get(peer, tag, memory), started)


def _run(transfer: Transfer, started: Started, runtime: Any = None) -> None:
    started(transfer)
    try:
        transfer.wait(transfer.chunks, limit())
    except BaseException:
        give_up(transfer, runtime)
        raise


def give_up(transfer: Transfer, runtime: Any = None) -> None:
    """Cancel a transfer, and wait a little for what is on its way: it still uses the memory.

    With `runtime`, that memory is the thread's staging memory, which is not used again where this takes long.
    """
    transfer.cancel()
    # of a peer that is gone nothing comes any more: MPI either lets go at once, or keeps the memory for ever
    end = time.monotonic() + (0.05 if transfer.status == LOST else 1.0)
    while not transfer.done and time.monotonic() < end:
        time.sleep(1e-3)
    if runtime is not None and not transfer.done:
        runtime.drop_staging()


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
    heard : bool
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
        self.heard = False
        self.offered = False
        self.failure: BaseException | None = None
        self._transfer: Transfer | None = None

    def started(self, transfer: Transfer) -> None:
        """Note the transfer, which a failure of the other side cancels."""
        self._transfer = transfer
        if self.failure is not None:
            transfer.cancel()

    def check(self) -> None:
        """Raise what the other side failed with, if it has."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: BaseException) -> None:
        """The other side failed, or is gone: nothing that this one waits for will come."""
        self.failure = failure = self.failure or failure
        for awaited in (self.go, self.end, self.room, self.answer):
            awaited.fail(failure)
        if self._transfer is not None:
            self._transfer.cancel()
