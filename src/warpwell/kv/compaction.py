"""Compaction: copy the live values of mostly dead segments, and delete these segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import batches_of
from .keys import keys_in
from .log.format import SUPERBLOCK, footprint, segment_of, size_of
from .log.log import Log
from .records import Records

Progress = Callable[[int, int], object]
_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 8192


@dataclass(frozen=True)
class CompactionReport:
    """The result of a compaction.

    Attributes
    ----------
    segments : tuple of int
        Segments that were retired.
    moved : int
        Number of values that were copied.
    moved_bytes : int
    freed_bytes : int
        Size of the retired files minus the size of the copies, in bytes.
    """

    segments: tuple[int, ...]
    moved: int
    moved_bytes: int
    freed_bytes: int


def compact(records: Records, *, threshold: float = 0.5, progress: Progress | None = None) -> CompactionReport:
    """Reclaim the space of dead values while readers and the writer continue.

    Copies are ordinary records, so a crash at any time leaves a store with the old values, and maybe with copies too.
    If a caller has appended records without committing them, the copies join that group, which the caller commits, and
    the segments are removed at the next snapshot (see `Log.emptied`): until then the journal may refer to their values.
    The segments' files are deleted when no reader uses a location in them any more.

    Parameters
    ----------
    records : Records
        Open for writing.
    threshold : float
        Segments with at least this share of dead bytes are compacted.
    progress : callable, optional
        Called with the bytes moved so far and the bytes to move in all.

    Raises
    ------
    CorruptionError
        A live value is damaged. The store stays valid; copies that were made are kept.
    StorageFullError, StoreFailedError
        As for `Log.append`.
    """
    with records.for_compaction():
        return _compact(records, threshold, progress)


def _compact(records: Records, threshold: float, progress: Progress | None) -> CompactionReport:
    log = records.log
    with records.change():
        victims, slots = _victims(records, threshold)
    if not victims:
        return CompactionReport((), 0, 0, 0)
    sizes = size_of(slots[:, 2], slots[:, 3])
    total, done, moved = int(sizes.sum()), 0, 0
    for rows in batches_of(sizes, _BATCH_BYTES, _BATCH_RECORDS):
        moved += _move(records, slots[rows], _read(log, slots[rows, 2:]))
        done += int(sizes[rows].sum())
        if progress is not None:
            progress(done, total)
    with records.change():
        freed = sum(_size(log, segment) for segment in victims) - done
        log.emptied(victims)
        if not log.group_open:
            records.snapshot()
    return CompactionReport(tuple(victims), moved, done, freed)


def _victims(records: Records, threshold: float) -> tuple[list[int], NDArray[np.int64]]:
    """Return the segments to retire, and the slots of their live records in file order."""
    log, slots = records.log, records.index.slots()
    segments, sizes = segment_of(slots[:, 2]), size_of(slots[:, 2], slots[:, 3])
    used = np.bincount(segments, footprint(sizes), max(log.segments.ids()) + 1)
    victims = []
    for segment in sorted(set(log.segments.ids()) - log._emptied - log.retired):
        total = _size(log, segment)
        dead = total - int(used[segment])
        if dead > 0 and dead >= threshold * total:
            victims.append(segment)
    for shard, head in enumerate(log.segments.heads):
        if head in victims:
            log.roll(shard)
    slots = slots[np.isin(segments, victims)]
    return victims, slots[np.argsort(slots[:, 2], kind="stable")]


def _size(log: Log, segment: int) -> int:
    return log.segments.size(segment) - SUPERBLOCK


def _read(log: Log, locations: NDArray[np.int64]) -> list[Any]:
    """Read values and check them: a damaged value must not be copied with a new checksum."""
    values = []
    for stored in map(log.segments.stored, locations):
        contents = stored.read()
        if contents is None:
            raise stored.damaged()
        values.append(contents)
    return values


def _move(records: Records, slots: NDArray[np.int64], values: list[Any]) -> int:
    """Append copies of the values that are still live, and index them; return their number."""
    log, keys = records.log, keys_in(slots)
    with records.change():
        rows = np.flatnonzero(records.index.lookup(keys)[:, 0] == slots[:, 2])
        shards = log.segments.shard_of(segment_of(slots[rows, 2])).astype(np.uint8)
        chosen = [values[k] for k in rows.tolist()]
        records.index.put(log.append(*keys.take(rows).marked(), chosen, shards=shards, moved=True))
        return len(rows)
