"""Files: every system call of a store that changes the disk. Guard: stops writing after a failed one.

Tests replace `Files` by one that kills the process at a call, fails the call, or withholds the bytes that the call
would make durable. Nothing else in this folder changes a file. A full disk leaves the log
unchanged; after any other error the log accepts no more writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ... import errors
from ..._os import Threads, uninterrupted
from ...replacing import NO_SPACE

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
        view = memoryview(data).cast("B")
        while len(view):
            done = os.pwrite(fd, view, offset)
            view = view[done:]
            offset += done

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

        # The kernel reports an error once: it would be lost if the wait ended before its thread, or if an interrupt
        # took its place.
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
    """Return bytes of a file, fewer where it ends earlier."""
    parts = []
    while nbytes > 0:
        part = os.pread(fd, min(nbytes, 1 << 30), offset)
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
        self.on_failure: Callable[[], object] = lambda: None
        self._failure: tuple[str, int | None] | None = None

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which no more are accepted."""
        return self._failure is not None

    def check(self) -> None:
        """Raise StoreFailedError after a failed write."""
        if self._failure is not None:
            raise self._error()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError into StorageFullError (nothing has changed) or StoreFailedError."""
        try:
            yield
        except errors.WarpwellError:
            raise
        except OSError as error:
            if full(error) and self._failure is None:
                raise storage_full(self._path) from error
            if self._failure is None:
                self.fail(str(error), error.errno)
            raise self._error() from error

    def fail(self, why: str, code: int | None = None) -> None:
        """Accept no more writes, for a reason and with the error number of a system call, if one failed."""
        self._failure = (why, code)
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
