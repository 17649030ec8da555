"""`LaunchStream`: copies and launches of a device in order, concurrently with other work of the process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._os import clock
from .gpu.device import GpuDevice
from .memory import view_of


class LaunchStream:
    """An order of work on a device. Use `stream_on`.

    This class is the stream of the `cpu` and `interp` targets: each call returns when its work is done. `GpuStream`
    overrides all methods. Addresses refer to device memory and to shared memory (`Allocator.allocate_shared`). The
    contents of the memory must stay until the work is done.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes, in any direction."""
        if nbytes:
            view_of(to, nbytes, np.uint8)[:] = view_of(source, nbytes, np.uint8)

    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes of device memory to zero."""
        if nbytes:
            view_of(address, nbytes, np.uint8)[:] = 0

    def after_default(self, stream: int | None = None) -> None:
        """Let later work wait for all work so far in the device's default stream, and in the stream of this handle."""

    def point(self) -> Any:
        """Return the point after all work so far, for `after` of other streams."""
        return None

    def after(self, point: Any) -> None:
        """Let later work wait for a point of another stream; the host does not wait."""

    def launch(
        self, kernel: Any, n: int, *args: int, services: Sequence[Callable[[], object]] = (), aborts: Sequence[Any] = ()
    ) -> None:
        """Launch a kernel of `n` threads; see `Launch` for `services` and `aborts`."""
        kernel[n](*args, device=self.device, services=services, aborts=aborts)

    def wait(self, participants: Sequence[Any] = ()) -> None:
        """Wait for all work so far; Ctrl-C calls ``abort()`` of `participants`, then is raised."""

    def wait_for_word(self, address: int, minimum: int) -> None:
        """Let later work wait until a word of shared memory is at least `minimum`; on a GPU the host does not wait."""
        word = view_of(address, 8, np.int64)
        while word[0] < minimum:
            clock.sleep(1e-5)

    def mark(self) -> Callable[[], bool]:
        """Return a function that reports whether all work so far is done."""
        return lambda: True

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the stream's device the current one for a block."""
        return contextlib.nullcontext()


class GpuStream(LaunchStream):
    """A stream of one GPU: one with the highest priority, which does not wait for the default stream; or a given one.

    Parameters
    ----------
    ordinal : int
    handle : int, optional
        Handle of a stream, whose owner keeps it; 0 is the default stream.
    """

    def __init__(self, ordinal: int, handle: int | None = None) -> None:
        self._gpu = GpuDevice(ordinal) if handle is None else _gpu(ordinal)
        self._stream = self._gpu.new_stream(priority=8) if handle is None else self._gpu.given_stream(handle)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return self._gpu.on_device()

    def copy(self, to: int, source: int, nbytes: int) -> None:
        if nbytes:
            with self.on_device():
                self._gpu.copy(self._stream, to, source, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        if nbytes:
            with self.on_device():
                self._gpu.zero(self._stream, address, nbytes)

    def after_default(self, stream: int | None = None) -> None:
        with self.on_device():
            for handle in (0,) if stream is None else (0, stream):
                self._gpu.after(self._stream, self._gpu.given_stream(handle))

    def point(self) -> Any:
        with self.on_device():
            return self._gpu.mark(self._stream)

    def after(self, point: Any) -> None:
        with self.on_device():
            self._gpu.after(self._stream, point)

    def launch(
        self, kernel: Any, n: int, *args: int, services: Sequence[Callable[[], object]] = (), aborts: Sequence[Any] = ()
    ) -> None:
        """Launch; `wait` is what Ctrl-C interrupts."""
        from .compiler import run_cuda  # needs the cuda extra

        with self.on_device():
            run_cuda.launch(kernel, n, self._stream, *args)

    def wait(self, participants: Sequence[Any] = ()) -> None:
        from .compiler import run_cuda  # needs the cuda extra

        with self.on_device():
            run_cuda.wait(self._gpu.mark(self._stream), participants)

    def wait_for_word(self, address: int, minimum: int) -> None:
        with self.on_device():
            self._gpu.wait_for_word(self._stream, address, minimum)

    def mark(self) -> Callable[[], bool]:
        with self.on_device():
            event = self._gpu.mark(self._stream)

        def done() -> bool:
            with self.on_device():
                return self._gpu.done(event)

        return done


@functools.cache
def _gpu(ordinal: int) -> GpuDevice:
    return GpuDevice(ordinal)


def stream_of(device: str, handle: int) -> LaunchStream:
    """Return a `LaunchStream` for the stream of a handle (see `handle_of`), whose owner keeps it."""
    return GpuStream(0, handle) if device == "cuda" else LaunchStream(device)


def stream_on(device: str) -> LaunchStream:
    """Return a new stream of "cpu", "interp", "cuda" (the first GPU) or "cuda:1".

    Raises
    ------
    DeviceNotFoundError
        The GPU does not exist.
    """
    if not device.startswith("cuda"):
        return LaunchStream(device)
    return GpuStream(int(device.partition(":")[2] or 0))
