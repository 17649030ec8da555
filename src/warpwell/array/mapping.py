"""`Mapping`: a file in the process's memory, which kernels on the CPU read and write directly (tier "mapped")."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme.status import UNRECOVERED_READ_ERROR, WRITE_FAULT
from ..storage import FileMedium
from ..targets import bus_error

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

SAMPLE_RUNS = 16
"""Maximum number of runs whose pages `Mapping.announce` looks up in the page cache."""


class Mapping:
    """The bytes of a file as memory. The file is unmapped when the last object that refers to the mapping is deleted.

    If the system cannot read a page, or has no space to write it, the process receives SIGBUS, which
    `warpwell.targets.bus_error` handles: from that page on, the mapping is replaced by zeros, launches that use it are
    aborted, and `require` raises. Items stored before that page are in the file; items stored after it are lost, and
    the error reports it.

    Parameters
    ----------
    medium : FileMedium
        The file. Header, mapping, reads by the host and `FileMedium.sync` use its one descriptor, so all of them see
        the same file, even if its path is replaced.
    name : str
        For messages.

    Attributes
    ----------
    address, end : int
        Address of byte 0 of the file, and the address after its last page.
    reports_residency : bool
        Whether ``mincore`` reports to this process which pages are in memory; otherwise it reports all pages.

    Raises
    ------
    OSError
        The file system maps no files, or too much is mapped.
    """

    def __init__(self, medium: FileMedium, name: str) -> None:
        self._medium = medium
        self._name = name
        self._lost: str | None = None
        self._nbytes = max(medium.nbytes, 1)
        kind = bus_error.REST_TO_WRITE if medium.writable else bus_error.REST_OF_ZEROS
        address = bus_error.map_guarded(medium.fileno(), self._nbytes, kind)
        if address is None:
            code = ctypes.get_errno()
            raise OSError(code, f"{medium.path} cannot be mapped: {os.strerror(code)}")
        self.address = address
        self.end = address + -(-self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        owner = os.fstat(medium.fileno()).st_uid
        self.reports_residency = os.geteuid() in (0, owner) or os.access(f"/proc/self/fd/{medium.fileno()}", os.W_OK)
        self._finalizer = weakref.finalize(self, bus_error.unmap, address, self._nbytes)
        self._finalizer.atexit = False

    @property
    def __array_interface__(self) -> dict[str, object]:
        """The bytes of the file, for NumPy; arrays of them keep it mapped."""
        data = self.address, not self._medium.writable
        return {"version": 3, "shape": (self._nbytes,), "typestr": "|u1", "data": data}

    def require(self) -> None:
        """Raise if part of the mapping failed, or a failure could not be answered.

        Raises
        ------
        MediumError, StorageFullError
            The array has to be opened again.
        """
        error = self.failure()
        if error is None and not bus_error.handled():
            error = errors.MediumError(f"array {self._name!r}: the process has no room for a handler of SIGBUS")
        if error is not None:
            raise error

    def failure(self) -> Exception | None:
        """Return the exception for the first failure, or None."""
        if self._lost is not None:
            return errors.MediumError(self._lost, array=self._name, status=WRITE_FAULT)
        failed = bus_error.failure(self.address)
        if failed is None:
            return None
        at, stored = failed[0] - self.address, failed[1]
        where = f"{'writing' if stored else 'reading'} byte {at} of array {self._name!r} failed"
        again = "then close the array and open it again" + (
            ": items that kernels stored from that byte on are lost" if self._medium.writable else ""
        )
        size = os.fstat(self._medium.fileno()).st_size
        if size < self._medium.nbytes:
            text = f"{self._medium.path} was truncated from {self._medium.nbytes} to {size} bytes while it was open"
            message = f"{where}: {text}: restore it, {again}"
        elif stored and not os.fstatvfs(self._medium.fileno()).f_bavail:
            return errors.StorageFullError(f"{where}: no space is left: free some, {again}", path=self._medium.path)
        else:
            cause = "the file was shorter at that time, or the drive fails"
            message = f"{where}: the system could not {'write' if stored else 'read'} it ({cause}): check both, {again}"
        status = WRITE_FAULT if stored else UNRECOVERED_READ_ERROR
        return errors.MediumError(message, array=self._name, lba=at // 512, status=status)

    def sync(self) -> None:
        """Make what kernels and the host stored durable.

        Raises
        ------
        MediumError, StorageFullError, FormatError
            A write failed, and the system does not record which: the array has to be opened again.
        """
        try:
            self._medium.sync()
        except (errors.MediumError, errors.StorageFullError) as error:
            # the system counts these pages as written: another sync would succeed although data is lost
            what = f"changes of array {self._name!r} may be lost"
            self._lost = f"{error}: {what}: repair the drive, open the array again and compare"
            raise
        failed = self.failure()
        if failed is not None:
            raise failed

    def read_ahead(self, start: int, end: int) -> None:
        """Begin to read bytes [start, end) into the page cache."""
        self._advise(start, end, mmap.MADV_WILLNEED)

    def announce(self, starts: NDArray[np.int64], nbytes: int) -> None:
        """Begin to read runs of `nbytes` bytes into the page cache, unless it has all pages of a sample."""
        resident = ctypes.c_ubyte(1)
        for start in starts[:: len(starts) // SAMPLE_RUNS + 1].tolist():
            page = (self.address + start) // mmap.PAGESIZE * mmap.PAGESIZE
            if _libc.mincore(page, mmap.PAGESIZE, ctypes.byref(resident)) == 0 and not resident.value & 1:
                for run in starts.tolist():
                    self.read_ahead(run, run + nbytes)
                return

    def read_alone(self, alone: bool) -> None:
        """Set whether the system reads a touched page alone, or together with the pages after it."""
        self._advise(0, self._nbytes, mmap.MADV_RANDOM if alone else mmap.MADV_NORMAL)

    def drop(self, start: int, end: int) -> None:
        """Drop bytes [start, end) from the page cache, as far as they are written and no other process uses them."""
        self._advise(start, end, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._medium.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)

    def _advise(self, start: int, end: int, advice: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(self.address + first, min(end, self._nbytes) - first, advice)
