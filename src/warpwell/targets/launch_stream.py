"""Stream: copies and launches of a device in order, beside everything else that the process does there."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import errors
from .memory import view_of


class Stream(ABC):
    """An order of work on a device. Use `stream_on`.

    Addresses are those of device memory and of shared memory (`Memory.allocate_shared`), whose contents must
    stay until the work is done.
    """

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes, in any direction."""

    @abstractmethod
    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes of device memory to zero."""

    @abstractmethod
    def after_default(self, stream: int | None = None) -> None:
        """Let what follows wait for all that the device's default stream, and one of this handle, were given so far."""

    @abstractmethod
    def launch(
        self, kernel: Any, n: int, *args: int, services: Sequence[Callable[[], object]] = (), aborts: Sequence[Any] = ()
    ) -> None:
        """Launch a kernel of `n` threads; see `Launch` for `services` and `aborts`."""

    @abstractmethod
    def wait(self, participants: Sequence[Any] = ()) -> None:
        """Wait for everything so far; Ctrl-C calls ``abort()`` of `participants`, then is raised."""

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """Return what tells whether all that was begun so far is done."""

    @abstractmethod
    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the stream's device the current one for a block."""


class HostStream(Stream):
    """The stream of the `cpu` and `interp` targets: each call returns when it is done."""

    def __init__(self, device: str) -> None:
        self.device = device

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """See `Stream`."""
        if nbytes:
            view_of(to, nbytes, np.uint8)[:] = view_of(source, nbytes, np.uint8)

    def zero(self, address: int, nbytes: int) -> None:
        """See `Stream`."""
        if nbytes:
            view_of(address, nbytes, np.uint8)[:] = 0

    def after_default(self, stream: int | None = None) -> None:
        """See `Stream`."""

    def launch(
        self, kernel: Any, n: int, *args: int, services: Sequence[Callable[[], object]] = (), aborts: Sequence[Any] = ()
    ) -> None:
        """See `Stream`."""
        kernel[n](*args, device=self.device, services=services, aborts=aborts)

    def wait(self, participants: Sequence[Any] = ()) -> None:
        """See `Stream`."""

    def mark(self) -> Callable[[], bool]:
        """See `Stream`."""
        return lambda: True

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """See `Stream`."""
        return contextlib.nullcontext()


class CudaStream(Stream):
    """A stream of one GPU that does not wait for the default stream, nor that for it; its blocks go first."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver
        from numba import cuda

        from .compiler import run_cuda

        self.ordinal = ordinal
        self._driver = driver
        with self.on_device():
            run_cuda.share_fault_page()
            cuda.current_context()
            _, _low, high = self._checked(driver.cuCtxGetStreamPriorityRange())
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._handle = self._checked(driver.cuStreamCreateWithPriority(flags, high))[1]
            self._stream = cuda.external_stream(int(self._handle))

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """See `Stream`."""
        return _gpu(self.ordinal)

    def _checked(self, result: Any) -> Any:
        if int(result[0]) != 0:
            raise errors.DeviceNotFoundError(f"the GPU refused a call ({result[0]}): was it reset?")
        return result

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """See `Stream`."""
        if nbytes:
            with self.on_device():
                self._checked(self._driver.cuMemcpyAsync(to, source, nbytes, self._handle))

    def zero(self, address: int, nbytes: int) -> None:
        """See `Stream`."""
        if nbytes:
            with self.on_device():
                self._checked(self._driver.cuMemsetD8Async(address, 0, nbytes, self._handle))

    def after_default(self, stream: int | None = None) -> None:
        """See `Stream`."""
        from numba import cuda

        with self.on_device():
            others = [cuda.default_stream()]
            if stream is not None:
                others.append(cuda.external_stream(stream))
            for other in others:
                event = cuda.event(timing=False)
                event.record(other)
                event.wait(self._stream)

    def launch(
        self, kernel: Any, n: int, *args: int, services: Sequence[Callable[[], object]] = (), aborts: Sequence[Any] = ()
    ) -> None:
        """See `Stream`; `wait` is what Ctrl-C interrupts."""
        from .compiler import run_cuda

        with self.on_device():
            run_cuda.launch(kernel, n, self._stream, *args)

    def wait(self, participants: Sequence[Any] = ()) -> None:
        """See `Stream`."""
        from numba import cuda

        from .compiler import run_cuda

        with self.on_device():
            done = cuda.event(timing=False)
            done.record(self._stream)
            run_cuda.wait(done, participants)

    def mark(self) -> Callable[[], bool]:
        """See `Stream`."""
        from numba import cuda

        # asking whether an event is done is no failure to log
        logging.getLogger("numba.cuda.cudadrv.driver").setLevel(logging.CRITICAL)
        with self.on_device():
            event = cuda.event(timing=False)
            event.record(self._stream)

        def done() -> bool:
            with self.on_device():
                return bool(event.query())

        return done


@contextlib.contextmanager
def _gpu(ordinal: int) -> Iterator[None]:
    from numba import cuda

    with cuda.gpus[ordinal]:
        yield


def stream_on(device: str) -> Stream:
    """Return a new stream of "cpu", "interp", "cuda" (the first GPU) or "cuda:1".

    Raises
    ------
    DeviceNotFoundError
        There is no such GPU.
    """
    if not device.startswith("cuda"):
        return HostStream(device)
    from numba import cuda

    ordinal = int(device[5:] or 0) if device[4:5] in ("", ":") and device[5:].isdigit() | (device[5:] == "") else -1
    count = len(cuda.gpus) if cuda.is_available() else 0
    if not 0 <= ordinal < count:
        raise errors.DeviceNotFoundError(f"device {device!r}: this machine has {count} GPUs; use one of them, or cpu")
    return CudaStream(ordinal)
