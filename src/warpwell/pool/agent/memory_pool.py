"""`MemoryPool`: the pool from which this process allocates memory of a GPU; `ImportedPool`: a pool of another process.

These are pools of the driver. The memory resources of cuda.core are not suitable here: they choose how much freed
memory they keep, and an allocation may wait for a kernel.

A process can send a CUDA memory pool to another process as a file descriptor over a socket, and each of its allocations
as 64 bytes (CUDA driver API, "Stream Ordered Memory Allocator", interprocess communication support).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from ... import errors
from ..._os import socket_peer
from ...libcuda import check as check_driver
from ...targets import GpuDevice
from .peer_access import PeerAccess

TIMEOUT = 5.0
"""Timeout in seconds for the other process to hand over a pool."""

OOM_SECONDS = 2.0
"""Time in seconds that an allocation waits for memory that is being freed."""

_PROBE = 4 << 20


def check(result: Any) -> Any:
    """Return the result of a driver function; raise `PoolError` if it failed."""
    return check_driver(result, errors.PoolError)


class MemoryPool:
    """A pool of device memory. Other processes of this user and host may open its allocations. `of` returns it.

    If the driver does not support such pools, or never returns their memory to the GPU, this is the default pool of the
    device, which other processes cannot open.

    Parameters
    ----------
    driver : module
        ``cuda.bindings.driver``.
    ordinal : int

    Attributes
    ----------
    handle : CUmemoryPool
    exportable : bool
    """

    _all: ClassVar[dict[int, MemoryPool]] = {}
    _making = threading.Lock()

    @classmethod
    def of(cls, driver: Any, ordinal: int) -> MemoryPool:
        """Return this process's pool of a GPU, whose context must be current."""
        with cls._making:
            if ordinal not in cls._all:
                cls._all[ordinal] = cls(driver, ordinal)
            return cls._all[ordinal]

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._lock = threading.Lock()
        self._name: str | None = None
        self._attributes = driver.CUmemPool_attribute
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = self._kind
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        status, self.handle = driver.cuMemPoolCreate(properties)
        self.exportable = int(status) == 0
        # freed memory that the pool keeps; the rest returns to the GPU
        _, total = check(driver.cuMemGetInfo())
        self._release_threshold = driver.cuuint64_t(int(total) // 4)
        if self.exportable:
            try:
                self._set()
                self.exportable = self._returns_memory()
            except errors.PoolError:  # the GPU has no memory for the probe: other processes use it, too
                self.exportable = False
            if not self.exportable:
                check((driver.cuMemPoolDestroy(self.handle)[0],))
        if not self.exportable:
            self.handle = check(driver.cuDeviceGetDefaultMemPool(ordinal))
            self._set()

    def _set(self) -> None:
        put, attributes = self._driver.cuMemPoolSetAttribute, self._attributes
        check(put(self.handle, attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, self._release_threshold))
        # an allocation must not wait for a kernel that uses memory that is being freed
        check(put(self.handle, attributes.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0))

    def _returns_memory(self) -> bool:
        """Return True if the pool returns freed memory to the GPU. Older drivers never do."""
        driver = self._driver
        address = check(driver.cuMemAllocFromPoolAsync(_PROBE, self.handle, 0))
        check(driver.cuMemFreeAsync(address, 0))
        check(driver.cuStreamSynchronize(0))
        check(driver.cuMemPoolTrimTo(self.handle, 0))
        return self.reserved == 0

    @property
    def reserved(self) -> int:
        """Size in bytes of the GPU memory of the pool."""
        return self._get(self._attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    @property
    def used(self) -> int:
        """Size in bytes of the allocated memory of the pool."""
        return self._get(self._attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)

    def _get(self, attribute: Any) -> int:
        return int(check(self._driver.cuMemPoolGetAttribute(self.handle, attribute)))

    def trim(self) -> None:
        """Return memory that is not allocated to the GPU."""
        check(self._driver.cuMemPoolTrimTo(self.handle, 0))

    # -- for other GPUs and processes --------------------------------------------------------------------------------

    def allow(self, ordinal: int) -> None:
        """Let another GPU of this process access the pool."""
        if ordinal != self.ordinal:
            check(self._driver.cuMemPoolSetAccess(self.handle, [_access(self._driver, ordinal)], 1))

    def name(self) -> str | None:
        """Return the name of a socket that sends the pool to processes of this user; None unless `exportable`."""
        if not self.exportable:
            return None
        with self._lock:
            if self._name is None:
                descriptor = int(check(self._driver.cuMemPoolExportToShareableHandle(self.handle, self._kind, 0)))
                door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                name = f"warpwell-{os.urandom(16).hex()}"
                door.bind("\0" + name)
                door.listen(64)
                threading.Thread(target=_serve, args=(door, descriptor), name="warpwell memory", daemon=True).start()
                self._name = name
            return self._name

    def export(self, address: int) -> bytes:
        """Return the data with which another process opens an allocation."""
        return bytes(check(self._driver.cuMemPoolExportPointer(address)).reserved)


class PoolMemory:
    """Allocates memory of a GPU from its `MemoryPool`, and frees it after the streams that used it.

    Parameters
    ----------
    gpu : GpuDevice
        The GPU of the calling thread.

    Attributes
    ----------
    pool : MemoryPool
    """

    def __init__(self, gpu: GpuDevice) -> None:
        self.pool = MemoryPool.of(gpu.driver, gpu.ordinal)
        self._gpu = gpu
        self._lock = threading.Lock()
        self._freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._allocating = gpu.new_stream()
        self._freeing = gpu.new_stream()
        threading.Thread(target=self._free, name="warpwell frees", daemon=True).start()

    def info(self) -> tuple[int, int]:
        """Return free and total bytes. Freed memory that the pool keeps counts as free."""
        free, total = self._gpu.memory_info()
        return free + self.pool.reserved - self.pool.used, total

    def allocate(self, nbytes: int) -> PoolBlock:
        """Return a block. If memory is exhausted, wait up to `OOM_SECONDS` for memory that is being freed."""
        driver, handle = self._gpu.driver, self._allocating.handle
        until = time.monotonic() + OOM_SECONDS
        while True:
            result = driver.cuMemAllocFromPoolAsync(max(16, nbytes), self.pool.handle, handle)
            if result[0] != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                address = int(check_driver(result, errors.KernelError))
                self._gpu.synchronize(self._allocating)
                return PoolBlock(self, address, nbytes)
            if time.monotonic() > until:
                free, total = self.info()
                raise MemoryError(f"the GPU has no memory for {nbytes} bytes: {free} of {total} are free")
            time.sleep(0.01)
            self._gpu.synchronize(self._freeing)
            self.pool.trim()

    def trim(self) -> None:
        """Return all released memory to the GPU."""
        is_freed = threading.Event()
        self._freed.put((0, is_freed))
        is_freed.wait(OOM_SECONDS)
        self._gpu.synchronize(self._freeing)
        self.pool.trim()

    def release(self, address: int, used: Sequence[Any]) -> None:
        """Free memory after the work of streams. Any thread and any finalizer may call it."""
        self._freed.put((address, used))

    def close_stream(self, stream: Any) -> None:
        """Destroy a stream after its work, and not while a free is queued after it."""
        self._gpu.driver.cuStreamSynchronize(stream.handle)
        with self._lock:
            stream.close()

    def _free(self) -> None:
        self._gpu.enter()
        driver = self._gpu.driver
        while True:
            address, used = self._freed.get()
            if not address:
                used.set()  # of `trim`
                continue
            # After a failed kernel nothing can be freed, and its stream reports the failure.
            with contextlib.suppress(errors.KernelError):
                with self._lock:  # no stream is destroyed concurrently
                    for stream in used:
                        if not stream.is_closed:
                            self._gpu.after(self._freeing, stream)
                check_driver(driver.cuMemFreeAsync(address, self._freeing.handle), errors.KernelError)
            used = stream = None


class PoolBlock:
    """Memory of a GPU. It is freed with the last reference, after the streams in `used`."""

    def __init__(self, memory: PoolMemory, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.used: set[Any] = set()
        self._memory = memory

    def __del__(self) -> None:
        self._memory.release(self.address, tuple(self.used))


class ImportedPool(PeerAccess):
    """The pool of another process, to which a GPU of this process writes. The context of the GPU must be current.

    Parameters
    ----------
    gpu : GpuDevice
        The GPU that writes.
    name : str
        Name of the socket.

    Raises
    ------
    OSError
        No process listens on the socket: it is on another host, or in another network namespace.
    PoolError
        The process belongs to another user, or this GPU cannot access the memory of the other GPU.
    """

    def __init__(self, gpu: GpuDevice, name: str) -> None:
        self._gpu, driver = gpu, gpu.driver
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect("\0" + name)
            if socket_peer(connection)[1] != os.getuid():
                raise errors.PoolError("the memory pool belongs to another user")
            _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        try:
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self._handle = check(driver.cuMemPoolImportFromShareableHandle(descriptor, kind, 0))
        finally:
            os.close(descriptor)
        check(driver.cuMemPoolSetAccess(self._handle, [_access(driver, gpu.ordinal)], 1))
        self._closing = gpu.new_stream()

    def open(self, block: Any) -> int:
        """Open an allocation, of which `MemoryPool.export` has the data, and return its address in this process."""
        exported = self._gpu.driver.CUmemPoolPtrExportData()
        exported.reserved = block[1]
        return int(check(self._gpu.driver.cuMemPoolImportPointer(self._handle, exported)))

    def close(self, address: int) -> None:
        """Close an allocation; its owner may free it after this returns."""
        check(self._gpu.driver.cuMemFreeAsync(address, self._closing.handle))
        check(self._gpu.driver.cuStreamSynchronize(self._closing.handle))

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy memory of the GPU to the other process, in the order of a stream."""
        self._gpu.copy(stream, to, source, nbytes)


def _access(driver: Any, ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _serve(door: socket.socket, descriptor: int) -> None:
    while True:
        try:
            connection, _ = door.accept()
        except OSError:  # this process has no free file descriptor
            time.sleep(0.1)
            continue
        with connection:
            if socket_peer(connection)[1] == os.getuid():
                connection.settimeout(TIMEOUT)
                try:
                    socket.send_fds(connection, [b"p"], [descriptor])
                except OSError:
                    continue  # the client has exited
