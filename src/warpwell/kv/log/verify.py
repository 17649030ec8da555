"""Verify: read all files of a store and list the damage, without changing them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..keys import SUFFIX_BYTES, long_key_in
from .checksum import check_file
from .files import Files, read_at
from .format import INTEGER, LONG, extents_of, key_len_of, marked_len_of, offset_of, segment_of, size_of
from .journal import COMMITTED_NAME, journal_path, read_marks
from .manifest import IDENTITY_NAME, Manifest, read_manifest
from .recovery import check_previous, load_for_reading
from .segments import Segments
from .shards import locate_segments

_BATCH = 1024


@dataclass(frozen=True)
class Problem:
    """A damaged place: the file, the byte where it begins, and a description; `key` is the key of a damaged value."""

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
        Bytes after the journal's last commit: a crash left them, or a writer is writing them now.
    unsettled_values : int
        Values that only the journal has since a power failure; the next writer copies them to their segments.
    problems : list of Problem
    """

    path: str
    records: int = 0
    value_bytes: int = 0
    journal_records: int = 0
    torn_bytes: int = 0
    unsettled_values: int = 0
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
    for offset in read_marks(path, manifest.uuid_bytes)[1]:
        report.problems.append(Problem(os.path.join(path, COMMITTED_NAME), offset, "the mark is missing or damaged"))
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
        report.journal_records = loaded.position.seq - loaded.start.seq
        report.torn_bytes = max(0, loaded.size - loaded.position.offset)
        report.unsettled_values = len(loaded.restored)
        journal = journal_path(path, manifest.journal)
        report.problems += [_copy_problem(journal, offset) for offset in loaded.damaged_copies()]
        damaged: list[errors.CorruptionError] = []
        slots = loaded.live(damaged)
        loaded.close(Files())
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
        if read_manifest(folder) == manifest:  # else a writer has deleted it in the meantime
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
    done = 0
    slots = slots[np.argsort(slots[:, 2], kind="stable")]
    ids = segment_of(slots[:, 2])
    for segment in np.unique(ids).tolist():
        rows = slots[ids == segment]
        path, fd = segments.path(segment), segments.fd(segment)
        for at in range(0, len(rows), _BATCH):
            part = rows[at : at + _BATCH]
            status = check_file(fd, extents_of(part[:, 2:]))
            for k in np.flatnonzero(status).tolist():
                report.problems.append(_bad_value(part[k], int(status[k]), path, fd))
            done += len(part)
            if progress is not None:
                progress(done, len(slots))


def _bad_value(slot: Any, status: int, path: str, fd: int) -> Problem:
    key: int | bytes = stored_key(slot, fd)
    if int(marked_len_of(slot[3])) & INTEGER:
        key = int(slot[0])
    damage = "does not match its checksum" if status > 0 else f"cannot be read: {os.strerror(-status)}"
    return Problem(path, int(offset_of(slot[2])), f"the value of {int(size_of(slot[2], slot[3]))} bytes {damage}", key)


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
