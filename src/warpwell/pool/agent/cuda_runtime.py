"""`CudaRuntime`: the operations of an agent's GPU."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import GpuDevice, Launch, LaunchFlag, SourceLaunch, is_argument, share_fault_page, to_host
from ...targets.compiler import keep, reads_launch_flag, start
from ...targets.gpu import as_array, pin, pinned
from .memory_pool import ImportedPool, MemoryPool, PoolMemory
from .peer_access import PeerAccess
from .runtime import Runtime, Shape, proof

MAX_CACHED_STAGING_BYTES = 256 << 20
"""Maximum size of the staging memory that a lane keeps between copies."""


class CudaRuntime(Runtime):
    """A GPU. Calls queue work in its streams and return; reading and synchronizing wait.

    Parameters
    ----------
    ordinal : int
    """

    target = "cuda"
    synchronous = False

    def __init__(self, ordinal: int) -> None:
        self.gpu = GpuDevice(ordinal, errors.KernelError)
        self.gpu.enter()
        share_fault_page()
        self._memory = PoolMemory(self.gpu)
        self._cupy_streams: dict[int, Any] = {}
        self._thread = threading.local()

    def enter(self) -> None:
        self.gpu.enter()

    def info(self) -> dict[str, Any]:
        names = ("name", "uuid", "ordinal", "compute_capability")
        return {**{name: getattr(self.gpu, name) for name in names}, "memory": self.memory_info()[1]}

    def memory_info(self) -> tuple[int, int]:
        return self._memory.info()

    def allocate(self, nbytes: int) -> Any:
        return self._memory.allocate(nbytes)

    def used(self, block: Any, stream: Any) -> None:
        block.used.add(stream)

    def array(self, block: Any, offset: int, dtype: np.dtype[Any], shape: Shape, strides: Shape | None = None) -> Any:
        return as_array(block.address + offset, shape, dtype, strides, block)

    def operand(self, block: Any, offset: int, dtype: np.dtype[Any], shape: Shape) -> Callable[[], Any]:
        """Return a function that returns an array of CuPy, if CuPy supports the dtype."""
        cupy = _cupy()
        if cupy is None or dtype.kind not in "biufc" or not block.nbytes:
            array = self.array(block, offset, dtype, shape)
            return lambda: array
        memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block, self.gpu.ordinal)
        make: Callable[[], Any] = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset)).view
        return make

    def staging(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return page-locked memory, which the calling thread may use until its next call of this method."""
        memory: NDArray[np.uint8] | None = getattr(self._thread, "staging", None)
        if memory is None or memory.nbytes < nbytes:
            self._thread.staging = None
            memory = pinned(max(nbytes, 1 << 20))
            self._thread.staging = memory if nbytes <= MAX_CACHED_STAGING_BYTES else None
        return memory[:nbytes]

    def drop_staging(self) -> None:
        self._thread.staging = None

    def page_lock(self, address: int, nbytes: int) -> Callable[[], object] | None:
        return pin(address, nbytes)

    def stream(self, priority: int) -> Any:
        return self.gpu.new_stream(priority)

    def close_stream(self, stream: Any) -> None:
        self._cupy_streams.pop(int(stream.handle), None)
        self._memory.close_stream(stream)

    def write(self, stream: Any, to: int, data: Any) -> None:
        raw = np.frombuffer(data, np.uint8)
        if raw.nbytes:
            self.gpu.to_gpu(stream, to, int(raw.ctypes.data), raw.nbytes)

    def read(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        if to.nbytes:
            self.gpu.to_host(stream, int(to.ctypes.data), source, to.nbytes)
        self.gpu.synchronize(stream)

    def fetch(self, stream: Any, to: NDArray[np.uint8], source: int) -> None:
        self.gpu.to_host(stream, int(to.ctypes.data), source, to.nbytes)

    def copy(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        if nbytes:
            self.gpu.copy(stream, to, source, nbytes)

    def peer_address(self) -> Any:
        return os.getpid(), proof.tobytes(), self.gpu.ordinal, self._memory.pool.name()

    def export(self, block: Any) -> Any:
        return block.address, self._memory.pool.export(block.address) if self._memory.pool.exportable else None

    def peer_access(self, address: Any) -> PeerAccess:
        process, peer_proof, ordinal, name = address
        if process == os.getpid() and peer_proof == proof.tobytes():
            return _LocalGpuAccess(self.gpu, ordinal)
        if name is None:
            raise errors.PoolError("the memory pool of the other GPU cannot be exported")
        return ImportedPool(self.gpu, name)

    def fill(self, stream: Any, to: int, item: bytes, count: int) -> None:
        """Write an item `count` times: as columns of 4 bytes, or of 1 byte if its size is not a multiple of 4."""
        driver, size = self.gpu.driver, len(item)
        if not count or not size:
            return
        if item.count(item[:1]) == size:
            self.gpu.check(driver.cuMemsetD8Async(to, item[0], count * size, stream.handle))
            return
        if size == 4:
            self.gpu.check(driver.cuMemsetD32Async(to, int.from_bytes(item, "little"), count, stream.handle))
            return
        width, put = (4, driver.cuMemsetD2D32Async) if size % 4 == 0 else (1, driver.cuMemsetD2D8Async)
        for offset in range(0, size, width):
            word = int.from_bytes(item[offset : offset + width], "little")
            self.gpu.check(put(to + offset, size, word, 1, count, stream.handle))

    def launch(self, stream: Any, launch: Any, arguments: Sequence[Any]) -> None:
        if isinstance(launch, SourceLaunch):
            launch.start(arguments, stream)
        elif any(map(is_argument, arguments)):
            # so that a failure in device code is reported for this launch and not for a later operation
            Launch(launch.kernel, launch.shape, stream, waits=True)(*arguments, device="cuda")
        elif math.prod(launch.shape):
            flag = LaunchFlag("cuda")
            start(launch, arguments, stream, flag)
            if reads_launch_flag(launch.kernel):
                keep(flag, self.gpu.mark(stream))

    def call(self, stream: Any, function: Callable[..., Any], arguments: Sequence[Any], options: Any) -> Any:
        """Call a host function. Without CuPy, its own work is in the default stream, so wait for both streams."""
        cupy = _cupy()
        if cupy is None:
            self.gpu.synchronize(stream)
            result = function(*arguments, **options)
            self.gpu.synchronize()
            return _to_host(result)
        handle = int(stream.handle)
        if handle not in self._cupy_streams:
            self._cupy_streams[handle] = as_cupy_stream(cupy, stream)
        with cupy.cuda.Device(self.gpu.ordinal), self._cupy_streams[handle]:
            named = {name: _as_cupy(cupy, a) for name, a in options.items()}
            return _to_host(function(*[_as_cupy(cupy, a) for a in arguments], **named))

    def mark(self, stream: Any, timing: bool) -> Any:
        return self.gpu.mark(stream, timing)

    def reached(self, mark: Any) -> bool:
        return self.gpu.done(mark)

    def after(self, stream: Any, mark: Any) -> None:
        self.gpu.after(stream, mark)

    def elapsed(self, mark: Any, earlier: Any) -> float:
        return self.gpu.elapsed(earlier, mark)

    def synchronize(self, stream: Any) -> None:
        self.gpu.synchronize(stream)

    def trim(self) -> None:
        self._memory.trim()
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.get_default_memory_pool().free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()


class _LocalGpuAccess(PeerAccess):
    """The memory of a GPU of this process."""

    def __init__(self, gpu: GpuDevice, ordinal: int) -> None:
        self._gpu = gpu
        MemoryPool.of(gpu.driver, ordinal).allow(gpu.ordinal)

    def open(self, block: Any) -> int:
        return int(block[0])

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        self._gpu.copy(stream, to, source, nbytes)


@functools.cache
def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None


def _as_cupy(cupy: Any, value: Any) -> Any:
    return cupy.asarray(value) if hasattr(value, "__cuda_array_interface__") else value


def _to_host(value: Any) -> Any:
    """Return a result with its device arrays as NumPy arrays, also inside tuples, lists and dictionaries."""
    if hasattr(value, "__cuda_array_interface__"):
        return value.get() if hasattr(value, "get") else to_host(value)
    if type(value) in (tuple, list):
        return type(value)(_to_host(v) for v in value)
    if type(value) is dict:
        return {key: _to_host(v) for key, v in value.items()}
    return value


def as_cupy_stream(cupy: Any, stream: Any) -> Any:
    """Return a stream as a CuPy stream: with the protocol ``__cuda_stream__``, or by handle for an older CuPy."""
    external = getattr(cupy.cuda.Stream, "from_external", None)
    return cupy.cuda.ExternalStream(int(stream.handle)) if external is None else external(stream)
