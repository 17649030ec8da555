"""`MemoryPool`: the memory of one GPU from which this process allocates; `ImportedPool`: that pool in another process.

cuda.core's memory resources choose what they keep when memory is freed, and let an allocation wait for a kernel; here
neither is wanted, so these are the driver's pools.

CUDA's memory pools can be given to another process as a file descriptor, over a socket, and their allocations then as
64 bytes each (CUDA driver API, "Stream Ordered Memory Allocator", interprocess communication support).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from ... import errors
from ...libcuda import check as check_driver
from ...targets import GpuDevice

TIMEOUT = 5.0
"""Timeout in seconds for the other process to hand over a pool."""

OOM_SECONDS = 2.0
"""How long an allocation without room waits for memory that is being freed."""

_PROBE = 4 << 20


def check(result: Any) -> Any:
    """Return what a driver's call gave; raise `PoolError` where it failed."""
    return check_driver(result, errors.PoolError)


class MemoryPool:
    """A pool of device memory. Other processes of this user and host may open its allocations.

    Where the driver has no such pools, or never gives their memory back, it is the device's default pool, which other
    processes cannot open. Use `of`.

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
        """Return the pool of a GPU, one for the whole process. The context of the GPU must be current."""
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
        # so much stays with the pool when it is freed: the system is asked again for the rest
        _, total = check(driver.cuMemGetInfo())
        self._keep = driver.cuuint64_t(int(total) // 4)
        if self.exportable:
            try:
                self._set()
                self.exportable = self._gives_back()
            except errors.PoolError:  # the GPU has no room for a probe: others use it, too
                self.exportable = False
            if not self.exportable:
                check((driver.cuMemPoolDestroy(self.handle)[0],))
        if not self.exportable:
            self.handle = check(driver.cuDeviceGetDefaultMemPool(ordinal))
            self._set()

    def _set(self) -> None:
        put, attributes = self._driver.cuMemPoolSetAttribute, self._attributes
        check(put(self.handle, attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, self._keep))
        # an allocation must not wait for a kernel that still uses memory which is being freed
        check(put(self.handle, attributes.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0))

    def _gives_back(self) -> bool:
        """Return True if the pool gives freed memory back to the GPU, which older drivers never do."""
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
        """Bytes of it that are allocated."""
        return self._get(self._attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)

    def _get(self, attribute: Any) -> int:
        return int(check(self._driver.cuMemPoolGetAttribute(self.handle, attribute)))

    def trim(self) -> None:
        """Give the GPU back what is not allocated."""
        check(self._driver.cuMemPoolTrimTo(self.handle, 0))

    # -- for others ------------------------------------------------------------------------------------------------

    def allow(self, ordinal: int) -> None:
        """Let another GPU of this process reach all of it."""
        if ordinal != self.ordinal:
            check(self._driver.cuMemPoolSetAccess(self.handle, [_access(self._driver, ordinal)], 1))

    def name(self) -> str | None:
        """Return the name of a socket that hands the pool to processes of this user; None if it is not `exportable`."""
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
        """Return what opens an allocation elsewhere."""
        return bytes(check(self._driver.cuMemPoolExportPointer(address)).reserved)


class PoolMemory:
    """Memory of one GPU by address, out of its `MemoryPool`, that is freed behind the streams that used it.

    Parameters
    ----------
    gpu : GpuDevice
        The calling thread's.

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
        """Return free and total bytes. Memory that was freed, and is kept for later allocations, is free."""
        free, total = self._gpu.memory_info()
        return free + self.pool.reserved - self.pool.used, total

    def allocate(self, nbytes: int) -> PoolBlock:
        """Return memory; if there is no room, wait a little for memory that is being freed."""
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
                raise MemoryError(f"the GPU has no room for {nbytes} bytes: {free} of {total} are free")
            time.sleep(0.01)
            self._gpu.synchronize(self._freeing)
            self.pool.trim()

    def trim(self) -> None:
        """Give the GPU back all memory that was released."""
        is_freed = threading.Event()
        self._freed.put((0, is_freed))
        is_freed.wait(OOM_SECONDS)
        self._gpu.synchronize(self._freeing)
        self.pool.trim()

    def release(self, address: int, used: Sequence[Any]) -> None:
        """Free memory behind the work of streams, from any thread and any finalizer."""
        self._freed.put((address, used))

    def close_stream(self, stream: Any) -> None:
        """Destroy a stream when its work is done, and not while a free is queued behind it."""
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
                with self._lock:  # no stream is destroyed meanwhile
                    for stream in used:
                        if not stream.is_closed:
                            self._gpu.after(self._freeing, stream)
                check_driver(driver.cuMemFreeAsync(address, self._freeing.handle), errors.KernelError)
            used = stream = None


class PoolBlock:
    """Memory of a GPU, freed with the last reference, behind the streams in `used`."""

    def __init__(self, memory: PoolMemory, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.used: set[Any] = set()
        self._memory = memory

    def __del__(self) -> None:
        self._memory.release(self.address, tuple(self.used))


class ImportedPool:
    """The pool of another process, to which this one's GPU writes. The GPU's context must be current.

    Parameters
    ----------
    driver : module
    ordinal : int
        The GPU that writes.
    name : str
        Of the socket.

    Raises
    ------
    OSError
        No process listens there: it is on another host, or in another network namespace.
    PoolError
        The process is another user's, or this GPU cannot reach the other's memory.
    """

    def __init__(self, driver: Any, ordinal: int, name: str) -> None:
        self._driver = driver
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect("\0" + name)
            if _user(connection) != os.getuid():
                raise errors.PoolError("the memory pool belongs to another user")
            _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        try:
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self._handle = check(driver.cuMemPoolImportFromShareableHandle(descriptor, kind, 0))
        finally:
            os.close(descriptor)
        check(driver.cuMemPoolSetAccess(self._handle, [_access(driver, ordinal)], 1))

    def open(self, data: bytes) -> int:
        """Return the address of an allocation here."""
        exported = self._driver.CUmemPoolPtrExportData()
        exported.reserved = data
        return int(check(self._driver.cuMemPoolImportPointer(self._handle, exported)))

    def close(self, address: int, stream: Any) -> None:
        """Close an allocation; its owner may free it when this returns, and not before."""
        check(self._driver.cuMemFreeAsync(address, stream))
        check(self._driver.cuStreamSynchronize(stream))


def _access(driver: Any, ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _user(connection: socket.socket) -> int:
    """Return the user at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _serve(door: socket.socket, descriptor: int) -> None:
    while True:
        try:
            connection, _ = door.accept()
        except OSError:  # no descriptor is left, for now
            time.sleep(0.1)
            continue
        with connection:
            if _user(connection) == os.getuid():
                connection.settimeout(TIMEOUT)
                try:
                    socket.send_fds(connection, [b"p"], [descriptor])
                except OSError:
                    continue  # the client has exited
