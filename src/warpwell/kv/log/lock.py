"""WriterLock: one writer of a store at a time, also after a fork.

The lock is ``flock``. On some file systems ``flock`` does nothing, or nothing between hosts, and two writers would
destroy each other's commits. So a writer checks when it opens a store, once, that the lock refuses a second descriptor
and that no writer of another host has left the store open: the lock file names the last writer and its state.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import weakref

from ... import errors
from .checksum import crc32c
from .files import Files, read_at

LOCK_NAME = "LOCK"
LOCK_BYTES = 128

OPEN, CLOSED = "open", "closed"
"""State of the store that the last writer recorded."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class WriterLock:
    """The lock of a store's one writer; readers need none.

    It is an advisory lock of the open file, so it ends with the process, even after a crash. A forked child closes its
    copy at once: otherwise the store would stay locked while the child lives.

    Parameters
    ----------
    files : Files
    folder : str

    Raises
    ------
    SharingError
        Another writer has the store open or may have it open, or locks do not work on the file system.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder
        self._fd = -1
        path = os.path.join(folder, LOCK_NAME)
        try:
            fd = files.open(path, writable=True)
        except FileNotFoundError:
            try:
                fd = files.create(path)
            except FileExistsError:  # another process was faster
                fd = files.open(path, writable=True)
        try:
            if not self._lock(fd):
                raise errors.SharingError(
                    f"{folder} is already open for writing ({_holder(read_at(fd, LOCK_BYTES, 0))}): close it there, "
                    'or open it with mode="r"',
                    path=folder,
                )
            self._before = read_at(fd, LOCK_BYTES, 0)
            self._check(path)
            files.pwrite(fd, _line(OPEN), 0)
            self._fd = fd
        except BaseException:
            files.close(fd)
            raise
        _held.add(self)

    def _lock(self, fd: int) -> bool:
        try:
            return self._files.lock(fd)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise self._no_locks(f"no locks ({os.strerror(error.errno or 0)})") from error

    def _check(self, path: str) -> None:
        """Raise SharingError unless the lock keeps all other writers out."""
        fd = self._files.open(path, writable=True)
        try:
            if self._files.lock(fd):
                raise self._no_locks("locks that do nothing") from OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        finally:
            self._files.close(fd)
        state, boot, host = _parse(self._before)
        if state == OPEN and boot != _boot() and host != _host():
            raise errors.SharingError(
                f"{self._folder} was opened for writing by another host ({_holder(self._before)}) and not closed, and"
                f" locks may not reach other hosts: close it there; if that process has ended, remove {path}",
                path=self._folder,
            )

    def _no_locks(self, locking: str) -> errors.SharingError:
        return errors.SharingError(
            f"{self._folder}: the file system has {locking}, but a store needs locks to keep a second writer out: mount"
            " it with locks (NFS: its lock service), or copy the store to a local disk; reading needs no locks",
            path=self._folder,
        )

    def release(self, *, clean: bool = True, opened: bool = True) -> None:
        """Release the lock.

        Parameters
        ----------
        clean : bool
            The next writer need not repair the store.
        opened : bool
            False if the store could not be opened: the lock file gets its previous contents.
        """
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            with contextlib.suppress(OSError):
                if clean:
                    self._files.pwrite(fd, _line(CLOSED) if opened else self._before.ljust(LOCK_BYTES), 0)
            # A child that was forked just now may not have closed its copy yet.
            with contextlib.suppress(OSError):
                self._files.unlock(fd)
            self._files.close(fd)


def _line(state: str) -> bytes:
    """Return the contents of the lock file."""
    contents = f"{os.getpid()} {_host()}\n{state} {_boot()}\n".encode("ascii", "replace")
    return (contents + b"%08x\n" % crc32c(contents)).ljust(LOCK_BYTES)


def _host() -> str:
    return socket.gethostname()[:40]


def _holder(data: bytes) -> str:
    pid, _, host = data.split(b"\n")[0].decode("ascii", "replace").strip().partition(" ")
    if not pid:
        return "by an unknown process"
    return f"process {pid}" if host in ("", _host()) else f"process {pid} on {host}"


def _parse(data: bytes) -> tuple[str, str, str]:
    """Return the state that the last writer recorded, the boot id of its system, and its host."""
    rows = data.split(b"\n")
    checksum = rows[2].strip() if len(rows) > 2 else b"cut"
    # Earlier releases write no checksum. If it is wrong, the power failed while the file was written.
    is_whole = checksum in (b"", b"%08x" % crc32c(b"%b\n%b\n" % (*rows, b"")[:2]))
    fields = rows[1].decode("ascii", "replace").split() if is_whole else []
    # Format 2 has a third state, and a token after the boot id.
    state, boot = fields[:2] if len(fields) >= 2 else (CLOSED, "")
    return state if state == CLOSED else OPEN, boot, rows[0].decode("ascii", "replace").partition(" ")[2].strip()


def _boot() -> str:
    """Return the boot id of this system, or a random id if the system has no boot id."""
    if not _boots:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                _boots.append(file.read().strip().replace("-", "")[:32])
        except OSError:
            _boots.append(secrets.token_hex(16))
    return _boots[0]


_boots: list[str] = []
_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        fd, lock._fd = lock._fd, -1
        if fd >= 0:
            # closing, not unlocking: the lock belongs to the open file, which the parent still has
            with contextlib.suppress(OSError):
                os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


BY_PATH = "open it again here, by its path (for reading if the other process still writes)"


def check_process(pid: int, action: str, advice: str = BY_PATH, path: str | None = None) -> None:
    """Raise ForkError unless this is the process `pid`; `action` says what was done there, and to which object."""
    if os.getpid() != pid:
        raise errors.ForkError(
            f"{action} in process {pid}, which this one ({os.getpid()}) was forked from: {advice}", path=path
        )
