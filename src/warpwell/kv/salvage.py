"""Salvage: copy the undamaged records of a damaged store into a new one; the source is only read.

A store keeps the previous snapshot and journal (see `Manifest.previous`), and every record has a number and a checksum
of its own. So the recovered state consists of the newest undamaged snapshot and all undamaged records after it, in any
journal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..cache import batches_of
from .index.sealed import BLOCK, block_counts, read_damaged
from .keys import keys_in, long_key_in, suffix_of
from .log.checksum import crc32c
from .log.files import LOCK_NAME, Files
from .log.format import (
    COMMIT,
    DELETE,
    INDEX_FILE,
    INLINE,
    JOURNAL_FILE,
    LONG,
    MAGIC,
    ORDERED,
    PUT,
    RECORD,
    RECORD_BYTES,
    SLOT_BYTES,
    SNAPSHOT_FILE,
    SUFFIXES,
    SUPERBLOCK,
    SYNCED,
    Superblock,
    crc_of,
    file_name,
    footprint,
    key_len_of,
    segment_of,
    size_of,
    slots_of,
)
from .log.journal import have_right_crcs, highest, read_marks
from .log.manifest import IDENTITY_NAME, Manifest, is_index, read_identity, read_manifest
from .log.recovery import Problem, live, stored_key, value_status
from .log.segments import Segments
from .log.shards import locate_segments
from .opening import create

_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 4096

Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]


@dataclass
class SalvageReport:
    """The result of `salvage`: the recovered and the lost records.

    Attributes
    ----------
    path, target : str
    records : int
        Records that were put into the new store.
    value_bytes : int
    lost : list of Problem
        Records whose values are damaged or missing, with their keys, and missing shards, without keys.
    missing_records : int
        Number of unreadable puts and deletes. Their keys are unknown. If such a key had a value before, that value was
        recovered, otherwise nothing.
    unproven : int
        Number of records with an undamaged value whose key was found only in a damaged snapshot.
    problems : list of Problem
        Files that are damaged or missing.
    """

    path: str
    target: str
    records: int = 0
    value_bytes: int = 0
    lost: list[Problem] = field(default_factory=list)
    missing_records: int = 0
    unproven: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all committed records were recovered."""
        return not self.lost and not self.missing_records and not self.unproven


def salvage(path: Path, target: Path, *, progress: Progress | None = None) -> SalvageReport:
    """Copy the undamaged records of a store into a new store.

    The source is never changed. The new store gets the records of all shards.

    Parameters
    ----------
    path : path-like
        The store; no process may have it open for writing.
    target : path-like
        Folder of the new store; it must not exist.
    progress : callable, optional
        Called with the number of records checked and the number of all records.

    Raises
    ------
    MissingFileError, FormatError
        The folder does not hold a store, or its format is newer.
    SharingError
        The store is open for writing.
    ArgumentError, StorageFullError
        The target cannot be created. Nothing of it is left.
    """
    folder = os.path.abspath(path)
    report = SalvageReport(folder, os.path.abspath(target))
    manifest = _described(folder, report)
    folders, missing = locate_segments(folder, manifest)
    shards = [shard.path for shard in folders]
    report.lost += [
        Problem(shards[shard], None, str(error))
        for shard, error in missing.items()
        if not isinstance(error, errors.CorruptionError)  # the values of a damaged shard are read anyway
    ]
    # The folders of logs, and for each the folders of its segments.
    logs = [(shard.path, [shard]) for shard in folders] if manifest.separate_logs else [(folder, folders)]
    schema = (manifest.schema or {}).get("schema")
    for path in map(os.path.realpath, [folder, *shards]):
        if os.path.commonpath([os.path.realpath(target), path]) == path:
            raise errors.ArgumentError(f"{target} is inside the store itself: choose another folder", name="target")
    with contextlib.ExitStack() as stack:
        for path in dict.fromkeys([folder, *shards]):
            _keep_from_writers(path, stack)
        copies: Copies = {}
        found = []
        for log, parts in logs:
            segments = Segments(Files(), parts, manifest.segment_bytes, writable=False)
            stack.callback(segments.close)
            found.append((segments, _state(log, segments, report, copies)))
        made = create(
            target,
            None if schema is None else {n: (d, tuple(s)) for n, d, s in schema},
            durability=manifest.durability,
            segment_bytes=manifest.segment_bytes,
            metadata=(manifest.schema or {}).get("metadata"),
        )
        try:
            with made:
                total, done = sum(len(slots) for _, slots in found), 0
                for segments, slots in found:
                    slots = slots[np.argsort(slots[:, 2], kind="stable")]
                    for rows in batches_of(size_of(slots[:, 2], slots[:, 3]), _BATCH_BYTES, _BATCH_RECORDS):
                        _put(made, segments, slots[rows], copies, report)
                        done += len(slots[rows])
                        if progress is not None:
                            progress(done, total)
        except BaseException:
            shutil.rmtree(report.target, ignore_errors=True)
            raise
    return report


def _described(folder: str, report: SalvageReport) -> Manifest:
    """Return the manifest, or the copy of the store's first manifest."""
    try:
        return read_manifest(folder)
    except (errors.StoreVersionError, errors.MissingFileError):
        raise
    except errors.FormatError:
        identity = read_identity(folder)
        if identity is not None:
            return identity
        names = os.listdir(folder) if os.path.isdir(folder) else []
        if not any(name.endswith((".jnl", ".snap", ".idx")) for name in names):
            raise
    report.problems.append(
        Problem(os.path.join(folder, IDENTITY_NAME), None, "the schema is not known: values are recovered as bytes")
    )
    return Manifest("0" * 32, "commit", 256 << 20, 0, None, (), 0, 0)


def _keep_from_writers(folder: str, stack: contextlib.ExitStack) -> None:
    """Keep the store from being opened for writing until `stack` is closed."""
    # Without a lock file no process has opened the store for writing since it was copied.
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(folder, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        if not Files().lock(fd):
            raise errors.SharingError(
                f"{folder} is open for writing: close it in that process, or salvage a copy", path=folder
            )


def _state(folder: str, segments: Segments, report: SalvageReport, copies: Copies) -> NDArray[np.int64]:
    """Return the live slots of one folder, as far as they can be recovered, and add the copies of values."""
    found = DamagedFolder(folder, report.problems)
    journals = read_journals(found, copies)
    snapshots = read_snapshots(found)
    sound = [s for s in snapshots if s.sound]
    base = np.empty((0, SLOT_BYTES // 8), np.int64)
    seq = 0
    if sound:
        base, seq = sound[-1].slots, sound[-1].seq
    elif snapshots and (not journals or journals[0].start > 0):
        # Nothing confirms these keys. A value with a matching checksum makes them likely; the report counts them.
        base, seq = snapshots[-1].slots, journals[-1].start if journals else snapshots[-1].seq
        report.unproven += len(base)
    marks, damaged_marks = read_marks(folder, found.uuid)
    newest = max((s.seq for s in snapshots), default=0)
    is_current = bool(journals) and journals[-1].start >= newest
    if journals:
        floor = max(found.floor, highest(marks, journals[-1].salt)[0]) if is_current else newest
        committed = journals[-1].committed = _last_committed(journals[-1], floor, segments, copies)
        if damaged_marks:  # these marks may have named later records
            report.missing_records += int(np.count_nonzero(journals[-1].records["seq"] > committed))
    if not is_current:  # the current journal is lost with an unknown number of records
        report.missing_records += max(1, max((mark[0] for mark in marks), default=0) - newest)
    records, last = _behind(journals, seq)
    report.missing_records += max(0, last - seq - len(records))
    return live(np.concatenate([base, records]))


def _last_committed(journal: JournalRecords, floor: int, segments: Segments, copies: Copies) -> int:
    """Return the number of the last committed record of a journal, as recovery finds it.

    Records up to `floor` and records before a group with the flag ORDERED or SYNCED were durable. A crash
    may have torn the groups after these: they count up to the first group that is incomplete or lacks a value.
    """
    records = journal.records
    is_flagged = (records["flags"] & (ORDERED | SYNCED)) != 0
    group_starts = records["seq"] - records["ordinal"]
    proven = max(floor, journal.start, int(group_starts[is_flagged].max(initial=0)) - 1)
    rows = np.flatnonzero(records["seq"] > proven)
    before = records[rows - 1]
    is_next = (records["seq"][rows] == proven + 1 + np.arange(len(rows))) & (
        (records["previous"][rows] == before["crc"]) | (before["seq"] != records["seq"][rows] - 1)
    )
    rows = rows[: int(np.argmin(np.append(is_next, False)))]
    slots = journal.slots[rows]
    for segment in np.unique(segment_of(slots[slots[:, 2] > 0, 2])).tolist():
        _open(segments, segment)
    # A segment is durable before a record refers to it. So the crash did not remove the segment, and its values are
    # lost.
    is_torn = (value_status(slots, segments) > 0) & np.isin(segment_of(slots[:, 2]), segments.ids())
    is_torn &= (records["flags"][rows] & ORDERED) == 0
    is_torn &= np.fromiter((tuple(location) not in copies for location in slots[:, 2:].tolist()), np.bool_, len(slots))
    rows = rows[: int(np.argmax(np.append(is_torn, True)))]
    ends = rows[(records["flags"][rows] & COMMIT) != 0]
    return int(records["seq"][ends[-1]]) if len(ends) else proven


def _open(segments: Segments, segment: int) -> str:
    """Open a segment; return the reason if it cannot be read, or ""."""
    try:
        segments.open(segment, has_superblock=False)
    except FileNotFoundError:
        return "the file is missing"
    except OSError as error:
        return f"the file is not readable ({error})"
    return ""


def _behind(journals: list[JournalRecords], seq: int) -> tuple[NDArray[np.int64], int]:
    """Return the undamaged committed records after number `seq`, in order, and the last number."""
    slots, last = [], seq
    for k, journal in enumerate(journals):
        # In format 2 a journal may continue after the next one begins, because a second writer was detected late.
        until = journals[k + 1].start if k + 1 < len(journals) else journal.committed
        numbers = journal.records["seq"]
        chosen = (numbers > seq) & (numbers <= until)
        slots.append(journal.slots[chosen])
        last = max(last, until)
    return np.concatenate([np.empty((0, SLOT_BYTES // 8), np.int64), *slots]), last


def _put(store: Any, segments: Segments, slots: NDArray[np.int64], copies: Copies, report: SalvageReport) -> None:
    """Read and check the values of a batch, and put the undamaged ones."""
    lengths, ids = key_len_of(slots[:, 3]), segment_of(slots[:, 2])
    keys = keys_in(slots)
    for segment in np.unique(ids).tolist():
        rows = np.flatnonzero(ids == segment)
        unreadable = _open(segments, segment)
        values: list[bytes] = []
        readable: list[int] = []
        for k in rows.tolist():
            stored, value = segments.stored(slots[k, 2:]), None
            wrong = "the record has no location"
            if stored.offset >= SUPERBLOCK:
                if not unreadable:
                    with contextlib.suppress(OSError):
                        value = stored.read()
                if value is None:
                    value = copies.get((int(slots[k, 2]), int(slots[k, 3])))
                wrong = unreadable or "the value does not match its checksum"
            is_long = lengths[k] == LONG
            if value is not None and store.schema is not None:
                # Not `stored_key`: the value may be a copy from a journal because the segment is damaged.
                long_key = long_key_in(value, slots[k, :2].tobytes()) if is_long else b""
                record = value[: -len(suffix_of(long_key))] if is_long else value
                if not store.schema.accepts(record):
                    value, wrong = None, f"the value of {stored.nbytes} bytes is not a record of the schema"
            if value is None:
                key = stored_key(slots[k], stored.fd) if is_long else keys.row(k)
                report.lost.append(Problem(stored.path, stored.offset, wrong, key))
            else:
                readable.append(k)
                values.append(value)
        if readable:
            store._records.put(keys.take(np.array(readable)), values)
            report.records += len(readable)
            report.value_bytes += sum(map(len, values))


class DamagedFolder:
    """The files of a folder that may hold records.

    Parameters
    ----------
    folder : str
    problems : list of Problem
        The list to which damage is added.
    """

    def __init__(self, folder: str, problems: list[Problem]) -> None:
        self.folder, self.problems = folder, problems
        try:
            manifest = read_manifest(folder)
            self.uuid, self.floor = manifest.uuid_bytes, manifest.floor_seq
            self._ids = {JOURNAL_FILE: sorted(manifest.journals()), SNAPSHOT_FILE: [], INDEX_FILE: []}
            for id in sorted(manifest.snapshots()):
                self._ids[INDEX_FILE if is_index(folder, id) else SNAPSHOT_FILE].append(id)
        except (errors.MissingFileError, errors.FormatError) as error:
            self.note(str(error.path), getattr(error, "offset", None), str(error))
            identity = read_identity(folder)
            self.uuid, self.floor = bytes(16) if identity is None else identity.uuid_bytes, 0
            self._ids = {kind: self._find_ids(SUFFIXES[kind]) for kind in (JOURNAL_FILE, SNAPSHOT_FILE, INDEX_FILE)}

    def _find_ids(self, suffix: str) -> list[int]:
        try:
            names = [os.path.splitext(name) for name in os.listdir(self.folder)]
        except OSError:
            return []
        return sorted(int(stem) for stem, end in names if end == suffix and stem.isdecimal())

    def files(self, kind: int) -> list[tuple[int, str, bytes]]:
        """Return id, path and contents of all files of a type, ordered by id."""
        out = []
        for id in self._ids[kind]:
            path = os.path.join(self.folder, file_name(kind, id))
            try:
                with open(path, "rb") as file:
                    out.append((id, path, file.read()))
            except OSError as error:
                self.note(path, None, f"the file cannot be read ({error.strerror})")
        return out

    def superblock(self, data: bytes, kind: int, id: int, path: str) -> Superblock | None:
        """Return the superblock of a file; if it is damaged, record that and return None."""
        uuid = self.uuid if any(self.uuid) else data[16:32]
        try:
            block = Superblock.unpack(data[:SUPERBLOCK], kind, uuid, id, path)
        except errors.FormatError as error:
            self.note(path, 0, str(error))
            return None
        self.uuid = uuid
        return block

    def note(self, path: str, offset: int | None, damage: str) -> None:
        """Record damage."""
        self.problems.append(Problem(path, offset, damage))


@dataclass
class JournalRecords:
    """The undamaged records of a journal in the order of the file, its start, and the last committed record."""

    records: NDArray[np.void]
    start: int
    committed: int
    salt: int

    @property
    def slots(self) -> NDArray[np.int64]:
        """Key0, key1, loc0 and loc1 of the records, int64 [N, 4]."""
        return slots_of(self.records)


@dataclass
class SnapshotSlots:
    """The slots of a snapshot; `sound` is True if no slot is damaged."""

    slots: NDArray[np.int64]
    seq: int
    sound: bool


Copies = dict[tuple[int, int], bytes]
"""Sound values in journals, by the location of the value in its segment."""


def read_journals(found: DamagedFolder, copies: Copies) -> list[JournalRecords]:
    """Return the readable records of all journals, and add the values in them to `copies`."""
    out = []
    for id, path, data in found.files(JOURNAL_FILE):
        block = found.superblock(data, JOURNAL_FILE, id, path)
        count = max(0, len(data) - SUPERBLOCK) // RECORD_BYTES
        records = np.frombuffer(data, RECORD, count, SUPERBLOCK) if count else np.empty(0, RECORD)
        good = _sound(records)
        if block is not None:
            good &= records["salt"] == block.salt
        elif good.any():
            salts, counts = np.unique(records["salt"][good], return_counts=True)
            good &= records["salt"] == salts[np.argmax(counts)]
        is_value = _find_values(data, records, good, copies)
        good &= ~is_value
        # If a shorter write replaced a failed write, old records follow the last record.
        seqs = np.where(good, records["seq"], 0)
        good[1:] &= seqs[1:] > np.maximum.accumulate(seqs)[:-1]
        intact = records[good]
        if block is None and not len(intact):
            continue
        start = int(intact["seq"].min()) - 1 if block is None else block.seq
        numbers = np.flatnonzero(good)
        inside = np.flatnonzero(~(good | is_value)[: int(numbers[-1]) + 1 if len(numbers) else 0])
        for k in inside.tolist():
            found.note(path, SUPERBLOCK + RECORD_BYTES * k, "a record of the journal is damaged")
        salt = int(intact["salt"][0]) if block is None else block.salt
        out.append(JournalRecords(intact, start, start, salt))
    return sorted(out, key=lambda journal: journal.start)


def _find_values(data: bytes, records: NDArray[np.void], good: NDArray[np.bool_], copies: Copies) -> NDArray[np.bool_]:
    """Return which units of a journal belong to values, and add the sound values to `copies`."""
    is_value = np.zeros(len(records), np.bool_)
    for end in np.flatnonzero(good & (records["flags"] & INLINE != 0)).tolist():
        if is_value[end]:
            continue
        group = slice(max(0, end - int(records["ordinal"][end])), end + 1)
        members = records[group]
        if not good[group].all():  # the sizes of some values are not known
            is_value[end + 1 : end + 1 + int(np.argmax(np.append(good[end + 1 :], True)))] = True
            continue
        at = SUPERBLOCK + RECORD_BYTES * (end + 1)
        for loc0, loc1 in members["loc"][members["type"] == PUT].tolist():
            value = data[at : at + size_of(loc0, loc1)]
            if crc32c(value) == crc_of(loc1):
                copies[loc0, loc1] = value
            at += footprint(size_of(loc0, loc1))
        is_value[end + 1 : (at - SUPERBLOCK) // RECORD_BYTES] = True
    return is_value


def read_snapshots(found: DamagedFolder) -> list[SnapshotSlots]:
    """Return the readable slots of all snapshots, in the order of their ids."""
    out = []
    for kind in (SNAPSHOT_FILE, INDEX_FILE):  # earlier formats first
        for id, path, data in found.files(kind):
            block, body = found.superblock(data, kind, id, path), data[SUPERBLOCK:]
            damage: list[tuple[int, str]] = []
            if kind == SNAPSHOT_FILE:
                slots = np.frombuffer(body, np.int64, len(body) // SLOT_BYTES * 4).reshape(-1, 4)
                if block is not None and (len(slots) != block.count or crc32c(slots) != block.body_crc):
                    damage = [(0, "the records of the snapshot do not match their checksum")]
            elif block is None:
                slots, _ = read_damaged(body, None, None)
            else:
                slots, damaged = read_damaged(body, block.salt, block.block_type)
                damage = [(BLOCK * k, "a block of the index does not match its checksum") for k in damaged]
                expected = BLOCK * sum(block_counts(block.block_type, block.positions, block.segments))
                if len(body) != expected:
                    damage.append((0, f"the index has {len(body)} bytes instead of {expected}"))
            for offset, problem in damage:
                found.note(path, SUPERBLOCK + offset, problem)
            sound = block is not None and not damage
            out.append(SnapshotSlots(slots if sound else _plausible(slots), 0 if block is None else block.seq, sound))
    return out


def _plausible(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots with a valid location and key length."""
    lens = key_len_of(slots[:, 3])
    valid: NDArray[np.int64] = slots[(slots[:, 2] > 0) & (lens >= 1) & (lens <= LONG)]
    return valid


def _sound(records: NDArray[np.void]) -> NDArray[np.bool_]:
    lens = records["key_len"]
    sound: NDArray[np.bool_] = (records["magic"] == MAGIC) & have_right_crcs(records)
    sound &= (lens >= 1) & (lens <= LONG) & ((records["type"] == PUT) | (records["type"] == DELETE))
    return sound
