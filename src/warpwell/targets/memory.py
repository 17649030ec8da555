"""Memory that device code reaches: device memory, and host memory that host and device share."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gpu import memory as gpu_memory
from .gpu.device import wait_default

ALIGNMENT = 4096
"""Bytes; every allocation starts at a multiple of it, so that O_DIRECT transfers may use it."""


def view_of(address: int, nbytes: int, dtype: Any) -> NDArray[Any]:
    """Return host memory at an address as a flat NumPy array, which does not own it."""
    raw: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(raw, dtype, nbytes // np.dtype(dtype).itemsize)


def private_memory(nbytes: int) -> mmap.mmap:
    """Return zeroed memory of which a forked child gets a copy.

    ``mmap.mmap(-1, nbytes)`` alone is shared with children: each process reads the writes of the other. But memory to
    which O_DIRECT transfers write must be shared (`Allocator`): a fork in the middle of a transfer to private memory
    may leave the data only in the child (open(2)).
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def private_block(nbytes: int) -> Block:
    """Return zeroed host memory of which a forked child gets a copy."""
    raw = private_memory(-(-nbytes // ALIGNMENT) * ALIGNMENT)
    return Block(ctypes.addressof(ctypes.c_char.from_buffer(raw)), nbytes, raw, host=True)


class Block:
    """A piece of memory.

    Attributes
    ----------
    address : int
        Byte address, the same for the device and, in shared memory, the host.
    nbytes : int
    """

    def __init__(self, address: int, nbytes: int, owner: Any, *, host: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner
        self._host = host

    @property
    def words(self) -> NDArray[np.int64]:
        """The memory as 64-bit words, for the host (host memory only)."""
        return self.view(np.dtype(np.int64))

    def view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the memory as a flat NumPy array (host memory only)."""
        if not self._host:
            raise TypeError("this block is in device memory: use read() and write()")
        return view_of(self.address, self.nbytes, dtype)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a copy of `nbytes` bytes from byte `offset`, after all earlier launches."""
        if self._host:
            return self.view(np.dtype(np.uint8))[offset : offset + nbytes].copy()
        return np.asarray(self._owner[offset : offset + nbytes].copy_to_host())

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Copy `data` (C order) to byte `offset`."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if self._host:
            self.view(np.dtype(np.uint8))[offset : offset + raw.nbytes] = raw
        elif raw.nbytes:
            self._owner[offset : offset + raw.nbytes].copy_to_device(raw)
            # the copy may return before its last bytes have arrived, and no other stream waits for them
            wait_default()

    def free(self) -> None:
        """Drop the memory; the block must not be used again."""
        self._owner = None


class Allocator:
    """Allocator of one device. Blocks are freed when their owner drops them or by `Block.free`.

    This class allocates for the `cpu` and `interp` targets: all memory is host memory. It is shared with forked
    children, because of O_DIRECT; see `private_memory`.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed device memory of `nbytes` bytes."""
        size = max(nbytes, 8)
        raw = mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)
        address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
        return Block(address, size, raw, host=True)

    def allocate_shared(self, nbytes: int) -> Block:
        """Return zeroed host memory (pinned on `cuda`) that both host and device address."""
        return self.allocate(nbytes)


class CudaMemory(Allocator):
    """Device memory and pinned host memory of the current GPU."""

    def allocate(self, nbytes: int) -> Block:
        size = max(-(-nbytes // 16) * 16, 16)
        array = gpu_memory.zeros(size, np.dtype(np.uint8))
        return Block(gpu_memory.address_of(array), size, array, host=False)

    def allocate_shared(self, nbytes: int) -> Block:
        size = max(nbytes, 16)
        array = gpu_memory.pinned(size + ALIGNMENT)
        array[:] = 0
        base = int(array.ctypes.data)
        return Block(-(-base // ALIGNMENT) * ALIGNMENT, size, array, host=True)


def memory_for(device: str) -> Allocator:
    """Return the allocator of "cpu", "cuda" or "interp"."""
    return CudaMemory(device) if device == "cuda" else Allocator(device)
