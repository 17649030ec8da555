"""Files: every system call of a store that changes the disk. Guard: stops writing after a failed one. WriterLock.

Tests replace `Files` by a class that kills the process at a call, fails the call, or withholds the bytes that the call
would make durable. Nothing else in this folder changes a file. A full disk leaves the log unchanged; after any other
error the log accepts no more writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

from ... import errors
from ..._os import Threads, uninterrupted
from ...replacing import NO_SPACE
from .checksum import crc32c

_threads = Threads("warpwell-kv-sync")


def _after_fork() -> None:
    global _threads
    _threads = Threads(_threads.name)  # the others are threads of the parent


os.register_at_fork(after_in_child=_after_fork)


class Files:
    """The system calls. All raise OSError."""

    def mkdir(self, path: str) -> None:
        """Create a folder."""
        os.mkdir(path)

    def create(self, path: str) -> int:
        """Create a file that does not exist and open it for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: str, writable: bool) -> int:
        """Open a file that exists (this changes nothing on disk)."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        """Write all of a buffer."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += os.pwrite(fd, view[done:] if done else view, offset + done)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable."""
        os.fdatasync(fd)

    def sync_all(self, fds: Sequence[int]) -> None:
        """Make the bytes and sizes of files durable, all at the same time: a drive then flushes its cache once."""
        if len(fds) == 1:
            os.fdatasync(fds[0])
            return
        failures: list[OSError] = []
        finished = threading.Semaphore(0)

        def sync(fd: int) -> None:
            try:
                os.fdatasync(fd)
            except OSError as error:
                failures.append(error)
            finally:
                finished.release()

        # The kernel reports an error once. The error would be lost if this wait ended before the thread that receives
        # it, or if an interrupt replaced it.
        try:
            with uninterrupted():
                try:
                    _threads.run(*(partial(sync, fd) for fd in fds[1:]))
                except RuntimeError:  # Python is shutting down and starts no threads
                    for fd in fds[1:]:
                        sync(fd)
                sync(fds[0])
                for _ in fds:
                    finished.acquire()
        finally:
            if failures:
                raise failures[0]

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Replace a file by another."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, nbytes)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of an open file; return False if another process holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock, also for the copies of the descriptor in forked children."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)


@contextlib.contextmanager
def closing_on_error(files: Files, fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it if the block raises."""
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise


def write_new(files: Files, path: str, parts: list[Any]) -> int:
    """Create a durable file of `parts`, one after the other; its name is not durable yet. Return its descriptor."""
    fd = files.create(path)
    with closing_on_error(files, fd):
        try:
            offset = 0
            for part in parts:
                files.pwrite(fd, part, offset)
                offset += memoryview(part).nbytes
            files.sync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                files.unlink(path)
            raise
    return fd


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return bytes of a file, fewer if it ends earlier."""
    parts = []
    while nbytes > 0:
        part = os.pread(fd, min(nbytes, 0x7FFFF000), offset)  # as many as one call of Linux reads
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def full(error: OSError) -> bool:
    """Return whether an error says that no space is left, which leaves a store unchanged."""
    return error.errno in NO_SPACE


def storage_full(path: str) -> errors.StorageFullError:
    """Return the error for a full disk."""
    return errors.StorageFullError(
        f"{path}: no space left, and nothing was changed; free some space and try again", path=path
    )


class Guard:
    """Remembers the first failure of a log.

    After a failed fsync the kernel marks the unwritten pages as clean. A second fsync would succeed without writing
    them, so none is tried.

    Parameters
    ----------
    path : str
        For messages.

    Attributes
    ----------
    on_failure : callable
        Called when the log accepts no more writes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.on_failure: Callable[[], object] | None = None
        self._failure: tuple[str, int | None] | None = None

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which no more are accepted."""
        return self._failure is not None

    def check(self) -> None:
        """Raise StoreFailedError after a failed write."""
        if self._failure is not None:
            raise self._error()

    def writing(self) -> Self:
        """Return a block that turns an OSError into StorageFullError (nothing has changed) or StoreFailedError."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, errors.WarpwellError):
            return
        if full(error) and self._failure is None:
            raise storage_full(self._path) from error
        if self._failure is None:
            self.fail(str(error), error.errno)
        raise self._error() from error

    def fail(self, why: str, code: int | None = None) -> None:
        """Accept no more writes, for a reason and with the error number of a system call, if one failed."""
        self._failure = (why, code)
        if self.on_failure is not None:
            self.on_failure()

    def sync(self, call: Callable[[], object]) -> None:
        """Call a function that syncs; after any error the log accepts no more writes."""
        try:
            call()
        except OSError as error:
            self.fail(f"fsync: {error}", error.errno)
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a signal handler: an error of a thread that still syncs would be lost
            self.fail(f"fsync: {error!r}")
            raise

    @contextlib.contextmanager
    def replacing_manifest(self) -> Iterator[None]:
        """Let Ctrl-C wait until the manifest on disk and the log agree; after other exceptions accept no more writes.

        Otherwise the log would write to files that the manifest on disk no longer names.
        """
        with uninterrupted():
            try:
                yield
            except errors.WarpwellError:
                raise
            except OSError as error:
                if not full(error) and self._failure is None:
                    self.fail(str(error), error.errno)
                raise
            except BaseException as error:  # of a signal handler
                self.fail(repr(error))
                raise

    def _error(self) -> Exception:
        cause, code = self._failure or ("", None)
        return errors.StoreFailedError(
            f"{self._path} accepts no more writes, because one failed ({cause}): earlier commits are safe. Close "
            "it, check the disk, and open it again",
            path=self._path,
            code=code,
        )


# -- the lock of the writer -----------------------------------------------------------------------------------

# The lock is `flock`. On some file systems it does nothing, or nothing between hosts, and two writers would destroy
# each other's commits. So a writer checks when it opens a store, once, that the lock refuses a second descriptor, and
# that no writer of another host has left the store open: the lock file names the last writer and its state.


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
    # Earlier releases write no checksum. If the checksum is wrong, the power failed while the file was written.
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
            # close, but do not unlock: the lock belongs to the open file, which the parent still has
            with contextlib.suppress(OSError):
                os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def forked_error(path: str) -> errors.ForkError:
    """Return the error for a store that is used in a process that was forked from the process that opened it."""
    return errors.ForkError(
        f"{path} was opened in the process that this one ({os.getpid()}) was forked from: open it again here, by its"
        " path (for reading if the other process still writes)",
        path=path,
    )


def check_process(pid: int, path: str) -> None:
    """Raise ForkError unless this is the process `pid`, which opened a store."""
    if os.getpid() != pid:
        raise forked_error(path)
