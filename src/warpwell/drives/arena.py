"""`DmaArena`: contiguous host memory that a controller reads and writes.

Rings, staging and page lists are in it. A failed controller may still complete earlier reads. So memory that is freed
after a failure stays in *quarantine* until the controller was reset.

The memory is an anonymous file: another process (QEMU) can map it, and a fork does not copy it. In a forked child, the
same addresses hold a private copy: stores of the child do not reach the parent or the drive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from .. import errors
from .._check import checked_nbytes
from ..targets import ALIGNMENT, Allocator, Block, memory_for, private_block, view_of
from ..targets.gpu import pin

LOWEST = 0x10_0000_0000
"""Lowest address of an arena, if it is free: 64 GiB, which every IOMMU reaches. Addresses that the kernel chooses have
47 bits, and the IOMMUs of client processors have 39."""

_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTFORK = 10
_FAILED = ctypes.c_void_p(-1).value
_MAX_TRIES = 1 << 12

libc: Any = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class DmaArena:
    """Memory that a controller and this process share.

    Parameters
    ----------
    nbytes : int or str
        A power of two of at least "64KiB". The system provides memory at its first use, unless the transport pins all
        of it.
    ranges : sequence of (int, int), optional
        First and last addresses of the ranges that the controller reaches. Default: `LOWEST` to 2**46.

    Attributes
    ----------
    address, nbytes : int
        Address in this process, and size.
    fd : int
        Descriptor of the file, which another process may map.

    Raises
    ------
    ArgumentError
        The size is not a power of two.
    DriveError
        No range of `ranges` has enough free addresses.
    """

    def __init__(self, nbytes: int | str, *, ranges: Sequence[tuple[int, int]] = ((LOWEST, (1 << 46) - 1),)) -> None:
        nbytes = checked_nbytes(nbytes, "arena", minimum=1 << 16)
        if nbytes & (nbytes - 1):
            raise errors.ArgumentError(f"arena must be a power of two, got {nbytes} bytes", name="arena")
        self.nbytes = nbytes
        self.fd = os.memfd_create("warpwell-dma", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.address = self._map(ranges)
        except BaseException:
            os.close(self.fd)
            raise
        libc.madvise(self.address, nbytes, _MADV_DONTFORK)
        self._lock = threading.RLock()
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # offset and bytes, in order, adjacent ranges joined
        self._touched = 0  # Memory from this offset on was never used, so it is zero.
        self._dropped: deque[tuple[int, int]] = deque()  # Finalizers append without a lock.
        self._in_quarantine = False
        self._closed = False
        self._pid = os.getpid()
        self._mapping = weakref.finalize(self, unmap, self.address, nbytes, self._pid)
        self._mapping.atexit = False  # Threads may use the memory until the process ends.
        self._file = weakref.finalize(self, os.close, self.fd)
        self._file.atexit = False
        _arenas.add(self)

    def _map(self, ranges: Sequence[tuple[int, int]]) -> int:
        tries = 0
        for first, last in ranges:
            at = -(-max(first, LOWEST if last >= LOWEST + self.nbytes else mmap.PAGESIZE) // self.nbytes) * self.nbytes
            while at + self.nbytes - 1 <= last and tries < _MAX_TRIES:
                tries += 1
                if _map_at(at, self.nbytes, self.fd, mmap.MAP_SHARED | _MAP_NORESERVE):
                    return at
                at += max(self.nbytes, 1 << 30)
        raise errors.DriveError(
            f"the addresses that a drive reaches have no {self.nbytes} free bytes in one piece "
            f"({', '.join(f'{a:#x} to {b:#x}' for a, b in ranges)}): choose a smaller arena"
        )

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed memory at a multiple of 4,096; it is freed when its owner drops it.

        Raises
        ------
        DriveError
            The arena is full.
        ForkError
            This process was forked from the arena's.
        ClosedError
            The arena is closed.
        """
        self._check()
        size = -(-max(nbytes, 8) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._check()  # Another thread may have closed the arena.
            self._reclaim()
            for k, (offset, free) in enumerate(self._free):
                if free >= size:
                    self._free[k : k + 1] = [(offset + size, free - size)] if free > size else []
                    break
            else:
                waiting = sum(dropped for _, dropped in self._dropped.copy())
                why = (
                    f"{waiting} are in quarantine until a reset" if waiting else "use smaller depths or a larger arena="
                )
                raise errors.DriveError(f"the drive's memory of {self.nbytes} bytes has no {size} in one piece: {why}")
            used = min(size, max(0, self._touched - offset))
            self._touched = max(self._touched, offset + size)
        address = self.address + offset
        if used:
            view_of(address, used, "u1")[:] = 0
        return Block(address, max(nbytes, 8), _Piece(self, offset, size), host=True)

    def memory(self, device: str) -> Allocator:
        """Return an allocator of a device whose shared memory is in the arena, and page-locked for "cuda"."""
        return _ArenaMemory(self, device)

    def quarantine(self) -> None:
        """Begin quarantine: memory that is freed from now on is not allocated again."""
        self._in_quarantine = True

    def end_quarantine(self) -> None:
        """End quarantine: no controller accesses the freed memory."""
        self._in_quarantine = False

    def close(self) -> None:
        """Close the arena (idempotent). No controller may reach it.

        It is unmapped when no block is in use: an array that is still open reads its rings.
        """
        with self._lock:
            self._closed = True
            used = self.nbytes - sum(size for _, size in (*self._free, *self._dropped.copy()))
        self._file()
        if not used:
            self._mapping()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"the drive's memory belongs to process {self._pid}, from which this process ({os.getpid()}) was "
                "forked: use the drive there, or open another drive here"
            )
        if self._closed:
            raise errors.ClosedError("the drive's memory is closed: open the drive again")

    def _reclaim(self) -> None:
        """Add dropped ranges to the free ones (lock held)."""
        if self._in_quarantine or not self._dropped:
            return
        pieces = list(self._free)
        while self._dropped:
            pieces.append(self._dropped.popleft())
        joined: list[tuple[int, int]] = []
        for offset, size in sorted(pieces):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((offset, size))
        self._free = joined


class _Piece:
    """Owner of a block's memory, and of the arena. When it is dropped, the memory is free."""

    def __init__(self, arena: DmaArena, offset: int, size: int) -> None:
        self.arena = arena
        self.range = offset, size

    def __del__(self) -> None:
        self.arena._dropped.append(self.range)


class _Pinned:
    """Owner of a block that a GPU reaches as well. When it is dropped, the block is unlocked and freed."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.unpin = pin(block.address, -(-block.nbytes // ALIGNMENT) * ALIGNMENT)
        if self.unpin is None:
            raise errors.DriveError(
                f"CUDA does not page-lock {block.nbytes} bytes of the drive's memory: choose smaller depths, or open "
                'the array with device="cpu"'
            )

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


class _ArenaMemory(Allocator):
    def __init__(self, arena: DmaArena, device: str) -> None:
        self.device = device
        self._arena = arena
        self._own = memory_for(device)

    def allocate(self, nbytes: int) -> Block:
        # A forked child has a copy: ids that the child takes are not taken in the parent.
        return self._own.allocate(nbytes) if self.device == "cuda" else private_block(nbytes)

    def allocate_shared(self, nbytes: int) -> Block:
        block = self._arena.allocate(nbytes)
        return Block(block.address, block.nbytes, _Pinned(block), host=True) if self.device == "cuda" else block


def _map_at(address: int, nbytes: int, fd: int, flags: int) -> bool:
    """Map a file at an address if no other mapping is there; return False otherwise."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    got = libc.mmap(address, nbytes, protection, flags | _MAP_FIXED_NOREPLACE, fd, 0)
    if got == address:
        return True
    if got not in (None, _FAILED):
        libc.munmap(got, nbytes)  # Kernels before 4.17 treat the address as a hint.
    return False


def unmap(address: int, nbytes: int, pid: int) -> None:
    """Unmap memory in the process that mapped it; a forked child does not have it."""
    if os.getpid() == pid:
        libc.munmap(address, nbytes)


_arenas: weakref.WeakSet[DmaArena] = weakref.WeakSet()


def _after_fork() -> None:
    """Map private pages in the child at the addresses that a fork does not copy."""
    for arena in list(_arenas):
        if arena._mapping.alive:
            fd, kind = (arena.fd, 0) if arena._file.alive else (-1, mmap.MAP_ANONYMOUS)
            _map_at(arena.address, arena.nbytes, fd, mmap.MAP_PRIVATE | _MAP_NORESERVE | kind)


os.register_at_fork(after_in_child=_after_fork)
