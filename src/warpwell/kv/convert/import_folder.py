"""A folder of files, each a value: ``FolderSource``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import FormatError
from ..log.format import MAX_VALUE
from .sources import Batch, KeyRule, SchemaFields, check_value, in_batches


class FolderSource:
    """Files at any depth, in the order of their paths. Links to files are followed, links to folders are not.

    Parameters
    ----------
    path : pathlib.Path
        The folder.
    rule : KeyRule
        Names are paths relative to the folder, with ``/``.

    Raises
    ------
    FormatError
        There is no file in it.
    """

    kind = "folder"
    schema: SchemaFields | None = None

    def __init__(self, path: Path, rule: KeyRule) -> None:
        self.path = path
        self._rule = rule
        # names alone take far less than the values; the count makes progress tell something
        self.records = sum(1 for _ in _files(path))
        if not self.records:
            raise FormatError(f"{path} holds no file: check the path", path=path)

    def batches(self) -> Iterator[Batch]:
        """Read all files; raise an error if a file grows over the limit or vanishes during the load."""
        return in_batches(self._records(), self._rule, self.path)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _records(self) -> Iterator[tuple[bytes, bytes]]:
        for file in _files(self.path):
            with file.open("rb") as opened:
                check_value(os.fstat(opened.fileno()).st_size, str(file))
                value = opened.read(MAX_VALUE + 1)
            check_value(len(value), str(file))
            yield os.fsencode(file.relative_to(self.path).as_posix()), value


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)
