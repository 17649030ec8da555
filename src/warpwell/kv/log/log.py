"""Log: the crash-safe record of a store's puts and deletes on disk.

A commit makes a group of records durable, in this order::

    values to their segments
    records to the journal, with the commit mark in the last one; then, in a small group, the values again
    fdatasync of the journal; if it lacks the group's values, also of the segments, at the same time
    the floor in COMMITTED        the commit is acknowledged

After a crash the last group may lack values, which their checksums reveal. The flag `SYNCED` of a later group proves
that the groups before it are complete. See `journal` for values that are durable in the journal only.

A new segment and its name are durable before the manifest names the segment. A rename replaces the manifest before a
record refers to the segment. After a failed fsync the log never retries: it accepts no more writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid as uuids
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..index.sealed import SealedIndex
from .files import LOCK_NAME, Files, Guard, WriterLock, check_process, full, storage_full, write_new
from .format import (
    DELETE,
    FORMAT_VERSION,
    INLINE_VERSION,
    INTEGER,
    LONG,
    MAX_SEGMENT_BYTES,
    MOVED,
    PUT,
    RECORD_BYTES,
    SLOT_BYTES,
    SUPERBLOCK,
    low_size,
    segment_of,
    slots_of,
)
from .journal import COMMITTED_NAME, INLINE_BYTES, Floor, Pending, Position, Values, new_journal, new_records
from .manifest import (
    DURABILITIES,
    IDENTITY_NAME,
    MANIFEST_NAME,
    NEW_NAME,
    Manifest,
    ManifestWriter,
    is_index,
    open_index,
    read_manifest,
)
from .recovery import (
    Changes,
    LoadedLog,
    Recovered,
    follow,
    load,
    load_for_reading,
    missing,
    open_segments,
    repair,
)
from .segments import SegmentFolder, Segments, ValueBuffers
from .shards import take_shards, written
from .staged import Staged, StagedEncoder, sealed_group

_SPILL = 1 << 18
"""Maximum number of records of one group that are kept in memory."""
UNSYNCED_BYTES = 4 << 20
"""Maximum size of values that are durable in the journal only, in bytes: opening a store checks them."""
JOURNAL_VALUE_BYTES = 64 << 20
"""Size of the values in a journal at which a snapshot replaces it, in bytes; the size of its records if that is
larger."""


class Log:
    """A log in a folder; see `create` and `open`.

    Attributes
    ----------
    path : str
    writable : bool
    durability : {"commit", "always", "none"}
        When records become durable: at `commit`, at every append, or only at `snapshot` and `close`.
    segment_bytes : int
    uuid : str
    schema_json : dict or None
        The schema that was passed to `create`.
    lock : threading.RLock
        Every method acquires it. A caller with an index holds it while it appends and changes its index, so that a
        compaction in another thread sees both changes or neither.
    segments : Segments
        The files of values, and their descriptors.
    guard : Guard
    recovered : Recovered
        The records at opening; set it to None when the index is built.
    retired : set of int
        Segments whose descriptors are open although no location refers to them.
    on_snapshot : callable or None
        Called with the index that `snapshot` has written, with `lock` held.
    """

    def __init__(
        self,
        folder: str,
        files: Files,
        manifest: Manifest,
        segments: Segments,
        loaded: LoadedLog,
        writer: WriterLock | None = None,
        floor: Floor | None = None,
    ) -> None:
        self.path, self.writable = folder, writer is not None
        self.durability, self.segment_bytes = manifest.durability, manifest.segment_bytes
        self.uuid, self.schema_json = manifest.uuid, manifest.schema
        self.lock = threading.RLock()
        self.recovered: Recovered | None = loaded
        self.on_snapshot: Callable[[SealedIndex], object] | None = None
        self.guard = Guard(folder)
        self.retired: set[int] = set()
        self._files, self.segments, self._manifest = files, segments, manifest
        self._journal = loaded.journal
        self._manifest_writer = ManifestWriter(files, folder, manifest, segments, self.guard)
        self._floor, self._writer = floor, writer
        self._pending = Pending()
        self._spilled = 0
        self._unsynced = False  # the journal has records that may not be durable
        self._emptied: set[int] = set()
        self._pid = os.getpid()
        self._closed = False
        self._live = len(loaded.slots) if loaded.base is None else loaded.base.count
        self._start_seq = loaded.start_seq
        # Values of records up to this one are durable in their segments.
        self._in_segments = self._journal.position.seq
        self._synced_value_bytes = self._value_bytes  # bytes of values in the journal at that record

    # -- creation and opening ---------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        schema_json: dict[str, Any] | None = None,
        durability: str = "commit",
        segment_bytes: int = 256 << 20,
        shards: Sequence[str] = (),
        files: Files | None = None,
    ) -> Log:
        """Create an empty log and open it for writing.

        Parameters
        ----------
        folder : path-like
            A path that does not exist, or an empty folder. Its parent must exist.
        schema_json : dict, optional
            Stored in the manifest.
        durability : {"commit", "always", "none"}
        segment_bytes : int
            At least 64 KiB.
        shards : sequence of str
            Absolute paths of folders for the segments, which must be empty or not exist. Default: the log's own folder.
        files : Files, optional
            The system calls.

        Raises
        ------
        ArgumentError
            `folder` already exists, or an option is not valid.
        MissingFileError
            The parent does not exist.
        StorageFullError
        """
        path = os.path.abspath(folder)
        files = files or Files()
        if durability not in DURABILITIES:
            raise errors.ArgumentError(
                f"durability={durability!r}: choose one of {', '.join(map(repr, DURABILITIES))}", name="durability"
            )
        if not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise errors.ArgumentError(
                f"segment_bytes={segment_bytes}: choose from {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES} bytes",
                name="segment_bytes",
            )
        manifest = Manifest(uuids.uuid4().hex, durability, int(segment_bytes), 1, None, (), 2, 2, schema=schema_json)
        with contextlib.ExitStack() as undo, _translate_os_errors(path, "choose a folder that can be written"):
            writer = _new_folder(files, path, undo)
            folders = [SegmentFolder(path, manifest.uuid_bytes)]
            if shards:
                folders = [_create_shard(files, path, manifest, k, shard, undo) for k, shard in enumerate(shards)]
            segments = Segments(files, folders, segment_bytes, writable=True)
            first = tuple(segments.id_of(shard, 1) for shard in range(len(folders)))
            listed = tuple({"path": written(shard, path), "uuid": uuid.hex()} for shard, uuid in folders if shards)
            heads = tuple((segment, SUPERBLOCK) for segment in first)
            manifest = manifest.with_changes(segments=first, shards=listed, heads=heads)
            try:
                for segment in first:
                    segments.create(segment)
            finally:
                segments.close()
            new_journal(files, path, manifest.uuid_bytes, 1, Position(SUPERBLOCK, 0, 0)).close()
            Floor(files, path, manifest.uuid_bytes).close()
            files.close(write_new(files, os.path.join(path, IDENTITY_NAME), [manifest.pack()]))
            files.sync_folder(os.path.dirname(path))
            files.sync_folder(path)
            undo.callback(
                remove_made, path, False
            )  # `undo` runs this first: it removes the manifest before other files
            manifest.publish(files, path)
            files.sync_folder(path)
            log = cls._open(files, path, writer)
            undo.pop_all()
            return log

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, writable: bool, files: Files | None = None) -> Log:
        """Open a log and recover its records.

        A writer removes records after the last commit (left by a crash); a reader ignores them.

        Raises
        ------
        MissingFileError, FormatError, StoreVersionError
            The folder does not hold a store, or its format is newer.
        CorruptionError
            Committed data is damaged or missing. Nothing is changed.
        SharingError
            Another writer has it open.
        """
        path = os.path.abspath(folder)
        files = files or Files()
        if not writable:
            return cls(path, files, *load_for_reading(files, path))
        read_manifest(path)  # raise before a lock file is created in a folder that is not a store
        with _translate_os_errors(path, 'open it with mode="r"'):
            writer = WriterLock(files, path)
            try:
                return cls._open(files, path, writer)
            except BaseException:
                writer.release(opened=False)
                raise

    @classmethod
    def _open(cls, files: Files, path: str, writer: WriterLock) -> Log:
        """Open a log for writing and repair it after a crash."""
        manifest = read_manifest(path)  # the writer before us may have replaced it
        segments = open_segments(files, path, manifest, writable=True)
        take_shards(files, path, manifest)
        with contextlib.ExitStack() as undo:
            undo.callback(segments.close)
            try:
                manifest, loaded = load(files, path, manifest, segments, writable=True)
            except FileNotFoundError as error:
                raise missing(error) from None
            undo.callback(loaded.close)
            repair(files, path, loaded, manifest, segments)
            for segment in manifest.segments:
                # After the file's end, not after the last live record: readers may still use a replaced value.
                segments.set_head(segment, segments.size(segment))
            floor = Floor(files, path, manifest.uuid_bytes)
            undo.callback(floor.close)
            log = cls(path, files, manifest, segments, loaded, writer, floor)
            if manifest.separate_logs:
                log.snapshot(loaded.live())  # it replaces the logs of the shards
            else:
                floor.raise_to(loaded.journal.position, loaded.journal.salt, loaded.journal.position.seq)
            undo.pop_all()
            return log

    # -- appending --------------------------------------------------------------------------------------------

    def append(
        self,
        keys: NDArray[np.uint8],
        key_lens: NDArray[np.uint8],
        values: Any,
        *,
        shards: NDArray[np.uint8] | None = None,
        moved: bool = False,
    ) -> NDArray[np.int64]:
        """Append puts and return their slots; they are durable once `commit` has returned.

        Parameters
        ----------
        keys : uint8 [N, 16]
        key_lens : uint8 [N]
            They have the flag `INTEGER` if a key was passed as an integer.
        values : sequence, numpy.ndarray or Ragged
            See `ValueBuffers.of`.
        shards : uint8 [N], optional
            The shard of each value; default 0.
        moved : bool, default False
            Whether the records are copies made by a compaction.

        Returns
        -------
        int64 [N, 4]
            See `format.slots_of`; shard by shard.

        Raises
        ------
        StorageFullError
            Nothing was appended.
        StoreFailedError
            A write failed, in this call or an earlier one.
        """
        with self.lock:
            self._check_writable()
            if not len(key_lens):
                return np.empty((0, SLOT_BYTES // 8), np.int64)
            groups = _by_shard(ValueBuffers.of(values), shards)
            with self.guard.writing():
                if self._pending.count >= _SPILL:
                    self._spill()
                if self._manifest.version < FORMAT_VERSION:
                    largest = max(buffers.largest for _, _, buffers in groups)
                    self._upgrade_for(largest, int((key_lens & (INTEGER - 1)).max(initial=0)))
                is_small = sum(buffers.nbytes for _, _, buffers in groups) <= INLINE_BYTES
                copies: Values | None = [] if is_small and not moved and self.durability != "none" else None
                pieces = []
                for shard, rows, buffers in groups:
                    lens, locs = np.ascontiguousarray(key_lens[rows]), np.empty((len(buffers.sizes), 2), np.int64)
                    self.segments.append(shard, partial(buffers.encode, lens, locs), self._roll, copies)
                    pieces.append(new_records(PUT, keys[rows], lens, locs, MOVED if moved else 0))
                records = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
                self._pending.add(records, copies)
                self._pending.moved += len(records) if moved else 0
            self._always()
            return slots_of(records)

    def append_staged(self, staged: Staged, nbytes: int) -> NDArray[np.int64]:
        """Append the puts of staged records and return their slots; see `append`.

        `nbytes` is the approximate size of the values with their padding, in bytes.
        """
        with self.lock:
            self._check_writable()
            with self.guard.writing():
                if self._pending.count >= _SPILL:
                    self._spill()
                copies: Values | None = None if self.durability == "none" else []
                encoder = StagedEncoder(staged, nbytes, len(self.segments.paths))
                for shard in range(len(self.segments.paths)):
                    self.segments.append(shard, partial(encoder.encode, shard), self._roll, copies)
                records = encoder.records[0] if len(encoder.records) == 1 else np.concatenate(encoder.records)
                self._pending.add(records, copies)
            return slots_of(records)

    def commit_staged(self, staged: Staged, nbytes: int, index: Callable[[NDArray[np.int64]], object]) -> int | None:
        """Append and commit the puts of staged records, like `append_staged` and `commit`, with fewer calls.

        The call commits only a small group that needs no other change of files. Otherwise it changes nothing and
        returns None.

        Parameters
        ----------
        staged : Staged
        nbytes : int
            Approximate size of the records, and of the values with their padding, in bytes.
        index : callable
            Called with the slots of the records when they are in the journal.
        """
        with self.lock:
            self._check_writable()
            segments, journal = self.segments, self._journal
            is_simple = self.durability == "commit" and len(segments.paths) == 1 and nbytes <= INLINE_BYTES
            if not is_simple or self._pending.count or self._spilled or self._unsynced or not self._can_inline(nbytes):
                return None
            found = sealed_group(staged, nbytes, segments.heads[0], segments.ends[0], segments.limit, journal)
            if found is None:
                return None
            (group, nbytes, chain), count = found, len(staged)
            with self.guard.writing():
                segments.write_placed(group[RECORD_BYTES * count : nbytes])
                self._unsynced = True
                journal.write_group(group, count, chain)
                index(slots_of(group[: RECORD_BYTES * count]))
                self._sync(segments=False)
            return journal.position.seq

    def append_deletes(self, keys: NDArray[np.uint8], key_lens: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Append deletes and return their slots; see `append`."""
        with self.lock:
            self._check_writable()
            records = new_records(DELETE, keys, np.ascontiguousarray(key_lens))
            if len(records):
                with self.guard.writing():
                    if self._pending.count >= _SPILL:
                        self._spill()
                    self._pending.add(records, [])
                self._always()
            return slots_of(records)

    def commit(self) -> int:
        """Make all appended records durable, as one group; return the last durable sequence number.

        With durability "none" records only reach the operating system: a killed process loses none of them, but a power
        failure may lose some.

        Raises
        ------
        StorageFullError
            Nothing was committed. The appended records remain, and `commit` can be called again.
        StoreFailedError
            A write or fsync failed: the log accepts no more writes.
        """
        with self.lock:
            self._check_writable()
            journal = self._journal
            if self._pending.count:
                records, values = self._pending.take()
                is_inline = values is not None and self._can_inline(sum(map(len, values)))
                with self.guard.writing():
                    self._write_records(records, last=True, values=values if is_inline else None)
                    self._pending.clear()
                    self._spilled = 0
                    if self.durability != "none":
                        self._sync(segments=not is_inline)
            elif self._unsynced and self.durability != "none":  # an earlier call was interrupted
                with self.guard.writing():
                    self._sync()
            return journal.position.seq

    def _can_inline(self, nbytes: int) -> bool:
        """Return whether the journal has room for `nbytes` bytes of values of a group."""
        end = self._value_bytes + nbytes
        return (
            self.durability != "none"
            and self._manifest.version >= INLINE_VERSION
            and end - self._synced_value_bytes <= UNSYNCED_BYTES
            and end <= self._max_value_bytes
        )

    @property
    def _value_bytes(self) -> int:
        """Bytes of values in the journal."""
        end = self._journal.position
        return end.offset - SUPERBLOCK - RECORD_BYTES * (end.seq - self._start_seq)

    @property
    def _max_value_bytes(self) -> int:
        return max(JOURNAL_VALUE_BYTES, SLOT_BYTES * self._live)

    # -- snapshots --------------------------------------------------------------------------------------------

    @property
    def snapshot_due(self) -> bool:
        """Whether a snapshot would make opening notably faster or free space."""
        records = self._journal.position.seq - self._start_seq
        is_full = self._value_bytes > self._max_value_bytes - INLINE_BYTES
        return records > max(65_536, self._live // 2) or is_full or bool(self._emptied and not self.group_open)

    @property
    def is_sealed(self) -> bool:
        """Whether an index file has all committed records, and the journal is empty."""
        has_index = self._manifest.snapshot is not None and is_index(self.path, self._manifest.snapshot)
        return has_index and self._journal.position.seq == self._start_seq

    @property
    def group_open(self) -> bool:
        """Whether a caller has appended records without committing them."""
        return self._pending.count + self._spilled > self._pending.moved

    def snapshot(self, slots: NDArray[np.int64]) -> None:
        """Commit, write all live records to one file, and start a new journal.

        Parameters
        ----------
        slots : int64 [N, 4]
            Every live record of the index. The caller must hold `lock` since it read them.
        """
        with self.lock:
            self._check_writable()
            self.commit()
            drop = sorted(self._emptied)
            wrong = set(np.unique(segment_of(slots[:, 2])).tolist()) - (set(self._manifest.segments) - set(drop))
            if wrong or set(self.segments.heads) & set(drop):
                raise errors.ArgumentError(
                    f"records are in segments {sorted(wrong)}, which will be removed: move the records first",
                    name="slots",
                )
            with self.guard.writing():
                self._sync()
                self._journal.trim()
            with self.guard.writing(), self.guard.replacing_manifest():
                journal = self._manifest_writer.replace_journal(slots, self._journal.position, drop)
                self._manifest = self._manifest_writer.manifest
                self._journal.close()
                self._journal, self._start_seq, self._live = journal, journal.position.seq, len(slots)
                self._in_segments, self._synced_value_bytes = journal.position.seq, 0
                self.retired |= self._emptied
                self._emptied = set()
            if self.on_snapshot is not None:
                with contextlib.suppress(OSError):  # the caller's index has the same records
                    self.on_snapshot(open_index(self.path, self._manifest.uuid_bytes, self._manifest.snapshot or 0)[0])

    # -- segments without records ------------------------------------------------------------------

    def emptied(self, segments: Sequence[int]) -> None:
        """Register segments without live values: the next snapshot removes them from the manifest."""
        with self.lock:
            self._emptied |= set(segments)

    def release(self, segments: Sequence[int]) -> None:
        """Close retired segments once no reader uses them; a writer also deletes their files."""
        with self.lock:
            closing = [s for s in segments if s in self.retired]
            self.segments.close(closing)
            self.retired.difference_update(closing)
            if self.writable and not self.guard.failed:
                check_process(self._pid, self.path)
                with self.guard.writing():
                    for segment in closing:
                        with contextlib.suppress(FileNotFoundError):
                            self._files.unlink(self.segments.path(segment))

    # -- reading ----------------------------------------------------------------------------------------------

    def refresh(self, *, reads_all: bool = False) -> Changes:
        """Return the records that a writer has committed since the last call (for readers; none for a writer).

        With `reads_all` it returns all records, for a caller that may have lost the records of the last call.

        Raises
        ------
        CorruptionError
        """
        with self.lock:
            self.check_open()
            if self.writable:
                return Changes(0, None, np.empty((0, 4), np.int64))
            self._journal, self._manifest, retired, changes = follow(
                self._files, self.path, self._manifest, self.segments, self._journal, reads_all=reads_all
            )
            self.retired |= retired
            return changes

    def uncommitted(self) -> int:
        """Return the number of records that the next commit makes durable."""
        with self.lock:
            return self._pending.count + self._spilled

    @property
    def seq(self) -> int:
        """Sequence number of the last committed record."""
        return self._journal.position.seq

    @property
    def failed(self) -> bool:
        """Whether a write failed; the log accepts no writes after that."""
        return self.guard.failed

    def roll(self, shard: int = 0) -> None:
        """Begin a new segment of a shard."""
        with self.lock:
            self._check_writable()
            with self.guard.writing():
                self._roll(shard)

    # -- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit, and close the log. In a forked child it closes without a commit."""
        with self.lock:
            if self._closed:
                return
            clean = False
            try:
                if self.writable and not self.guard.failed and os.getpid() == self._pid:
                    self.commit()
                    with self.guard.writing():
                        self._sync()
                        self._journal.trim()
                        if self._floor is not None:
                            self.guard.sync(self._floor.sync)
                    self.release(sorted(self.retired))
                    clean = True
            finally:
                self._release_files(clean=clean)

    def _release_files(self, *, clean: bool) -> None:
        self._closed = True
        if self.recovered is not None and self.recovered.base is not None:
            self.recovered.base.close()
        self.segments.close()
        self._journal.close()
        if self._floor is not None:
            self._floor.close()
        if self._writer is not None:
            self._writer.release(clean=clean)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- internals --------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise errors.ClosedError(f"{self.path} is closed: open it again")

    def _check_writable(self) -> None:
        if not self._closed and self.writable and os.getpid() == self._pid and not self.guard.failed:
            return
        self.check_open()
        if not self.writable:
            raise errors.ReadOnlyError(f'{self.path} is open for reading only: open it with mode="r+"')
        check_process(self._pid, self.path)
        self.guard.check()

    def _write_records(self, records: NDArray[Any], *, last: bool, values: Values | None = None) -> None:
        if self.durability != "none" and self._unsynced:
            self._sync()  # an earlier call was interrupted
        self._unsynced = True
        self._journal.write(records, synced=self.durability != "none", last=last, values=values)

    def _sync(self, *, segments: bool = True) -> None:
        """Make records durable, and values unless the journal has the values of the last group; raise the floor."""
        journal, unsynced = self._journal, self.segments.unsynced() if segments else {}
        fds = [self.segments.fd(segment) for segment in unsynced]
        if self._unsynced:
            fds.append(journal.fd)
        if fds:
            self.guard.sync(lambda: self._files.sync_all(fds))
        self.segments.mark_synced(unsynced)
        is_new = self._unsynced
        self._unsynced = False
        if segments:
            is_new |= self._in_segments != journal.position.seq
            self._in_segments, self._synced_value_bytes = journal.position.seq, self._value_bytes
        if is_new and self._floor is not None:
            self._floor.raise_to(journal.position, journal.salt, self._in_segments)

    def _always(self) -> None:
        if self.durability != "always":
            return
        try:
            self.commit()
        except errors.StorageFullError:
            self._pending = Pending()  # an append that raises must not append records
            raise

    def _spill(self) -> None:
        """Write records of an unfinished group to the journal; keep the last one, which will carry the commit mark."""
        records, _ = self._pending.take()
        count = len(records) - 1
        self._write_records(records[:count], last=False)
        self._spilled += count
        self._pending.clear(keep=1)

    def _upgrade_for(self, nbytes: int, key_len: int) -> None:
        """Upgrade the format before writing a value size or a long key that earlier releases cannot read."""
        if low_size(nbytes) != nbytes or key_len == LONG:
            with self.guard.replacing_manifest():
                self._manifest_writer.upgrade()
                self._manifest = self._manifest_writer.manifest

    def _roll(self, shard: int) -> None:
        unsure = self._unsynced
        with self.guard.replacing_manifest():
            self._manifest_writer.add_segment(shard, None if unsure else self._journal.position)
            self._manifest = self._manifest_writer.manifest


def _by_shard(values: ValueBuffers, shards: NDArray[np.uint8] | None) -> list[tuple[int, Any, ValueBuffers]]:
    """Return the shards of a batch, each with its rows and its values."""
    if shards is None:
        return [(0, slice(None), values)]
    rows_of = [(shard, np.flatnonzero(shards == shard)) for shard in np.unique(shards).tolist()]
    return [(shard, rows, values.take(rows)) for shard, rows in rows_of]


# -- creation and opening of files ----------------------------------------------------------------------------


MIN_SEGMENT_BYTES = 1 << 16


def _new_folder(files: Files, path: str, undo: contextlib.ExitStack) -> WriterLock:
    """Make the folder of a new store and take its lock; `undo` removes both."""
    made = False
    try:
        files.mkdir(path)
        made = True
    except FileNotFoundError:
        raise errors.MissingFileError(
            f"{os.path.dirname(path)}: no such folder to create {os.path.basename(path)} in; create it first", path=path
        ) from None
    except FileExistsError:
        if not os.path.isdir(path):
            raise errors.ArgumentError(
                f"{path} is a file: choose another name, or remove it yourself", name="path"
            ) from None
        _check_empty(path)
    try:
        writer = WriterLock(files, path)
        undo.callback(writer.release, clean=False)
        _check_empty(path)
        for name in os.listdir(path):  # an interrupted creation left these files
            if name != LOCK_NAME:
                files.unlink(os.path.join(path, name))
    except BaseException as error:
        # Another process is creating a store here. If the error has a cause, the file system has no locks.
        is_locked = isinstance(error, errors.SharingError) and error.__cause__ is None
        if made and not is_locked and not isinstance(error, errors.ArgumentError):
            remove_made(path, made)
        raise
    undo.callback(remove_made, path, made)
    return writer


def _create_shard(
    files: Files, main: str, manifest: Manifest, number: int, path: str, undo: contextlib.ExitStack
) -> SegmentFolder:
    """Create the folder of a shard, durably, without segments."""
    identity = uuids.uuid4()
    schema = {"shard": number, "store": written(main, path)}
    own = manifest.with_changes(uuid=identity.hex, schema=schema, journal=0, next_segment=0, next_file=0)
    with _translate_os_errors(path, "choose a folder that can be written"):
        writer = _new_folder(files, path, undo)
        own.publish(files, path)
        files.sync_folder(os.path.dirname(path))
        files.sync_folder(path)
    writer.release()
    return SegmentFolder(path, identity.bytes)


@contextlib.contextmanager
def _translate_os_errors(path: str, instead: str) -> Iterator[None]:
    """Turn errors of the system that users can correct into Warpwell's errors."""
    try:
        yield
    except errors.WarpwellError:
        raise
    except OSError as error:
        if full(error):
            raise storage_full(path) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise errors.ReadOnlyError(
                f"{path} cannot be written ({os.strerror(error.errno)}): {instead}, or change its file system or "
                "permissions"
            ) from error
        raise


def _check_empty(path: str) -> None:
    """Raise ArgumentError if a folder has files that are not from an interrupted creation."""
    names = os.listdir(path)
    if MANIFEST_NAME in names:
        raise errors.ArgumentError(
            f'{path} is already a store: open it with mode="r+", or replace it with overwrite=True', name="path"
        )
    for name in names:
        if not _left_over(os.path.join(path, name)):
            raise errors.ArgumentError(
                f"{path} exists and holds other files ({name}): choose another name, or remove it yourself", name="path"
            )


def remove_made(path: str, made: bool) -> None:
    """Remove the files of a creation that failed, and the folder if the creation made it."""
    with contextlib.suppress(OSError):
        # The manifest first: a crash in this loop must leave either a whole store or a folder that is not a store.
        for name in sorted(os.listdir(path), key=lambda name: name != MANIFEST_NAME):
            os.unlink(os.path.join(path, name))
        if made:
            os.rmdir(path)


def _left_over(path: str) -> bool:
    """Return whether a file can only belong to a store that never had a record."""
    name = os.path.basename(path)
    if name in (LOCK_NAME, NEW_NAME, IDENTITY_NAME):
        return True
    empty = os.path.getsize(path) <= SUPERBLOCK
    return empty and (name == COMMITTED_NAME or os.path.splitext(name)[1] in (".val", ".jnl"))
