"""`SharedFile`: words and locks that the processes of a device share; `shared_folder`: the folder of these files.

A lock is a byte of the file (``F_SETLK``). The kernel frees it when its process exits, however it exits, and a forked
child does not inherit it. A word may be a futex.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar, Self

from ._os import FUTEX
from ._settings import settings
from .errors import SchedulerError

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FUTEX = FUTEX or 98  # the number that new processors have
_FUTEX_WAIT, _FUTEX_WAKE_OP = 0, 5
_ALL_WAITERS = ctypes.c_void_p(1 << 30)
_ADD_ONE = ctypes.c_uint(1 << 28 | 1 << 12)  # FUTEX_OP_ADD; the result of its comparison is not used
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def shared_folder() -> Path:
    """Return the folder of the files (``WARPWELL_TURNS``, else one of this user in ``/dev/shm``), created if needed.

    Raises
    ------
    SchedulerError
        The folder cannot be created, the variable is not an absolute path, or (without the variable) another user can
        write to it.
    """
    chosen = settings.turns_folder
    base = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    if chosen and not os.path.isabs(chosen):
        raise SchedulerError(f"WARPWELL_TURNS must be an absolute path, got {chosen!r}; programs must share the folder")
    path = Path(chosen or os.path.join(base, f"warpwell-{os.getuid()}"))
    try:
        path.mkdir(mode=0o700, parents=bool(chosen), exist_ok=True)
        info = os.lstat(path)
    except OSError as error:
        reason = error.strerror or error
        raise SchedulerError(f"cannot create {path}: {reason}; name another folder in WARPWELL_TURNS") from error
    is_own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
    if not chosen and (not is_own or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise SchedulerError(
            f"{path} must be a folder that only you can write to; chmod 700 it, or name another one in WARPWELL_TURNS"
        )
    return path


class SharedFile:
    """A file of a device, which this process maps once and never closes.

    To close any descriptor of the file would free all locks that this process has in it.

    Parameters
    ----------
    path : Path
        The file, which is created if it does not exist.

    Attributes
    ----------
    name : str
        Name of the device.
    descriptor : int
    SUFFIX : str
        End of the file's name.
    NBYTES : int
        Size of the file, a multiple of 8.
    FORMAT : int
        First word of the file.
    """

    SUFFIX: ClassVar[str]
    NBYTES: ClassVar[int]
    FORMAT: ClassVar[int]
    _files: ClassVar[dict[Path, Any]]
    _made: ClassVar[list[Any]] = []
    _opening: ClassVar[threading.RLock]

    def __init_subclass__(cls) -> None:
        cls.forget()

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name.removesuffix(self.SUFFIX)
        folder = os.stat(path.parent)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if folder.st_mode & stat.S_IWGRP and os.fstat(self.descriptor).st_uid == os.getuid():
            with contextlib.suppress(OSError):  # this user is not in the group, or a container does not know it
                os.fchown(self.descriptor, -1, folder.st_gid)
            os.fchmod(self.descriptor, 0o660)
        if os.fstat(self.descriptor).st_size < self.NBYTES:
            # otherwise a write to the mapping could kill the process
            os.posix_fallocate(self.descriptor, 0, self.NBYTES)
        self._map = mmap.mmap(self.descriptor, self.NBYTES)
        first = int.from_bytes(self._map[:8], "little")
        if first not in (0, self.FORMAT):
            self._map.close()
            os.close(self.descriptor)
            raise SchedulerError(f"{path} is of another version of Warpwell: end its programs, then remove the file")
        self._map[:8] = self.FORMAT.to_bytes(8, "little")
        self._halves = memoryview(self._map).cast("B").cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the file of a device.

        Raises
        ------
        SchedulerError
            The file cannot be opened, or is of another version.
        """
        path = shared_folder() / f"{name}{cls.SUFFIX}"
        with cls._opening:
            try:
                if path not in cls._files:
                    # kept forever, even if a signal handler has created another one in the meantime
                    cls._made.append(cls(path))
                    cls._files.setdefault(path, cls._made[-1])
                file: Self = cls._files[path]
                return file
            except OSError as error:
                reason, room = error.strerror or error, -(-cls.NBYTES // 1024)
                message = f"cannot use {path}: {reason}; name a writable folder with {room} KiB in memory in "
                raise SchedulerError(message + "WARPWELL_TURNS") from error

    @classmethod
    def forget(cls) -> None:
        """Drop all files in a forked child, because locks are not inherited. Their mappings stay open."""
        cls._files, cls._opening = {}, threading.RLock()

    # -- locks ---------------------------------------------------------------------------------------------------

    def lock(self, byte: int) -> bool:
        """Take a lock; return False if another process has it."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, byte: int) -> None:
        """Free a lock."""
        fcntl.fcntl(self.descriptor, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))

    def lock_owner(self, byte: int) -> int | None:
        """Return the other process that has a lock, 0 if it is of another container, or None."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_GETLK, query))
        return None if kind == fcntl.F_UNLCK else max(0, int(process))

    # -- futexes: the lower half of a 64-bit word ----------------------------------------------------------------

    def _read_futex(self, word: int) -> int:
        return self._halves[2 * word]

    def _wake(self, word: int) -> None:
        """Change a futex, and wake all that wait for it. A full memory fence.

        Linux adds 1 atomically: no change is lost, so a thread that has read the futex before does not sleep.
        """
        address = ctypes.c_void_p(self._address + 8 * word)
        _libc.syscall(_FUTEX, address, _FUTEX_WAKE_OP, _ALL_WAITERS, _ALL_WAITERS, address, _ADD_ONE)

    def _wait(self, word: int, expected: int, seconds: float) -> None:
        """Wait until a futex differs from `expected`, a signal arrives, or the time is over."""
        limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        address = ctypes.c_void_p(self._address + 8 * word)
        _libc.syscall(_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint(expected), limit)
