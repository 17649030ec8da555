"""Recovery: read the live records from a store's files; follow a writer as a reader; repair after a crash; verify.

`load` and `follow` only read, so that a damaged store is not changed; `repair` changes files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..index.sealed import SealedIndex, segment_ends
from ..keys import SUFFIX_BYTES, long_key_in
from .checksum import check_file, crc32c
from .files import Files, closing_on_error, read_at
from .format import (
    INTEGER,
    JOURNAL_SEGMENT,
    LONG,
    PUT,
    RECORD,
    RECORD_BYTES,
    SEGMENT_SHIFT,
    SLOT_BYTES,
    SUPERBLOCK,
    corruption,
    extents_of,
    first_word,
    footprint,
    key_len_of,
    marked_len_of,
    offset_of,
    segment_of,
    size_of,
)
from .journal import (
    COMMITTED_NAME,
    Journal,
    Position,
    Scanned,
    highest,
    journal_path,
    read_marks,
    read_superblock,
    scan,
)
from .manifest import (
    IDENTITY_NAME,
    Manifest,
    is_index,
    open_index,
    read_manifest,
    read_old_snapshot,
    remove_strays,
    snapshot_path,
)
from .segments import SegmentFolder, Segments
from .shards import locate_segments, segment_folders


@dataclass
class Recovered:
    """The records of a log.

    Attributes
    ----------
    base : SealedIndex or None
        The snapshot; owned by the caller.
    slots : int64 [N, 4]
        Later records in the order in which they were written: key0, key1, loc0 and loc1; loc0 is -1 for a delete.
    """

    base: SealedIndex | None
    slots: NDArray[np.int64]

    def live(self, damaged: list[errors.CorruptionError] | None = None) -> NDArray[np.int64]:
        """Return the live records, int64 [N, 4]; see `SealedIndex.slots`."""
        if self.base is None:
            return live(self.slots)
        found = self.base.slots(damaged)
        return live(np.concatenate([found, self.slots])) if len(self.slots) else found


@dataclass
class LoadedLog(Recovered):
    """The state of a log that recovery found: its records, and the position of the next record.

    Attributes
    ----------
    journal : Journal
        Owned by the caller from now on; its position is the end of the last complete group.
    scanned : Scanned
        The records of the journal.
    start_seq : int
        Number of the last record before the journal.
    unsynced : int
        Number of records at the end that may not be durable, or whose values may not be durable in the segments.
    unsynced_offset : int
        Byte offset of these records in the journal.
    restored : int64 [N, 2]
        Rows in `slots` of records whose values only the journal has, and the first words of their locations.
    """

    journal: Journal
    scanned: Scanned
    start_seq: int
    unsynced: int = 0
    unsynced_offset: int = SUPERBLOCK
    restored: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))

    def close(self) -> None:
        """Release the journal and the snapshot."""
        self.journal.close()
        if self.base is not None:
            self.base.close()


def load(
    files: Files, folder: str, manifest: Manifest, segments: Segments, *, writable: bool
) -> tuple[Manifest, LoadedLog]:
    """Open a store's files and read its records; return them with the manifest of all segments.

    Raises
    ------
    CorruptionError
        Durable data is missing or damaged.
    FileNotFoundError
        A file that the manifest names does not exist (a reader may find that a newer manifest has replaced it).
    """
    if manifest.separate_logs:
        return _load_separate_logs(files, folder, manifest, segments)
    return manifest, _load_log(files, folder, manifest, segments, writable=writable)


def _load_log(files: Files, folder: str, manifest: Manifest, segments: Segments, *, writable: bool) -> LoadedLog:
    uuid = manifest.uuid_bytes
    marks, _ = read_marks(folder, uuid)
    for segment in manifest.segments:
        if segments.shard_of(segment) not in segments.missing:
            segments.open(segment)
    with contextlib.ExitStack() as undo:
        base, before, seq, chain = read_snapshot(folder, uuid, manifest.snapshot)
        if base is not None:
            undo.callback(base.close)
            _check_ends(base.ends(), segments)
        if len(before):
            _check_ends(segment_ends(before[:, 2:]), segments)
        path = journal_path(folder, manifest.journal)
        fd = files.open(path, writable)
        undo.callback(files.close, fd)
        block = read_superblock(fd, uuid, manifest.journal, path)
        if (block.seq, block.chain) != (seq, chain):
            raise corruption(
                path,
                f"{path} begins after record {block.seq}, but the snapshot ends at {seq}: one of the two is an "
                "older or newer version of its file; restore the right one",
                0,
            )
        mark = highest(marks, block.salt)
        floor = max(mark[:2], (manifest.floor_seq, manifest.floor_crc))
        start = Position(SUPERBLOCK, seq, chain)
        scanned = scan(fd, block.salt, start, floor)
        refuse_damage(scanned, path)
        first = min(max(0, mark.in_segments - seq), len(scanned.records))
        slots = scanned.slots
        restored = restore(scanned, slots, first, segments, fd, path)
        slots, position = valid_records(scanned, slots, start, floor[0], segments)
        undo.pop_all()
    count = len(slots) - min(first, max(0, floor[0] - seq))
    offset = int(scanned.offsets[len(slots) - count]) if count > 0 else position.offset
    restored = restored[restored[:, 0] < len(slots)] + np.array([len(before), 0])
    slots = np.concatenate([before, slots]) if len(before) else slots
    journal = Journal(files, fd, block.salt, position)
    return LoadedLog(base, slots, journal, scanned, seq, max(0, count), offset, restored)


def restore(
    scanned: Scanned, slots: NDArray[np.int64], first: int, segments: Segments, fd: int, path: str
) -> NDArray[np.int64]:
    """Let records from `first` on refer to the journal if their value is intact only there.

    Returns
    -------
    int64 [N, 2]
        The rows that were changed in `slots`, and the first words of their locations in the segments.
    """
    if first == len(scanned.records):
        return np.empty((0, 2), np.int64)
    copies = scanned.value_offsets(first)
    rows = first + np.flatnonzero(copies)
    rows = rows[np.isin(segment_of(slots[rows, 2]), segments.ids()) & (value_status(slots[rows], segments) != 0)]
    extents = np.column_stack([copies[rows - first], extents_of(slots[rows, 2:])[:, 1:]])
    intact = check_file(fd, extents) == 0
    rows, extents = rows[intact], extents[intact]
    found = np.column_stack([rows, slots[rows, 2]])
    if len(rows):
        segments.open_journal(path)
        slots[rows, 2] = first_word(JOURNAL_SEGMENT, extents[:, 0], extents[:, 1])
    return found


def read_snapshot(folder: str, uuid: bytes, id: int | None) -> tuple[SealedIndex | None, NDArray[np.int64], int, int]:
    """Return a snapshot's index, or the slots of an old one; its last sequence number and that record's checksum."""
    nothing = np.empty((0, SLOT_BYTES // 8), np.int64)
    if id is None:
        return None, nothing, 0, 0
    if not is_index(folder, id):
        return None, *read_old_snapshot(folder, uuid, id)
    base, block = open_index(folder, uuid, id)
    return base, nothing, block.seq, block.chain


def _check_ends(ends: NDArray[np.int64], segments: Segments) -> None:
    """Raise CorruptionError if a segment is missing, or ends before its last value; `ends` is int64 [N, 2]."""
    for segment, end in ends.tolist():
        if segments.shard_of(segment) in segments.missing:
            continue
        if segment not in segments.ids() or segments.size(segment) < end:
            path = segments.path(segment)
            raise corruption(
                path, f"{path} is missing or cut: its values end at byte {end}; restore it from a copy", end
            )


def _load_separate_logs(
    files: Files, folder: str, manifest: Manifest, segments: Segments
) -> tuple[Manifest, LoadedLog]:
    """Read a store of format 2 with shards, each of which has a log of its own."""
    slots = [np.empty((0, SLOT_BYTES // 8), np.int64)]
    last = 1  # the journal must begin after a record, like every journal after a snapshot
    for shard, path in enumerate(segments.paths):
        if shard in segments.missing:
            continue
        part = read_manifest(path)
        own = Segments(files, [SegmentFolder(path, part.uuid_bytes)], part.segment_bytes, writable=False)
        try:
            loaded = _load_log(files, path, part, own, writable=False)
        finally:
            own.close()
        loaded.close()
        found = live(loaded.slots)
        moved = segments.id_of(shard, segment_of(found[:, 2])) - segment_of(found[:, 2])
        found[:, 2] += moved << SEGMENT_SHIFT
        slots.append(found)
        last += loaded.journal.position.seq
        manifest = manifest.with_changes(
            segments=(*(manifest.segments if shard else ()), *(segments.id_of(shard, n) for n in part.segments)),
            next_segment=max(manifest.next_segment, part.next_segment),
        )
    for segment in manifest.segments:
        segments.open(segment)
    path = journal_path(folder, manifest.journal)
    fd = files.open(path, False)
    with closing_on_error(files, fd):
        salt = read_superblock(fd, manifest.uuid_bytes, manifest.journal, path).salt
    journal = Journal(files, fd, salt, Position(SUPERBLOCK, last, 0))
    nothing = Scanned(np.empty(0, RECORD), np.empty(0, np.int64), np.empty(0, np.bool_), journal.position, SUPERBLOCK)
    return manifest, LoadedLog(None, np.concatenate(slots), journal, nothing, last)


def damaged_copies(scanned: Scanned, fd: int) -> list[int]:
    """Return the offsets of values in a journal that do not match their checksums, or their padding.

    Damaged values in the last group do not count if it is not known to be durable: a power failure may leave them.
    """
    copies = np.where(scanned.durable, scanned.value_offsets(), 0)
    damaged = []
    for at, (_, size, crc) in zip(copies.tolist(), extents_of(scanned.records["loc"]).tolist(), strict=True):
        if at:
            found = read_at(fd, footprint(size), at)
            if crc32c(found[:size]) != crc or any(found[size:]):
                damaged.append(at)
    return damaged


def check_previous(folder: str, manifest: Manifest) -> list[int]:
    """Check that the previous snapshot and journal lead to the current snapshot; return the offsets of damaged copies.

    Raises
    ------
    CorruptionError
    FileNotFoundError
    """
    uuid, (before, id) = manifest.uuid_bytes, manifest.previous or (None, 0)
    seq, chain = _check_snapshot(folder, uuid, before, all_blocks=True)
    path = journal_path(folder, id)
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        block = read_superblock(fd, uuid, id, path)
        last, crc = _check_snapshot(folder, uuid, manifest.snapshot, all_blocks=False)
        scanned = scan(fd, block.salt, Position(SUPERBLOCK, block.seq, block.chain), (last, crc))
        refuse_damage(scanned, path)
        if (block.seq, block.chain) != (seq, chain) or scanned.position.seq < last:
            raise corruption(path, f"journal {path} does not connect the previous snapshot to the current one", 0)
        return damaged_copies(scanned, fd)


def _check_snapshot(folder: str, uuid: bytes, id: int | None, *, all_blocks: bool) -> tuple[int, int]:
    """Check a snapshot; return its last sequence number and that record's checksum."""
    base, _, seq, chain = read_snapshot(folder, uuid, id)
    if base is not None:
        try:
            if all_blocks:
                base.slots()
                base.ends()
        finally:
            base.close()
    return seq, chain


def refuse_damage(scanned: Scanned, path: str) -> None:
    """Raise CorruptionError if a scan found that the journal is damaged."""
    if scanned.why:
        offset = scanned.bad if scanned.bad is not None else scanned.position.offset
        raise corruption(
            path,
            f"{path} is damaged at byte {offset}: {scanned.why}. Nothing was changed; `warpwell kv verify` says "
            "more; restore a copy of the store, or run `warpwell kv salvage`",
            offset,
        )


def valid_records(
    scanned: Scanned, slots: NDArray[np.int64], start: Position, floor: int, segments: Segments
) -> tuple[NDArray[np.int64], Position]:
    """Check locations and, after the floor, values; return the valid records and the position after them.

    A commit syncs values and records at the same time, so after a crash the last group may lack a value. Such a group
    does not count. A later group proves that the values before it were durable (in a segment, or in the journal, see
    `restore`), so a bad value among them is damage. With durability "none", a later group proves nothing: records are
    valid up to the first group with a bad value.
    """
    position = scanned.position
    fresh = max(0, min(len(slots), floor - start.seq))
    if fresh:
        old = slots[:fresh, 2:]
        is_value = old[:, 0] > 0
        _check_ends(segment_ends(old if is_value.all() else old[is_value]), segments)
    found = fresh + np.flatnonzero(value_status(slots[fresh:], segments))
    if not len(found):
        return slots, position
    bad = int(found[0])
    if scanned.durable[bad]:
        raise segments.stored(slots[bad, 2:]).damaged()
    keep = int(np.flatnonzero(scanned.records["ordinal"][: bad + 1] == 0)[-1])
    return slots[:keep], Position(int(scanned.offsets[keep]), start.seq + keep, int(scanned.records["previous"][keep]))


def value_status(slots: NDArray[np.int64], segments: Segments) -> NDArray[np.int64]:
    """Read and check values; return 0, 1 (damaged, or outside of its segment) or -errno for each.

    Deletes, empty values and values in missing shards are 0.
    """
    if not len(slots):
        return np.empty(0, np.int64)
    ids = segment_of(slots[:, 2])
    is_value = (slots[:, 2] > 0) & ~np.isin(segments.shard_of(ids), sorted(segments.missing))
    status = np.where(is_value & (size_of(slots[:, 2], slots[:, 3]) > 0), 1, 0)
    for segment in np.intersect1d(ids[is_value], segments.ids()).tolist():
        rows = np.flatnonzero(ids == segment)
        status[rows] = check_file(segments.fd(segment), extents_of(slots[rows, 2:]))
    return status


def live(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the last slot of every key, without deletes, in order."""
    lens = key_len_of(slots[:, 3])
    order = np.arange(len(slots))
    if (lens == 8).all():
        ranked = np.lexsort((order, slots[:, 0]))
    else:
        ranked = np.lexsort((order, lens, slots[:, 1], slots[:, 0]))
    k0, k1, n = slots[ranked, 0], slots[ranked, 1], lens[ranked]
    last = np.ones(len(slots), np.bool_)
    last[:-1] = (k0[1:] != k0[:-1]) | (k1[1:] != k1[:-1]) | (n[1:] != n[:-1])
    slots = slots[np.sort(ranked[last])]
    return slots[slots[:, 2] > 0]


def repair(files: Files, folder: str, loaded: LoadedLog, manifest: Manifest, segments: Segments) -> None:
    """Prepare a log for writing: truncate the torn end, and make all committed records durable.

    Records after the floor and their values are written again. After a failed fsync the kernel marks lost pages as
    clean, so that another fsync alone would succeed without writing them.
    """
    # The process that renamed the current manifest may have ended before the rename was durable. Commits and deleted
    # files must not depend on a rename that a power failure can undo.
    files.sync_folder(folder)
    if manifest.separate_logs:  # the writer's first snapshot merges the logs
        for stray in (snapshot_path(folder, manifest.next_file), journal_path(folder, manifest.next_file + 1)):
            with contextlib.suppress(FileNotFoundError):
                files.unlink(stray)
        if manifest.durability == "none":
            _rewrite_values(files, loaded.slots, segments)
        return
    end, fd = loaded.journal.position.offset, loaded.journal.fd
    if loaded.scanned.size != end:
        files.truncate(fd, end)
        files.sync(fd)
    if loaded.unsynced:
        _copy_values(files, loaded, segments)
        _rewrite_values(files, loaded.slots[len(loaded.slots) - loaded.unsynced :], segments)
        _rewrite_copies(files, loaded, segments)
        _rewrite(files, fd, loaded.unsynced_offset, end)
        files.sync(fd)
    _cut_leftovers(files, loaded, manifest, segments)
    remove_strays(files, folder, manifest, segments)


def _cut_leftovers(files: Files, loaded: LoadedLog, manifest: Manifest, segments: Segments) -> None:
    """Cut off values that a killed writer did not commit; they follow the values of the snapshot and of the journal.

    No reader has seen these values. The cut needs no sync: after a crash, the next writer cuts again.
    """
    if manifest.heads is None:
        return
    records = loaded.scanned.records
    ends = dict(manifest.heads)
    heads = {segments.shard_of(segment): segment for segment in ends}
    for segment, end in segment_ends(records["loc"][records["type"] == PUT]).tolist():
        ends[segment] = max(end, ends.get(segment, 0))
    for segment in manifest.segments:
        end = ends.get(segment, SUPERBLOCK)
        if segment >= heads[segments.shard_of(segment)] and segments.size(segment) > end:
            with contextlib.suppress(OSError):
                files.truncate(segments.fd(segment), end)


def _copy_values(files: Files, loaded: LoadedLog, segments: Segments) -> None:
    """Copy values that only the journal has to their segments."""
    for row, loc0 in loaded.restored.tolist():
        at, size, _ = extents_of(loaded.slots[row : row + 1, 2:])[0].tolist()
        files.pwrite(segments.fd(segment_of(loc0)), read_at(loaded.journal.fd, size, at), offset_of(loc0))
        loaded.slots[row, 2] = loc0
    segments.close([JOURNAL_SEGMENT])


def _rewrite_copies(files: Files, loaded: LoadedLog, segments: Segments) -> None:
    """Write values to the journal again whose groups may not be durable: only segments may have these values."""
    count = loaded.journal.position.seq - loaded.start_seq
    first = int(np.argmin(np.append(loaded.scanned.durable[:count], False)))  # the first record of a group
    offsets, locations = loaded.scanned.value_offsets(first, count), loaded.scanned.records["loc"][first:count]
    for at, location in zip(offsets.tolist(), locations, strict=True):
        if at:
            value = segments.stored(location)
            contents = read_at(value.fd, value.nbytes, value.offset)
            files.pwrite(loaded.journal.fd, contents.ljust(footprint(value.nbytes), b"\0"), at)


def _rewrite_values(files: Files, slots: NDArray[np.int64], segments: Segments) -> None:
    slots = slots[slots[:, 2] > 0]
    ids, offsets, sizes = segment_of(slots[:, 2]), offset_of(slots[:, 2]), size_of(slots[:, 2], slots[:, 3])
    for segment in np.unique(ids).tolist():
        rows = ids == segment
        _rewrite(files, segments.fd(segment), int(offsets[rows].min()), int((offsets[rows] + sizes[rows]).max()))
        files.sync(segments.fd(segment))


def _rewrite(files: Files, fd: int, begin: int, end: int) -> None:
    while begin < end:
        part = read_at(fd, min(end - begin, 1 << 23), begin)
        if not part:
            break
        files.pwrite(fd, part, begin)
        begin += len(part)


_ATTEMPTS = 8
_BATCH = 1024
"""Number of values that `verify` checks between calls of `progress`."""


class Changes(NamedTuple):
    """Records that were committed since the last call.

    Attributes
    ----------
    changed : int
        Number of these records.
    records : Recovered or None
        All records, which replace all earlier ones, if the reader continues with another snapshot or journal.
    slots : int64 [N, 4]
        If `records` is None, the records in the order of the log.
    """

    changed: int
    records: Recovered | None
    slots: NDArray[np.int64]


def open_segments(files: Files, folder: str, manifest: Manifest, *, writable: bool) -> Segments:
    """Return the segments of a store, none of which is open yet."""
    return Segments(files, segment_folders(folder, manifest), manifest.segment_bytes, writable=writable)


def load_for_reading(
    files: Files, folder: str, segments: Segments | None = None
) -> tuple[Manifest, Segments, LoadedLog]:
    """Load a store while a writer may be replacing its files; see `recovery.load`.

    Apparent damage may be a file that was replaced between two reads, so it is read again.
    """
    with contextlib.ExitStack() as undo:
        attempt = 0
        while True:
            manifest = read_manifest(folder)
            if segments is None:
                segments = open_segments(files, folder, manifest, writable=False)
                undo.callback(segments.close)
            try:
                manifest, loaded = load(files, folder, manifest, segments, writable=False)
                undo.pop_all()
                return manifest, segments, loaded
            except (FileNotFoundError, errors.CorruptionError) as error:
                attempt += 1
                if attempt == _ATTEMPTS or (attempt > 2 and read_manifest(folder) == manifest):
                    raise error if isinstance(error, errors.CorruptionError) else missing(error) from None
                time.sleep(0.002 * (attempt - 1))


def missing(error: FileNotFoundError) -> errors.CorruptionError:
    """Return the error for a file that the manifest names and that does not exist."""
    return errors.CorruptionError(
        f"{error.filename} is missing: the store's manifest names it; restore it from a copy", path=error.filename
    )


def follow(
    files: Files, folder: str, manifest: Manifest, segments: Segments, journal: Journal, *, reads_all: bool = False
) -> tuple[Journal, Manifest, set[int], Changes]:
    """Read the records that were committed after `journal.position`.

    All records are read if the writer has begun another journal, if `reads_all` is True, or if the journal does not
    continue the records that were read: a reader may have read a commit that the writer could not finish and that the
    next commit has replaced.

    Returns
    -------
    Journal
        The journal to continue with: `journal`, or another one (then `journal` is closed).
    Manifest
    set of int
        Segments that the manifest no longer names.
    Changes
    """
    replaced = False
    for attempt in range(0 if reads_all else 3):
        try:
            followed = _follow(folder, manifest, segments, journal)
            if followed is not None:
                return followed
        except FileNotFoundError:
            pass
        except errors.CorruptionError:
            time.sleep(0.002 * attempt)
            continue
        replaced = True
        break
    _check_same(folder, manifest, read_manifest(folder))
    manifest, segments, loaded = load_for_reading(files, folder, segments)
    journal.close()
    changed = max(loaded.journal.position.seq - journal.position.seq, int(not replaced))
    retired = set(segments.ids()) - {*manifest.segments, *[JOURNAL_SEGMENT] * (len(loaded.restored) > 0)}
    changes = Changes(changed, Recovered(loaded.base, loaded.slots), np.empty((0, 4), np.int64))
    return loaded.journal, manifest, retired, changes


def _follow(
    folder: str, manifest: Manifest, segments: Segments, journal: Journal
) -> tuple[Journal, Manifest, set[int], Changes] | None:
    """Return the result of `follow`, or None if the reader must continue with other files."""
    # Read the floor before the manifest: it then belongs to the journal that the manifest names, or to an earlier one.
    # No record is appended to a journal that the manifest no longer names.
    floor = highest(read_marks(folder, manifest.uuid_bytes)[0], journal.salt)[:2]
    newest = read_manifest(folder)
    _check_same(folder, manifest, newest)
    if newest.separate_logs or newest.journal != manifest.journal:
        return None
    for segment in newest.segments:
        segments.open(segment)
    start, slots = journal.position, np.empty((0, 4), np.int64)
    if floor[0] > start.seq or any(read_at(journal.fd, RECORD_BYTES, start.offset)):
        new_floor = floor if floor[0] > start.seq else (0, 0)
        scanned = scan(journal.fd, journal.salt, start, new_floor, is_followed=True)
        refuse_damage(scanned, journal_path(folder, manifest.journal))
        puts = scanned.records["loc"][scanned.records["type"] == PUT]
        if len(np.setdiff1d(segment_of(puts[:, 0]), segments.ids())):
            return None
        slots, journal.position = valid_records(scanned, scanned.slots, start, floor[0], segments)
    return journal, newest, set(segments.ids()) - {JOURNAL_SEGMENT, *newest.segments}, Changes(len(slots), None, slots)


def _check_same(folder: str, manifest: Manifest, newest: Manifest) -> None:
    if newest.uuid != manifest.uuid:
        raise errors.CorruptionError(f"{folder} was replaced by another store: open it again", path=folder)


# -- verify --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Damage: the file, the byte where it begins, and a description; `key` is the key of a damaged value."""

    path: str
    offset: int | None
    what: str
    key: int | bytes | None = None


@dataclass
class VerifyReport:
    """The number of records and bytes that `verify` read, and the damage that it found.

    Attributes
    ----------
    path : str
    records : int
        Live records.
    value_bytes : int
        Bytes of their values, all of which were read.
    journal_records : int
        Journal records since the snapshot.
    torn_bytes : int
        Bytes after the journal's last commit, without zeros at the end: a crash left them, or a writer is writing them.
    unsettled_values : int
        Values that only the journal has since a power failure; the next writer copies them to their segments.
    torn_marks : int
        Damaged marks in COMMITTED, at most 2: a power failure may leave them, and the next commits replace them.
    problems : list of Problem
    """

    path: str
    records: int = 0
    value_bytes: int = 0
    journal_records: int = 0
    torn_bytes: int = 0
    unsettled_values: int = 0
    torn_marks: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """True if nothing is damaged."""
        return not self.problems


def verify(folder: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
    """Check the manifest, every superblock, the snapshot, the journal's chain, and every live value.

    A writer may have the store open.

    Parameters
    ----------
    folder : path-like
    progress : callable, optional
        Called with the number of values checked and the number of all values.

    Raises
    ------
    MissingFileError, FormatError, StoreVersionError
        The folder does not hold a store of a known format, or it is a shard.
    """
    path = os.path.abspath(folder)
    report = VerifyReport(path)
    try:
        manifest = read_manifest(path)
    except errors.CorruptionError as error:
        report.problems.append(_problem(error))
        return report
    damaged_marks, committed = read_marks(path, manifest.uuid_bytes)[1], os.path.join(path, COMMITTED_NAME)
    has_marks = os.path.exists(committed)
    report.torn_marks = len(damaged_marks) if has_marks else 0
    _check_spares(manifest, path, report)
    folders, missing = locate_segments(path, manifest)
    report.problems += [Problem(folders[shard].path, None, str(why)) for shard, why in missing.items()]
    segments = Segments(Files(), folders, manifest.segment_bytes, writable=False)
    segments.missing.update(missing)
    try:
        try:
            manifest, segments, loaded = load_for_reading(Files(), path, segments)
        except errors.CorruptionError as error:
            report.problems.append(_problem(error))
            _check_superblocks(manifest, segments, report)
            return report
        end, fd = loaded.journal.position, loaded.journal.fd
        report.journal_records = end.seq - loaded.start_seq
        if not has_marks and report.journal_records:  # a writer makes the file durable before its first record
            report.problems.append(Problem(committed, None, "the file is missing"))
        torn = read_at(fd, max(0, loaded.scanned.size - end.offset), end.offset)
        report.torn_bytes = len(torn.rstrip(b"\0"))
        report.unsettled_values = len(loaded.restored)
        journal = journal_path(path, manifest.journal)
        report.problems += [_copy_problem(journal, offset) for offset in damaged_copies(loaded.scanned, fd)]
        damaged: list[errors.CorruptionError] = []
        slots = loaded.live(damaged)
        loaded.close()
        report.problems += map(_problem, damaged)
        slots = slots[np.isin(segment_of(slots[:, 2]), segments.ids())]
        report.records, report.value_bytes = len(slots), int(size_of(slots[:, 2], slots[:, 3]).sum())
        _check_values(slots, segments, report, progress)
    finally:
        segments.close()
    return report


def _check_spares(manifest: Manifest, folder: str, report: VerifyReport) -> None:
    """Check the files that only `salvage` reads: the first manifest's copy, the previous snapshot and journal."""
    try:
        with contextlib.suppress(errors.MissingFileError):
            if os.path.lexists(os.path.join(folder, IDENTITY_NAME)):
                read_manifest(folder, IDENTITY_NAME)
        if manifest.previous is not None and manifest.snapshot is not None:
            path = journal_path(folder, manifest.previous[1])
            report.problems += [_copy_problem(path, offset) for offset in check_previous(folder, manifest)]
    except errors.CorruptionError as error:
        report.problems.append(_problem(error))
    except FileNotFoundError as error:
        if read_manifest(folder) == manifest:  # otherwise a writer has deleted the file in the meantime
            report.problems.append(Problem(str(error.filename), None, "the file is missing"))


def _copy_problem(path: str, offset: int) -> Problem:
    return Problem(path, offset, "the copy of a value in the journal does not match its checksum")


def _check_superblocks(manifest: Manifest, segments: Segments, report: VerifyReport) -> None:
    reported_paths = {problem.path for problem in report.problems}
    for segment in manifest.segments:
        try:
            if segments.shard_of(segment) not in segments.missing:
                segments.open(segment)
        except FileNotFoundError:
            report.problems.append(Problem(segments.path(segment), None, "the file is missing"))
        except errors.CorruptionError as error:
            if str(error.path) not in reported_paths:
                report.problems.append(_problem(error))


def _check_values(
    slots: NDArray[np.int64], segments: Segments, report: VerifyReport, progress: Callable[[int, int], object] | None
) -> None:
    slots = slots[np.argsort(slots[:, 2], kind="stable")]
    for at in range(0, len(slots), _BATCH):
        part = slots[at : at + _BATCH]
        status = value_status(part, segments)
        report.problems += [_bad_value(part[k], int(status[k]), segments) for k in np.flatnonzero(status).tolist()]
        if progress is not None:
            progress(at + len(part), len(slots))


def _bad_value(slot: Any, status: int, segments: Segments) -> Problem:
    value = segments.stored(slot[2:])
    key: int | bytes = stored_key(slot, value.fd)
    if int(marked_len_of(slot[3])) & INTEGER:
        key = int(slot[0])
    damage = "does not match its checksum" if status > 0 else f"cannot be read: {os.strerror(-status)}"
    return Problem(value.path, value.offset, f"the value of {value.nbytes} bytes {damage}", key)


def stored_key(slot: NDArray[np.int64], fd: int) -> bytes:
    """Return the bytes of a slot's key, or the hash of a long key that is damaged; `fd` is the file of the value."""
    key = np.ascontiguousarray(slot[:2]).tobytes()[: int(key_len_of(slot[3]))]
    if key_len_of(slot[3]) < LONG:
        return key
    offset, size, _ = extents_of(slot[None, 2:])[0].tolist()
    with contextlib.suppress(OSError):
        nbytes = min(size, SUFFIX_BYTES)
        return long_key_in(read_at(fd, nbytes, offset + size - nbytes), key) or key
    return key


def _problem(error: errors.CorruptionError) -> Problem:
    return Problem(str(error.path), error.offset, str(error))
