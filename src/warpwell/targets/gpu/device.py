"""`GpuDevice`: one GPU's identity, streams, events and copies, over cuda.core; and which GPUs this process sees.

The packages of the ``cuda`` extra are optional, so functions import them when they are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from ... import errors
from ..._check import extra
from ...libcuda import FAILED, check, driver

_thread = threading.local()
"""The GPU that `GpuDevice.enter` made the calling thread's."""


_LAYER = "WARPWELL_CUDA"
"""Variable of a process whose driver library is the interposition layer, which sends CUDA calls to a pool."""


@functools.cache
def has_cuda() -> bool:
    """Return True if there are a GPU and numba-cuda. GPUs of a pool, which CUDA calls may reach, do not count."""
    if os.environ.get(_LAYER):
        return False  # the driver would be the layer: such a process uses the GPUs by `ww.devices()`
    try:
        from numba import cuda

        return bool(cuda.is_available())
    except Exception:  # a broken driver raises errors of its own types; then no GPU is usable
        return False


_forked = False
"""Whether a parent process has initialised the driver, which then works in no child."""


def _after_fork() -> None:
    global _forked
    _forked = _forked or (has_cuda.cache_info().currsize > 0 and has_cuda())


os.register_at_fork(after_in_child=_after_fork)


def is_lost_by_fork() -> bool:
    """Return whether this process was forked from one that has used a GPU, and so can use none."""
    return _forked


def check_fork() -> None:
    """Raise if this process was forked from one that has used a GPU.

    Raises
    ------
    ForkError
    """
    if _forked:
        raise errors.ForkError(
            f"process {os.getpid()} cannot use a GPU: the process that it was forked from had initialised CUDA, which "
            f"does not work in a forked child: start it with multiprocessing's spawn method and open arrays there, by "
            f"their path, or use device='cpu' and Devices(targets=['cpu'])"
        )


def require_gpu() -> None:
    """Raise unless this process can use a GPU.

    Raises
    ------
    DeviceNotFoundError
    ForkError
        See `check_fork`.
    """
    if os.environ.get(_LAYER):
        raise errors.DeviceNotFoundError(
            "the GPUs of this program belong to a pool, which Warpwell itself uses only by `ww.devices()`: use "
            "these, choose device cpu, or start it with `warpwell run --cuda local`",
            device="cuda",
        )
    if not has_cuda():
        raise errors.DeviceNotFoundError(
            f"no GPU is usable here: install the driver and {extra('cuda')}, see `warpwell info`, or choose device cpu",
            device="cuda",
        )
    check_fork()


def gpu_count() -> int:
    """Return the number of GPUs that this process sees.

    Raises
    ------
    ForkError
        This process was forked from one that has used a GPU.
    """
    if not has_cuda():
        return 0
    check_fork()
    from numba import cuda

    return len(cuda.gpus)


def gpus() -> list[dict[str, Any]]:
    """Return name, compute capability and memory (bytes) of each GPU that can be used; empty without any."""
    found = []
    for gpu in map(GpuDevice, range(gpu_count())):
        major, minor = gpu.compute_capability
        _, total = gpu.memory_info()
        found.append({"name": gpu.name, "compute_capability": f"{major}.{minor}", "memory": total})
    return found


def current() -> tuple[Any, Any]:
    """Return the driver (`cuda.bindings.driver`), and cuda.core's device that is the calling thread's."""
    from cuda.bindings import driver
    from cuda.core import Device
    from numba import cuda

    cuda.current_context()  # A thread that has not used a GPU has no context.
    return driver, Device()


@functools.cache
def default_stream(ordinal: int) -> Any:
    """Return the default stream (`cuda.core.Stream`) of a GPU, which is the calling thread's.

    cuda.core has one object for the streams of all GPUs, with the context of the first; an event of it would be in that
    context, and the driver refuses it in another GPU's stream.
    """
    from cuda.bindings import driver
    from cuda.core import Stream

    return Stream.from_handle(int(driver.CU_STREAM_LEGACY))


def handle_of(stream: Any) -> int:
    """Return the handle of a stream of any library: 0 for None, which is the default stream.

    Raises
    ------
    ArgumentError
        The object is not a stream.
    """
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, numba-cuda
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise errors.ArgumentError(
        f"{stream!r:.60} is not a stream: pass one of PyTorch, CuPy or numba-cuda, or none for the default stream",
        name="stream",
    )


def mark(stream: Any = None) -> Any:
    """Return an event after all work so far in a stream of cuda.core or numba-cuda.

    Without a stream, that is the default stream of the calling thread's GPU.

    Raises
    ------
    KernelError
        A kernel failed.
    """
    from cuda.core import Stream

    if stream is None:
        stream = default_stream(int(current()[1].device_id))
    elif not isinstance(stream, Stream):
        stream = Stream.from_handle(int(stream.handle))
    return _attempt(lambda: stream.record(), errors.KernelError)


def reached(event: Any, failure: type[Exception] = errors.KernelError) -> bool:
    """Return True if an event is reached; raise `failure` if the driver reports that a kernel failed."""
    return bool(_attempt(lambda: event.is_done, failure))


_SHAPE_ERRORS = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_NOT_FOUND",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
)
"""Errors of the driver about a launch that can never run; other errors are about the GPU."""


def check_kernel(result: Any, name: str) -> Any:
    """Return the values that a call of the driver about a kernel returned after its status.

    Raises
    ------
    ArgumentError
        The kernel cannot run so on this GPU.
    DeviceNotFoundError
        The GPU is lost.
    """
    status = getattr(result[0], "name", str(result[0]))
    if status in _SHAPE_ERRORS:
        raise errors.ArgumentError(f"the GPU refused kernel {name!r} ({status}): see its blocks, threads and options")
    return check(result)


def wait_default() -> None:
    """Wait for all work in the current GPU's default stream."""
    if _query_default()(0) == 0:
        return  # usually the stream is empty
    from numba import cuda

    cuda.default_stream().synchronize()


@functools.cache
def _query_default() -> Callable[[int], int]:
    """Return the driver's cuStreamQuery, called without releasing the interpreter's lock.

    A thread that releases the lock, even for a microsecond, may wait for it until another thread's 5 ms are over.
    """
    library = driver()
    if library is None:
        return lambda stream: 1
    address = ctypes.cast(library.cuStreamQuery, ctypes.c_void_p).value
    query: Callable[[int], int] = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address or 0)
    return query


def _attempt(call: Callable[[], Any], failure: type[Exception]) -> Any:
    try:
        return call()
    except Exception as error:
        if type(error).__name__ != "CUDAError":  # which cuda.core does not export
            raise
        raise failure(f"the GPU refused a call ({error}): {FAILED}") from error


class GpuDevice:
    """One GPU. Every thread that uses it calls `enter` once, or works within `on_device`.

    Its streams and the default stream do not wait for each other.

    Parameters
    ----------
    ordinal : int
    failure : exception class
        Class of the exception if the driver refuses a call. After a kernel has failed, the driver refuses all calls.

    Raises
    ------
    DeviceNotFoundError
        The GPU does not exist.

    Attributes
    ----------
    driver : module
        ``cuda.bindings.driver``, for functions that cuda.core does not have.
    name, uuid : str
    compute_capability : (int, int)
    """

    def __init__(self, ordinal: int = 0, failure: type[Exception] = errors.DeviceNotFoundError) -> None:
        count = gpu_count()
        if not 0 <= ordinal < count:
            require_gpu()
            raise errors.DeviceNotFoundError(
                f"there is no GPU {ordinal}: {count} were found; use one of them, or the CPU", device=f"cuda:{ordinal}"
            )
        from cuda import core
        from cuda.bindings import driver

        self.ordinal = ordinal
        self.driver = driver
        self._core = core
        self._failure = failure
        self._timed = core.EventOptions(timing_enabled=True)
        with self.on_device():
            device = core.Device(ordinal)
            self.name = str(device.name)
            self.uuid = f"GPU-{device.uuid}"
            self.compute_capability = tuple(int(n) for n in device.compute_capability)
            self._lowest, self._highest = self.check(driver.cuCtxGetStreamPriorityRange())

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the current GPU of the calling thread for a block."""
        from numba import cuda

        return cuda.gpus[self.ordinal]  # type: ignore[no-any-return]

    def enter(self) -> None:
        """Make this the GPU of the calling thread for good."""
        from numba import cuda

        if getattr(_thread, "ordinal", None) != self.ordinal:
            cuda.select_device(self.ordinal)
            _thread.ordinal = self.ordinal

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of device memory."""
        with self.on_device():
            free, total = self.check(self.driver.cuMemGetInfo())
        return int(free), int(total)

    def check(self, result: Any) -> Any:
        """Return the values that a call of the driver returned after its status; see `libcuda.check`."""
        return check(result, self._failure)

    check_kernel = staticmethod(check_kernel)

    # -- streams and events ----------------------------------------------------------------------------------

    def new_stream(self, priority: int = 0) -> Any:
        """Return a new stream (`cuda.core.Stream`).

        Parameters
        ----------
        priority : int
            0 is the least; larger is sooner, as far as the GPU has levels. It matters when blocks are placed.
        """
        level = int(max(self._highest, self._lowest - max(0, priority)))  # smaller numbers are higher priorities
        options = self._core.StreamOptions(nonblocking=True, priority=level)
        with self.on_device():
            device = self._core.Device(self.ordinal)
            device.set_current()  # cuda.core requires it once per thread
            return _attempt(lambda: device.create_stream(options=options), self._failure)

    def given_stream(self, handle: int) -> Any:
        """Return the stream of a handle, whose owner keeps it, as `cuda.core.Stream`; 0 is the default stream."""
        return default_stream(self.ordinal) if handle in (0, 1) else self._core.Stream.from_handle(handle)

    def mark(self, stream: Any, timing: bool = False) -> Any:
        """Return an event after all work so far in a stream."""
        return _attempt(lambda: stream.record(options=self._timed if timing else None), self._failure)

    def done(self, event: Any) -> bool:
        """Return True if an event is reached."""
        return reached(event, self._failure)

    def elapsed(self, first: Any, last: Any) -> float:
        """Return the seconds between two events that were marked with `timing` and reached."""
        return 1e-3 * float(_attempt(lambda: last - first, self._failure))

    def after(self, stream: Any, event: Any) -> None:
        """Let later work of a stream wait for an event, or for all work so far in another stream."""
        _attempt(lambda: stream.wait(event), self._failure)

    def wait_for_word(self, stream: Any, address: int, minimum: int) -> None:
        """Let later work of a stream wait until a word of pinned memory is at least `minimum`."""
        at_least = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self.check(self.driver.cuStreamWaitValue64(stream.handle, address, minimum, at_least))

    def synchronize(self, stream: Any = None) -> None:
        """Wait for all work so far in a stream, by default in the default stream."""
        self.check(self.driver.cuStreamSynchronize(0 if stream is None else stream.handle))

    def wait_default(self) -> None:
        """Wait for all work in the default stream, for which the streams of this class do not wait."""
        wait_default()

    # -- memory by address -----------------------------------------------------------------------------------

    def to_gpu(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy host memory. Pinned memory must not change until the stream has passed the copy; other memory may."""
        self.check(self.driver.cuMemcpyHtoDAsync(to, source, nbytes, stream.handle))

    def to_host(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy to host memory; the copy is complete when the stream has passed it."""
        self.check(self.driver.cuMemcpyDtoHAsync(to, source, nbytes, stream.handle))

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy between device memory and pinned memory in any direction, also to memory of another GPU."""
        self.check(self.driver.cuMemcpyAsync(to, source, nbytes, stream.handle))

    def zero(self, stream: Any, address: int, nbytes: int) -> None:
        """Set bytes of device memory to zero."""
        self.check(self.driver.cuMemsetD8Async(address, 0, nbytes, stream.handle))
