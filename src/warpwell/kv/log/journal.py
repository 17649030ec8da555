"""Journal: 64-byte records, chained and checksummed, in atomic groups; and the last one that is known to be durable.

A small group carries its values, after its last record. Then one fdatasync of the journal makes it durable: the
values are in their segments, too, but a later commit syncs these. A group with more values has them only in the
segments, and its commit syncs these and the journal. Why no crash loses a value of a synced group:

- A process that is killed loses nothing that it wrote: readers find the values in the segments.
- After a power failure a segment may lack values of the groups since its last sync. The mark in COMMITTED records which
  group is the last one whose values are durable in the segments. Recovery checks the values of all later groups, and
  reads those that are damaged out of the journal (`recovery.restore`). A writer copies them to the segments, and syncs
  these, before it accepts changes; a reader changes no file and serves them from the journal.
- A mark may be lost, but then it is lower, and recovery checks more values.
- A segment is deleted, and a journal ends, after a snapshot. That syncs all segments first.

Without the marks in the file COMMITTED, a damaged last group could not be distinguished from one that a power failure
tore. A mark is written after the journal's fdatasync and needs no fdatasync itself: after a crash it may be too low,
never too high. Marks alternate between two offsets in separate sectors, so that one of them is always intact.

An fdatasync takes longer if the file has grown, because the file system also writes its metadata. So a small group
that makes the file longer also writes zeros after itself, which the next groups replace. The fdatasync of the group
makes both durable. Recovery treats zeros like the rest of a torn group. A power failure may leave zeros instead of any
sector of the last group, so its values count only if they match their checksums.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...targets import device
from ...targets.primitives import crc32c as crc32c_at
from ...targets.primitives import load_weak_as, store_weak_as
from ..native import INT64, UINT8, UINT16, UINT32, address_of, compiled
from .checksum import crc32c, crc32c_many
from .files import Files, closing_on_error, full, read_at, write_new
from .format import (
    COMMIT,
    DELETE,
    INLINE,
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
    UNIT,
    Superblock,
    file_name,
    footprint,
    key_len_of,
    new_salt,
    size_of,
    slots_of,
)

INLINE_BYTES = 1 << 17
"""Maximum size of the values that a group carries in the journal, in bytes: more take longer to write than a sync."""
MIN_AHEAD_BYTES = 1 << 14
"""Minimum size of the zeros that a group writes after itself, in bytes. They are as long as the journal if it is
longer: so a journal is at most twice as long as its groups."""
MAX_AHEAD_BYTES = 1 << 20
"""Maximum size of the zeros that a group writes after itself, in bytes."""
_GROUPS_AHEAD = 8
"""Minimum number of groups of the same size for which zeros are written: for fewer they cost more than they save."""

_SEALED_FLAGS = COMMIT | SYNCED | INLINE
_PROOFS = ORDERED | SYNCED
_RECORD_WORDS = RECORD_BYTES // 8
_CHUNK = 1 << 17
"""Number of records that are read at once."""
_CHUNK_BYTES = _CHUNK * RECORD_BYTES
_FOLLOWED_BYTES = 1 << 16
"""Size of a follower's first read in bytes: most of the file after its position may be zeros."""


@dataclass(slots=True)
class Position:
    """A position between two groups, where reading or writing continues."""

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
    records : RECORD [N]
        The records of complete groups, in order.
    offsets : int64 [N]
        Their byte offsets in the journal.
    durable : bool [N]
        The record's value is known to have been durable: a wrong one is damage.
    position : Position
        The end of the last complete group.
    size : int
        Size of the file when it was read.
    bad : int or None
        Offset of a record that does not continue the chain, if there is one.
    why : str
        Not empty if a later record or the floor proves that the bad or missing record was durable: the proof, for
        messages.
    """

    records: NDArray[Any]
    offsets: NDArray[np.int64]
    durable: NDArray[np.bool_]
    position: Position
    size: int
    bad: int | None = None
    why: str = ""

    @property
    def slots(self) -> NDArray[np.int64]:
        """Key0, key1, loc0 and loc1 of the records, int64 [N, 4]; loc0 is -1 for a delete."""
        return slots_of(self.records).copy()

    def value_offsets(self, first: int = 0, last: int | None = None) -> NDArray[np.int64]:
        """Return the byte offset of each record's value in the journal, 0 if it is not there.

        The records are whole groups, `first` to `last` - 1.
        """
        records, offsets = self.records[first:last], self.offsets[first:last]
        ends = np.flatnonzero(records["flags"] & COMMIT)
        sizes = np.where(records["type"] == PUT, size_of(*records["loc"].T), 0)
        before = np.cumsum(footprint(sizes)) - footprint(sizes)
        group = np.searchsorted(ends, np.arange(len(records)))
        begins, ends = np.concatenate([[0], ends + 1])[group], ends[group]
        out = offsets[ends] + RECORD_BYTES + before - before[begins]
        return np.where((records["flags"][ends] & INLINE != 0) & (sizes > 0), out, 0)


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
        self._end = 0  # of the zeros after the last group
        self._tail = position

    def write(
        self, records: NDArray[Any], *, synced: bool, last: bool, values: Sequence[NDArray[np.uint8]] | None = None
    ) -> None:
        """Write records of the current group, with the commit mark if they are its last.

        `synced` says that all groups before it are durable. `values` are the values of the whole group, each
        padded to `UNIT`, or None if its commit also syncs segments.

        The position does not change when it raises; the next call writes to the same place.
        """
        count = len(records)
        tail = self._tail
        flags = SYNCED if synced else 0, (COMMIT | INLINE if values else COMMIT) if last else 0
        arguments = count, tail.chain, tail.seq + 1, self._group, self.salt, *flags
        chain = int(compiled(seal)(address_of(records), *arguments))
        data = np.concatenate([records.view(np.uint8), *values]) if values else records.view(np.uint8)
        for at in range(0, len(data), _CHUNK_BYTES):
            self._files.pwrite(self.fd, data[at : at + _CHUNK_BYTES], tail.offset + at)
        if values is not None and tail.offset + len(data) > self._end:
            self._extend(tail.offset + len(data), len(data))
        self._tail = Position(tail.offset + len(data), tail.seq + count, chain)
        self._group += count
        if last:
            self._group, self.position = 0, self._tail

    def write_group(self, group: NDArray[np.uint8], count: int, chain: int) -> None:
        """Write a whole group, `count` sealed records and their values; `chain` is the last checksum."""
        tail = self._tail
        end = tail.offset + len(group)
        self._files.pwrite(self.fd, group, tail.offset)
        if end > self._end:
            self._extend(end, len(group))
        self._tail = self.position = Position(end, tail.seq + count, chain)

    def _extend(self, end: int, nbytes: int) -> None:
        """Write zeros after a group of `nbytes` bytes that ends at byte `end`, unless the disk is full."""
        ahead = min(max(end - SUPERBLOCK, MIN_AHEAD_BYTES), MAX_AHEAD_BYTES)
        if ahead < _GROUPS_AHEAD * nbytes:
            return
        self._end = end + ahead  # also if the disk is full: do not try it again with the next group
        try:
            self._files.pwrite(self.fd, bytes(ahead), end)
        except OSError as error:
            if not full(error):
                raise
            with contextlib.suppress(OSError):
                self._files.truncate(self.fd, end)  # leave the rest of the disk to groups and values

    def trim(self) -> None:
        """Cut the zeros after the last group."""
        if self._end > self.position.offset:
            self._files.truncate(self.fd, self.position.offset)
        self._end = 0

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._files.close(fd)


Values = list[NDArray[np.uint8]]
"""Copies of values, each padded to `UNIT`, in the order of their records."""


@dataclass
class Pending:
    """Records that are not yet in the journal, and their values.

    Attributes
    ----------
    pieces : list of tuple
        Records, and copies of their values, or None if the values of the group are not copied.
    count : int
    moved : int
        Records of the group that are copies of a compaction, those that were written already included.
    """

    pieces: list[tuple[NDArray[Any], Values | None]] = field(default_factory=list)
    count: int = 0
    moved: int = 0
    _nbytes: int = 0

    def add(self, records: NDArray[Any], values: Values | None) -> None:
        """Append records."""
        self._nbytes += INLINE_BYTES + 1 if values is None else sum(map(len, values))
        if self._nbytes > INLINE_BYTES:
            values, self.pieces = None, [(each, None) for each, _ in self.pieces]
        self.pieces.append((records, values))
        self.count += len(records)

    def take(self) -> tuple[NDArray[Any], Values | None]:
        """Return all records as one array, and their values unless one is missing; they stay here until `clear`."""
        if len(self.pieces) != 1:
            records = np.concatenate([records for records, _ in self.pieces])
            copies = [values for _, values in self.pieces if values is not None]
            values = [value for piece in copies for value in piece]
            self.pieces = [(records, values if len(copies) == len(self.pieces) else None)]
        return self.pieces[0]

    def clear(self, keep: int = 0) -> None:
        """Remove the records that `take` returned, except the last `keep`, but no records of a signal handler."""
        if not keep and len(self.pieces) == 1:
            self.pieces, self.count, self.moved, self._nbytes = [], 0, 0, 0
            return
        written, later = self.pieces[:1], self.pieces[1:]
        left = [(records[len(records) - keep :].copy(), None) for records, _ in written] if keep else []
        self.moved = self.moved if keep else 0
        self.pieces = [*left, *later]
        self.count -= sum(len(records) for records, _ in written) - keep
        self._nbytes = INLINE_BYTES + 1 if keep else sum(len(value) for _, values in later for value in values or ())


def new_records(
    kind: int,
    keys: NDArray[np.uint8],
    key_lens: NDArray[np.uint8],
    locs: NDArray[np.int64] | None = None,
    flags: int = 0,
) -> NDArray[Any]:
    """Return records of `kind` for keys, uint8 [N, 16], without order and checksums; deletes have no locations."""
    records = np.empty(len(key_lens), RECORD)
    keys = np.ascontiguousarray(keys)
    arrays = (address_of(records), address_of(keys), address_of(key_lens), 0 if locs is None else address_of(locs))
    compiled(fill_records)(*arrays, len(records), MAGIC | kind << 32 | flags << 48)
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


def scan(fd: int, salt: int, start: Position, floor: tuple[int, int], *, is_followed: bool = False) -> Scanned:
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
    is_followed : bool
        The caller reads the journal often while it grows: do not search zeros for later records.
    """
    size = os.fstat(fd).st_size
    state = np.zeros(SCAN_WORDS, np.int64)
    state[SCAN_SEQ], state[SCAN_CHAIN], state[SCAN_SALT] = start.seq + 1, start.chain, salt
    state[SCAN_FLOOR_SEQ], state[SCAN_FLOOR_CRC] = floor
    # NumPy copies rows of integers much faster than records with fields.
    pieces: list[NDArray[np.int64]] = []
    offsets: list[NDArray[np.int64]] = []
    committed_count = read_count = 0  # records of complete groups, and all valid records
    position, bad, offset = start, None, start.offset
    why, ends_in_zeros, chunk_bytes = "", False, _FOLLOWED_BYTES if is_followed else _CHUNK_BYTES
    while bad is None and offset + RECORD_BYTES <= size:
        records, chunk_bytes = _records_at(fd, offset, size, chunk_bytes), _CHUNK_BYTES
        if not len(records):
            break
        state[SCAN_LIMIT] = (size - offset) // RECORD_BYTES
        units = np.empty(len(records), np.int64)
        count = compiled(scan_units)(*(address_of(array) for array in (state, records, units)), len(records))
        units = units[:count]
        record_words = records.view(np.int64).reshape(-1, _RECORD_WORDS)
        is_adjacent = not len(units) or units[-1] == len(units) - 1
        pieces.append(record_words[: len(units)] if is_adjacent else np.take(record_words, units, axis=0))
        offsets.append(offset + RECORD_BYTES * units)
        if state[SCAN_COMMITTED]:
            committed_count = read_count + int(state[SCAN_COMMITTED])
            at = offset + RECORD_BYTES * int(state[SCAN_COMMITTED_END])
            position = Position(at, start.seq + committed_count, int(state[SCAN_COMMITTED_CHAIN]))
        read_count += len(units)
        offset += RECORD_BYTES * int(state[SCAN_NEXT])
        if state[SCAN_NEXT] < len(records):
            bad = offset
            ends_in_zeros = is_followed and not records[int(state[SCAN_NEXT])].tobytes().strip(b"\0")
    records = _joined(pieces, (0, _RECORD_WORDS)).reshape(-1).view(RECORD)
    durable = _durable(records)[:committed_count]
    durable[: max(0, floor[0] - start.seq)] = True
    if state[SCAN_UNKNOWN]:
        why = "its checksum is right, but no release writes such a record"
    elif state[SCAN_FLOOR_WRONG]:
        why = f"record {floor[0]} differs from the committed record with that number"
    elif floor[0] > position.seq:
        why = f"records up to {floor[0]} had been committed and end at {position.seq}"
    elif bad is not None and not ends_in_zeros and _followed(fd, salt, bad, size, int(state[SCAN_SEQ])):
        why = "valid records follow it"
    offsets_of_all = _joined(offsets, (0,))[:committed_count]
    return Scanned(records[:committed_count], offsets_of_all, durable, position, size, bad, why)


def _joined(pieces: list[NDArray[np.int64]], empty: tuple[int, ...]) -> NDArray[np.int64]:
    """Return arrays as one, without a copy if there is only one; without any, an array of the shape `empty`."""
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(empty, np.int64), *pieces])


def _records_at(fd: int, offset: int, size: int, nbytes: int = _CHUNK_BYTES) -> NDArray[Any]:
    """Return units of a journal of `size` bytes as records, at most `nbytes` bytes."""
    data = read_at(fd, min(nbytes, size - offset) // RECORD_BYTES * RECORD_BYTES, offset)
    return np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)


def have_right_crcs(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which records match their checksums."""
    records = np.ascontiguousarray(records)
    addresses = address_of(records) + RECORD_BYTES * np.arange(len(records))
    right: NDArray[np.bool_] = crc32c_many(addresses, np.full(len(records), RECORD_BYTES - 4)) == records["crc"]
    return right


def _durable(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which records have durable values according to the flags of their own or a later group."""
    flags = records["flags"]
    durable: NDArray[np.bool_] = (flags & ORDERED) != 0
    proofs = np.flatnonzero((records["ordinal"] == 0) & ((flags & _PROOFS) != 0))
    durable[: proofs[-1] if len(proofs) else 0] = True
    return durable


def _followed(fd: int, salt: int, bad: int, size: int, seq: int) -> bool:
    """Return whether a record after offset `bad` proves that the record `seq` at `bad` was durable."""
    offset = bad
    while offset + RECORD_BYTES <= size:
        records = _records_at(fd, offset, size)
        if not len(records):
            break
        is_proof = (records["magic"] == MAGIC) & (records["salt"] == salt) & (records["flags"] & _PROOFS != 0)
        is_proof &= records["seq"] - records["ordinal"] > seq  # its group begins after the record
        if have_right_crcs(records[is_proof]).any():
            return True
        offset += RECORD_BYTES * len(records)
    return False


# -- native code ----------------------------------------------------------------------------------------------

SCAN_SEQ = 0
"""Sequence number that is expected next."""
SCAN_CHAIN = 1
"""`crc` of the last good record."""
SCAN_ORDINAL = 2
"""Ordinal that is expected next."""
SCAN_SALT = 3
SCAN_COMMITTED = 4
"""Number of good records of this call up to the last commit mark, inclusive."""
SCAN_COMMITTED_CHAIN = 5
SCAN_FLOOR_SEQ = 6
SCAN_FLOOR_CRC = 7
SCAN_FLOOR_WRONG = 8
"""1 if the record `SCAN_FLOOR_SEQ` differs from the durable record with that number."""
SCAN_VALUE_UNITS = 9
"""Units of 64 bytes that the values of the current group take if they follow its last record."""
SCAN_LIMIT = 10
"""Units from the first record of this call to the end of the file."""
SCAN_NEXT = 11
"""The unit to continue at. A bad record is there if it is one of the units of this call."""
SCAN_COMMITTED_END = 12
"""The unit after the last complete group."""
SCAN_UNKNOWN = 13
"""1 if the next record has a right checksum, but contents that no release writes."""
SCAN_WORDS = 16


def fill_records(records: int, keys: int, lens: int, locs: int, count: int, prefix: int) -> int:
    """Write records; `prefix` is their first word without the length of the key. With 0 for `locs` they delete."""
    for k in range(count):
        at = records + RECORD_BYTES * k
        length = int(load_weak_as(lens + k, UINT8))
        store_weak_as(at, prefix | (length & (INTEGER - 1)) << 40, INT64)
        store_weak_as(at + 16, load_weak_as(keys + 16 * k, INT64), INT64)
        store_weak_as(at + 24, load_weak_as(keys + 16 * k + 8, INT64), INT64)
        if locs == 0:
            store_weak_as(at + 32, TOMBSTONE, INT64)
            store_weak_as(at + 40, length << KEY_LEN_SHIFT, INT64)
        else:
            store_weak_as(at + 32, load_weak_as(locs + 16 * k, INT64), INT64)
            store_weak_as(at + 40, load_weak_as(locs + 16 * k + 8, INT64), INT64)
    return 0


@device
def seal(records: int, count: int, chain: int, seq: int, ordinal: int, salt: int, synced: int, last: int) -> int:
    """Number, chain and checksum records; return the last checksum.

    `synced` is the flag `SYNCED` or 0, and `last` has the flags `COMMIT` and `INLINE`, or 0, of the last record.
    """
    for k in range(count):
        at = records + RECORD_BYTES * k
        flags = int(load_weak_as(at + 6, UINT16)) & ~_SEALED_FLAGS | synced
        store_weak_as(at + 6, flags | last if k == count - 1 else flags, UINT16)
        store_weak_as(at + 8, seq + k, INT64)
        store_weak_as(at + 48, ordinal + k | salt << 32, INT64)
        store_weak_as(at + 56, chain, UINT32)
        chain = crc32c_at(at, 60, 0)
        store_weak_as(at + 60, chain, UINT32)
    return chain


@device
def has_known_contents(first: int, loc0: int, loc1: int) -> bool:
    """Return whether a release may have written a record with these words."""
    kind = (first >> 32) & 0xFF
    key_len = (first >> 40) & 0xFF
    if key_len < 1 or key_len > LONG or key_len_of(loc1) != key_len:
        return False
    return (kind == PUT and loc0 > 0) or (kind == DELETE and loc0 == TOMBSTONE)


def scan_units(state: int, records: int, units: int, count: int) -> int:
    """Return the number of leading records that continue the chain, and store the unit of each."""
    seq = load_weak_as(state + 8 * SCAN_SEQ, INT64)
    chain = load_weak_as(state + 8 * SCAN_CHAIN, INT64)
    ordinal = load_weak_as(state + 8 * SCAN_ORDINAL, INT64)
    salt = load_weak_as(state + 8 * SCAN_SALT, INT64)
    floor = load_weak_as(state + 8 * SCAN_FLOOR_SEQ, INT64)
    limit = load_weak_as(state + 8 * SCAN_LIMIT, INT64)
    value_units = load_weak_as(state + 8 * SCAN_VALUE_UNITS, INT64)
    committed = 0
    good = 0
    unit = 0
    while unit < count:
        at = records + RECORD_BYTES * unit
        first = load_weak_as(at, INT64)
        ordinal_and_salt = load_weak_as(at + 48, INT64)
        link = load_weak_as(at + 56, INT64)
        if first & 0xFFFFFFFF != MAGIC or load_weak_as(at + 8, INT64) != seq or link & 0xFFFFFFFF != chain:
            break
        if ordinal_and_salt & 0xFFFFFFFF != ordinal or (ordinal_and_salt >> 32) & 0xFFFFFFFF != salt:
            break
        found = crc32c_at(at, 60, 0)
        if (link >> 32) & 0xFFFFFFFF != found:
            break
        loc0 = load_weak_as(at + 32, INT64)
        loc1 = load_weak_as(at + 40, INT64)
        if not has_known_contents(first, loc0, loc1):
            store_weak_as(state + 8 * SCAN_UNKNOWN, 1, INT64)
            break
        chain = found
        if seq == floor and chain != load_weak_as(state + 8 * SCAN_FLOOR_CRC, INT64):
            store_weak_as(state + 8 * SCAN_FLOOR_WRONG, 1, INT64)
        store_weak_as(units + 8 * good, unit, INT64)
        seq += 1
        ordinal += 1
        good += 1
        unit += 1
        if (first >> 32) & 0xFF == PUT:
            value_units += footprint(size_of(loc0, loc1)) // UNIT
        if (first >> 48) & COMMIT != 0:
            if (first >> 48) & INLINE != 0:
                unit += value_units
            if unit > limit:  # a crash has cut the values off: the group is not complete
                break
            ordinal = 0
            value_units = 0
            committed = good
            store_weak_as(state + 8 * SCAN_COMMITTED_CHAIN, chain, INT64)
            store_weak_as(state + 8 * SCAN_COMMITTED_END, unit, INT64)
    store_weak_as(state + 8 * SCAN_SEQ, seq, INT64)
    store_weak_as(state + 8 * SCAN_CHAIN, chain, INT64)
    store_weak_as(state + 8 * SCAN_ORDINAL, ordinal, INT64)
    store_weak_as(state + 8 * SCAN_VALUE_UNITS, value_units, INT64)
    store_weak_as(state + 8 * SCAN_NEXT, unit, INT64)
    store_weak_as(state + 8 * SCAN_COMMITTED, committed, INT64)
    return good


# -- COMMITTED ------------------------------------------------------------------------------------------------

COMMITTED_NAME = "COMMITTED"
MARK_OFFSETS = (0, 4096)
_MARK = struct.Struct("<8s16sqIIq12x")
"""Magic, UUID, sequence number and checksum of a record, salt of its journal, and the number of the last records up to
it whose values may not be durable in their segments (0 in formats 2 to 4); the CRC of these 60 bytes follows."""
_MARK_MAGIC = b"warpwfl1"
_MARK_BYTES = 64


class Mark(NamedTuple):
    """A durable record, and the last record up to which all values are durable in their segments."""

    seq: int = 0
    chain: int = 0
    salt: int = 0
    in_segments: int = 0


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
        except FileNotFoundError:  # a new store, or the file was removed
            self._fd = files.create(path)
            with closing_on_error(files, self._fd):
                files.sync_folder(folder)
        marks = [_unpack_mark(read_at(self._fd, _MARK_BYTES, offset), uuid) for offset in MARK_OFFSETS]
        # The next mark replaces a damaged mark, or the older one.
        self._next = min(range(2), key=lambda k: (marks[k] or Mark(-1)).seq)

    def raise_to(self, position: Position, salt: int, in_segments: int) -> None:
        """Record that the journal with this salt is durable up to a position, and values in segments up to a record.

        A full disk is not an error here: the old floor stays valid.
        """
        mark = _MARK.pack(_MARK_MAGIC, self._uuid, position.seq, position.chain, salt, position.seq - in_segments)
        try:
            self._files.pwrite(self._fd, mark + crc32c(mark).to_bytes(4, "little"), MARK_OFFSETS[self._next])
        except OSError:
            return
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
        file = open(os.path.join(folder, COMMITTED_NAME), "rb", buffering=0)
    except OSError:
        return [], [0]
    with file:
        packed = [read_at(file.fileno(), _MARK_BYTES, offset) for offset in MARK_OFFSETS]
    marks = [_unpack_mark(data, uuid) for data in packed]
    damaged = [MARK_OFFSETS[k] for k in range(2) if marks[k] is None and any(packed[k])]
    return [mark for mark in marks if mark is not None], damaged


def highest(marks: list[Mark], salt: int) -> Mark:
    """Return the highest mark for a journal, or zeros.

    Marks of other journals do not count, because the manifest is newer than the earlier journals.
    """
    return max((mark for mark in marks if mark.salt == salt), default=Mark())


def _unpack_mark(data: bytes, uuid: bytes) -> Mark | None:
    if len(data) < _MARK_BYTES or int.from_bytes(data[60:], "little") != crc32c(data[:60]):
        return None
    magic, of, seq, chain, salt, count = _MARK.unpack(data[:60])
    return Mark(seq, chain, salt, seq - count) if magic == _MARK_MAGIC and of == uuid else None
