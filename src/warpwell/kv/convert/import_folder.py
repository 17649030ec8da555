"""A folder of files, each a value: ``FolderSource``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import FormatError
from ..schema import MAX_VALUE
from .importers import BATCH_BYTES, BATCH_RECORDS, Batch, KeyRule, SchemaFields, check_value


class FolderSource:
    """Files at any depth, in the order of their paths. Links to files are followed, links to folders are not.

    Parameters
    ----------
    path : pathlib.Path
        The folder.
    rule : KeyRule
        Names are paths from the folder on, with ``/``.

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
            raise FormatError(f"{path} holds no file: is it the right folder?", path=path)

    def batches(self) -> Iterator[Batch]:
        """Read all files; a file that grows over the limit or vanishes meanwhile is an error."""
        names: list[bytes] = []
        values: list[bytes] = []
        nbytes = start = 0
        for file in _files(self.path):
            with file.open("rb") as opened:
                value = opened.read(MAX_VALUE + 1)
            if len(value) > MAX_VALUE:
                check_value(max(file.stat().st_size, len(value)), str(file))
            names.append(os.fsencode(file.relative_to(self.path).as_posix()))
            values.append(value)
            nbytes += len(value)
            if nbytes >= BATCH_BYTES or len(names) >= BATCH_RECORDS:
                yield Batch(self._rule.from_names(names, start, str(self.path)), values, nbytes)
                start += len(names)
                names, values, nbytes = [], [], 0
        if names:
            yield Batch(self._rule.from_names(names, start, str(self.path)), values, nbytes)

    def close(self) -> None:
        """Nothing is open."""


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)
