"""A graph's folder that is created atomically: ``new_folder``."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from warpwell.errors import ArgumentError, MissingFileError
from warpwell.graph.npy import storage_full
from warpwell.replacing import replacing


@contextlib.contextmanager
def new_folder(
    path: str | Path, *, overwrite: bool = False, kind: str = "graph", advice: str | None = None
) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block ends well, and is removed if it raises.

    See `replacing`; what is written is made durable as well.

    Parameters
    ----------
    path : path-like
        The folder to create. Its parent must exist.
    overwrite : bool, default False
        Replace an existing graph. Other files and folders (except empty ones) are never replaced.
    kind : str
        What the folder is: one that may be replaced has the file ``<kind>.json``.
    advice : str, optional
        End of the message where no space is left.

    Yields
    ------
    Path
        The temporary folder.

    Raises
    ------
    ArgumentError
        The path already exists and may not be replaced.
    MissingFileError
        The parent does not exist.
    StorageFullError
        No space is left.
    """
    path = Path(os.path.abspath(path))
    _refuse(path, overwrite, kind)
    if not path.parent.is_dir():
        raise MissingFileError(
            f"{path.parent}: no such folder to write {path.name} into. Create it first.", path=path.parent
        )
    with replacing(path) as part:
        with storage_full(part, advice):
            part.mkdir()
            yield part
            sync_names(part)
        _refuse(path, overwrite, kind)  # another process may have been faster
    sync_names(path.parent)


def _refuse(path: Path, overwrite: bool, kind: str) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise ArgumentError(
            f"{path} exists already. Choose another name, or replace it with overwrite=True (--overwrite)."
        )
    plain = path.is_dir() and not path.is_symlink()
    if not plain or not ((path / f"{kind}.json").is_file() or not any(path.iterdir())):
        raise ArgumentError(
            f"{path} exists and is not a {kind}, so it is not replaced. Choose another name or remove it yourself."
        )


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
