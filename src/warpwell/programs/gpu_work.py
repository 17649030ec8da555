"""`Work`: the work of a thread's leases that may still be on the GPU.

It uses the driver's own functions, in the context that the thread's framework has made current, and imports no
framework. Without a driver there is no work. Failed calls are ignored: the framework meets the same failure at its
next call, and reports more about it.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from .._os import clock
from ..errors import ArgumentError
from ..libcuda import current_context, driver

RUN_AHEAD_SECONDS = 2e-3
"""Work that the host may have enqueued, in seconds, before a mark at which it waits. Chosen with the H200 turns of 23
November: it bounds the wait of a program that comes first."""

_MARKS, _WEIGHT = 32, 0.1
"""Marks that are kept; weight of a new interval between two marks in their average."""

_EVENT_FLAGS = 3
"""Flags of events: waits do not spin, and no times are recorded."""

_CAPTURE_RELAXED = 2


def stream_handles(stream: Any) -> tuple[int, ...]:
    """Return the handles of a stream, or of a sequence of streams.

    Raises
    ------
    ArgumentError
        An object is not a stream.
    """
    if stream is None:
        return ()
    if isinstance(stream, list | tuple):
        return tuple(handle for each in stream for handle in stream_handles(each))
    found = stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__()[1] if callable(stream.__cuda_stream__) else stream.__cuda_stream__[1]
    else:
        for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                break
    found = getattr(found, "value", found)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # PyTorch raises RuntimeError for a tensor
        return (int(found or 0),)
    raise ArgumentError(
        f"stream must be a stream of PyTorch, CuPy or numba, a handle, or a list, got {stream!r:.60}", name="stream"
    )


def relax_captures() -> None:
    """Set this thread's capture mode so that its calls do not invalidate captures of other threads."""
    library = driver()
    if library is not None and hasattr(library, "cuThreadExchangeStreamCaptureMode"):
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))


class Work:
    """The GPU work of the leases of one thread.

    A host may enqueue much faster than the GPU works, and the next program would wait for all of it. So the host waits
    at a mark if more than `RUN_AHEAD_SECONDS` of work, and at least one turn or a part of a turn, are queued after the
    mark. The average interval between marks is the estimate of the work between them.

    Attributes
    ----------
    context : int
        CUDA context of the last turn. With 0 there is no work.
    """

    def __init__(self) -> None:
        self.context = 0
        self._last_mark: list[Any] = []
        self._is_whole = True
        self._marks: list[list[Any]] = [[] for _ in range(_MARKS)]
        self._count = 0
        self._interval = 4 * RUN_AHEAD_SECONDS
        self._marked = 0.0

    def mark(self, streams: tuple[int, ...]) -> None:
        """Record that all work until now belongs to turns, or parts of a turn, that have ended."""
        context = current_context()
        self._last_mark, self._is_whole = [], True
        if context != self.context:
            self._forget_marks()
            self.context = context
        if not context:
            return
        library, marks = driver(), self._marks[self._count % _MARKS]
        count = len(streams) or 1
        while len(marks) < count:
            event = ctypes.c_void_p()
            if library.cuEventCreate(ctypes.byref(event), _EVENT_FLAGS) != 0:
                return
            marks.append(event)
        status = [library.cuEventRecord(event, stream) for event, stream in zip(marks, streams or (0,), strict=False)]
        self._last_mark, self._is_whole = marks[:count], not streams or any(status)
        self._count += 1
        now = clock.monotonic()
        self._interval += _WEIGHT * (min(now - self._marked, 4 * RUN_AHEAD_SECONDS) - self._interval)
        self._marked = now

    def wait_ahead(self) -> None:
        """Wait until the queued work is short enough."""
        depth = min(_MARKS - 1, max(1, int(RUN_AHEAD_SECONDS / self._interval))) if self._interval else 1
        if self.context and self._count > depth:
            for event in self._marks[(self._count - 1 - depth) % _MARKS]:
                driver().cuEventSynchronize(event)

    def forget_mark(self) -> None:
        """Have `drain` wait for the whole context: work may have been enqueued after the last mark."""
        self._is_whole = True

    def resume(self) -> None:
        """Exclude the time until now from the interval between two marks: the thread has waited for the lease."""
        self._marked = clock.monotonic()

    def drain(self) -> None:
        """Wait until the GPU has done all work. Any thread may call it.

        If the turn named its streams, this method waits for the events of the last mark, because the streams may have
        been destroyed.
        """
        if not self.context:
            return
        library, before = driver(), current_context()
        if before != self.context:
            library.cuCtxSetCurrent(self.context)
        try:
            if self._is_whole:
                library.cuCtxSynchronize()
            else:
                for event in self._last_mark:
                    library.cuEventSynchronize(event)
        finally:
            if before != self.context:
                library.cuCtxSetCurrent(before or None)

    def _forget_marks(self) -> None:
        """Destroy the events of a context that this thread has left."""
        for event in [event for marks in self._marks for event in marks]:
            driver().cuEventDestroy_v2(event)
        self._marks, self._count = [[] for _ in range(_MARKS)], 0
