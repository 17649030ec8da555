"""`PoolGpu`: memory, streams and events of one GPU by address, as an agent of a pool uses them."""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..compiler.run_cuda import asks_flag, keep, start
from ..fault import LaunchFlag
from ..kernel import Launch, has_cuda, is_argument
from ..source.cuda_source import SourceLaunch
from .memory_pool import MemoryPool

OOM_SECONDS = 2.0
"""How long an allocation without room waits for memory that is being freed."""


class PoolGpu:
    """One GPU. Every thread that uses it calls `enter` once; streams do not wait for the default one, nor it for them.

    Parameters
    ----------
    ordinal : int
    """

    def __init__(self, ordinal: int) -> None:
        if not has_cuda():
            raise errors.DeviceNotFoundError("no GPU was found: use the target 'cpu'", device=f"cuda:{ordinal}")
        from cuda.bindings import driver
        from numba import cuda

        from ..fault import share_fault_page

        if not 0 <= ordinal < len(cuda.gpus):
            raise errors.DeviceNotFoundError(f"there is no GPU {ordinal}: {len(cuda.gpus)} were found", device="cuda")
        self.ordinal = ordinal
        self.driver = driver
        self._lock = threading.Lock()
        self._freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.enter()
        share_fault_page()
        device = cuda.get_current_device()
        self.name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
        self.uuid = str(device.uuid)
        self.compute_capability = tuple(int(n) for n in device.compute_capability)
        _, self._least, self._greatest = self._check(driver.cuCtxGetStreamPriorityRange())
        self._allocating = self.stream(0)
        self._freeing = self.stream(0)
        self.pool = MemoryPool.of(driver, ordinal)
        threading.Thread(target=self._free, name="warpwell frees", daemon=True).start()

    def enter(self) -> None:
        """Make the GPU the calling thread's."""
        from numba import cuda

        cuda.select_device(self.ordinal)
        cuda.current_context()

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes. Memory that was freed, and is kept for later allocations, is free."""
        _, free, total = self._check(self.driver.cuMemGetInfo())
        return int(free) + self.pool.reserved - self.pool.used, int(total)

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> GpuBlock:
        """Return memory; wait a little for what is being freed where there is no room."""
        until = time.monotonic() + OOM_SECONDS
        while True:
            status, address = self.driver.cuMemAllocFromPoolAsync(
                max(16, nbytes), self.pool.handle, self._allocating.handle
            )
            if int(status) == 0:
                self._check(self.driver.cuStreamSynchronize(self._allocating.handle))
                return GpuBlock(self, int(address), nbytes)
            if status != self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                self._check((status,))
            if time.monotonic() > until:
                free, total = self.memory_info()
                raise MemoryError(f"the GPU has no room for {nbytes} bytes: {free} of {total} are free")
            time.sleep(0.01)
            self._check(self.driver.cuStreamSynchronize(self._freeing.handle))
            self.pool.trim()

    def release(self, address: int, used: Sequence[GpuStream]) -> None:
        """Free memory behind the work of streams, from any thread and any finalizer."""
        self._freed.put((address, used))

    def _free(self) -> None:
        self.enter()
        driver = self.driver
        while True:
            address, used = self._freed.get()
            # after a failed kernel nothing can be freed any more, and its stream tells of it
            with contextlib.suppress(errors.KernelError):
                with self._lock:  # no stream is destroyed meanwhile
                    for stream in used:
                        if stream.open:
                            self.after(self._freeing, self.mark(stream, False))
                self._check(driver.cuMemFreeAsync(address, self._freeing.handle))
            used = stream = None

    def array(self, block: GpuBlock, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...],
              strides: tuple[int, ...] | None = None) -> Any:  # fmt: skip
        """Return a part of a block as a numba-cuda array, which keeps the block."""
        from numba import cuda

        about = {"shape": shape, "typestr": dtype, "data": (block.address + offset, False), "version": 3,
                 "strides": strides}  # fmt: skip
        return cuda.from_cuda_array_interface(about, owner=block, sync=False)

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, priority: int) -> GpuStream:
        """Return a new stream; 0 is the least priority."""
        from numba import cuda

        level = max(self._greatest, self._least - max(0, priority))
        flags = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self._check(self.driver.cuStreamCreateWithPriority(flags, level))[1]
        return GpuStream(handle, cuda.external_stream(int(handle)))

    def close_stream(self, stream: GpuStream) -> None:
        """Destroy a stream when its work is done."""
        self.driver.cuStreamSynchronize(stream.handle)
        with self._lock:
            stream.open = False
            self.driver.cuStreamDestroy(stream.handle)

    def synchronize(self, stream: GpuStream) -> None:
        """Wait for the work of a stream."""
        self._check(self.driver.cuStreamSynchronize(stream.handle))

    def synchronize_default(self) -> None:
        """Wait for the work of the default stream."""
        self._check(self.driver.cuStreamSynchronize(0))

    def to_gpu(self, stream: GpuStream, to: int, source: int, nbytes: int) -> None:
        """Copy host memory. Pinned memory is lent until the stream is there; other memory may change at once."""
        self._check(self.driver.cuMemcpyHtoDAsync(to, source, nbytes, stream.handle))

    def to_host(self, stream: GpuStream, to: int, source: int, nbytes: int) -> None:
        """Copy to host memory; it is there when the stream is."""
        self._check(self.driver.cuMemcpyDtoHAsync(to, source, nbytes, stream.handle))

    def within(self, stream: GpuStream, to: int, source: int, nbytes: int) -> None:
        """Copy within the GPU."""
        self._check(self.driver.cuMemcpyDtoDAsync(to, source, nbytes, stream.handle))

    def to_other(self, stream: GpuStream, to: int, source: int, nbytes: int) -> None:
        """Copy to the memory of another GPU, which was opened."""
        self._check(self.driver.cuMemcpyAsync(to, source, nbytes, stream.handle))

    def fill(self, stream: GpuStream, to: int, item: bytes, count: int) -> None:
        """Write an item `count` times: as columns of words, or of bytes where its size is odd."""
        driver = self.driver
        if item.count(item[:1]) == len(item):
            self._check(driver.cuMemsetD8Async(to, item[0], count * len(item), stream.handle))
            return
        width, put = (4, driver.cuMemsetD2D32Async) if len(item) % 4 == 0 else (1, driver.cuMemsetD2D8Async)
        if len(item) == 4:
            self._check(driver.cuMemsetD32Async(to, int.from_bytes(item, "little"), count, stream.handle))
            return
        for at in range(0, len(item), width):
            word = int.from_bytes(item[at : at + width], "little")
            self._check(put(to + at, len(item), word, 1, count, stream.handle))

    def launch(self, stream: GpuStream, launch: Any, arguments: Sequence[Any]) -> None:
        """Run a kernel in a stream; return at once, unless it reads storage."""
        if isinstance(launch, SourceLaunch):
            launch.start(arguments, stream.numba)
            return
        storage = [a for a in arguments if is_argument(a)]
        if storage:
            # what device code latches is this launch's failure, and not that of a later operation
            waiting = Launch(launch.kernel, launch.shape, stream.numba)
            waiting.waits = True
            waiting(*arguments, device="cuda")
        elif math.prod(launch.shape):
            flag = LaunchFlag("cuda")
            start(launch, arguments, stream.numba, flag)
            if asks_flag(launch.kernel):
                keep(flag, self.mark(stream, False))

    # -- events ----------------------------------------------------------------------------------------------------

    def mark(self, stream: GpuStream, timing: bool) -> GpuMark:
        """Return an event behind the work of a stream so far."""
        flags = self.driver.CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        made = GpuMark(self.driver, self._check(self.driver.cuEventCreate(kind))[1])
        self._check(self.driver.cuEventRecord(made.handle, stream.handle))
        return made

    def reached(self, mark: GpuMark) -> bool:
        """Tell whether an event is reached."""
        status = self.driver.cuEventQuery(mark.handle)[0]
        if status == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((status,))
        return True

    def after(self, stream: GpuStream, mark: GpuMark) -> None:
        """Let later work of a stream wait for an event."""
        self._check(self.driver.cuStreamWaitEvent(stream.handle, mark.handle, 0))

    def elapsed(self, mark: GpuMark, earlier: GpuMark) -> float:
        """Return seconds between two events."""
        return 1e-3 * float(self._check(self.driver.cuEventElapsedTime(earlier.handle, mark.handle))[1])

    def _check(self, result: Any) -> Any:
        if int(result[0]) != 0:
            name = getattr(result[0], "name", str(result[0]))
            raise errors.KernelError(f"the GPU reports {name}: a kernel may have failed, and all later calls fail too")
        return result


class GpuBlock:
    """Memory of a GPU, freed with the last reference, behind the streams in `used`."""

    def __init__(self, gpu: PoolGpu, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.used: set[GpuStream] = set()
        self._gpu = gpu

    def __del__(self) -> None:
        self._gpu.release(self.address, tuple(self.used))


class GpuStream:
    """A stream, as the driver and as numba-cuda know it."""

    def __init__(self, handle: Any, numba: Any) -> None:
        self.handle = handle
        self.numba = numba
        self.cupy: Any = None
        self.open = True

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and handle, for other libraries."""
        return 0, int(self.handle)


class GpuMark:
    """An event."""

    def __init__(self, driver: Any, handle: Any) -> None:
        self.handle = handle
        self._destroy = driver.cuEventDestroy
        self._query, self._not_ready = driver.cuEventQuery, driver.CUresult.CUDA_ERROR_NOT_READY

    def __del__(self) -> None:
        self._destroy(self.handle)

    def query(self) -> bool:
        """Tell whether it is reached, or the GPU lost."""
        return int(self._query(self.handle)[0]) != int(self._not_ready)


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Return pinned host memory."""
    from numba import cuda

    return np.asarray(cuda.pinned_array(nbytes, np.uint8))


def gpu_count() -> int:
    """Return how many GPUs this process sees."""
    if not has_cuda():
        return 0
    from numba import cuda

    return len(cuda.gpus)


def pin(address: int, nbytes: int) -> Callable[[], object] | None:
    """Page-lock host memory, for all GPUs; return what undoes that, also at the end of the process, or None."""
    from cuda.bindings import driver
    from numba import cuda

    cuda.current_context()
    status = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
    return functools.partial(driver.cuMemHostUnregister, address) if int(status) == 0 else None
