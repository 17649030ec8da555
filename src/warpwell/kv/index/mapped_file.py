"""Memory-mapped segment files, from which small values are read without a system call.

A copy from a mapped file takes some 30 ns, a pread 700 ns. Errors of mapped files are handled: a file that is truncated
or fails reads as zeros (`warpwell.targets.bus_error`), the CRC then differs, and the value is read again by pread,
which returns the error. Files that are not in the page cache are not mapped: pread fetches a value at once, where page
faults would fetch it page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from ...targets.bus_error import map_guarded, unmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

_RESIDENT = 0.9
"""Share of a file that must be in the page cache."""
_SAMPLES = 64
"""Pages of a file that are looked at where mincore() does not tell."""
_ROOM = 1 << 28
"""Bytes that are mapped at least, since a file may grow."""


class MappedFile:
    """A file in memory, for reading.

    Attributes
    ----------
    address : int
    nbytes : int
        May exceed the file's size, because the file may grow.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def close(self) -> None:
        """Unmap the file; no thread may be reading it."""
        unmap(self.address, self.nbytes)


def map_file(fd: int) -> MappedFile | None:
    """Map a file that is in the page cache; return None if it is not, or cannot be mapped."""
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        nbytes = -(-max(size, _ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE
        address = map_guarded(fd, nbytes)
        if address is None:
            return None
        mapping = MappedFile(address, nbytes)
        with contextlib.suppress(OSError):
            if _resident(mapping.address, size) if _may_ask(fd) else _sampled(fd, size):
                return mapping
        mapping.close()
    return None


def _may_ask(fd: int) -> bool:
    """Return whether mincore() can be trusted: to users who neither own nor may write a file it reports all pages."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _resident(address: int, size: int) -> bool:
    pages = -(-size // mmap.PAGESIZE)
    if pages == 0:
        return True
    flags = np.zeros(pages, np.uint8)
    if _libc.mincore(address, size, flags.ctypes.data) != 0:
        return False
    return bool((flags & 1).mean() >= _RESIDENT)


def _sampled(fd: int, size: int) -> bool:
    """Return whether a sample of a file's pages is in the page cache."""
    pages = -(-size // mmap.PAGESIZE)
    count = min(_SAMPLES, pages)
    absent = 0
    # of its own, so that looking at a page reads no others ahead
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
        for k in range(count):
            try:
                os.preadv(own, [bytearray(1)], k * pages // count * mmap.PAGESIZE, os.RWF_NOWAIT)
            except BlockingIOError:
                absent += 1
                if absent > (1 - _RESIDENT) * count:
                    return False
    finally:
        os.close(own)
    return True
