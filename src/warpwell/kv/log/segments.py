"""Segments: the files that hold values, their descriptors, and the place of the next value.

A store has one folder of segments, or several, its shards. File `number` of shard `shard` is the segment
``number * shards + shard``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import allow_more_files
from ...targets import view_of
from ...targets.primitives import copy_bytes, load_weak_as, store_weak_as
from ...targets.primitives import crc32c as crc32c_at
from ..native import compiled
from ..ragged import Ragged
from .checksum import crc32c
from .files import Files, closing_on_error, read_at, write_new
from .format import (
    JOURNAL_SEGMENT,
    MAX_SEGMENT,
    MAX_SEGMENT_BYTES,
    MAX_VALUE,
    SEGMENT_FILE,
    SUPERBLOCK,
    UNIT,
    Superblock,
    corruption,
    crc_of,
    file_name,
    footprint,
    locations,
    offset_of,
    segment_of,
    size_of,
)

_WRITE_BYTES = 1 << 20
"""Maximum size of values that one buffer gathers for a write, in bytes: the buffer stays in the processor's cache."""
_LARGE = 1 << 16
"""Minimum size of a value that is written without a copy, in bytes."""
_CONTENTS = bytes.__basicsize__ - 1
"""Offset of the contents of a bytes object."""

INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)

Callback = Callable[[int, int], None]


class SegmentFolder(NamedTuple):
    """A folder of segments, and the UUID in their superblocks."""

    path: str
    uuid: bytes


class Segments:
    """Open segment files; values are appended to the last one of a shard.

    Parameters
    ----------
    files : Files
    folders : sequence of SegmentFolder
        One for each shard.
    segment_bytes : int
        Size at which a segment is full. A larger value gets its own segment.
    writable : bool

    Attributes
    ----------
    paths : list of str
        The folders.
    heads, ends : list of int
        For each shard the segment that values are appended to, and its used size in bytes.
    missing : set of int
        Shards without a folder, if a damaged store is read as far as possible.
    """

    def __init__(self, files: Files, folders: Sequence[SegmentFolder], segment_bytes: int, *, writable: bool) -> None:
        # minus one unit, because a value of 0 bytes may be placed at the end
        self._segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES - UNIT)
        self._files, self._writable = files, writable
        self.paths, self._uuids = [path for path, _ in folders], [uuid for _, uuid in folders]
        self._fds: dict[int, int] = {}
        self._callbacks: list[Callback] = []
        self.heads, self.ends = [0] * len(folders), [SUPERBLOCK] * len(folders)
        self.missing: set[int] = set()
        self._journal_path = ""
        self._unsynced: dict[int, int] = {}  # segments with values that may not be durable, and the last one's end

    # -- descriptors ------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """Return the open segments."""
        return sorted(self._fds)

    def id_of(self, shard: int, number: int) -> int:
        """Return the segment that is file `number` of a shard."""
        return number * len(self.paths) + shard

    def shard_of(self, segment: Any) -> Any:
        """Return the shard of a segment (or an array of them)."""
        return segment % len(self.paths)

    def path(self, segment: int) -> str:
        """Return a segment's file."""
        number, shard = divmod(segment, len(self.paths))
        name = file_name(SEGMENT_FILE, number)
        return self._journal_path if segment == JOURNAL_SEGMENT else os.path.join(self.paths[shard], name)

    def fd(self, segment: int) -> int:
        """Return the descriptor of a segment.

        Raises
        ------
        KeyError
            The segment is not open.
        """
        return self._fds[segment]

    def on_segment(self, callback: Callback) -> None:
        """Call ``callback(segment, fd)`` for each segment, now and later; fd is -1 for a closed segment."""
        self._callbacks.append(callback)
        for segment in self.ids():
            callback(segment, self._fds[segment])

    def open(self, segment: int, *, has_superblock: bool = True) -> None:
        """Open a segment that exists; with `has_superblock` check its superblock.

        Raises
        ------
        CorruptionError
            The file is damaged, or belongs to another store or segment.
        FileNotFoundError
        """
        if segment in self._fds:
            return
        path = self.path(segment)
        fd = self._files.open(path, self._writable)
        with closing_on_error(self._files, fd):
            if has_superblock:
                uuid, number = self._uuids[self.shard_of(segment)], segment // len(self.paths)
                Superblock.unpack(read_at(fd, SUPERBLOCK, 0), SEGMENT_FILE, uuid, number, path)
            self._adopt(segment, fd)

    def open_journal(self, path: str) -> None:
        """Make a journal readable as `JOURNAL_SEGMENT`."""
        if JOURNAL_SEGMENT not in self._fds:
            self._journal_path = path
            self._adopt(JOURNAL_SEGMENT, self._files.open(path, False))

    def create(self, segment: int) -> None:
        """Create a segment file. Its contents and its name are durable; the manifest does not name it yet.

        Raises
        ------
        OSError
        """
        shard = self.shard_of(segment)
        folder = self.paths[shard]
        if segment > MAX_SEGMENT:
            raise errors.StorageFullError(
                f"{folder}: all {MAX_SEGMENT} segment numbers are used up: load its records into a new store",
                path=folder,
            )
        block = Superblock(SEGMENT_FILE, self._uuids[shard], segment // len(self.paths))
        fd = write_new(self._files, self.path(segment), [block.pack()])
        with closing_on_error(self._files, fd):
            self._files.sync_folder(folder)
            self._adopt(segment, fd)

    def close(self, segments: Sequence[int] | None = None) -> None:
        """Close the descriptors of segments; by default of all segments."""
        for segment in self.ids() if segments is None else segments:
            fd = self._fds.pop(segment, -1)
            self._unsynced.pop(segment, None)
            if fd >= 0:
                for callback in self._callbacks:
                    callback(segment, -1)
                self._files.close(fd)

    def size(self, segment: int) -> int:
        """Return the bytes of a segment's file."""
        return os.fstat(self._fds[segment]).st_size

    def _adopt(self, segment: int, fd: int) -> None:
        self._fds[segment] = fd
        if fd > 200:
            allow_more_files(fd)
        for callback in self._callbacks:
            callback(segment, fd)

    # -- values -----------------------------------------------------------------------------------------------

    def stored(self, location: NDArray[np.int64]) -> StoredValue:
        """Return the value at a location, int64 [2]; its `fd` is -1 if the segment is not open."""
        loc0, loc1 = location.tolist()
        segment = segment_of(loc0)
        return StoredValue(
            self.path(segment), self._fds.get(segment, -1), offset_of(loc0), size_of(loc0, loc1), crc_of(loc1)
        )

    def set_head(self, segment: int, end: int) -> None:
        """Append later values of a shard to this segment, from byte `end` on."""
        shard = self.shard_of(segment)
        self.heads[shard], self.ends[shard] = segment, end

    def append(
        self,
        shard: int,
        values: ValueBuffers,
        key_lens: NDArray[np.uint8],
        roll: Callable[[int], object],
        copies: list[NDArray[np.uint8]] | None = None,
    ) -> NDArray[np.int64]:
        """Append values to a shard and return their locations.

        `roll` starts a new segment of a shard. `copies` receives the values in order, each padded to `UNIT`.
        """
        locs = np.empty((len(values.sizes), 2), np.int64)
        offsets, crcs = np.empty(len(locs), np.int64), np.empty(len(locs), np.int64)
        at = 0
        while at < len(locs):
            head, end = self.heads[shard], self.ends[shard]
            count = values.place_from(at, end, self._segment_bytes, offsets, crcs)
            if count == 0:
                roll(shard)
                continue
            rows = slice(at, at + count)
            # Set the end first: a finalizer that interrupts the write and appends must use other bytes.
            new_end = self.ends[shard] = int(offsets[rows][-1] + values.sizes[rows][-1])
            try:
                values.write(self._files, self._fds[head], rows, offsets[rows], copies)
            except BaseException:
                if self.heads[shard] == head and self.ends[shard] == new_end:
                    self.ends[shard] = end
                raise
            # After the write: a signal handler may sync the segment before that.
            self._unsynced[head] = new_end
            locs[rows] = locations(head, offsets[rows], crcs[rows], key_lens[rows], values.sizes[rows])
            at += count
        return locs

    def unsynced(self) -> dict[int, int]:
        """Return the segments with values that may not be durable, each with the end of its last value."""
        return dict(self._unsynced)

    def mark_synced(self, ends: dict[int, int]) -> None:
        """Record that the segments in a result of `unsynced` are durable, except those with later values."""
        for segment in ends:
            # A signal handler may have appended to it, or synced it.
            if segment in self._unsynced and self._unsynced[segment] == ends[segment]:
                del self._unsynced[segment]


@dataclass(frozen=True)
class StoredValue:
    """A value in a segment; `ValueBuffers` copies it in chunks, so that it need not fit into memory."""

    path: str
    fd: int
    offset: int
    nbytes: int
    crc: int

    def __len__(self) -> int:
        return self.nbytes

    def copy(self, files: Files, fd: int, offset: int) -> None:
        """Copy the value to another segment.

        Raises
        ------
        CorruptionError
            Its checksum is wrong, or its file ends before the value.
        """
        done = crc = 0
        while done < self.nbytes:
            part = read_at(self.fd, min(_WRITE_BYTES, self.nbytes - done), self.offset + done)
            if not part:
                break
            crc = crc32c(part, crc)
            files.pwrite(fd, part, offset + done)
            done += len(part)
        if done < self.nbytes or crc != self.crc:
            raise self.damaged()

    def damaged(self) -> errors.CorruptionError:
        """Return the error for a value with a wrong checksum."""
        return corruption(
            self.path,
            f"{self.path}: the value of {self.nbytes} bytes at byte {self.offset} is damaged; "
            "`warpwell kv verify` lists all damaged values; restore a copy of the store",
            self.offset,
        )


def place_values(addresses: int, sizes: int, count: int, end: int, limit: int, offsets: int, crcs: int) -> int:
    """Write the offsets and checksums of values after byte `end` of a segment, up to byte `limit`; return their number.

    Offsets are multiples of `UNIT`. The first value of a segment may exceed the limit.
    """
    for k in range(count):
        size = load_weak_as(sizes + 8 * k, INT64)
        offset = (end + UNIT - 1) & -UNIT
        if offset + size > limit and offset > SUPERBLOCK:
            return k
        address = load_weak_as(addresses + 8 * k, INT64)
        store_weak_as(offsets + 8 * k, offset, INT64)
        store_weak_as(crcs + 8 * k, -1 - address if address < 0 else crc32c_at(address, size, 0), INT64)
        end = offset + size
    return count


def gather(addresses: int, sizes: int, offsets: int, count: int, out: int) -> int:
    """Copy values to a buffer with the layout of the file, and zeros between them."""
    end = load_weak_as(offsets, INT64)
    start = end
    for k in range(count):
        size = load_weak_as(sizes + 8 * k, INT64)
        offset = load_weak_as(offsets + 8 * k, INT64)
        for gap in range(end, offset):
            store_weak_as(out + gap - start, 0, UINT8)
        copy_bytes(out + offset - start, load_weak_as(addresses + 8 * k, INT64), size)
        end = offset + size
    return 0


class ValueBuffers:
    """Values to be appended: a sequence of buffers, rows of one array, or items of one buffer.

    Parameters
    ----------
    values : sequence of bytes-like or StoredValue, uint8 [N, nbytes], or Ragged of uint8

    Attributes
    ----------
    addresses, sizes : int64 [N]
        The address of a `StoredValue` is -1 minus its checksum.

    Raises
    ------
    ValueSizeError
        A value is larger than `MAX_VALUE`.
    """

    def __init__(self, values: Any) -> None:
        self._owner: Any
        self._is_packed = False  # True if values have the same layout in memory and in the file
        if isinstance(values, Ragged):
            self._owner, starts = values._items
            self.sizes, self.addresses = values.lengths, self._owner.ctypes.data + starts
            self._is_packed = np.array_equal(np.diff(starts), -(-self.sizes[:-1] // UNIT) * UNIT)
        elif isinstance(values, np.ndarray) and values.ndim == 2:
            self._owner = np.ascontiguousarray(values).view(np.uint8)
            self.sizes = np.full(len(values), self._owner.shape[1], np.int64)
            self.addresses = self._owner.ctypes.data + self._owner.shape[1] * np.arange(len(values))
            self._is_packed = self._owner.shape[1] % UNIT == 0
        else:
            self._owner = [v if type(v) in (bytes, StoredValue) else np.frombuffer(v, np.uint8) for v in values]
            self.sizes = np.fromiter(map(len, self._owner), np.int64, len(self._owner))
            self.addresses = np.fromiter(map(_address, self._owner), np.int64, len(self._owner))
        if len(self.sizes) and int(self.sizes.max()) > MAX_VALUE:
            raise too_large(int(self.sizes.max()))

    def place_from(self, first: int, end: int, limit: int, offsets: NDArray[np.int64], crcs: NDArray[np.int64]) -> int:
        """Place the values from `first` on; see `place_values`."""
        addresses, sizes, *outputs = (a[first:].ctypes.data for a in (self.addresses, self.sizes, offsets, crcs))
        return int(compiled(place_values)(addresses, sizes, len(offsets) - first, end, limit, *outputs))

    def write(
        self,
        files: Files,
        fd: int,
        rows: slice,
        offsets: NDArray[np.int64],
        copies: list[NDArray[np.uint8]] | None = None,
    ) -> None:
        """Write the values of some rows at `offsets`, and append what was written to `copies`, padded to `UNIT`."""
        addresses, sizes = self.addresses[rows], self.sizes[rows]
        ends = offsets + sizes
        # values that are not gathered
        large = [*np.flatnonzero((sizes >= _LARGE) | (addresses < 0)).tolist(), len(offsets)]
        at, padded = 0, np.empty(0, np.uint8)
        while at < len(offsets):
            until = int(np.searchsorted(ends, offsets[at] + _WRITE_BYTES, "right"))
            until = len(offsets) if self._is_packed else max(at + 1, min(until, large[bisect_left(large, at)]))
            nbytes = int(ends[until - 1] - offsets[at])
            if addresses[at] < 0:
                self._owner[rows.start + at].copy(files, fd, int(offsets[at]))
                nbytes = 0
            elif until == at + 1 or self._is_packed:
                data = view_of(int(addresses[at]), nbytes, np.uint8)
            else:
                padded = np.zeros(footprint(nbytes), np.uint8)
                data = padded[:nbytes]
                arrays = (each[at:].ctypes.data for each in (addresses, sizes, offsets))
                compiled(gather)(*arrays, until - at, data.ctypes.data)
            if nbytes:
                files.pwrite(fd, data, int(offsets[at]))
            if nbytes and copies is not None:
                if data.base is not padded:
                    padded = np.zeros(footprint(nbytes), np.uint8)
                    padded[:nbytes] = data
                copies.append(padded)
            at = until


def _address(value: Any) -> int:
    if type(value) is bytes:
        return id(value) + _CONTENTS
    return -1 - value.crc if type(value) is StoredValue else int(value.ctypes.data)


def too_large(nbytes: int, owner: str = "a value") -> errors.ValueSizeError:
    """Return the error for a value of `nbytes` bytes."""
    return errors.ValueSizeError(
        f"{owner} has {nbytes} bytes, but a store accepts at most {MAX_VALUE}: split it", name="values", nbytes=nbytes
    )
