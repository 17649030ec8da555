"""`replacing`, `new_folder`: replace files and folders atomically. `storage_full`: converts errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .errors import ArgumentError, MissingFileError, StorageFullError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""

unfinished: set[Path] = set()
"""Files and folders to remove if this process is ended without an exception in the threads that write them."""


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """Return an unused hidden name in the folder of `path`: it starts with a dot and ends in ``.part``."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name; the file or folder that the block writes there replaces the one at the path.

    If the block raises, Ctrl-C included, its file is removed and the path is unchanged. Only a killed process
    (``kill -9``) can leave a file behind, under the temporary name.

    Parameters
    ----------
    path : path-like
        A file or folder, or a name that does not exist yet. Its parent exists.

    Yields
    ------
    Path
        Path of the new file or folder, a `temporary_name`.
    """
    path, part = Path(path), temporary_name(path)
    unfinished.add(part)
    try:
        yield part
        if os.path.lexists(path) and (path.is_dir() or part.is_dir()):
            _exchange(path, part)
        else:
            part.replace(path)
    finally:
        remove(part)
        if os.path.lexists(path):
            remove(part.with_suffix(".old"))  # Ctrl-C interrupted `_exchange`.
        unfinished.discard(part)


def require_replaceable(path: Path, overwrite: bool, is_replaceable: Callable[[Path], bool], noun: str) -> None:
    """Raise if a file or folder cannot be written at a path, or would replace something else.

    Parameters
    ----------
    path : Path
    overwrite : bool
        Whether an empty folder, or a path for which `is_replaceable` returns True, may be replaced.
    is_replaceable : callable
    noun : str
        Name of a replaceable object, for messages: "a table".

    Raises
    ------
    ArgumentError, MissingFileError, PermissionError
    """
    if not path.parent.is_dir():
        raise MissingFileError(f"{path.parent} does not exist: create the folder first", path=path.parent)
    require_writable(path.parent)
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise ArgumentError(
            f"{path} exists already: choose another name, or replace it with overwrite=True (--overwrite)"
        )
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.is_symlink() or not (is_empty or is_replaceable(path)):
        raise ArgumentError(f"{path} exists and is not {noun}, so it is not replaced: choose another name")


def require_writable(folder: Path) -> None:
    """Raise PermissionError if no file can be created in a folder."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, "you may not write in this folder", str(folder))


@contextlib.contextmanager
def new_folder(path: Path, require_free: Callable[[], None]) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` at the end of the block, durably, and is removed if it raises.

    `require_free` raises if the path cannot be replaced; it is called again at the end of the block, because another
    process may have been faster.
    """
    require_free()
    with replacing(path) as part:
        part.mkdir()
        yield part
        sync_names(part)
        require_free()
    sync_names(path.parent)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, and make it durable."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def storage_full(path: Path, advice: str = ": free some, or write to another disk") -> Iterator[None]:
    """Convert the errors of a full disk to StorageFullError; `advice` ends its message."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE or isinstance(error, StorageFullError):
            raise
        raise StorageFullError(f"{path}: no space left ({os.strerror(error.errno)}){advice}", path=path) from error


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(path: Path, part: Path) -> None:
    """Replace a folder, or replace a file by a folder: the system has no call for it."""
    old = part.with_suffix(".old")
    try:
        path.rename(old)
        part.rename(path)
    finally:
        if os.path.lexists(path):
            remove(old)
        elif os.path.lexists(old):
            old.rename(path)
