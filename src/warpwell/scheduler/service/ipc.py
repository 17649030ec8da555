"""Memory of a GPU that another process of this machine uses in place: `lend` names it, `Borrowed` opens it.

It uses only the driver's own functions, in the primary context that libraries share: the lending process may have
PyTorch or CuPy, but not the packages of the extra `cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ... import errors, libcuda
from ...libcuda import IpcHandle

_ORDINAL, _MAY_BE_LENT = 9, 10
"""Attributes of a pointer."""

_LAZY_PEER = 1

CLOSING = 600.0
"""Timeout in seconds of a process that opens or lends an allocation, until its last user has closed it."""


class Lent(NamedTuple):
    """Memory for another process: its allocation, where it begins in it, and the GPU that it is on."""

    handle: bytes
    offset: int
    ordinal: int


def driver() -> Any:
    """Return the driver's library.

    Raises
    ------
    DeviceNotFoundError
        The driver is missing, or cannot lend memory.
    """
    library = libcuda.driver()
    if not hasattr(library, "cuIpcOpenMemHandle_v2"):
        raise errors.DeviceNotFoundError("there is no driver of a GPU here that lends memory", device="cuda")
    return library


def lend(address: int, nbytes: int) -> Lent:
    """Name memory of this process for another one, once all that the GPU was given here is done.

    Keep it until the other process no longer uses it.

    Raises
    ------
    ArgumentError
        Its kind of memory cannot be lent, or it is not all of one allocation.
    """
    library, ordinal, may = driver(), ctypes.c_int(), ctypes.c_int()
    if library.cuPointerGetAttribute(ctypes.byref(ordinal), _ORDINAL, address):
        raise errors.ArgumentError(f"address {address:#x} is not in the memory of a GPU", name="args")
    with _context(ordinal.value):
        library.cuPointerGetAttribute(ctypes.byref(may), _MAY_BE_LENT, address)
        handle = IpcHandle()
        base, size = _range(address)
        if not may.value or library.cuIpcGetMemHandle(ctypes.byref(handle), base):
            raise errors.ArgumentError(
                "another process cannot open this memory: it is of a pool of the driver, of an expandable segment, or "
                "managed. Start PyTorch without expandable_segments and backend:cudaMallocAsync in "
                "PYTORCH_CUDA_ALLOC_CONF, and CuPy without MemoryAsyncPool; or copy the array to the host",
                name="args",
            )
        if address + nbytes > base + size:
            raise errors.ArgumentError(f"an array of {nbytes} bytes ends beyond its allocation of {size}", name="args")
        status = library.cuCtxSynchronize()
    if status:
        raise errors.ArgumentError(
            f"earlier work of the GPU failed, or a graph is being captured (status {status})", name="args"
        )
    return Lent(bytes(handle.bytes), address - base, ordinal.value)


class _Mapping:
    """An allocation of another process that is open here."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.nbytes = _range(address)[1]
        self.users = 0
        self.closed = threading.Event()


class Borrowed:
    """Allocations of other processes that are open here, each once, while it has a user."""

    def __init__(self, ordinal: int = 0) -> None:
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._open: dict[bytes, _Mapping] = {}

    def open(self, handle: bytes) -> tuple[int, int]:
        """Return address and bytes of an allocation, until as many calls of `close`.

        Raises
        ------
        ArgumentError
            The allocation does not exist or is on another GPU, or its last user's `close` does not return.
        """
        until = time.monotonic() + CLOSING
        while True:
            with self._lock:
                found = self._open.get(handle)
                if found is None or found.users:
                    found = self._open[handle] = found or self._opened(handle)
                    found.users += 1
                    return found.address, found.nbytes
            if not found.closed.wait(until - time.monotonic()):  # the driver opens an allocation once
                raise errors.ArgumentError(
                    f"the memory that was lent is being closed for over {CLOSING:g} s: wait for the kernels that run",
                    name="args",
                )

    def _opened(self, handle: bytes) -> _Mapping:
        with _context(self._ordinal):
            address = ctypes.c_void_p()
            ipc_handle = IpcHandle.from_buffer_copy(handle)
            status = driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), ipc_handle, _LAZY_PEER)
            if status:
                raise errors.ArgumentError(
                    f"the memory that was lent cannot be opened (status {status} of the driver): was it freed?",
                    name="args",
                )
            return _Mapping(address.value or 0)

    def close(self, handle: bytes) -> None:
        """Use an allocation no longer. The last user waits for all work of the GPU, without blocking other users."""
        with self._lock:
            found = self._open[handle]
            found.users -= 1
            if found.users:
                return
        try:
            with _context(self._ordinal):
                driver().cuIpcCloseMemHandle(found.address)
        finally:
            with self._lock:
                del self._open[handle]
            found.closed.set()


def _range(address: int) -> tuple[int, int]:
    """Return beginning and bytes of the allocation around an address."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    status = driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    return (0, 0) if status else (base.value or 0, size.value)


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[None]:
    """Have a GPU's primary context current."""
    library, device, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    status = library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), ordinal)
    status = status or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        raise errors.DeviceNotFoundError(f"GPU {ordinal} has no context (status {status})", device="cuda")
    try:
        library.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)
