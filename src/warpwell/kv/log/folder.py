"""The folder of a new store: made, or taken where a creation was cut short, and cleared when it fails."""

from __future__ import annotations

import contextlib
import os

from ... import errors
from .files import Files
from .floor import FLOOR_NAME
from .format import SUPERBLOCK
from .lock import LOCK_NAME
from .manifest import IDENTITY_NAME, MANIFEST_NAME, NEW_NAME


def make_folder(files: Files, path: str) -> bool:
    """Make the folder of a new store; return False where one was there that may be used.

    Raises
    ------
    ArgumentError
        Something else is there.
    MissingFileError
        The parent does not exist.
    """
    try:
        files.mkdir(path)
        return True
    except FileNotFoundError:
        raise errors.MissingFileError(
            f"{os.path.dirname(path)}: no such folder to create {os.path.basename(path)} in; create it first", path=path
        ) from None
    except FileExistsError:
        pass
    if not os.path.isdir(path):
        raise errors.ArgumentError(f"{path} is a file: choose another name, or remove it yourself", name="path")
    check_empty(path)
    return False


def check_empty(path: str) -> None:
    """Raise ArgumentError if a folder holds anything but what a creation leaves that was cut short."""
    names = os.listdir(path)
    if MANIFEST_NAME in names:
        raise errors.ArgumentError(
            f'{path} is a store already: open it with mode="r+", or replace it with overwrite=True', name="path"
        )
    for name in names:
        if not _left_over(os.path.join(path, name)):
            raise errors.ArgumentError(
                f"{path} exists and holds other files ({name}): choose another name, or remove it yourself", name="path"
            )


def clear(files: Files, path: str) -> None:
    """Remove what a creation left that was cut short; the lock is held."""
    check_empty(path)
    for name in os.listdir(path):
        if name != LOCK_NAME:
            files.unlink(os.path.join(path, name))


def remove_made(path: str, made: bool) -> None:
    """Remove what a creation that failed has made: all that is in the folder, and the folder if it was `made`."""
    with contextlib.suppress(OSError):
        # First what makes it a store: a crash in here must leave one or none.
        for name in sorted(os.listdir(path), key=lambda name: name != MANIFEST_NAME):
            os.unlink(os.path.join(path, name))
        if made:
            os.rmdir(path)


def _left_over(path: str) -> bool:
    """Tell whether a file can only be of a store that never held a record."""
    name = os.path.basename(path)
    if name in (LOCK_NAME, NEW_NAME, IDENTITY_NAME):
        return True
    empty = os.path.getsize(path) <= SUPERBLOCK
    return empty and (name == FLOOR_NAME or os.path.splitext(name)[1] in (".val", ".jnl"))
