"""Log: the crash-safe record of a store's puts and deletes on disk.

A commit makes a group of records durable, in this order::

    values to their segments      fdatasync of the segments
    records to the journal, the mark in the last one      fdatasync of the journal
    the floor (see `floor`)       the commit is acknowledged

A new segment is durable, with its name, before the manifest names it, and the manifest is replaced by a rename
before a record names the segment. An fsync that failed is never tried again: the log takes no more writes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import uuid as uuids
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .checksum import crc32c
from .files import Files, closing_on_error, full, storage_full, write_new
from .floor import Floor
from .folder import make_folder, remove_made
from .following import Changes, follow, load_for_reading
from .format import (
    CRC_SHIFT,
    DELETE,
    JOURNAL_FILE,
    KEY_LEN_SHIFT,
    MAGIC,
    MAX_VALUE,
    MOVED,
    PAGE,
    PUT,
    SEGMENT_SHIFT,
    SUPERBLOCK,
    UNIT,
    Superblock,
    footprint,
    new_salt,
    segment_of,
    size_of,
)
from .journal import Journal, Pending, Position, journal_path, new_records
from .lock import WriterLock, check_process
from .manifest import DURABILITIES, Manifest, read_manifest
from .recovery import Recovered, join, live, load, remove_strays, repair, split
from .segments import Segments, Values
from .snapshot import snapshot_path, write_snapshot

MIN_SEGMENT_BYTES = 1 << 16
_SPILL = 1 << 18
"""Records of one group that are kept in memory."""
_BATCH = 1 << 17
"""Values that are placed at once."""
_PACKED = struct.Struct("<IBBHq16sqqIIII")


@dataclass(frozen=True)
class LogStatistics:
    """Sizes of a log: `segments` files with `value_bytes` in all, and `journal_records` since the snapshot."""

    segments: int
    value_bytes: int
    journal_records: int
    seq: int
    durable_seq: int


class Log:
    """A log in a folder; see `create` and `open`.

    Attributes
    ----------
    path : str
    writable : bool
    durability : {"commit", "always", "none"}
        When records are made durable: at `commit`, at every append, or at `snapshot` and `close` only.
    segment_bytes : int
    uuid : str
    schema_json : dict or None
        What `create` was given.
    lock : threading.RLock
        Every method takes it. A caller with an index holds it over an append and the change of its index, so that
        compaction, in another thread, finds both or neither.
    recovered : Recovered
        The live records at opening; set it to None when the index is built.
    """

    def __init__(self, folder: str, files: Files, manifest: Manifest, segments: Segments, writable: bool) -> None:
        self.path, self.writable = folder, writable
        self.durability, self.segment_bytes = manifest.durability, manifest.segment_bytes
        self.uuid, self.schema_json = manifest.uuid, manifest.schema
        self.lock = threading.RLock()
        self.recovered: Recovered | None = None
        self._files, self._manifest, self._segments = files, manifest, segments
        self._pending = Pending()
        self._spilled = 0
        self._pid = os.getpid()
        self._failure: tuple[str, int | None] | None = None
        self._closed = False
        self._retired: set[int] = set()
        self._floor: Floor | None = None
        self._writer: WriterLock | None = None
        self._journal: Journal | None = None
        self._start_seq = 0
        self._live_at_open = 0
        self._unsynced_journal = False

    # -- creation and opening ---------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        schema_json: dict[str, Any] | None = None,
        durability: str = "commit",
        segment_bytes: int = 256 << 20,
        files: Files | None = None,
    ) -> Log:
        """Create an empty log and open it for writing.

        Parameters
        ----------
        folder : path-like
            Where nothing is, or an empty folder. Its parent must exist.
        schema_json : dict, optional
            Kept in the manifest.
        durability : {"commit", "always", "none"}
        segment_bytes : int
            From 64 KiB on.
        files : Files, optional
            The system calls.

        Raises
        ------
        ArgumentError
            Something is there already, or an option cannot be.
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
        if not MIN_SEGMENT_BYTES <= segment_bytes < 1 << 40:
            raise errors.ArgumentError(
                f"segment_bytes={segment_bytes}: choose from {MIN_SEGMENT_BYTES} to 2**40 bytes", name="segment_bytes"
            )
        identity = uuids.uuid4()
        manifest = Manifest(
            identity.hex, durability, int(segment_bytes), 1, None, (1,), 2, 2, schema=schema_json
        )
        made = make_folder(files, path)
        lock = segments = floor = None
        try:
            lock = WriterLock(files, path)
            segments = Segments(files, path, identity.bytes, segment_bytes, writable=True)
            segments.create(1)
            segments.set_head(1, SUPERBLOCK)
            journal, _ = _new_journal(files, path, identity.bytes, 1, Position(SUPERBLOCK, 0, 0))
            journal.close()
            floor = Floor(files, path, identity.bytes)
            floor.close()
            manifest.publish(files, path)
            files.sync_folder(path)
            files.sync_folder(os.path.dirname(path))
        except BaseException as error:
            if segments is not None:
                segments.close()
            remove_made(path, made)
            if lock is not None:
                lock.release()
            if isinstance(error, OSError) and not isinstance(error, errors.WarpwellError) and full(error):
                raise storage_full(path) from error
            raise
        segments.close()
        lock.release()
        return cls.open(path, writable=True, files=files)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, writable: bool, files: Files | None = None) -> Log:
        """Open a log and recover its records.

        A writer drops what a crash left behind the last commit; a reader leaves it alone.

        Raises
        ------
        MissingFileError, FormatError, StoreVersionError
            No store, or a newer one.
        CorruptionError
            Something that had been committed is damaged or missing. Nothing is changed.
        SharingError
            Another writer has it open.
        """
        path = os.path.abspath(folder)
        files = files or Files()
        manifest = read_manifest(path)
        if not writable:
            manifest, segments, loaded = load_for_reading(files, path)
            log = cls(path, files, manifest, segments, writable)
            log._journal = Journal(files, loaded.fd, loaded.salt, loaded.position)
            log.recovered = Recovered(*split(live(loaded.slots, loaded.distinct)))
            return log
        writer = WriterLock(files, path)
        try:
            manifest = read_manifest(path)  # the writer before us may have replaced it
        except BaseException:
            writer.release()
            raise
        segments = Segments(files, path, manifest.uuid_bytes, manifest.segment_bytes, writable=True)
        try:
            try:
                loaded = load(files, path, manifest, segments, writable=True)
            except FileNotFoundError as error:
                raise errors.CorruptionError(
                    f"{error.filename} is missing: the store's manifest names it; restore it from a copy",
                    path=error.filename,
                ) from None
            with closing_on_error(files, loaded.fd):
                repair(files, path, loaded, manifest, segments)
                head = manifest.segments[-1]
                # Behind the file's end, not behind the last record: a location is never used twice.
                segments.set_head(head, segments.size(head))
                log = cls(path, files, manifest, segments, writable)
                log._journal = Journal(files, loaded.fd, loaded.salt, loaded.position)
                log._start_seq = loaded.start.seq
                log._floor = Floor(files, path, manifest.uuid_bytes)
                log._floor.raise_to(loaded.position.seq, loaded.position.chain)
            log._writer = writer
            log.recovered = Recovered(*split(live(loaded.slots, loaded.distinct)))
            log._live_at_open = len(log.recovered)
            return log
        except BaseException as error:
            segments.close()
            writer.release()
            if isinstance(error, OSError) and not isinstance(error, errors.WarpwellError) and full(error):
                raise storage_full(path) from error
            raise

    # -- appending --------------------------------------------------------------------------------------------

    def append(
        self, keys: NDArray[np.uint8], key_lens: NDArray[np.uint8], values: Any, *, moved: bool = False
    ) -> NDArray[np.int64]:
        """Append puts and return the values' locations; they count once `commit` has returned.

        Parameters
        ----------
        keys : uint8 [N, 16]
        key_lens : uint8 [N]
        values : sequence of bytes-like, or uint8 [N, nbytes]
        moved : bool, default False
            Mark them as copies of compaction.

        Returns
        -------
        int64 [N, 2]

        Raises
        ------
        StorageFullError
            Nothing was appended.
        StoreFailedError
            A write failed, now or earlier.
        """
        with self.lock:
            self._check_writable()
            given = values if isinstance(values, Values) else Values(values)
            count = len(given.sizes)
            locs = np.empty((count, 2), np.int64)
            with self._guarded():
                if self._pending.count >= _SPILL:
                    self._spill()
                at = 0
                while at < count:
                    part = given.sizes[at : at + _BATCH]
                    fit, offsets, end = self._segments.fits(part)
                    if fit == 0:
                        self._roll()
                        continue
                    locs[at : at + fit] = self._segments.write(given, at, offsets, key_lens[at : at + fit])
                    self._segments.set_head(self._segments.head, end)
                    at += fit
                records = new_records(PUT, keys, key_lens, MOVED if moved else 0)
                records["loc"] = locs
                self._pending.add(records)
            self._always()
            return locs

    def append_one(self, key: bytes, value: Any) -> tuple[int, int]:
        """Append one put and return the two words of its location; as `append`, but faster."""
        with self.lock:
            self._check_writable()
            nbytes = len(value) if isinstance(value, bytes) else memoryview(value).nbytes
            if nbytes > MAX_VALUE:
                raise errors.ValueSizeError(
                    f"the value has {nbytes} bytes, and a store takes at most {MAX_VALUE}: split it",
                    name="value",
                    nbytes=nbytes,
                )
            segments = self._segments
            with self._guarded():
                if self._pending.count >= _SPILL:
                    self._spill()
                offset = _place_one(segments.end, nbytes)
                if offset + nbytes > self.segment_bytes and segments.end != SUPERBLOCK:
                    self._roll()
                    offset = _place_one(segments.end, nbytes)
                segments.write_one(value, nbytes, offset)
                segments.set_head(segments.head, offset + nbytes)
                loc0 = segments.head << SEGMENT_SHIFT | offset // UNIT
                crc = crc32c(value) if nbytes else 0
                loc1 = (crc - (crc >> 31 << 32)) << CRC_SHIFT | len(key) << KEY_LEN_SHIFT | nbytes
                self._pending.add_packed(
                    _PACKED.pack(MAGIC, PUT, len(key), 0, 0, key, loc0, loc1, 0, 0, 0, 0)
                )
            self._always()
            return loc0, loc1

    def append_deletes(self, keys: NDArray[np.uint8], key_lens: NDArray[np.uint8]) -> None:
        """Append deletes; as `append`."""
        with self.lock:
            self._check_writable()
            if not len(key_lens):
                return
            with self._guarded():
                if self._pending.count >= _SPILL:
                    self._spill()
                self._pending.add(new_records(DELETE, keys, key_lens))
            self._always()

    def commit(self) -> int:
        """Make everything that was appended durable, as one group; return the last durable sequence number.

        With durability "none" it only reaches the operating system: a killed process loses nothing, a power cut may.

        Raises
        ------
        StorageFullError
            Nothing was committed; what was appended stays, and `commit` may be called again.
        StoreFailedError
            A write or fsync failed: the log takes no more writes.
        """
        with self.lock:
            self._check_writable()
            journal = self._open_journal()
            if self._pending.count:
                ordered = self.durability != "none"
                records = self._pending.take()
                with self._guarded():
                    if ordered:
                        self._sync(self._segments.sync)
                    self._unsynced_journal = True
                    journal.write(records, ordered=ordered, last=True)
                    self._pending.clear()
                    self._spilled = 0
                    if ordered:
                        self._sync_journal()
            return journal.position.seq

    # -- snapshots --------------------------------------------------------------------------------------------

    @property
    def snapshot_due(self) -> bool:
        """Whether opening would take notably longer without a new snapshot."""
        records = self._open_journal().position.seq - self._start_seq
        return records > max(65_536, self._live_at_open // 2)

    def snapshot(
        self,
        keys: NDArray[np.uint8],
        key_lens: NDArray[np.uint8],
        locs: NDArray[np.int64],
        *,
        drop: Sequence[int] = (),
    ) -> None:
        """Commit, and write all live records to one file, from which a new journal goes on.

        Parameters
        ----------
        keys, key_lens, locs
            The index: every live record. The caller holds `lock` since it took them.
        drop : sequence of int
            Segments that no location names any more: the manifest forgets them (see `retired`).
        """
        with self.lock:
            self._check_writable()
            self.commit()
            slots = join(keys, key_lens, locs)
            wrong = set(np.unique(segment_of(slots[:, 2])).tolist()) - (set(self._manifest.segments) - set(drop))
            if wrong or self._segments.head in drop:
                raise errors.ArgumentError(
                    f"records are in segments {sorted(wrong)}, which are not to stay: move them first", name="locs"
                )
            with self._guarded():
                self._sync(self._segments.sync)
                self._sync_journal()
                self._replace_journal(slots, drop)

    def retired(self) -> list[int]:
        """Return segments that no location names any more, but whose descriptors are still open."""
        with self.lock:
            return sorted(self._retired)

    def release(self, segments: Sequence[int]) -> None:
        """Close retired segments once nobody reads from them; a writer deletes their files, too."""
        with self.lock:
            going = [s for s in segments if s in self._retired]
            self._segments.close(going)
            self._retired.difference_update(going)
            if self.writable and self._failure is None:
                check_process(self._pid, self.path)
                with self._guarded():
                    for segment in going:
                        with contextlib.suppress(FileNotFoundError):
                            self._files.unlink(self._segments.path(segment))

    # -- reading ----------------------------------------------------------------------------------------------

    def segment_fd(self, segment: int) -> int:
        """Return the descriptor of a segment (KeyError: it is not open)."""
        return self._segments.fd(segment)

    def segment_path(self, segment: int) -> str:
        """Return the file of a segment."""
        return self._segments.path(segment)

    def drop_recovered(self) -> None:
        """Forget the records of `recovered`, whose memory an index does not need twice."""
        self.recovered = None

    def segments(self) -> list[int]:
        """Return the open segments."""
        return self._segments.ids()

    def on_segment(self, callback: Any) -> None:
        """Call ``callback(segment, fd)`` for every segment that is or will be opened; fd is -1 when it is closed."""
        with self.lock:
            self._segments.on_segment(callback)

    def refresh(self) -> Changes:
        """Return what a writer has committed since (a reader's method; a writer knows already).

        Raises
        ------
        CorruptionError
        """
        with self.lock:
            self._check_open()
            if self.writable:
                return Changes.none()
            state, self._manifest, retired, changes = follow(
                self._files, self.path, self._manifest, self._segments, self._open_journal()
            )
            self._journal = state
            self._retired |= retired
            return changes

    def usage(self, locs: NDArray[np.int64]) -> dict[int, tuple[int, int]]:
        """Return for every segment the bytes of it that live records at `locs` occupy, and its bytes."""
        ids = segment_of(locs[:, 0])
        used = np.bincount(ids, footprint(size_of(locs[:, 1])), max(self._manifest.segments) + 1)
        return {s: (int(used[s]), self._segments.size(s) - SUPERBLOCK) for s in self._manifest.segments}

    def statistics(self) -> LogStatistics:
        """Return sizes."""
        with self.lock:
            position = self._open_journal().position
            nbytes = sum(self._segments.size(s) for s in self._segments.ids())
            pending = self._pending.count + self._spilled
            return LogStatistics(
                len(self._segments.ids()), nbytes, position.seq - self._start_seq, position.seq + pending, position.seq
            )

    @property
    def head(self) -> int:
        """The segment that values are appended to."""
        return self._segments.head

    @property
    def failed(self) -> bool:
        """Whether a write failed, so that no more are taken."""
        return self._failure is not None

    def roll(self) -> None:
        """Begin a new segment."""
        with self.lock:
            self._check_writable()
            with self._guarded():
                self._roll()

    # -- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit and give everything back. In a forked child it only gives back."""
        with self.lock:
            if self._closed:
                return
            try:
                if self.writable and self._failure is None and os.getpid() == self._pid:
                    self.commit()
                    with self._guarded():
                        self._sync(self._segments.sync)
                        self._sync_journal()
                        if self._floor is not None:
                            self._sync(self._floor.sync)
                    self.release(sorted(self._retired))
            finally:
                self._closed = True
                self._segments.close()
                for part in (self._journal, self._floor):
                    if part is not None:
                        part.close()
                if self._writer is not None:
                    self._writer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inner parts ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"{self.path} is closed: open it again")

    def _open_journal(self) -> Journal:
        self._check_open()
        assert self._journal is not None
        return self._journal

    def _check_writable(self) -> None:
        self._check_open()
        if not self.writable:
            raise errors.ReadOnlyError(f'{self.path} is open for reading only: open it with mode="r+"')
        check_process(self._pid, self.path)
        if self._failure is not None:
            raise self._failed()

    def _failed(self) -> errors.StoreFailedError:
        what, code = self._failure or ("", None)
        return errors.StoreFailedError(
            f"{self.path} takes no more writes since one failed ({what}): what was committed before is safe. "
            "Close it, look after the disk, and open it again",
            path=self.path,
            code=code,
        )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn a system's error into ours: a full disk changes nothing, all others end the writing."""
        try:
            yield
        except errors.WarpwellError:
            raise
        except OSError as error:
            if full(error) and self._failure is None:
                raise storage_full(self.path) from error
            if self._failure is None:
                self._failure = (str(error), error.errno)
            raise self._failed() from error

    def _sync(self, call: Any) -> None:
        """Call something that syncs; whatever its error is, it ends the writing, since pages may be lost."""
        try:
            call()
        except OSError as error:
            self._failure = (f"fsync: {error}", error.errno)
            raise

    def _sync_journal(self) -> None:
        """Make the journal durable, and note it."""
        journal = self._open_journal()
        if self._unsynced_journal:
            self._sync(journal.sync)
            self._unsynced_journal = False
            if self._floor is not None:
                self._floor.raise_to(journal.position.seq, journal.position.chain)

    def _always(self) -> None:
        if self.durability != "always":
            return
        try:
            self.commit()
        except errors.StorageFullError:
            self._pending = Pending()  # an append that raises has appended nothing
            raise

    def _spill(self) -> None:
        """Move records of an unfinished group to the journal; one stays here, to carry the mark."""
        records = self._pending.take()
        ordered = self.durability != "none"
        if ordered:
            self._sync(self._segments.sync)
        count = len(records) - 1
        self._open_journal().write(records[:count], ordered=ordered, last=False)
        self._spilled += count
        self._pending.clear(keep=1)

    def _roll(self) -> None:
        """Begin a new segment: the file, then its name, then the manifest, then its first value."""
        segment = self._manifest.next_segment
        manifest = self._with_floor(
            segments=(*self._manifest.segments, segment), next_segment=segment + 1
        )
        path = self._segments.path(segment)
        try:
            self._segments.create(segment)
            self._publish(manifest)
        except OSError:
            if self._failure is None:
                self._segments.close([segment])
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
            raise
        self._segments.set_head(segment, SUPERBLOCK)

    def _with_floor(self, **changes: Any) -> Manifest:
        if self.durability == "none" and self._unsynced_journal:
            return self._manifest.with_changes(**changes)
        position = self._open_journal().position
        return self._manifest.with_changes(floor_seq=position.seq, floor_crc=position.chain, **changes)

    def _publish(self, manifest: Manifest) -> None:
        manifest.publish(self._files, self.path)
        # From here on both the old and the new one may be what a crash leaves.
        self._sync(lambda: self._files.sync_folder(self.path))
        self._manifest = manifest

    def _replace_journal(self, slots: NDArray[np.int64], drop: Sequence[int]) -> None:
        old, id = self._manifest, self._manifest.next_file
        uuid, position = old.uuid_bytes, self._open_journal().position
        made = [snapshot_path(self.path, id), journal_path(self.path, id + 1)]
        journal: Journal | None = None
        try:
            write_snapshot(self._files, self.path, uuid, id, slots, position.seq, position.chain)
            journal, _ = _new_journal(self._files, self.path, uuid, id + 1, position)
            self._files.sync_folder(self.path)
            manifest = self._with_floor(
                snapshot=id,
                journal=id + 1,
                next_file=id + 2,
                segments=tuple(s for s in old.segments if s not in drop),
            )
            self._publish(manifest)
        except OSError:
            if journal is not None:
                journal.close()
            if self._failure is None:
                for path in made:
                    with contextlib.suppress(OSError):
                        self._files.unlink(path)
            raise
        self._open_journal().close()
        self._journal, self._start_seq, self._live_at_open = journal, position.seq, len(slots)
        self._retired |= set(drop)
        remove_strays(self._files, self.path, manifest.with_changes(segments=old.segments))


def _new_journal(files: Files, folder: str, uuid: bytes, id: int, after: Position) -> tuple[Journal, int]:
    salt = new_salt()
    block = Superblock(JOURNAL_FILE, uuid, id, after.seq, after.chain, salt)
    fd = write_new(files, journal_path(folder, id), [block.pack()])
    return Journal(files, fd, salt, Position(SUPERBLOCK, after.seq, after.chain)), salt


def _place_one(end: int, nbytes: int) -> int:
    unit = PAGE if nbytes >= PAGE else UNIT
    return -(-end // unit) * unit
