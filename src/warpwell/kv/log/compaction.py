"""Compaction: live values of segments that are mostly dead are copied to the head, and the segments are deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._os import uninterrupted
from ...cache import batches_of
from .checksum import crc32c
from .files import read_at
from .format import SUPERBLOCK, footprint, marked_len_of, segment_of, size_of
from .log import Log
from .recovery import join

_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 8192

Index = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]
"""Keys uint8 [N, 16], their lengths uint8 [N], locations int64 [N, 2]."""


@dataclass(frozen=True)
class CompactionReport:
    """The result of a compaction.

    Attributes
    ----------
    segments : tuple of int
        Segments that were retired.
    moved : int
        Values that were copied.
    moved_bytes : int
    freed_bytes : int
        Size of the retired files minus the size of the copies, in bytes.
    """

    segments: tuple[int, ...]
    moved: int
    moved_bytes: int
    freed_bytes: int


def compact(
    log: Log,
    *,
    live: Callable[[], Index],
    lookup: Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.int64]],
    relocate: Callable[[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]], object],
    threshold: float = 0.5,
    progress: Callable[[int, int], object] | None = None,
) -> CompactionReport:
    """Reclaim the space of dead values while readers and the writer continue.

    Copies are ordinary records, so a crash at any time leaves a store with both or with the old values. If a caller has
    appended records without committing them, the copies join that group, which the caller commits, and the segments are
    removed at the next snapshot (see `Log.emptied`): until then the journal may refer to their values. The caller
    deletes their files by `Log.release`, when no reader uses a location that it looked up before. All callbacks except
    `progress` run with `Log.lock` held.

    Parameters
    ----------
    log : Log
        Open for writing.
    live : callable
        Returns keys, lengths and locations of the whole index.
    lookup : callable
        ``(keys, key_lens) -> int64 [N, 2]``: the locations of keys in the index (first word 0 or -1: absent).
    relocate : callable
        ``(keys, key_lens, old, new)``: moves keys whose location is still `old`.
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
    with log.lock, uninterrupted():
        victims, slots = _victims(log, live(), threshold)
    if not victims:
        return CompactionReport((), 0, 0, 0)
    sizes = size_of(slots[:, 2], slots[:, 3])
    total, done, moved = int(sizes.sum()), 0, 0
    for rows in batches_of(sizes, _BATCH_BYTES, _BATCH_RECORDS):
        batch = slots[rows]
        values = _read(log, batch)
        moved += _move(log, batch, values, lookup, relocate)
        done += int(sizes[rows].sum())
        if progress is not None:
            progress(done, total)
    with log.lock, uninterrupted():
        freed = sum(_size(log, segment) for segment in victims) - done
        log.emptied(victims)
        if not log.group_open:
            log.snapshot(*live())
    return CompactionReport(tuple(victims), moved, done, freed)


def _victims(log: Log, index: Index, threshold: float) -> tuple[list[int], NDArray[np.int64]]:
    """Return the segments to retire and their live slots, in file order."""
    slots = join(*index)
    sizes = size_of(slots[:, 2], slots[:, 3])
    used = np.bincount(segment_of(slots[:, 2]), footprint(sizes), max(log.segments.ids()) + 1)
    victims = []
    for segment in sorted(set(log.segments.ids()) - log.to_be_dropped()):
        total = _size(log, segment)
        dead = total - int(used[segment])
        if dead > 0 and dead >= threshold * total:
            victims.append(segment)
    for shard, head in enumerate(log.segments.heads):
        if head in victims:
            log.roll(shard)
    slots = slots[np.isin(segment_of(slots[:, 2]), victims)]
    return victims, slots[np.argsort(slots[:, 2], kind="stable")]


def _size(log: Log, segment: int) -> int:
    return os.fstat(log.segments.fd(segment)).st_size - SUPERBLOCK


def _read(log: Log, slots: NDArray[np.int64]) -> list[Any]:
    """Read values and check them: a damaged value must not be copied with a new checksum.

    A value that is larger than a batch is not read: it checks itself when it is copied.
    """
    stored = [log.segments.stored(location) for location in slots[:, 2:]]
    if len(stored) == 1 and stored[0].nbytes > _BATCH_BYTES:
        return stored
    values = [read_at(value.fd, value.nbytes, value.offset) for value in stored]
    for value, contents in zip(stored, values, strict=True):
        if len(contents) != value.nbytes or crc32c(contents) != value.crc:
            raise value.damaged()
    return values


def _move(
    log: Log,
    slots: NDArray[np.int64],
    values: list[Any],
    lookup: Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.int64]],
    relocate: Callable[[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]], object],
) -> int:
    """Append copies of the values that are still live, with the lock held."""
    keys = np.ascontiguousarray(slots[:, :2]).view(np.uint8).reshape(-1, 16)
    lens = marked_len_of(slots[:, 3]).astype(np.uint8)
    with log.lock, uninterrupted():
        still = np.flatnonzero(lookup(keys, lens)[:, 0] == slots[:, 2])
        if not len(still):
            return 0
        chosen = [values[k] for k in still.tolist()]
        shards = log.segments.shard_of(segment_of(slots[still, 2])).astype(np.uint8)
        new = log.append(keys[still], lens[still], chosen, shards=shards, moved=True)
        relocate(keys[still], lens[still], np.ascontiguousarray(slots[still, 2:]), new)
        return len(still)
