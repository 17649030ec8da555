"""Floor: the last record that is known to be durable, so that a truncated or damaged end of the journal is noticed.

Without it, a damaged last group could not be distinguished from one that a power failure tore. The floor is written
after the journal's fdatasync and needs no fdatasync itself: after a crash it may be too low, never too high. It
alternates between two places in separate sectors, so that one of them is always intact.
"""

from __future__ import annotations

import contextlib
import os
import struct

import numpy as np

from .checksum import crc32c
from .files import Files, closing_on_error, read_at
from .format import layout_of

FLOOR_NAME = "COMMITTED"
PLACES = (0, 4096)

MARK = layout_of(
    64,
    [
        ("magic", "S8", 0),
        ("uuid", "V16", 8),
        ("seq", "<i8", 24),
        ("chain", "<u4", 32),
        ("salt", "<u4", 36),
        ("reserved", "V20", 40),
        ("crc", "<u4", 60),
    ],
)
_MAGIC = b"warpwfl1"
_PACKED = struct.Struct("<8s16sqII20x")  # all of `MARK` but its CRC

Mark = tuple[int, int, int]
"""Sequence number and checksum of a record, and the salt of its journal."""


class Floor:
    """The file, open for writing.

    Parameters
    ----------
    files : Files
    folder : str
    uuid : bytes
        The store's.
    """

    def __init__(self, files: Files, folder: str, uuid: bytes) -> None:
        self._files, self._uuid = files, uuid
        path = os.path.join(folder, FLOOR_NAME)
        try:
            self._fd = files.open(path, writable=True)
        except FileNotFoundError:  # a new store, or somebody removed it
            self._fd = files.create(path)
            with closing_on_error(files, self._fd):
                files.sync_folder(folder)
        marks = _marks(self._fd, uuid)
        # the older place, or one that does not read, is the next to be written
        self._next = min(range(2), key=lambda k: (marks[k] or (-1, 0, 0))[0])

    def raise_to(self, seq: int, chain: int, salt: int) -> None:
        """Note that the record `seq` of the journal with this salt is durable.

        A full disk is not an error here: the old floor stays valid.
        """
        mark = _PACKED.pack(_MAGIC, self._uuid, seq, chain, salt)
        with contextlib.suppress(OSError):
            self._files.pwrite(self._fd, mark + crc32c(mark).to_bytes(4, "little"), PLACES[self._next])
            self._next = 1 - self._next

    def sync(self) -> None:
        """Make the floor itself durable."""
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def read_floor(folder: str, uuid: bytes) -> list[Mark]:
    """Return the valid marks; see `highest`."""
    try:
        fd = os.open(os.path.join(folder, FLOOR_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return [m for m in _marks(fd, uuid) if m]
    finally:
        os.close(fd)


def highest(marks: list[Mark], salt: int) -> tuple[int, int]:
    """Return sequence number and checksum of the highest mark for a journal; (0, 0) for none.

    Marks of other journals do not count: the manifest is newer than those of earlier journals, and a writer that has
    not yet noticed its successor may note records that are in no journal any more. Marks of format 1 do not name their
    journal (0).
    """
    return max(((m[0], m[1]) for m in marks if m[2] in (0, salt)), default=(0, 0))


def damaged_places(folder: str, uuid: bytes) -> list[int]:
    """Return the offsets of places that do not hold a valid mark."""
    try:
        fd = os.open(os.path.join(folder, FLOOR_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [0]
    try:
        marks = _marks(fd, uuid)
        return [at for at, mark in zip(PLACES, marks, strict=True) if mark is None and any(read_at(fd, 64, at))]
    finally:
        os.close(fd)


def _marks(fd: int, uuid: bytes) -> list[Mark | None]:
    out: list[Mark | None] = []
    for at in PLACES:
        data = read_at(fd, 64, at)
        mark = np.frombuffer(data, MARK, 1)[0] if len(data) == 64 else None
        if mark is None or int(mark["crc"]) != crc32c(data[:60]) or mark["magic"] != _MAGIC:
            out.append(None)
        else:
            said = int(mark["seq"]), int(mark["chain"]), int(mark["salt"])
            out.append(said if mark["uuid"].tobytes() == uuid else None)
    return out
