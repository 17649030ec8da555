"""WriterLock: one writer of a store at a time, also after a fork.

The lock is ``flock``. On some file systems ``flock`` does nothing, or nothing between hosts. So the lock file also
holds a random token of the last writer that opened the store: a writer that finds another token is fenced off and
acknowledges no more commits (`check`, after the records are durable). A new writer first writes its token and then
reads the journal, so that it finds every acknowledged commit. It appends to existing files only if no other writer can
be alive (`sole`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import weakref

from ... import errors
from .files import Files, read_at

LOCK_NAME = "LOCK"
LOCK_BYTES = 128

TAKING, OPEN, CLOSED = "taking", "open", "closed"
"""A newcomer may still share files with the writer before it; has its own; has gone and left all in order."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class WriterLock:
    """The lock of a store's one writer; readers need none.

    It is an advisory lock of the open file, so it ends with the process, even after a crash. A forked child closes its
    copy at once: otherwise the store would stay locked while the child lives.

    Parameters
    ----------
    files : Files
    folder : str

    Attributes
    ----------
    sole : bool
        No other process can be writing: the previous writer closed the store, or ended on this machine, where the lock
        works.

    Raises
    ------
    SharingError
        Another writer has the store open, or the file system has no locks.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder
        self._fd = -1
        self._line = b""
        self._settled = False
        path = os.path.join(folder, LOCK_NAME)
        try:
            fd = files.open(path, writable=True)
        except FileNotFoundError:
            try:
                fd = files.create(path)
            except FileExistsError:  # somebody was faster
                fd = files.open(path, writable=True)
        try:
            if not self._lock(fd):
                raise errors.SharingError(
                    f"{folder} is already open for writing ({_holder(read_at(fd, LOCK_BYTES, 0))}): close it there, "
                    'or open it with mode="r"',
                    path=folder,
                )
            works = self._works(path)
            self._before = read_at(fd, LOCK_BYTES, 0)
            state, boot = _state(self._before)
            self.sole = state == CLOSED or (works and state == OPEN and boot == _boot())
            self._token = secrets.token_hex(16)
            self._fd = fd
            self._write(TAKING)
        except BaseException:
            self._fd = -1
            files.close(fd)
            raise
        _held.add(self)

    def _lock(self, fd: int) -> bool:
        try:
            return self._files.lock(fd)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise errors.SharingError(
                f"{self._folder}: the file system has no locks ({os.strerror(error.errno or 0)}), which keep a second"
                " writer out: mount it with locks (NFS: its lock service), or copy the store to a local disk; reading"
                " needs none",
                path=self._folder,
            ) from error

    def _works(self, path: str) -> bool:
        """Return whether the lock works: whether a second descriptor of the file is refused."""
        fd = self._files.open(path, writable=True)
        try:
            return not self._files.lock(fd)
        finally:
            self._files.close(fd)

    def check(self) -> None:
        """Raise SharingError if another writer has opened the store since."""
        if os.pread(self._fd, LOCK_BYTES, 0) != self._line:
            holder = _holder(read_at(self._fd, LOCK_BYTES, 0))
            raise errors.SharingError(
                f"{self._folder} was opened for writing by another ({holder}), which locks of this file system did not"
                " keep out: what was committed before is safe, and what was not yet may be in the store or not. Close"
                " this one",
                path=self._folder,
            )

    def settle(self) -> None:
        """Note that this writer appends only to its own files from now on."""
        self.check()
        self._write(OPEN)
        self._settled = True

    def release(self, *, clean: bool = True) -> None:
        """Release the lock; `clean` says that nothing has to be repaired."""
        fd = self._fd
        _held.discard(self)
        if fd >= 0:
            # A child that was forked just now may not have closed its copy yet.
            with contextlib.suppress(OSError):
                if clean and os.pread(fd, LOCK_BYTES, 0) == self._line:
                    if self._settled:
                        self._write(CLOSED)
                    elif _state(self._before)[0] == CLOSED:  # it was not opened after all
                        self._files.pwrite(fd, self._before, 0)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._files.unlock(fd)
            self._files.close(fd)

    def _write(self, state: str) -> None:
        text = f"{os.getpid()} {socket.gethostname()[:40]}\n{state} {_boot()} {self._token}\n"
        line = text.encode("ascii", "replace").ljust(LOCK_BYTES)
        self._files.pwrite(self._fd, line, 0)
        self._line = line


def _holder(data: bytes) -> str:
    pid, _, host = data.split(b"\n")[0].decode("ascii", "replace").strip().partition(" ")
    if not pid:
        return "by an unknown process"
    return f"process {pid}" if host in ("", socket.gethostname()[:40]) else f"process {pid} on {host}"


def _state(data: bytes) -> tuple[str, str]:
    """Return the state that the previous writer left, and the boot id of its system."""
    lines = data.decode("ascii", "replace").split("\n")
    words = lines[1].split(" ") if len(lines) > 2 else []
    if len(words) == 3 and words[0] in (TAKING, OPEN, CLOSED) and len(words[2]) == 32:
        return words[0], words[1]
    # of a release that wrote no more than its process id, on this machine as far as anybody knows
    return (OPEN, _boot()) if len(lines) == 2 and lines[0].isdigit() and not lines[1].strip() else ("", "")


def _boot() -> str:
    """Return the boot id of this system; a random one if the system has none."""
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


def check_process(pid: int, path: str) -> None:
    """Raise ForkError unless this is the process `pid`."""
    if os.getpid() != pid:
        raise errors.ForkError(
            f"{path} was opened by process {pid} and this is {os.getpid()}, forked from it: "
            "open the store again here, by its path (for reading if the other process still writes)",
            path=path,
        )
