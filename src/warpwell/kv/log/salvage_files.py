"""What can be read of the journals and snapshots of a damaged store: every record for itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import errors
from .checksum import crc32c, crc32c_many
from .files import read_at
from .format import (
    COMMIT,
    DELETE,
    JOURNAL_FILE,
    MAGIC,
    PUT,
    RECORD,
    RECORD_BYTES,
    SLOT_BYTES,
    SNAPSHOT_FILE,
    SUFFIXES,
    SUPERBLOCK,
    Superblock,
    file_name,
    key_len_of,
)
from .manifest import read_identity, read_manifest
from .verify import Problem


class Found:
    """The files of a folder that may hold records.

    Parameters
    ----------
    folder : str
    problems : list of Problem
        Where damage is noted.
    """

    def __init__(self, folder: str, problems: list[Problem]) -> None:
        self.folder, self.problems = folder, problems
        try:
            manifest = read_manifest(folder)
            self.uuid = manifest.uuid_bytes
            self._ids = {
                JOURNAL_FILE: sorted(manifest.journals()),
                SNAPSHOT_FILE: sorted(manifest.snapshots()),
            }
        except (errors.MissingFileError, errors.FormatError) as error:
            self.note(str(error.path), getattr(error, "offset", None), str(error))
            identity = read_identity(folder)
            self.uuid = bytes(16) if identity is None else identity.uuid_bytes
            self._ids = {kind: self._there(SUFFIXES[kind]) for kind in (JOURNAL_FILE, SNAPSHOT_FILE)}

    def _there(self, suffix: str) -> list[int]:
        try:
            names = [os.path.splitext(name) for name in os.listdir(self.folder)]
        except OSError:
            return []
        return sorted(int(stem) for stem, end in names if end == suffix and stem.isdigit())

    def files(self, kind: int) -> list[tuple[int, str, bytes]]:
        """Return id, path and contents of the files of a kind, in the order of their ids."""
        out = []
        for id in self._ids[kind]:
            path = os.path.join(self.folder, file_name(kind, id))
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.note(path, None, f"the file cannot be opened ({error.strerror})")
                continue
            try:
                out.append((id, path, read_at(fd, os.fstat(fd).st_size, 0)))
            except OSError as error:
                self.note(path, None, f"the file cannot be read ({error.strerror})")
            finally:
                os.close(fd)
        return out

    def superblock(self, data: bytes, kind: int, id: int, path: str) -> Superblock | None:
        """Return what a file says of itself, or note that it is damaged."""
        uuid = self.uuid if any(self.uuid) else data[16:32]
        try:
            block = Superblock.unpack(data[:SUPERBLOCK], kind, uuid, id, path)
        except errors.FormatError as error:
            self.note(path, 0, str(error))
            return None
        self.uuid = uuid
        return block

    def note(self, path: str, offset: int | None, what: str) -> None:
        """Note damage."""
        self.problems.append(Problem(path, offset, what))


@dataclass
class JournalRecords:
    """The sound records of a journal: slots [N, 4] and numbers [N], where it begins, and its last commit."""

    slots: NDArray[np.int64]
    seqs: NDArray[np.int64]
    start: int
    committed: int
    salt: int


@dataclass
class SnapshotSlots:
    """The slots of a snapshot; all of them are those that were written if it is `sound`."""

    slots: NDArray[np.int64]
    seq: int
    sound: bool


def read_journals(found: Found) -> list[JournalRecords]:
    """Return what can be read of journals."""
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
        kept = records[good]
        if block is None and not len(kept):
            continue
        start = int(kept["seq"].min()) - 1 if block is None else block.seq
        ends = kept["seq"][(kept["flags"] & COMMIT) != 0]
        committed = int(ends.max(initial=start))
        begun = np.flatnonzero(good)
        inside = np.flatnonzero(~good[: int(begun[-1]) + 1 if len(begun) else 0])
        for k in inside.tolist():
            found.note(path, SUPERBLOCK + RECORD_BYTES * k, "a record of the journal is damaged")
        slots = np.concatenate([kept["key"], kept["loc"]], axis=1)
        salt = int(kept["salt"][0]) if block is None else block.salt
        out.append(JournalRecords(slots, kept["seq"].astype(np.int64), start, committed, salt))
    return sorted(out, key=lambda journal: journal.start)


def read_snapshots(found: Found) -> list[SnapshotSlots]:
    """Return what can be read of snapshots, in the order of their ids."""
    out = []
    for id, path, data in found.files(SNAPSHOT_FILE):
        block = found.superblock(data, SNAPSHOT_FILE, id, path)
        body = np.frombuffer(data, np.uint8, max(0, len(data) - SUPERBLOCK) // SLOT_BYTES * SLOT_BYTES, SUPERBLOCK) if (
            len(data) > SUPERBLOCK
        ) else np.empty(0, np.uint8)
        slots = body.view(np.int64).reshape(-1, SLOT_BYTES // 8)
        sound = block is not None and len(slots) == block.count and crc32c(body) == block.body_crc
        if not sound and block is not None:
            found.note(path, SUPERBLOCK, "the records of the snapshot do not have their checksum")
        if not sound:
            lens = key_len_of(slots[:, 3])
            slots = slots[(slots[:, 2] > 0) & (lens >= 1) & (lens <= 16)]
        out.append(SnapshotSlots(slots, 0 if block is None else block.seq, sound))
    return out


def _sound(records: NDArray[np.void]) -> NDArray[np.bool_]:
    if not len(records):
        return np.empty(0, np.bool_)
    records = np.ascontiguousarray(records)
    places = records.ctypes.data + RECORD_BYTES * np.arange(len(records))
    crcs = crc32c_many(places, np.full(len(records), RECORD_BYTES - 4))
    lens = records["key_len"]
    sound: NDArray[np.bool_] = (records["magic"] == MAGIC) & (crcs & 0xFFFFFFFF == records["crc"])
    sound &= (lens >= 1) & (lens <= 16) & ((records["type"] == PUT) | (records["type"] == DELETE))
    return sound
