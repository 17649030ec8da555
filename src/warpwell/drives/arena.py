"""DmaArena: host memory that a controller reads and writes by itself, in one piece and at one place.

Rings, staging and lists of pages lie in it. A controller that was stopped may still write what it was told to read, so
memory that is freed while one is lost waits in *quarantine* until the controller was reset.

The memory is a file without a name: another process (QEMU) can map it, and a fork copies none of it. In a forked child
the same addresses hold a private copy, so that what the child does there reaches neither the parent nor the drive.
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
from ..targets import ALIGNMENT, Allocator, Block, memory_for
from ..targets.gpu.memory import pin
from ..targets.memory import view_of

LOWEST = 0x10_0000_0000
"""Where an arena lies if that is free: at 64 GiB, which every IOMMU reaches. Addresses that the kernel chooses have 47
bits, and the IOMMUs of client processors 39."""

_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MADV_DONTFORK = 10
_FAILED = ctypes.c_void_p(-1).value
_TRIES = 1 << 12

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class DmaArena:
    """Memory that a controller and this process share.

    Parameters
    ----------
    nbytes : int or str
        A power of two of at least "64KiB". Memory is taken from the system when it is first used, unless the transport
        pins all of it.
    ranges : sequence of (int, int), optional
        First and last address of what the controller can be given, where addresses of this process are used as they
        are. Default: everything from `LOWEST` to 2**46.

    Attributes
    ----------
    address, nbytes : int
        Where it lies, in this process.
    fd : int
        Its file, which another process may map.

    Raises
    ------
    ArgumentError
        The size is no power of two.
    DriveError
        No place in `ranges` is free.
    """

    def __init__(self, nbytes: int | str, *, ranges: Sequence[tuple[int, int]] = ((LOWEST, (1 << 46) - 1),)) -> None:
        nbytes = checked_nbytes(nbytes, "arena", minimum=1 << 16)
        if nbytes & (nbytes - 1):
            raise errors.ArgumentError(f"an arena of {nbytes} bytes: take a power of two", name="arena")
        self.nbytes = nbytes
        self.fd = os.memfd_create("warpwell-dma", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.address = self._map(ranges)
        except BaseException:
            os.close(self.fd)
            raise
        _libc.madvise(self.address, nbytes, _MADV_DONTFORK)
        self._lock = threading.RLock()
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # offset and bytes, in order, neighbours joined
        self._touched = 0  # from here on it is zero still
        self._dropped: deque[tuple[int, int]] = deque()  # by finalizers, which take no lock
        self._held = False
        self._closed = False
        self._pid = os.getpid()
        self._gone = weakref.finalize(self, _unmap, self.address, nbytes, self._pid)
        self._gone.atexit = False  # threads may be using it until the very end
        self._file = weakref.finalize(self, os.close, self.fd)
        self._file.atexit = False
        _arenas.add(self)

    def _map(self, ranges: Sequence[tuple[int, int]]) -> int:
        tries = 0
        for first, last in ranges:
            at = -(-max(first, LOWEST if last >= LOWEST + self.nbytes else mmap.PAGESIZE) // self.nbytes) * self.nbytes
            while at + self.nbytes - 1 <= last and tries < _TRIES:
                tries += 1
                if _map_at(at, self.nbytes, self.fd, mmap.MAP_SHARED | _MAP_NORESERVE):
                    return at
                at += max(self.nbytes, 1 << 30)
        raise errors.DriveError(
            f"no {self.nbytes} bytes of addresses are free where a drive can reach them "
            f"({', '.join(f'{a:#x} to {b:#x}' for a, b in ranges)}): take a smaller arena"
        )

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed memory at a multiple of 4,096; it is free again when its owner drops it.

        Raises
        ------
        DriveError
            The arena is full.
        ForkError
            This process was forked from the arena's.
        ClosedError
            It is closed.
        """
        self._check()
        size = -(-max(nbytes, 8) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._check()  # nobody closed it meanwhile
            self._take_back()
            for k, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[k : k + 1] = [(offset + size, room - size)] if room > size else []
                    break
            else:
                waiting = sum(dropped for _, dropped in self._dropped.copy())
                why = f"{waiting} wait until it is reset" if waiting else "take smaller depths or a larger arena"
                raise errors.DriveError(f"the drive's memory of {self.nbytes} bytes has no {size} in one piece: {why}")
            used = min(size, max(0, self._touched - offset))
            self._touched = max(self._touched, offset + size)
        address = self.address + offset
        if used:
            view_of(address, used, "u1")[:] = 0
        return Block(address, max(nbytes, 8), _Piece(self, offset, size), host=True)

    def memory(self, device: str) -> Allocator:
        """Return an allocator of a device whose shared memory lies in the arena; for "cuda" it is page-locked, too."""
        return _ArenaMemory(self, device)

    def hold(self) -> None:
        """Begin quarantine: memory that is freed from now on is not given out again."""
        self._held = True

    def release(self) -> None:
        """End quarantine: no controller will touch what was freed."""
        self._held = False

    def holds(self, address: int, nbytes: int) -> bool:
        """Tell whether a range lies in the arena."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """Give it up (idempotent). No controller may reach it any more.

        It is unmapped when nobody has a block of it: an array that is still open looks at its rings.
        """
        with self._lock:
            self._closed = True
            used = self.nbytes - sum(size for _, size in (*self._free, *self._dropped.copy()))
        self._file()
        if not used:
            self._gone()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"the drive's memory belongs to process {self._pid}, and this is {os.getpid()}, forked from it: use "
                "the drive there, or open another drive here"
            )
        if self.closed:
            raise errors.ClosedError("the drive's memory is closed: open the drive again")

    def _take_back(self) -> None:
        """Join what was dropped to what is free (lock held)."""
        if self._held or not self._dropped:
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
    """What owns a block's memory, and the arena: dropped, it gives the memory back."""

    def __init__(self, arena: DmaArena, offset: int, size: int) -> None:
        self.arena = arena
        self.range = offset, size

    def __del__(self) -> None:
        self.arena._dropped.append(self.range)


class _Pinned:
    """What owns a block that a GPU reaches as well: dropped, it is unlocked and given back."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.unpin = pin(block.address, -(-block.nbytes // ALIGNMENT) * ALIGNMENT)
        if self.unpin is None:
            raise errors.DriveError(
                f"CUDA does not page-lock {block.nbytes} bytes of the drive's memory: take smaller depths, or open the "
                'array with device="cpu"'
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
        return self._own.allocate(nbytes)

    def allocate_shared(self, nbytes: int) -> Block:
        block = self._arena.allocate(nbytes)
        return Block(block.address, block.nbytes, _Pinned(block), host=True) if self.device == "cuda" else block


def _map_at(address: int, nbytes: int, fd: int, flags: int) -> bool:
    """Map a file at an address if that is free; return whether it was."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    got = _libc.mmap(address, nbytes, protection, flags | _MAP_FIXED_NOREPLACE, fd, 0)
    if got == address:
        return True
    if got not in (None, _FAILED):
        _libc.munmap(got, nbytes)  # a kernel before 4.17 takes the address as a hint
    return False


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


_arenas: weakref.WeakSet[DmaArena] = weakref.WeakSet()


def _after_fork() -> None:
    """Give the child pages of its own at the addresses that a fork leaves out."""
    for arena in list(_arenas):
        if arena._gone.alive:
            fd, kind = (arena.fd, 0) if arena._file.alive else (-1, mmap.MAP_ANONYMOUS)
            _map_at(arena.address, arena.nbytes, fd, mmap.MAP_PRIVATE | _MAP_NORESERVE | kind)


os.register_at_fork(after_in_child=_after_fork)
