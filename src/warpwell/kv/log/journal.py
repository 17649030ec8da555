"""Journal: 64-byte records, chained and checksummed, in atomic groups; and the last one that is known to be durable.

Without the marks in the file COMMITTED, a damaged last group could not be distinguished from one that a power failure
tore. A mark is written after the journal's fdatasync and needs no fdatasync itself: after a crash it may be too low,
never too high. Marks alternate between two offsets in separate sectors, so that one of them is always intact.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checksum import (
    SCAN_CHAIN,
    SCAN_COMMITTED,
    SCAN_COMMITTED_CHAIN,
    SCAN_FLOOR_CRC,
    SCAN_FLOOR_SEQ,
    SCAN_FLOOR_WRONG,
    SCAN_SALT,
    SCAN_SEQ,
    SCAN_WORDS,
    crc32c,
    later_record,
    scan_records,
    seal_records,
)
from .files import Files, closing_on_error, read_at, write_new
from .format import (
    COMMIT,
    DELETE,
    INTEGER,
    JOURNAL_FILE,
    KEY_LEN_SHIFT,
    LONG,
    MAGIC,
    ORDERED,
    PUT,
    RECORD,
    RECORD_BYTES,
    SUPERBLOCK,
    SYNCED,
    TOMBSTONE,
    Superblock,
    file_name,
    key_len_of,
    new_salt,
)

_CHUNK = 1 << 17
"""Records that are read or written at once."""


@dataclass
class Position:
    """A place between two groups, at which to continue reading or writing."""

    offset: int
    seq: int
    """The last record before it."""
    chain: int
    """Its checksum."""


@dataclass
class Scanned:
    """The records that `scan` found.

    Attributes
    ----------
    slots : int64 [N, 4]
        key0, key1, loc0 and loc1 of the records of complete groups, in order; loc0 is -1 for a delete.
    durable : bool [N]
        The record's value is known to have been durable: a wrong one is damage.
    begins : bool [N]
        The record is the first of its group.
    position : Position
        The end of the last complete group.
    size : int
        Size of the file when it was read.
    bad : int or None
        Offset of a record that does not continue the chain, if there is one.
    damaged : bool
        A later record or the floor proves that the bad or missing record was durable.
    why : str
        The proof, for messages.
    """

    slots: NDArray[np.int64]
    durable: NDArray[np.bool_]
    begins: NDArray[np.bool_]
    position: Position
    size: int
    bad: int | None = None
    damaged: bool = False
    why: str = ""


class Journal:
    """A journal that is open for appending.

    Parameters
    ----------
    files : Files
    fd : int
        Owned by the journal from now on.
    salt : int
        From its superblock.
    position : Position
        The place at which to continue.
    """

    def __init__(self, files: Files, fd: int, salt: int, position: Position) -> None:
        self._files, self.fd, self.salt = files, fd, salt
        self.position = position
        self._group = 0  # records of the unfinished group that are in the file
        self._tail = Position(position.offset, position.seq, position.chain)

    def write(self, records: NDArray[Any], *, synced: bool, last: bool) -> None:
        """Write records of the current group, followed by the commit mark if they are its last.

        `synced` says that all groups before it are durable.

        The position does not change when it raises; the next call writes to the same place.
        """
        count = len(records)
        tail = self._tail
        flags = SYNCED if synced else 0, COMMIT if last else 0
        chain = seal_records(records, tail.chain, tail.seq + 1, self._group, self.salt, *flags)
        for at in range(0, count, _CHUNK):
            part = records[at : at + _CHUNK].view(np.uint8)
            self._files.pwrite(self.fd, part, tail.offset + RECORD_BYTES * at)
        self._tail = Position(tail.offset + RECORD_BYTES * count, tail.seq + count, chain)
        self._group += count
        if last:
            self._group = 0
            self.position = Position(self._tail.offset, self._tail.seq, self._tail.chain)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._files.close(fd)


@dataclass
class Pending:
    """Records that are not yet in the journal, as a list of arrays."""

    pieces: list[Any] = field(default_factory=list)
    count: int = 0
    moved: int = 0
    """Records of the group that are copies of a compaction, those that were written already included."""

    def add(self, records: NDArray[Any]) -> None:
        """Append records."""
        self.pieces.append(records)
        self.count += len(records)

    def take(self) -> NDArray[Any]:
        """Return all records as one array; they stay here until `clear`."""
        if len(self.pieces) != 1:
            self.pieces = [np.concatenate(self.pieces)]
        out: NDArray[Any] = self.pieces[0]
        return out

    def clear(self, keep: int = 0) -> None:
        """Remove all but the last `keep` of the records that `take` returned, but none that a signal handler added."""
        written, later = self.pieces[:1], self.pieces[1:]
        left = [records[len(records) - keep :].copy() for records in written] if keep else []
        self.moved = self.moved if keep else 0
        self.pieces = left + later
        self.count -= sum(map(len, written)) - keep


def new_records(kind: int, keys: NDArray[np.uint8], key_lens: NDArray[np.uint8], flags: int = 0) -> NDArray[Any]:
    """Return records of `kind` for keys, uint8 [N, 16]; the caller fills in locations, order and checksums."""
    records = np.zeros(len(keys), RECORD)
    records["magic"], records["type"], records["flags"] = MAGIC, kind, flags
    records["key_len"] = key_lens & (INTEGER - 1)
    records["key"] = np.ascontiguousarray(keys).view(np.int64)
    if kind == DELETE:
        records["loc"][:, 0] = TOMBSTONE
        records["loc"][:, 1] = key_lens.astype(np.int64) << KEY_LEN_SHIFT
    return records


def journal_path(folder: str, id: int) -> str:
    """Return a journal's file."""
    return os.path.join(folder, file_name(JOURNAL_FILE, id))


def new_journal(files: Files, folder: str, uuid: bytes, id: int, after: Position) -> Journal:
    """Create a durable journal that continues after a record; its name is not durable yet."""
    salt = new_salt()
    block = Superblock(JOURNAL_FILE, uuid, id, after.seq, after.chain, salt)
    fd = write_new(files, journal_path(folder, id), [block.pack()])
    return Journal(files, fd, salt, Position(SUPERBLOCK, after.seq, after.chain))


def read_superblock(fd: int, uuid: bytes, id: int, path: str) -> Superblock:
    """Check and return the superblock of an open journal."""
    return Superblock.unpack(read_at(fd, SUPERBLOCK, 0), JOURNAL_FILE, uuid, id, path)


def scan(fd: int, salt: int, start: Position, floor: tuple[int, int]) -> Scanned:
    """Read complete groups from `start`.

    A group whose last record is missing is ignored, and so are all records after a bad one. If a later record or the
    floor proves that the bad record was durable, the result says that the journal is damaged.

    Parameters
    ----------
    fd : int
    salt : int
    start : Position
    floor : tuple of int
        Sequence number and checksum of a record that was durable before this call.
    """
    size = os.fstat(fd).st_size
    state = np.zeros(SCAN_WORDS, np.int64)
    state[SCAN_SEQ], state[SCAN_CHAIN], state[SCAN_SALT] = start.seq + 1, start.chain, salt
    state[SCAN_FLOOR_SEQ], state[SCAN_FLOOR_CRC] = floor
    slots: list[NDArray[np.int64]] = []
    flags: list[NDArray[np.uint16]] = [np.empty(0, np.uint16)]
    begins: list[NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    committed_count = read_count = 0  # records of complete groups, and all valid records
    position, bad, offset = start, None, start.offset
    why = ""
    while bad is None and offset + RECORD_BYTES <= size:
        data = read_at(fd, min(_CHUNK * RECORD_BYTES, size - offset) // RECORD_BYTES * RECORD_BYTES, offset)
        records = np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)
        if not len(records):
            break
        good = scan_records(state, records)
        wrong = _unusable(records[:good])
        if wrong is not None:
            bad, why = offset + RECORD_BYTES * wrong, "its checksum is right, but no release writes such a record"
            break
        slots.append(np.concatenate([records["key"][:good], records["loc"][:good]], axis=1))
        flags.append(records["flags"][:good])
        begins.append(records["ordinal"][:good] == 0)
        if state[SCAN_COMMITTED]:
            committed_count = read_count + int(state[SCAN_COMMITTED])
            at = offset + RECORD_BYTES * int(state[SCAN_COMMITTED])
            position = Position(at, start.seq + committed_count, int(state[SCAN_COMMITTED_CHAIN]))
        read_count += good
        if good < len(records):
            bad = offset + RECORD_BYTES * good
        offset += RECORD_BYTES * len(records)
    out = Scanned(
        np.concatenate(slots)[:committed_count] if slots else np.empty((0, 4), np.int64),
        _durable(np.concatenate(flags), np.concatenate(begins))[:committed_count],
        np.concatenate(begins)[:committed_count],
        position,
        size,
        bad,
        why != "",
        why,
    )
    if state[SCAN_FLOOR_WRONG]:
        out.damaged, out.why = True, f"record {floor[0]} differs from the committed record with that number"
    elif not out.damaged and floor[0] > position.seq:
        out.damaged, out.why = True, f"records up to {floor[0]} had been committed and end at {position.seq}"
    elif not out.damaged and bad is not None and _followed(fd, salt, bad, size, int(state[SCAN_SEQ])):
        out.damaged, out.why = True, "valid records follow it"
    return out


def _durable(flags: NDArray[np.uint16], begins: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which records have durable values according to the flags of their own or a later group."""
    durable: NDArray[np.bool_] = (flags & ORDERED) != 0
    proofs = np.flatnonzero(begins & ((flags & (ORDERED | SYNCED)) != 0))
    durable[: proofs[-1] if len(proofs) else 0] = True
    return durable


def _unusable(records: NDArray[Any]) -> int | None:
    """Return the index of a record with contents that no release writes."""
    lens = records["key_len"]
    fine = (lens >= 1) & (lens <= LONG) & (key_len_of(records["loc"][:, 1]) == lens)
    fine &= ((records["type"] == PUT) & (records["loc"][:, 0] > 0)) | (
        (records["type"] == DELETE) & (records["loc"][:, 0] == TOMBSTONE)
    )
    return None if fine.all() else int(np.argmin(fine))


def _followed(fd: int, salt: int, bad: int, size: int, seq: int) -> bool:
    """Return whether a record after offset `bad` proves that the record `seq` at `bad` was durable."""
    offset = bad
    while offset + RECORD_BYTES <= size:
        data = read_at(fd, min(_CHUNK * RECORD_BYTES, size - offset) // RECORD_BYTES * RECORD_BYTES, offset)
        records = np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)
        if not len(records):
            break
        if later_record(records, salt, seq) >= 0:
            return True
        offset += RECORD_BYTES * len(records)
    return False


# -- COMMITTED ------------------------------------------------------------------------------------------------

COMMITTED_NAME = "COMMITTED"
MARK_OFFSETS = (0, 4096)
_MARK = struct.Struct("<8s16sqII20x")
"""Magic, UUID, sequence number and checksum of a record, salt of its journal; the CRC of these 60 bytes follows."""
_MARK_MAGIC = b"warpwfl1"
_MARK_BYTES = 64

Mark = tuple[int, int, int]
"""Sequence number and checksum of a record, and the salt of its journal."""


class Floor:
    """The file of marks, open for writing.

    Parameters
    ----------
    files : Files
    folder : str
    uuid : bytes
        The store's.
    """

    def __init__(self, files: Files, folder: str, uuid: bytes) -> None:
        self._files, self._uuid = files, uuid
        path = os.path.join(folder, COMMITTED_NAME)
        try:
            self._fd = files.open(path, writable=True)
        except FileNotFoundError:  # of a new store, or it was removed
            self._fd = files.create(path)
            with closing_on_error(files, self._fd):
                files.sync_folder(folder)
        marks = [_unpack_mark(read_at(self._fd, _MARK_BYTES, offset), uuid) for offset in MARK_OFFSETS]
        # The older mark, or one that is damaged, is the next to be replaced.
        self._next = min(range(2), key=lambda k: (marks[k] or (-1, 0, 0))[0])

    def raise_to(self, position: Position, salt: int) -> None:
        """Record that the journal with this salt is durable up to a position.

        A full disk is not an error here: the old floor stays valid.
        """
        mark = _MARK.pack(_MARK_MAGIC, self._uuid, position.seq, position.chain, salt)
        with contextlib.suppress(OSError):
            self._files.pwrite(self._fd, mark + crc32c(mark).to_bytes(4, "little"), MARK_OFFSETS[self._next])
            self._next = 1 - self._next

    def sync(self) -> None:
        """Make the floor itself durable."""
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def read_marks(folder: str, uuid: bytes) -> tuple[list[Mark], list[int]]:
    """Return the valid marks of a store, and the offsets of damaged ones."""
    try:
        fd = os.open(os.path.join(folder, COMMITTED_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [], [0]
    try:
        packed = [read_at(fd, _MARK_BYTES, offset) for offset in MARK_OFFSETS]
    finally:
        os.close(fd)
    marks = [_unpack_mark(data, uuid) for data in packed]
    damaged = [MARK_OFFSETS[k] for k in range(2) if marks[k] is None and any(packed[k])]
    return [mark for mark in marks if mark is not None], damaged


def highest(marks: list[Mark], salt: int) -> tuple[int, int]:
    """Return sequence number and checksum of the highest mark for a journal; (0, 0) for none.

    Marks of other journals do not count, because the manifest is newer than the earlier journals. Marks of format 1 do
    not name their journal (0).
    """
    return max(((seq, chain) for seq, chain, journal in marks if journal in (0, salt)), default=(0, 0))


def _unpack_mark(data: bytes, uuid: bytes) -> Mark | None:
    if len(data) < _MARK_BYTES or int.from_bytes(data[60:], "little") != crc32c(data[:60]):
        return None
    magic, of, seq, chain, salt = _MARK.unpack(data[:60])
    return (seq, chain, salt) if magic == _MARK_MAGIC and of == uuid else None
