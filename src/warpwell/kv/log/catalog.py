"""Catalog: changes of a log's manifest: new segments, and a new snapshot with its journal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import Files, Guard, write_new
from .format import JOURNAL_FILE, SUPERBLOCK, Superblock, new_salt
from .journal import Journal, Position, journal_path
from .lock import WriterLock
from .manifest import Manifest
from .recovery import remove_strays
from .segments import Segments
from .snapshot import snapshot_path, write_snapshot


class Catalog:
    """The files of a log that is open for writing.

    Each change first makes the files durable, then their names, then the manifest. A crash in between leaves files that
    no manifest names; the next writer deletes them.

    Parameters
    ----------
    files : Files
    folder : str
    manifest : Manifest
    segments : Segments
    guard : Guard
    writer : WriterLock
    """

    def __init__(
        self, files: Files, folder: str, manifest: Manifest, segments: Segments, guard: Guard, writer: WriterLock
    ) -> None:
        self.manifest, self._writer = manifest, writer
        self._files, self._folder, self._segments, self._guard = files, folder, segments, guard

    def roll(self, durable: Position | None) -> None:
        """Begin a new segment.

        Parameters
        ----------
        durable : Position, optional
            The last durable record, if known.
        """
        self._guard.fence(self._writer.check)
        segment = self.manifest.next_segment
        manifest = _raised(self.manifest, durable).with_changes(
            segments=(*self.manifest.segments, segment), next_segment=segment + 1
        )
        path = self._segments.path(segment)
        try:
            self._segments.create(segment)
            self._publish(manifest)
        except OSError:
            if not self._guard.failed:
                self._segments.close([segment])
                self._remove(path)
            raise
        self._segments.set_head(segment, SUPERBLOCK)

    def replace_journal(self, slots: NDArray[np.int64], end: Position, drop: Sequence[int]) -> Journal:
        """Write a snapshot and start a new journal, which is returned; of the old ones only the last pair is kept.

        Parameters
        ----------
        slots : int64 [N, 4]
            All live records.
        end : Position
            The last record; it is durable.
        drop : sequence of int
            Segments to remove from the manifest; their files stay for now.
        """
        self._guard.fence(self._writer.check)
        old, id = self.manifest, self.manifest.next_file
        journal: Journal | None = None
        try:
            write_snapshot(self._files, self._folder, old.uuid_bytes, id, slots, end.seq, end.chain)
            journal = new_journal(self._files, self._folder, old.uuid_bytes, id + 1, end)
            self._files.sync_folder(self._folder)
            kept = tuple(s for s in old.segments if s not in drop)
            manifest = _raised(old, end).with_changes(
                snapshot=id, journal=id + 1, next_file=id + 2, segments=kept, previous=(old.snapshot, old.journal)
            )
            self._publish(manifest)
        except OSError:
            if journal is not None:
                journal.close()
            if not self._guard.failed:
                self._remove(snapshot_path(self._folder, id), journal_path(self._folder, id + 1))
            raise
        remove_strays(self._files, self._folder, manifest.with_changes(segments=old.segments))
        return journal

    def describe(self, schema: dict[str, Any]) -> None:
        """Replace the JSON that the store keeps in the manifest."""
        self._publish(self.manifest.with_changes(schema=schema))

    def _publish(self, manifest: Manifest) -> None:
        self._guard.fence(self._writer.check)
        manifest.publish(self._files, self._folder)
        # From here on a crash may leave the old or the new one, until the folder is synced.
        self._guard.sync(lambda: self._files.sync_folder(self._folder))
        self.manifest = manifest

    def _remove(self, *paths: str) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                self._files.unlink(path)


def new_journal(files: Files, folder: str, uuid: bytes, id: int, after: Position) -> Journal:
    """Create a durable journal that continues after a record; its name is not durable yet."""
    salt = new_salt()
    block = Superblock(JOURNAL_FILE, uuid, id, after.seq, after.chain, salt)
    fd = write_new(files, journal_path(folder, id), [block.pack()])
    return Journal(files, fd, salt, Position(SUPERBLOCK, after.seq, after.chain))


def _raised(manifest: Manifest, durable: Position | None) -> Manifest:
    changes: dict[str, Any] = {} if durable is None else {"floor_seq": durable.seq, "floor_crc": durable.chain}
    return manifest.with_changes(**changes)
