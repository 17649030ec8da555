"""`copy_in` and `copy_out`: bulk data between a transport and device memory, in a pipeline.

While one chunk is received into a staging buffer, the one before is copied on to the device, and the other way round:
stages 1 and 2, and 4 and 5, of the source's five (section 4). With stages of equal rate, the time of many chunks comes
near that of one stage. ::

    link      | 0 | 1 | 2 | 3 | 4 |
    device        | 0 | 1 | 2 | 3 | 4 |        buffers 0 1 2 3 0 ...
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from ... import errors
from ..transport.milestone import limit
from ..transport.region import Region
from ..transport.transport import Transport
from . import copies
from .copies import Started
from .plan import Plan


def copy_in(transport: Transport, runtime: Any, stream: Any, peer: int, tag: int, plan: tuple[int, int], block: Any,
            to: int, nbytes: int, started: Started) -> None:  # fmt: skip
    """Receive bulk data into device memory; see `copies.copy_in`. `plan` is a `Plan`'s two numbers."""
    chunk, buffers = plan
    staging = runtime.staging(buffers * chunk) if buffers else None
    if staging is None:
        copies.copy_in(transport, runtime, stream, peer, tag, chunk, block, to, nbytes, started)
        return
    transfer = transport.get(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, buffers, staging))
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
        copies.give_up(transfer, runtime)
        raise
    finally:
        runtime.synchronize(stream)  # the staging memory is used again


def copy_out(transport: Transport, runtime: Any, stream: Any, peer: int, tag: int, plan: tuple[int, int], block: Any,
             source: int, nbytes: int, started: Started) -> None:  # fmt: skip
    """Send device memory, as earlier work of the stream leaves it; see `copies.copy_out`."""
    chunk, buffers = plan
    staging = runtime.staging(buffers * chunk) if buffers else None
    if staging is None:
        copies.copy_out(transport, runtime, stream, peer, tag, chunk, block, source, nbytes, started)
        return
    transfer = transport.put(peer, tag, Region(int(staging.ctypes.data), nbytes, chunk, buffers, staging))
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
        copies.give_up(transfer, runtime)
        runtime.synchronize(stream)
        raise


def _reach(runtime: Any, mark: Any) -> None:
    if not runtime.reach(mark, limit()):
        raise errors.StallError(f"the device did not come to the end of a copy in {limit():g} s", seconds=limit())


__all__ = ["Plan", "copy_in", "copy_out"]
