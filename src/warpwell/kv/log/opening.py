"""Create the files of a log, and open them for writing; the folder of a new log."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid as uuids
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ... import errors
from .files import Files, full, storage_full, write_new
from .format import MAX_SEGMENT_BYTES, SUPERBLOCK
from .journal import COMMITTED_NAME, Floor, Journal, Position, new_journal
from .lock import LOCK_NAME, WriterLock
from .manifest import DURABILITIES, IDENTITY_NAME, MANIFEST_NAME, NEW_NAME, Manifest, read_manifest
from .recovery import LoadedLog, load, open_segments, repair
from .segments import SegmentFolder, Segments
from .shards import take_shards, written

MIN_SEGMENT_BYTES = 1 << 16


@dataclass
class OpenedLog:
    """The files of a log that is open for writing, and the records that recovery found in them."""

    manifest: Manifest
    segments: Segments
    loaded: LoadedLog
    journal: Journal
    floor: Floor
    writer: WriterLock


def create_writable(
    files: Files,
    path: str,
    *,
    schema: dict[str, Any] | None,
    durability: str,
    segment_bytes: int,
    shards: Sequence[str] = (),
) -> OpenedLog:
    """Create an empty log and open it; see `Log.create`. If it raises, it leaves no new files."""
    if durability not in DURABILITIES:
        raise errors.ArgumentError(
            f"durability={durability!r}: choose one of {', '.join(map(repr, DURABILITIES))}", name="durability"
        )
    if not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
        raise errors.ArgumentError(
            f"segment_bytes={segment_bytes}: choose from {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES} bytes",
            name="segment_bytes",
        )
    manifest = Manifest(uuids.uuid4().hex, durability, int(segment_bytes), 1, None, (), 2, 2, schema=schema, kinds=True)
    with contextlib.ExitStack() as undo, _translate_os_errors(path, "choose a folder that can be written"):
        writer = _new_folder(files, path, undo)
        folders = [SegmentFolder(path, manifest.uuid_bytes)]
        if shards:
            folders = [_create_shard(files, path, manifest, number, shard, undo) for number, shard in enumerate(shards)]
        segments = Segments(files, folders, segment_bytes, writable=True)
        first = tuple(segments.id_of(shard, 1) for shard in range(len(folders)))
        listed = tuple({"path": written(shard, path), "uuid": uuid.hex()} for shard, uuid in folders if shards)
        manifest = manifest.with_changes(segments=first, shards=listed)
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
        undo.callback(remove_made, path, False)  # `undo` runs this first: it removes the manifest before other files
        manifest.publish(files, path)
        files.sync_folder(path)
        opened = _open(files, path, writer)
        undo.pop_all()
        return opened


def _new_folder(files: Files, path: str, undo: contextlib.ExitStack) -> WriterLock:
    """Make the folder of a new store and take its lock; `undo` removes both."""
    made = make_folder(files, path)
    try:
        writer = WriterLock(files, path)
        undo.callback(writer.release, clean=False)
        clear(files, path)
    except BaseException as error:
        # The lock is held by a process that creates a store here. With a cause, the file system has no locks.
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


def open_writable(files: Files, path: str) -> OpenedLog:
    """Open a log for writing and repair it after a crash; see `Log.open`."""
    read_manifest(path)  # raises before a lock file is created in a folder that does not hold a store
    with _translate_os_errors(path, 'open it with mode="r"'):
        writer = WriterLock(files, path)
        try:
            return _open(files, path, writer)
        except BaseException:
            writer.release(opened=False)
            raise


def _open(files: Files, path: str, writer: WriterLock) -> OpenedLog:
    manifest = read_manifest(path)  # the writer before us may have replaced it
    segments = open_segments(files, path, manifest, writable=True)
    take_shards(files, path, manifest)
    try:
        try:
            manifest, loaded = load(files, path, manifest, segments, writable=True)
        except FileNotFoundError as error:
            raise errors.CorruptionError(
                f"{error.filename} is missing: the store's manifest names it; restore it from a copy",
                path=error.filename,
            ) from None
        with contextlib.ExitStack() as undo:
            undo.callback(loaded.close, files)
            repair(files, path, loaded, manifest, segments)
            for segment in manifest.segments:
                # After the file's end, not after the last record: a location is never used twice.
                segments.set_head(segment, segments.size(segment))
            journal = Journal(files, loaded.fd, loaded.salt, loaded.position)
            floor = Floor(files, path, manifest.uuid_bytes)
            if not manifest.separate_logs:
                floor.raise_to(loaded.position, loaded.salt, loaded.position.seq)
            undo.pop_all()
    except BaseException:
        segments.close()
        raise
    return OpenedLog(manifest, segments, loaded, journal, floor, writer)


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


def make_folder(files: Files, path: str) -> bool:
    """Make the folder of a new store; return False if a usable folder already exists.

    Raises
    ------
    ArgumentError
        Another file or folder is there.
    MissingFileError
        The parent does not exist.
    """
    try:
        files.mkdir(path)
        return True
    except FileNotFoundError:
        raise errors.MissingFileError(
            f"{os.path.dirname(path)}: no such folder to create {os.path.basename(path)} in; create it first", path=path
        ) from None
    except FileExistsError:
        pass
    if not os.path.isdir(path):
        raise errors.ArgumentError(f"{path} is a file: choose another name, or remove it yourself", name="path")
    check_empty(path)
    return False


def check_empty(path: str) -> None:
    """Raise ArgumentError if a folder holds files that an interrupted creation did not leave."""
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


def clear(files: Files, path: str) -> None:
    """Remove the files of an interrupted creation; the lock is held."""
    check_empty(path)
    for name in os.listdir(path):
        if name != LOCK_NAME:
            files.unlink(os.path.join(path, name))


def remove_made(path: str, made: bool) -> None:
    """Remove the files of a creation that failed, and the folder if the creation made it."""
    with contextlib.suppress(OSError):
        # The manifest first: a crash in this loop must leave either a whole store or a folder that is not a store.
        for name in sorted(os.listdir(path), key=lambda name: name != MANIFEST_NAME):
            os.unlink(os.path.join(path, name))
        if made:
            os.rmdir(path)


def _left_over(path: str) -> bool:
    """Return whether a file can only belong to a store that never held a record."""
    name = os.path.basename(path)
    if name in (LOCK_NAME, NEW_NAME, IDENTITY_NAME):
        return True
    empty = os.path.getsize(path) <= SUPERBLOCK
    return empty and (name == COMMITTED_NAME or os.path.splitext(name)[1] in (".val", ".jnl"))
