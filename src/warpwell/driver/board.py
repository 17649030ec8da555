"""`Board`: the file by which the programs of a GPU and its arbiter meet; ``native/gate.h`` has its layout and rules.

Nothing here needs the scheduler or a GPU: the server of programs opens boards, and an arbiter reads them.
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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from .._settings import settings
from ..errors import SchedulerError

FORMAT = int.from_bytes(b"WWWGATE1", "little")
SLOTS, SLOT_BYTES, TABLE, NAME_BYTES = 128, 256, 4096, 64
NBYTES = TABLE + SLOTS * SLOT_BYTES
_SLOT_LOCKS, _ARBITER_LOCK = 1 << 40, (1 << 40) - 1
"""Bytes of the file that the kernel locks for the owners of slots, and for the arbiter."""
_FORMAT, _ARBITER, _BEAT, _PROGRAMS, _BELL = 0, 1, 8, 9, 16
"""64-bit fields of the head."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FUTEX = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(os.uname().machine, 98)
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def board_folder() -> Path:
    """Return the folder of the boards: ``WARPWELL_TURNS``, else one of this user in ``/dev/shm``; make it if needed.

    Raises
    ------
    SchedulerError
        It cannot be made, the variable is not an absolute path, or (without the variable) another user can write to it.
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


def device_file(uuid: bytes) -> str:
    """Return the name of a GPU's board, without the suffix."""
    return f"gpu-{uuid.hex()}"


class Board:
    """The board of one device. A process opens each board once and never closes it.

    To close any descriptor of the file would free all locks that this process has in it.

    Parameters
    ----------
    path : Path
        The file, which is created if it does not exist.

    Attributes
    ----------
    name : str
        Name of the device.
    fields : memoryview of uint64
    descriptor : int
    GATE, BUDGET_NS, OPENED, SERIAL, ... : int
        Words of a slot.
    WORKER, STREAMS, TURN : int
        Kinds of programs.
    IDLE, RUNNING, LEAVING, WAITING : int
        States of a slot, as its arbiter sees it.
    """

    GATE, BUDGET_NS, OPENED, SERIAL = range(4)
    HELD, ISSUED, DONE, EXPECTED_NS, LONGEST_NS = range(8, 13)
    STATE, SINCE_NS, USED_NS, LAUNCHES, KIND, PID, PRIORITY = range(16, 23)
    TENANT = 24
    WORKER, STREAMS, TURN = 1, 2, 3
    IDLE, RUNNING, LEAVING, WAITING = range(4)

    _boards: dict[Path, Board] = {}  # noqa: RUF012 - one a process
    _opening = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name.removesuffix(".board")
        folder = os.stat(path.parent)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if folder.st_mode & stat.S_IWGRP and os.fstat(self.descriptor).st_uid == os.getuid():
            with contextlib.suppress(OSError):  # this user is not in the group, or a container does not know it
                os.fchown(self.descriptor, -1, folder.st_gid)
            os.fchmod(self.descriptor, 0o660)
        if os.fstat(self.descriptor).st_size < NBYTES:
            os.posix_fallocate(self.descriptor, 0, NBYTES)  # else a write to the mapping could kill the process
        self._map = mmap.mmap(self.descriptor, NBYTES)
        if int.from_bytes(self._map[:8], "little") not in (0, FORMAT):
            self._map.close()
            os.close(self.descriptor)
            raise SchedulerError(f"{path} is of another version of Warpwell: end its programs, then remove the file")
        self.fields = memoryview(self._map).cast("B").cast("Q")
        self._halves = memoryview(self._map).cast("B").cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.fields[_FORMAT] = FORMAT
        self._own: set[int] = set()
        self._started: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, name: str) -> Board:
        """Return the board of a device.

        Raises
        ------
        SchedulerError
            The file cannot be opened, or is of another version.
        """
        path = board_folder() / f"{name}.board"
        with cls._opening:
            try:
                return cls._boards.get(path) or cls._boards.setdefault(path, cls(path))
            except OSError as error:
                reason = error.strerror or error
                message = f"cannot use {path}: {reason}; name a writable folder with {NBYTES >> 10} KiB in memory in "
                raise SchedulerError(message + "WARPWELL_TURNS") from error

    @classmethod
    def forget(cls) -> None:
        """Forget all boards in a forked child, because locks are not inherited."""
        cls._boards, cls._opening = {}, threading.Lock()

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

    # -- the arbiter ---------------------------------------------------------------------------------------------

    def ensure_arbiter(self) -> None:
        """Start an arbiter unless one has the lock; it exits when the board has no programs."""
        if self._started is not None and self._started.poll() is None:
            return
        self._started = None
        if self.arbiter is None:
            self._started = subprocess.Popen(
                [sys.executable, "-P", "-m", "warpwell", "share", "arbiter", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def become_arbiter(self) -> bool:
        """Take the lock of the arbiter; return False if another process has it."""
        return self.lock(_ARBITER_LOCK)

    def resign(self) -> None:
        """Free the lock of the arbiter."""
        self.unlock(_ARBITER_LOCK)

    @property
    def arbiter(self) -> int | None:
        """The process of the arbiter, 0 if it is of another container, or None."""
        return self.lock_owner(_ARBITER_LOCK)

    def beat(self, programs: int) -> None:
        """Show that the arbiter is alive, and how many programs it sees."""
        self.fields[_ARBITER], self.fields[_PROGRAMS] = os.getpid(), programs
        self.fields[_BEAT] = (self.fields[_BEAT] + 1) & 0xFFFFFFFF

    @property
    def beats(self) -> int:
        """The word that changes while the arbiter is alive and a program waits."""
        return self.fields[_BEAT]

    @property
    def bell(self) -> int:
        """The value of the futex of the arbiter, for `wait`."""
        return self._halves[2 * _BELL]

    def ring(self) -> None:
        """Wake the arbiter."""
        self._change(2 * _BELL)

    def wait(self, bell: int, seconds: float) -> None:
        """Wait until the bell differs from `bell`, a signal arrives, or the time is over."""
        self._wait(2 * _BELL, bell, seconds)

    # -- slots ---------------------------------------------------------------------------------------------------

    @staticmethod
    def slot(index: int) -> int:
        """Return the index of the first word of a slot."""
        return (TABLE + index * SLOT_BYTES) // 8

    def used_slots(self) -> Iterator[tuple[int, int]]:
        """Yield index and serial of the slots in use; their owners may have exited."""
        fields, base = self.fields, TABLE // 8 + self.SERIAL
        for index, serial in enumerate(fields[base :: SLOT_BYTES // 8].tolist()):
            if serial & 1:
                yield index, serial

    def owner(self, index: int) -> int | None:
        """Return the process that has a slot, 0 if it is of another container, or None if it has exited."""
        return os.getpid() if index in self._own else self.lock_owner(_SLOT_LOCKS + index)

    def is_alive(self, index: int) -> bool:
        """Return True if the process of a slot has not exited."""
        return self.owner(index) is not None

    def free_slot(self, index: int, serial: int) -> None:
        """Mark the slot of an exited process as free, unless another process has taken it."""
        if self.lock(_SLOT_LOCKS + index):
            if self.fields[self.slot(index) + self.SERIAL] == serial:
                self.fields[self.slot(index) + self.SERIAL] = (serial + 1) % (1 << 64)
            self.unlock(_SLOT_LOCKS + index)

    def take_slot(self, kind: int, pid: int, priority: int, tenant: str) -> tuple[int, int] | None:
        """Take a free slot for this process; return its index and serial, or None if all are in use."""
        for index in range(SLOTS):
            if index in self._own or not self.lock(_SLOT_LOCKS + index):
                continue
            at = self.slot(index)
            self._own.add(index)
            serial = (self.fields[at + self.SERIAL] & ~1) + 2
            self.fields[at + self.SERIAL] = serial
            for word in (*range(self.BUDGET_NS, self.SERIAL), *range(self.HELD, self.TENANT)):
                self.fields[at + word] = 0
            self.fields[at + self.GATE] = 1
            self.fields[at + self.KIND], self.fields[at + self.PID] = kind, pid
            self.fields[at + self.PRIORITY] = priority % (1 << 64)
            name = tenant.encode()[: NAME_BYTES - 1]
            self._map[8 * (at + self.TENANT) : 8 * (at + self.TENANT) + NAME_BYTES] = name.ljust(NAME_BYTES, b"\0")
            self.fields[at + self.SERIAL] = serial + 1
            self.ring()
            return index, serial + 1
        return None

    def release_slot(self, index: int) -> None:
        """Free a slot of this process."""
        self.fields[self.slot(index) + self.SERIAL] = (self.fields[self.slot(index) + self.SERIAL] + 1) % (1 << 64)
        self._own.discard(index)
        self.unlock(_SLOT_LOCKS + index)
        self.ring()

    def tenant(self, index: int) -> str:
        """Return the tenant of a slot; its bytes may be invalid UTF-8."""
        at = 8 * (self.slot(index) + self.TENANT)
        return self._map[at : at + NAME_BYTES].split(b"\0")[0].decode(errors="replace") or "default"

    def set_gate(self, index: int, is_open: bool) -> None:
        """Open or close the gate of a slot, and wake its program. A full memory fence."""
        self.fields[self.slot(index) + self.GATE] = is_open
        self._change(2 * (self.slot(index) + self.OPENED))

    def _change(self, half: int) -> None:
        self._halves[half] = (self._halves[half] + 1) & 0xFFFFFFFF
        _libc.syscall(_FUTEX, ctypes.c_void_p(self._address + 4 * half), 1, 1 << 30, None, None, 0)

    def _wait(self, half: int, expected: int, seconds: float) -> None:
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _libc.syscall(
            _FUTEX, ctypes.c_void_p(self._address + 4 * half), 0, ctypes.c_uint(expected), ctypes.byref(limit)
        )
