"""WriterLock: one writer of a store at a time, and what happens to it in a forked process."""

from __future__ import annotations

import contextlib
import os
import weakref

from .. import errors
from .files import Files, read_at

LOCK_NAME = "LOCK"


class WriterLock:
    """The lock of a store's one writer; readers need none.

    It is an advisory lock of the open file, so it ends with the process, however that ends. A forked child
    drops its copy at once: else the store would stay locked for as long as the child lives.

    Parameters
    ----------
    files : Files
    folder : str

    Raises
    ------
    SharingError
        Another writer has the store open.
    """

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._fd = -1
        path = os.path.join(folder, LOCK_NAME)
        try:
            fd = files.open(path, writable=True)
        except FileNotFoundError:
            try:
                fd = files.create(path)
            except FileExistsError:  # somebody was faster
                fd = files.open(path, writable=True)
        try:
            if not files.lock(fd):
                holder = read_at(fd, 32, 0).split(b"\n")[0].decode("ascii", "replace")
                raise errors.SharingError(
                    f"{folder} is open for writing already (process {holder or 'unknown'}): close it there, "
                    'or open it with mode="r"',
                    path=folder,
                )
            files.pwrite(fd, f"{os.getpid()}\n".encode().ljust(32), 0)
        except BaseException:
            files.close(fd)
            raise
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Let the next writer in."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            # A child that was forked just now may not have closed its copy yet.
            with contextlib.suppress(OSError):
                self._files.unlock(fd)
            self._files.close(fd)


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
            "open the store again here (multiprocessing: use the spawn method, or open it in the worker)",
            path=path,
        )
