"""`replacing`: a file or folder that appears whole, or not at all. `storage_full`: the error where the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import StorageFullError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where no space is left."""

unfinished: set[Path] = set()
"""Files and folders to remove if this process is ended without an exception in the threads that write them."""


def beside(path: str | os.PathLike[str]) -> Path:
    """Return a hidden name beside `path` that nothing has: it starts with a dot and ends in ``.part``."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a name `beside` a path; what the block writes there takes the place of what the path has.

    If the block raises, Ctrl-C included, what it wrote is removed and the path stays as it was. Only the end of the
    whole process (``kill -9``) can leave something behind, under the hidden name.

    Parameters
    ----------
    path : path-like
        A file, a folder, or nothing yet. Its parent exists.

    Yields
    ------
    Path
        Where to write the new file or folder.
    """
    path, part = Path(path), beside(path)
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
            remove(part.with_suffix(".old"))  # an interrupt came while `_exchange` removed it
        unfinished.discard(part)


@contextlib.contextmanager
def storage_full(path: Path, advice: str = ": free some, or write to another disk") -> Iterator[None]:
    """Turn the errors of a full disk into StorageFullError; `advice` ends its message."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE or isinstance(error, StorageFullError):
            raise
        raise StorageFullError(f"{path}: no space left ({os.strerror(error.errno)}){advice}", path=path) from error


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(path: Path, part: Path) -> None:
    """Put a folder in the place of something, or something in the place of a folder: the system has no call for it."""
    old = part.with_suffix(".old")
    try:
        path.rename(old)
        part.rename(path)
    finally:
        if os.path.lexists(path):
            remove(old)
        elif os.path.lexists(old):
            old.rename(path)
