"""`receive` and `send`: move bulk data between a transport and device memory, through staging buffers.

While one chunk is received into a staging buffer, the chunk before it is copied to the device, and the other way round:
stages 1 and 2, and 4 and 5, of the five stages of the source (section 4). If all stages have the same rate, a copy of N
chunks takes about as long as one stage. ::

    link      | 0 | 1 | 2 | 3 | 4 |
    device        | 0 | 1 | 2 | 3 | 4 |        buffers 0 1 2 3 0 ...

If device memory is host memory, nothing is staged.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import errors
from ..._os import clock
from ..transport.bulk import LOST, Region, Transfer
from ..transport.milestone import limit
from .lane import Lane, LaneOwner
from .memory import BufferView
from .runtime import Runtime

Started = Callable[[Transfer], None]
"""Called with each transfer that starts, so that another thread can cancel it."""


def receive(
    agent: LaneOwner, lane: Lane, view: BufferView, peer: int, tag: int, plan: tuple[int, int], started: Started
) -> None:
    """Receive bulk data into a view. Later work of the lane's stream can read it.

    Parameters
    ----------
    agent : LaneOwner
    lane : Lane
    view : BufferView
        Its block is referenced until the transfer has ended.
    peer, tag : int
    plan : CopyPlan
        Must be equal on both sides.
    started : callable
    """
    runtime, stream, nbytes, (chunk, buffers) = agent.runtime, lane.stream, view.nbytes, plan
    to = view.address(runtime, stream)
    if not nbytes:
        return
    staging = runtime.staging(buffers * chunk)
    if staging is None:
        run(agent.transport.get(peer, tag, Region(to, nbytes, chunk, None, view.memory.block)), started)
        return
    transfer = agent.transport.get(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, buffers, staging))
    started(transfer)
    marks = _Marks(runtime, buffers)
    try:
        transfer.allow(min(buffers, transfer.chunks))
        for k in range(transfer.chunks):
            transfer.wait(k + 1, limit())
            offset, size = k * chunk, min(chunk, nbytes - k * chunk)
            slot = k % buffers * chunk
            runtime.write(stream, to + offset, staging[slot : slot + size])
            marks.add(stream)
            transfer.allow(min(transfer.chunks, marks.count_reached() + buffers))
    except BaseException:
        cancel_and_wait(transfer, runtime)
        raise
    finally:
        runtime.synchronize(stream)  # the next copy reuses the staging memory


def send(
    agent: LaneOwner, lane: Lane, view: BufferView, peer: int, tag: int, plan: tuple[int, int], started: Started
) -> None:
    """Send a view after earlier work of the lane's stream; return when it may change. See `receive`."""
    runtime, stream, nbytes, (chunk, buffers) = agent.runtime, lane.stream, view.nbytes, plan
    source = view.address(runtime, stream)
    if not nbytes:
        return
    staging = runtime.staging(buffers * chunk)
    if staging is None:
        runtime.synchronize(stream)
        run(agent.transport.put(peer, tag, Region(source, nbytes, chunk, None, view.memory.block)), started)
        return
    transfer = agent.transport.put(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, buffers, staging))
    started(transfer)
    marks = _Marks(runtime, buffers)
    try:
        for k in range(transfer.chunks):
            transfer.allow(marks.count_reached())
            if k >= buffers:  # the previous chunk of this buffer must have been sent
                transfer.wait(k - buffers + 1, limit())
            offset, size = k * chunk, min(chunk, nbytes - k * chunk)
            slot = k % buffers * chunk
            runtime.fetch(stream, np.asarray(staging[slot : slot + size]), source + offset)
            marks.add(stream)
        while marks.pending:
            transfer.allow(marks.wait_first())
        transfer.wait(transfer.chunks, limit())
    except BaseException:
        cancel_and_wait(transfer, runtime)
        runtime.synchronize(stream)
        raise


class _Marks:
    """The copies between staging buffers and the device, at most one for each buffer."""

    def __init__(self, runtime: Runtime, buffers: int) -> None:
        self.pending: collections.deque[Any] = collections.deque()
        self._runtime, self._buffers = runtime, buffers
        self._reached = 0

    def add(self, stream: Any) -> None:
        self.pending.append(self._runtime.mark(stream, False))

    def count_reached(self) -> int:
        """Return the number of completed copies. If all buffers are in use, wait for one copy before."""
        while self.pending and (len(self.pending) == self._buffers or self._runtime.reached(self.pending[0])):
            self.wait_first()
        return self._reached

    def wait_first(self) -> int:
        """Wait for the next copy, and return the number of completed copies."""
        if not self._runtime.reach(self.pending.popleft(), limit()):
            raise errors.StallError(f"the device did not finish a copy within {limit():g} s", seconds=limit())
        self._reached += 1
        return self._reached


def run(transfer: Transfer, started: Started) -> None:
    """Wait for a transfer."""
    started(transfer)
    try:
        transfer.wait(transfer.chunks, limit())
    except BaseException:
        cancel_and_wait(transfer)
        raise


def cancel_and_wait(transfer: Transfer, runtime: Runtime | None = None) -> None:
    """Cancel a transfer, and wait at most 1 s for the chunks in flight, which still use the memory.

    With `runtime`, that memory is the thread's staging memory, which is dropped after this time.
    """
    transfer.cancel()
    # A lost peer does not send any more: MPI releases the memory at once, or never.
    end = clock.monotonic() + (0.05 if transfer.status == LOST else 1.0)
    while not transfer.done and clock.monotonic() < end:
        clock.sleep(1e-3)
    if runtime is not None and not transfer.done:
        runtime.drop_staging()
