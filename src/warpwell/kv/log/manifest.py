"""Manifest: the list of a store's files; replaced as a whole, by a rename. Changes of it by a writer. Snapshots.

A snapshot has all live records in one file, which a journal continues. It is the index that all processes map. Stores
of formats 2 and 3 have a list of slots in its place (``.snap``), which is read and never written.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets.bus_error import map_guarded, unmap
from ..index.sealed import SealedIndex, block_counts, new_blocks
from .checksum import crc32c
from .files import Files, Guard, read_at, write_new
from .format import (
    FORMAT_VERSION,
    INDEX_FILE,
    JOURNAL_FILE,
    SLOT_BYTES,
    SNAPSHOT_FILE,
    SUFFIXES,
    SUPERBLOCK,
    Superblock,
    corruption,
    file_name,
    new_salt,
    newer,
    size_of,
)
from .journal import Journal, Position, journal_path, new_journal
from .segments import Segments

MANIFEST_NAME = "MANIFEST"
NEW_NAME = "MANIFEST.new"
IDENTITY_NAME = "IDENTITY"
"""A copy of the first manifest, for `salvage`: UUID, schema and other constant properties."""
TITLE = "warpwell-kv"
DURABILITIES = ("commit", "always", "none")


@dataclass(frozen=True)
class Manifest:
    """The files of a store and its fixed properties.

    Attributes
    ----------
    uuid : str
        32 hexadecimal digits; every file of the store carries them.
    durability : {"commit", "always", "none"}
    segment_bytes : int
    journal : int
        The journal's id.
    snapshot : int or None
        The snapshot that the journal continues.
    segments : tuple of int
        In the order of their creation; values are appended to the last one of each shard.
    next_segment, next_file : int
        The next unused numbers, of segment files and of other files.
    floor_seq, floor_crc : int
        A record that was durable when the manifest was written, and its checksum.
    schema : dict, optional
        JSON of the store above, such as its schema; in the manifest of a shard, its number and the folder of its store.
    previous : tuple, optional
        The previous snapshot (or None) and journal: together they hold the records of the current snapshot.
    shards : tuple of dict
        Path and UUID of each folder of segments; none if segments are in the store's own folder.
    heads : tuple of (int, int), optional
        For each shard, the segment to which values were appended when the snapshot was written, and its size at that
        time. Only records of the journal refer to later bytes of this segment and to later segments. None in stores of
        earlier releases.
    separate_logs : bool
        Each shard has its own log, as in format 2. A writer merges them.
    version : int
        The format of the file from which the manifest was read. A manifest is always written in the newest format.
    """

    uuid: str
    durability: str
    segment_bytes: int
    journal: int
    snapshot: int | None
    segments: tuple[int, ...]
    next_segment: int
    next_file: int
    floor_seq: int = 0
    floor_crc: int = 0
    schema: dict[str, Any] | None = field(default=None)
    previous: tuple[int | None, int] | None = None
    shards: tuple[dict[str, str], ...] = ()
    heads: tuple[tuple[int, int], ...] | None = None
    separate_logs: bool = False
    version: int = field(default=FORMAT_VERSION, compare=False)

    @property
    def uuid_bytes(self) -> bytes:
        """The 16 bytes in superblocks."""
        return uuids.UUID(self.uuid).bytes

    def journals(self) -> list[int]:
        """Return the journals that are kept, the current one last."""
        return [*([] if self.previous is None else [self.previous[1]]), self.journal]

    def snapshots(self) -> list[int]:
        """Return the snapshots that are kept, the current one last."""
        before = None if self.previous is None else self.previous[0]
        return [id for id in (before, self.snapshot) if id is not None]

    def pack(self) -> bytes:
        """Return the file: a line with version, length and CRC-32C, then JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "version"}
        body = json.dumps({**fields, "kinds": True}, indent=1, sort_keys=True).encode() + b"\n"
        return _title(FORMAT_VERSION, body) + body

    def publish(self, files: Files, folder: str) -> None:
        """Make this the store's manifest; it is durable once the folder is synced.

        Every file that the manifest names must be durable, including its name. If the call raises, nothing has changed.
        """
        new = os.path.join(folder, NEW_NAME)
        with contextlib.suppress(FileNotFoundError):
            files.unlink(new)  # a crash left it
        files.close(write_new(files, new, [self.pack()]))
        try:
            files.rename(new, os.path.join(folder, MANIFEST_NAME))
        except OSError:
            with contextlib.suppress(OSError):
                files.unlink(new)
            raise

    def with_changes(self, **changes: Any) -> Manifest:
        """Return a copy with other values."""
        return replace(self, **changes)


def read_identity(folder: str) -> Manifest | None:
    """Return the copy of a store's first manifest, or None if it is missing or damaged."""
    try:
        return read_manifest(folder, IDENTITY_NAME)
    except (errors.MissingFileError, errors.FormatError):
        return None


def read_manifest(folder: str, name: str = MANIFEST_NAME) -> Manifest:
    """Return a store's manifest.

    Raises
    ------
    MissingFileError
        `folder` does not exist.
    FormatError
        It is not a store, or its creation was interrupted.
    StoreVersionError
        Its format is newer, or format 1.
    CorruptionError
        The manifest is damaged.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if not os.path.lexists(folder):
            raise errors.MissingFileError(
                f"{folder} does not exist: create a store there with warpwell.kv.create, or check the path", path=folder
            ) from None
        raise errors.FormatError(
            f"{folder} is not a key-value store ({name}: {error.strerror}): check the path, or create a store there",
            path=folder,
        ) from None
    title, _, body = data.partition(b"\n")
    title_fields = title.split(b" ")
    if title_fields[0] != TITLE.encode() or len(title_fields) != 4:
        raise corruption(
            path,
            f"{path} does not start with '{TITLE}': it is damaged or belongs to another program; restore it from "
            "a copy",
            0,
        )
    version = int(title_fields[1]) if title_fields[1].isdigit() else 0
    if data != _title(version, body) + body:
        raise corruption(
            path, f"{path} is damaged or was edited: restore it from a copy, or see `warpwell kv salvage`", 0
        )
    if version > FORMAT_VERSION:
        raise newer(path, version)
    try:
        fields = json.loads(body)
        marks_integers = fields.pop("kinds", False)
        if version < 3 and "shards" in (fields["schema"] or {}):
            fields["shards"], fields["separate_logs"] = fields["schema"].pop("shards"), True
        fields["segments"], fields["shards"] = tuple(fields["segments"]), tuple(fields.get("shards", ()))
        if fields.get("previous") is not None:
            fields["previous"] = tuple(fields["previous"])
        if fields.get("heads") is not None:
            fields["heads"] = tuple(map(tuple, fields["heads"]))
        manifest = Manifest(**fields, version=version)
    except (ValueError, TypeError, KeyError) as error:
        raise corruption(
            path, f"{path} has other fields than format {version} ({error}): restore it from a copy", 0
        ) from None
    if not marks_integers:
        raise errors.StoreVersionError(
            f"{path} is of a store of format 1, but this release reads formats 2 to {FORMAT_VERSION}: dump it with the"
            " release that wrote it, and load the dump",
            path=path,
            version=1,
        )
    return manifest


def _title(version: int, body: bytes) -> bytes:
    # The checksum covers the version too: otherwise a damaged version would be reported as newer.
    crc = crc32c(body, crc32c(str(version).encode()))
    return f"{TITLE} {version} {len(body)} {crc:08x}\n".encode()


class ManifestWriter:
    """Changes the manifest of a log that is open for writing.

    Each change first makes the files durable, then their names, then the manifest. A crash in between leaves files that
    no manifest names; the next writer deletes them.

    Parameters
    ----------
    files : Files
    folder : str
    manifest : Manifest
    segments : Segments
    guard : Guard
    """

    def __init__(self, files: Files, folder: str, manifest: Manifest, segments: Segments, guard: Guard) -> None:
        self.manifest = manifest
        self._files, self._folder, self._segments, self._guard = files, folder, segments, guard

    def upgrade(self) -> None:
        """Make the store's format the newest, so that earlier releases refuse it."""
        self._publish(self.manifest)

    def add_segment(self, shard: int, durable: Position | None) -> None:
        """Begin a new segment of a shard; `durable` is the last durable record, if known."""
        number = self.manifest.next_segment
        segment = self._segments.id_of(shard, number)
        manifest = _with_floor(self.manifest, durable).with_changes(
            segments=(*self.manifest.segments, segment), next_segment=number + 1
        )
        try:
            self._segments.create(segment)
            self._publish(manifest)
        except OSError:
            if self._is_unpublished(manifest):
                self._segments.close([segment])
                self._remove(self._segments.path(segment))
            raise
        self._segments.set_head(segment, SUPERBLOCK)

    def replace_journal(self, slots: NDArray[np.int64], end: Position, drop: Sequence[int]) -> Journal:
        """Write a snapshot and start a new journal, which is returned; only the last old snapshot and journal are kept.

        Parameters
        ----------
        slots : int64 [N, 4]
            All live records.
        end : Position
            The last record; it is durable.
        drop : sequence of int
            Segments to remove from the manifest; their files stay for now.
        """
        old, id = self.manifest, self.manifest.next_file
        journal: Journal | None = None
        manifest: Manifest | None = None
        try:
            write_snapshot(self._files, self._folder, old.uuid_bytes, id, slots, end.seq, end.chain)
            journal = new_journal(self._files, self._folder, old.uuid_bytes, id + 1, end)
            self._files.sync_folder(self._folder)
            manifest = _with_floor(old, end).with_changes(
                snapshot=id,
                journal=id + 1,
                next_file=id + 2,
                segments=tuple(s for s in old.segments if s not in drop),
                heads=tuple(zip(self._segments.heads, self._segments.ends, strict=True)),
                previous=None if old.separate_logs else (old.snapshot, old.journal),
                separate_logs=False,
            )
            self._publish(manifest)
        except OSError:
            if journal is not None:
                journal.close()
            if self._is_unpublished(manifest):
                self._remove(snapshot_path(self._folder, id), journal_path(self._folder, id + 1))
            raise
        with contextlib.suppress(OSError):  # the new journal is valid already; the next writer removes the files
            remove_strays(self._files, self._folder, manifest.with_changes(segments=old.segments), self._segments)
        return journal

    def _publish(self, manifest: Manifest) -> None:
        manifest.publish(self._files, self._folder)
        # Until the folder is synced, a crash may leave the old or the new manifest.
        self._guard.sync(lambda: self._files.sync_folder(self._folder))
        self.manifest = manifest.with_changes(version=FORMAT_VERSION)

    def _is_unpublished(self, manifest: Manifest | None) -> bool:
        """Return whether the files of a new manifest may be removed: a rename that raises may have taken effect.

        If the rename took effect or may have, the log accepts no more writes.
        """
        if self._guard.failed:
            return False
        try:
            if manifest is None or read_manifest(self._folder) != manifest:
                return True
        except (OSError, errors.WarpwellError):
            pass
        self._guard.fail("an error occurred after the manifest was replaced")
        return False

    def _remove(self, *paths: str) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                self._files.unlink(path)


def _with_floor(manifest: Manifest, durable: Position | None) -> Manifest:
    return manifest if durable is None else manifest.with_changes(floor_seq=durable.seq, floor_crc=durable.chain)


def remove_strays(files: Files, folder: str, manifest: Manifest, segments: Segments) -> None:
    """Delete files that a crash left and the manifest does not name."""
    named = {segments.path(segment) for segment in manifest.segments}
    named |= {os.path.join(folder, file_name(JOURNAL_FILE, id)) for id in manifest.journals()}
    named |= {snapshot_path(folder, id) for id in manifest.snapshots()}
    for parent in dict.fromkeys([folder, *segments.paths]):
        for name in os.listdir(parent):
            stem, suffix = os.path.splitext(name)
            is_log_file = suffix in SUFFIXES.values() and stem.isdigit() and len(stem) >= 8
            if os.path.join(parent, name) not in named and (is_log_file or name == NEW_NAME):
                files.unlink(os.path.join(parent, name))


# -- snapshots ------------------------------------------------------------------------------------------------


_PART_BYTES = 64 << 20


def snapshot_path(folder: str, id: int) -> str:
    """Return a snapshot's file: an index, or a list of slots if a store of an earlier format has one."""
    old = os.path.join(folder, file_name(SNAPSHOT_FILE, id))
    return old if os.path.lexists(old) else os.path.join(folder, file_name(INDEX_FILE, id))


def is_index(folder: str, id: int) -> bool:
    """Return whether a snapshot has the present format."""
    return snapshot_path(folder, id).endswith(SUFFIXES[INDEX_FILE])


def write_snapshot(
    files: Files, folder: str, uuid: bytes, id: int, slots: NDArray[np.int64], seq: int, chain: int
) -> None:
    """Write an index file. Its contents are durable, its name is not durable yet.

    Parameters
    ----------
    files : Files
    folder : str
    uuid : bytes
    id : int
    slots : int64 [N, 4]
        key0, key1, loc0, loc1; with different keys.
    seq, chain : int
        Number of its last record, and that record's checksum.
    """
    salt = new_salt() | 1  # a salt other than 0, so that no block ends with zeros
    block_type, positions, segments, blocks = new_blocks(slots, salt)
    block = Superblock(
        INDEX_FILE,
        uuid,
        id,
        seq,
        chain,
        salt,
        count=len(slots),
        positions=positions,
        value_bytes=int(size_of(slots[:, 2], slots[:, 3]).sum()),
        segments=segments,
        block_type=block_type,
    )
    parts = [blocks[at : at + _PART_BYTES] for at in range(0, len(blocks), _PART_BYTES)]
    files.close(write_new(files, os.path.join(folder, file_name(INDEX_FILE, id)), [block.pack(), *parts]))


def open_index(folder: str, uuid: bytes, id: int) -> tuple[SealedIndex, Superblock]:
    """Map an index; return it and its superblock. No block has been read.

    Raises
    ------
    CorruptionError
        The superblock is damaged, or the file is truncated.
    FileNotFoundError
    """
    path = os.path.join(folder, file_name(INDEX_FILE, id))
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        block = Superblock.unpack(read_at(fd, SUPERBLOCK, 0), INDEX_FILE, uuid, id, path)
        size = os.fstat(fd).st_size
        nbytes = SUPERBLOCK * (1 + sum(block_counts(block.block_type, block.positions, block.segments)))
        if size != nbytes:
            raise corruption(path, f"{path} has {size} bytes, but {nbytes} are expected: restore it from a copy", size)
        address = map_guarded(fd, nbytes)
        release: Callable[[], object]
        if address is None:  # the file system cannot map files: read a copy
            copied = np.frombuffer(read_at(fd, nbytes, 0), np.uint8)
            address, release = int(copied.ctypes.data), [copied].clear
        else:
            release = partial(unmap, address, nbytes)
    return SealedIndex(path, address + SUPERBLOCK, block, release), block


def read_old_snapshot(folder: str, uuid: bytes, id: int) -> tuple[NDArray[np.int64], int, int]:
    """Return the slots of a snapshot of formats 2 and 3, its last sequence number and that record's checksum.

    Raises
    ------
    CorruptionError
        The file is damaged or truncated.
    FileNotFoundError
    """
    path = os.path.join(folder, file_name(SNAPSHOT_FILE, id))
    with open(path, "rb") as file:
        data = file.read()
    block, nbytes = Superblock.unpack(data[:SUPERBLOCK], SNAPSHOT_FILE, uuid, id, path), len(data) - SUPERBLOCK
    if nbytes != SLOT_BYTES * block.count:
        raise corruption(
            path,
            f"{path} has {nbytes} bytes of records, but {SLOT_BYTES * block.count} are expected: restore it from a "
            "copy",
            SUPERBLOCK,
        )
    slots = np.frombuffer(data[SUPERBLOCK:], np.int64).reshape(-1, SLOT_BYTES // 8)
    if crc32c(slots) != block.body_crc:
        raise corruption(
            path,
            f"{path} is damaged: its {block.count} records do not match its checksum; "
            "restore it from a copy, or copy its undamaged records into a new store with `warpwell kv salvage`",
            SUPERBLOCK,
        )
    return slots, block.seq, block.chain
