"""`copy_in` and `copy_out`: bulk data between a transport and device memory, as an agent moves them.

While one chunk is received into a staging buffer, the one before is copied on to the device, and the other way round:
stages 1 and 2, and 4 and 5, of the source's five (section 4). With stages of equal rate, the time of many chunks comes
near that of one stage. ::

    link      | 0 | 1 | 2 | 3 | 4 |
    device        | 0 | 1 | 2 | 3 | 4 |        buffers 0 1 2 3 0 ...

A plan without buffers goes the plain way: all of the data into staging memory, then all of it on. Where device memory
is host memory, nothing is staged.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import errors
from ..transport.bulk import LOST, Region, Transfer
from ..transport.milestone import limit
from ..transport.transport import Transport

Started = Callable[[Transfer], None]
"""Called with each transfer that was begun, so that somebody else can cancel it."""


def copy_in(
    transport: Transport,
    runtime: Any,
    stream: Any,
    peer: int,
    tag: int,
    plan: tuple[int, int],
    block: Any,
    to: int,
    nbytes: int,
    started: Started,
) -> None:
    """Receive bulk data into device memory; return when later work of the stream finds it there.

    Parameters
    ----------
    transport, runtime, stream
    peer, tag : int
    plan : CopyPlan
        Its two numbers, the same as the other side's.
    block : object
        The runtime's block, held until the transfer is over.
    to : int
        Address in it.
    nbytes : int
    started : callable
    """
    chunk, buffers = plan
    staging = runtime.staging(buffers * chunk or nbytes)
    if staging is None:
        run(transport.get(peer, tag, Region(to, nbytes, chunk, None, block)), started)
        return
    memory = Region(int(staging.ctypes.data), nbytes, chunk, buffers or None, staging)
    transfer = transport.get(peer, tag, memory)
    if not buffers:
        run(transfer, started, runtime)
        runtime.write(stream, to, staging[:nbytes], lent=True)
        runtime.synchronize(stream)  # the staging memory is used again
        return
    started(transfer)
    marks: collections.deque[Any] = collections.deque()
    free = 0
    try:
        transfer.allow(min(buffers, transfer.chunks))
        for k in range(transfer.chunks):
            transfer.wait(k + 1, limit())
            at, size = k * chunk, min(chunk, nbytes - k * chunk)
            place = k % buffers * chunk
            runtime.write(stream, to + at, staging[place : place + size], lent=True)
            marks.append(runtime.mark(stream, False))
            while marks and (len(marks) == buffers or runtime.reached(marks[0])):
                _reach(runtime, marks.popleft())
                free += 1
            transfer.allow(min(transfer.chunks, free + buffers))
    except BaseException:
        give_up(transfer, runtime)
        raise
    finally:
        runtime.synchronize(stream)  # the staging memory is used again


def copy_out(
    transport: Transport,
    runtime: Any,
    stream: Any,
    peer: int,
    tag: int,
    plan: tuple[int, int],
    block: Any,
    source: int,
    nbytes: int,
    started: Started,
) -> None:
    """Send device memory, as earlier work of the stream leaves it; return when it may change again."""
    chunk, buffers = plan
    staging = runtime.staging(buffers * chunk or nbytes)
    if staging is None:
        runtime.synchronize(stream)
        run(transport.put(peer, tag, Region(source, nbytes, chunk, None, block)), started)
        return
    memory = Region(int(staging.ctypes.data), nbytes, chunk, buffers or None, staging)
    if not buffers:
        runtime.read(stream, np.asarray(staging[:nbytes]), source)
        run(transport.put(peer, tag, memory), started, runtime)
        return
    transfer = transport.put(peer, tag, memory)
    started(transfer)
    marks: collections.deque[Any] = collections.deque()
    filled = 0
    try:
        for k in range(transfer.chunks):
            while marks and (len(marks) == buffers or runtime.reached(marks[0])):
                _reach(runtime, marks.popleft())
                filled += 1
            transfer.allow(filled)
            if k >= buffers:  # the chunk that was in this buffer is filled, and must have been sent
                transfer.wait(k - buffers + 1, limit())
            at, size = k * chunk, min(chunk, nbytes - k * chunk)
            place = k % buffers * chunk
            runtime.fetch(stream, np.asarray(staging[place : place + size]), source + at)
            marks.append(runtime.mark(stream, False))
        while marks:
            _reach(runtime, marks.popleft())
            filled += 1
            transfer.allow(filled)
        transfer.wait(transfer.chunks, limit())
    except BaseException:
        give_up(transfer, runtime)
        runtime.synchronize(stream)
        raise


def run(transfer: Transfer, started: Started, runtime: Any = None) -> None:
    """Wait for a transfer; see `give_up` for `runtime`."""
    started(transfer)
    try:
        transfer.wait(transfer.chunks, limit())
    except BaseException:
        give_up(transfer, runtime)
        raise


def give_up(transfer: Transfer, runtime: Any = None) -> None:
    """Cancel a transfer, and wait a little for the chunks that are on their way: they still use the memory.

    With `runtime`, that memory is the thread's staging memory, which is not used again if this takes long.
    """
    transfer.cancel()
    # of a peer that is gone nothing comes any more: MPI either lets go at once, or keeps the memory for ever
    end = time.monotonic() + (0.05 if transfer.status == LOST else 1.0)
    while not transfer.done and time.monotonic() < end:
        time.sleep(1e-3)
    if runtime is not None and not transfer.done:
        runtime.drop_staging()


def _reach(runtime: Any, mark: Any) -> None:
    if not runtime.reach(mark, limit()):
        raise errors.StallError(f"the device did not come to the end of a copy in {limit():g} s", seconds=limit())
