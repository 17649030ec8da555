"""`Work`: how far the GPU is with what a thread has enqueued; `device_name`: which GPU that is.

All of it by the driver's own functions, on the context that the thread's framework has made current: none is made here,
and nothing is imported. Without a driver there is no work to wait for. Calls that fail are passed over: the framework
meets the same failure at its next call, and says more.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

from .. import errors
from ..libcuda import driver, uuid_of

AHEAD = 2e-3
"""Seconds of work that the host may have enqueued before a mark at which it waits."""

_MARKS, _LEARN = 32, 0.1
"""Marks that are kept; weight of a new time between two."""

_QUIET = 3
"""Flags of events: waits do not spin, and no times."""


NO_GPU = "host"
"""Name of the device of turns where there is no GPU."""


def current_context() -> int:
    """Return the calling thread's context, 0 where it has none."""
    library = driver()
    if library is None:
        return 0
    found = ctypes.c_void_p()
    return (found.value or 0) if library.cuCtxGetCurrent(ctypes.byref(found)) == 0 else 0


def device_name(device: int | None) -> str:
    """Return the name of a GPU: of the calling thread's, if no number is given, or else of the first; "host": no GPU.

    Raises
    ------
    DeviceNotFoundError
        This process sees no such GPU.
    """
    library = driver()
    number = ctypes.c_int()
    if library is not None and (device is None and library.cuCtxGetDevice(ctypes.byref(number)) == 0):
        return _named(library, number)
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(number), device or 0) != 0:
        if device is not None:
            raise errors.DeviceNotFoundError(f"this process sees no GPU {device}: see `nvidia-smi`", device="cuda")
        return NO_GPU
    return _named(library, number)


def _named(library: Any, number: Any) -> str:
    found = uuid_of(library, number)
    if found is None:
        raise errors.DeviceNotFoundError("the driver does not name this GPU: see `nvidia-smi -L`", device="cuda")
    return "gpu-" + found.hex()


def handles(stream: Any) -> tuple[int, ...]:
    """Return the streams that a caller names, as the driver knows them; none are all of the context.

    Raises
    ------
    ArgumentError
        Something is not a stream.
    """
    if stream is None:
        return ()
    if isinstance(stream, list | tuple):
        return tuple(handle for one in stream for handle in handles(one))
    found = stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__()[1] if callable(stream.__cuda_stream__) else stream.__cuda_stream__[1]
    else:
        for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                break
    found = getattr(found, "value", found)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # the last one is PyTorch's, for a tensor
        return (int(found or 0),)
    raise errors.ArgumentError(
        f"stream is {stream!r:.60}: give a stream of PyTorch, CuPy or numba, its handle, or a list", name="stream"
    )


class Work:
    """The GPU work of the turns of one thread.

    A host may enqueue much faster than the GPU works, and whoever asks for the lease would wait for all of it. So the
    host waits at a mark if more than `AHEAD` seconds of work lie behind it, and at least one turn, or part of one: it
    takes those between two marks for as long as they took on the average.
    """

    def __init__(self) -> None:
        self._context = 0
        self._reached: list[Any] = []
        self._whole = True
        self._marks: list[list[Any]] = [[] for _ in range(_MARKS)]
        self._count = 0
        self._mean = 4 * AHEAD
        self._last = 0.0

    def mark(self, streams: tuple[int, ...]) -> None:
        """Note that all that was enqueued until now belongs to turns, or parts of one, that have ended."""
        context = current_context()
        self._reached, self._whole = [], True
        if context != self._context:
            self._forget()
            self._context = context
        if not context:
            return
        library = driver()
        marks = self._marks[self._count % _MARKS]
        count = len(streams) or 1
        while len(marks) < count:
            event = ctypes.c_void_p()
            if library.cuEventCreate(ctypes.byref(event), _QUIET) != 0:
                return
            marks.append(event)
        status = [library.cuEventRecord(event, stream) for event, stream in zip(marks, streams or (0,), strict=False)]
        self._reached, self._whole = marks[:count], not streams or any(status)
        self._count += 1
        now = time.monotonic()
        self._mean += _LEARN * (min(now - self._last, 4 * AHEAD) - self._mean)
        self._last = now

    def wait_ahead(self) -> None:
        """Wait until the GPU has come so far that little enough is queued."""
        deep = min(_MARKS - 1, max(1, int(AHEAD / self._mean))) if self._mean else 1
        if self._context and self._count > deep:
            for event in self._marks[(self._count - 1 - deep) % _MARKS]:
                driver().cuEventSynchronize(event)

    def forget_mark(self) -> None:
        """Have `drain` wait for all of the context: the last mark may not stand behind what was enqueued."""
        self._whole = True

    def resume(self) -> None:
        """Note that the thread has waited for the lease: that is no part of the time between two marks."""
        self._last = time.monotonic()

    def drain(self, alone: bool = True) -> None:
        """Wait until all turns have ended on the GPU; any thread may call it.

        By the events of the last mark, if streams were named: the streams may be no more by now. Also if the thread is
        not `alone` in its context with work that stands at gates, for that waits for this one.
        """
        if not self._context:
            return
        library = driver()
        before = current_context()
        if before != self._context:
            library.cuCtxSetCurrent(self._context)
        try:
            if self._whole and alone:
                library.cuCtxSynchronize()
            else:
                for event in self._reached:
                    library.cuEventSynchronize(event)
        finally:
            if before != self._context:
                library.cuCtxSetCurrent(before or None)

    def _forget(self) -> None:
        """Drop the events of a context that this thread uses no more."""
        for event in [event for marks in self._marks for event in marks]:
            driver().cuEventDestroy_v2(event)
        self._marks, self._count = [[] for _ in range(_MARKS)], 0
