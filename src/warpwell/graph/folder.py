"""A graph's folder that appears whole or not at all: ``new_folder``."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from warpwell.errors import ArgumentError, MissingFileError
from warpwell.graph.npy import storage_full

unfinished: set[Path] = set()
"""Temporary folders of this process, for who ends it without raising in the threads that write them."""


@contextlib.contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `path` if the block ends well, and is removed if it does not.

    The temporary folder lies beside `path`, under a name that starts with a dot and ends in ``.part``. An
    exception of any kind, Ctrl-C included, removes it. Only the end of the whole process (a lost machine,
    ``kill -9``) can leave it behind; even then nothing lies at `path`.

    Parameters
    ----------
    path : path-like
        Where the folder shall be. Its parent must exist.
    overwrite : bool, default False
        Replace a graph that is there. Anything else than a graph or an empty folder is never replaced.

    Yields
    ------
    Path
        The temporary folder.

    Raises
    ------
    ArgumentError
        Something is there already and may not be replaced.
    MissingFileError
        The parent does not exist.
    StorageFullError
        No space is left.
    """
    path = Path(os.path.abspath(path))
    _refuse(path, overwrite)
    if not path.parent.is_dir():
        raise MissingFileError(
            f"{path.parent}: no such folder to write {path.name} into. Create it first.", path=path.parent
        )
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    part = path.with_name(f".{path.name}.{token}.part")
    unfinished.add(part)
    try:
        with storage_full(part):
            part.mkdir()
            yield part
            _sync(part)
        _refuse(path, overwrite)  # somebody else may have been faster
        old = path.with_name(f".{path.name}.{token}.old")
        if path.exists():
            path.rename(old)
        try:
            part.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        unfinished.discard(part)


def _refuse(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise ArgumentError(
            f"{path} exists already. Choose another name, or replace it with overwrite=True (--overwrite)."
        )
    plain = path.is_dir() and not path.is_symlink()
    if not plain or not ((path / "graph.json").is_file() or not any(path.iterdir())):
        raise ArgumentError(
            f"{path} exists and is not a graph, so it is not replaced. "
            "Choose another name or remove it yourself."
        )


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
