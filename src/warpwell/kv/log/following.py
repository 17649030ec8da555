"""Following: how a reader opens a log that a writer may be changing, and takes over what the writer commits."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from .files import Files, closing_on_error
from .floor import highest, read_floor
from .format import SUPERBLOCK
from .journal import Journal, Position, journal_path, read_superblock, scan
from .manifest import Manifest, read_manifest
from .recovery import Loaded, live, load, refuse_damage, settle, split
from .segments import Segments

_ATTEMPTS = 8


class Changes(NamedTuple):
    """What was committed since.

    Attributes
    ----------
    keys : uint8 [N, 16]
    key_lens : uint8 [N]
    locs : int64 [N, 2]
        In the order of the log; the first word is -1 where a key was deleted.
    reset : bool
        True: these are all live records, and what was known before is void (the reader was too far behind).
    """

    keys: NDArray[np.uint8]
    key_lens: NDArray[np.uint8]
    locs: NDArray[np.int64]
    reset: bool

    @classmethod
    def none(cls) -> Changes:
        """No changes."""
        return cls(np.empty((0, 16), np.uint8), np.empty(0, np.uint8), np.empty((0, 2), np.int64), False)


def load_for_reading(
    files: Files, folder: str, segments: Segments | None = None
) -> tuple[Manifest, Segments, Loaded]:
    """Load a store while a writer may be replacing its files; see `recovery.load`.

    What looks like damage may be a file that was replaced between two looks, so it is looked at again.
    """
    own = segments is None
    for attempt in range(_ATTEMPTS):
        manifest = read_manifest(folder)
        if segments is None:
            segments = Segments(files, folder, manifest.uuid_bytes, manifest.segment_bytes, writable=False)
        try:
            return manifest, segments, load(files, folder, manifest, segments, writable=False)
        except (FileNotFoundError, errors.CorruptionError) as error:
            if attempt + 1 == _ATTEMPTS or (attempt >= 2 and read_manifest(folder) == manifest):
                if own:
                    segments.close()
                if isinstance(error, errors.CorruptionError):
                    raise
                raise errors.CorruptionError(
                    f"{error.filename} is missing: the store's manifest names it; restore it from a copy",
                    path=error.filename,
                ) from None
            time.sleep(0.002 * attempt)
        except BaseException:
            if own:
                segments.close()
            raise
    raise AssertionError


def follow(
    files: Files, folder: str, manifest: Manifest, segments: Segments, journal: Journal
) -> tuple[Journal, Manifest, set[int], Changes]:
    """Read what was committed behind `journal.position`.

    Returns
    -------
    Journal
        Where to go on; the one given, or another (then the one given is closed).
    Manifest
    set of int
        Segments that the manifest does not name any more.
    Changes
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _follow(files, folder, manifest, segments, journal)
        except _Behind:
            break
        except errors.CorruptionError:
            if attempt >= 2:
                raise
            time.sleep(0.002 * attempt)
    manifest, segments, loaded = load_for_reading(files, folder, segments)
    journal.close()
    changes = Changes(*split(live(loaded.slots, loaded.distinct)), True)
    retired = set(segments.ids()) - set(manifest.segments)
    return Journal(files, loaded.fd, loaded.salt, loaded.position), manifest, retired, changes


class _Behind(Exception):
    """Files that the reader had still to read are gone."""


def _follow(
    files: Files, folder: str, manifest: Manifest, segments: Segments, journal: Journal
) -> tuple[Journal, Manifest, set[int], Changes]:
    # In this order: the floor that is read first is one of the journal that the manifest then names, or of an
    # earlier one; and nothing is appended to a journal after a manifest without it.
    uuid = manifest.uuid_bytes
    floor = highest(read_floor(folder, uuid), journal.salt)
    newest = read_manifest(folder)
    if newest.uuid != manifest.uuid:
        raise errors.CorruptionError(f"{folder} is another store than before: open it again", path=folder)
    same = newest.journal == manifest.journal
    path = journal_path(folder, manifest.journal)
    for segment in newest.segments:
        _open(segments, segment)
    slots, position = _read(journal, journal.position, floor if same else (0, 0), segments, path)
    if same:
        journal.position = position
        return journal, newest, set(segments.ids()) - set(newest.segments), Changes(*split(slots), False)
    path = journal_path(folder, newest.journal)
    try:
        fd = files.open(path, False)
    except FileNotFoundError:
        raise _Behind from None
    with closing_on_error(files, fd):
        block = read_superblock(fd, uuid, newest.journal, path)
        if (block.seq, block.chain) != (position.seq, position.chain):
            raise _Behind
        following = Journal(files, fd, block.salt, Position(SUPERBLOCK, block.seq, block.chain))
        more, following.position = _read(following, following.position, (0, 0), segments, path)
    journal.close()
    changes = Changes(*split(np.concatenate([slots, more])), False)
    return following, newest, set(segments.ids()) - set(newest.segments), changes


def _open(segments: Segments, segment: int) -> None:
    try:
        segments.open(segment)
    except FileNotFoundError:
        raise _Behind from None


def _read(
    journal: Journal, start: Position, floor: tuple[int, int], segments: Segments, path: str
) -> tuple[NDArray[np.int64], Position]:
    if os.fstat(journal.fd).st_size <= start.offset and floor[0] <= start.seq:
        return np.empty((0, 4), np.int64), start
    scanned = scan(journal.fd, journal.salt, start, floor if floor[0] > start.seq else (0, 0))
    refuse_damage(scanned, path)
    unknown = np.setdiff1d(scanned.slots[:, 2][scanned.slots[:, 2] > 0] >> 40, segments.ids())
    if len(unknown):
        raise _Behind
    return settle(scanned, start, floor[0], segments, journal.fd, path)
