"""Segments: the files that hold values, their descriptors, and the place of the next value.

A store has one folder of segments, or several, its shards. File `number` of shard `shard` is the segment
``number * shards + shard``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import allow_more_files
from ...targets import device, view_of
from ...targets.primitives import copy_crc32c, load_weak_as, store_weak_as
from ...targets.primitives import crc32c as crc32c_at
from ..native import CONTENTS, INT64, SIZE, TYPE, UINT8, address_of, compiled, items_of
from ..ragged import Ragged
from .checksum import crc32c
from .files import Files, closing_on_error, read_at, write_new
from .format import (
    CRC_SHIFT,
    JOURNAL_SEGMENT,
    KEY_LEN_SHIFT,
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
    first_word,
    footprint,
    low_size,
    offset_of,
    segment_of,
    size_of,
)

WRITE_BYTES = 1 << 20
"""Maximum size of the values in one write, in bytes, so that they stay in the processor's cache; a larger value is
written alone."""
_LARGE = 1 << 18
"""Minimum size of a value that is written without a copy, in bytes."""

Callback = Callable[[int, int], None]
Encode = Callable[[int, int, int], "Chunk | None"]
"""See `Segments.append`."""


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
    limit : int
        Values end before this byte of a segment, except the first value.
    heads, ends : list of int
        For each shard the segment that values are appended to, and its used size in bytes.
    missing : set of int
        Shards without a folder, if a damaged store is read as far as possible.
    """

    def __init__(self, files: Files, folders: Sequence[SegmentFolder], segment_bytes: int, *, writable: bool) -> None:
        # less one unit, because a value of 0 bytes may be placed at the end
        self.limit = min(segment_bytes, MAX_SEGMENT_BYTES - UNIT)
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
        encode: Encode,
        roll: Callable[[int], object],
        copies: list[NDArray[np.uint8]] | None = None,
    ) -> None:
        """Append values to a shard.

        Parameters
        ----------
        shard : int
        encode : callable
            ``encode(segment, end, limit)`` places the next values after byte `end` of a segment, up to byte `limit`,
            and returns them, or None if the segment is full.
        roll : callable
            Starts a new segment of a shard.
        copies : list, optional
            Receives the values in order, each padded to `UNIT`.
        """
        first_head, first_end, is_last = 0, 0, False
        while not is_last:
            head, end = self.heads[shard], self.ends[shard]
            if head != first_head:
                first_head, first_end = head, end
            chunk = encode(head, end, self.limit)
            if chunk is None:
                roll(shard)
                continue
            is_last = chunk.is_last
            if not chunk.count:
                continue
            # Set the end first: a finalizer may interrupt this write and append, and must use other bytes.
            new_end = self.ends[shard] = chunk.offset + chunk.nbytes
            try:
                if chunk.nbytes:
                    self._files.pwrite(self._fds[head], chunk.contents[: chunk.nbytes], chunk.offset)
            except BaseException:
                if self.heads[shard] == head and self.ends[shard] == new_end:
                    self.ends[shard] = first_end
                raise
            # Do this after the write: a signal handler may sync the segment before the write.
            self._unsynced[head] = new_end
            if copies is not None and chunk.nbytes:
                copies.append(chunk.padded())

    def write_placed(self, contents: NDArray[np.uint8]) -> None:
        """Write values that were placed after the end of the first shard's segment."""
        head, offset = self.heads[0], footprint(self.ends[0])
        self._files.pwrite(self._fds[head], contents, offset)
        self._unsynced[head] = self.ends[0] = offset + len(contents)

    def unsynced(self) -> dict[int, int]:
        """Return the segments with values that may not be durable, each with the end of its last value."""
        return dict(self._unsynced)

    def mark_synced(self, ends: dict[int, int]) -> None:
        """Record that the segments in a result of `unsynced` are durable, except those with later values."""
        for segment in ends:
            # A signal handler may have appended to the segment, or synced it.
            if segment in self._unsynced and self._unsynced[segment] == ends[segment]:
                del self._unsynced[segment]


@dataclass(frozen=True)
class StoredValue:
    """A value in a segment."""

    path: str
    fd: int
    offset: int
    nbytes: int
    crc: int

    def read(self) -> bytes | None:
        """Return the contents, or None if they do not match the checksum."""
        if self.nbytes > max(0, os.fstat(self.fd).st_size - self.offset):
            return None  # a damaged size may exceed the memory of the process
        contents = read_at(self.fd, self.nbytes, self.offset)
        return contents if len(contents) == self.nbytes and crc32c(contents) == self.crc else None

    def damaged(self) -> errors.CorruptionError:
        """Return the error for a value with a wrong checksum."""
        return corruption(
            self.path,
            f"{self.path}: the value of {self.nbytes} bytes at byte {self.offset} is damaged; "
            "`warpwell kv verify` lists all damaged values; restore a copy of the store",
            self.offset,
        )


def read_objects(objects: int, count: int, bytes_type: int, addresses: int, sizes: int) -> int:
    """Write addresses and sizes of bytes objects, up to the first object of another type; return their number."""
    for k in range(count):
        found = load_weak_as(objects + 8 * k, INT64)
        if load_weak_as(found + TYPE, INT64) != bytes_type:
            return k
        store_weak_as(addresses + 8 * k, found + CONTENTS, INT64)
        store_weak_as(sizes + 8 * k, load_weak_as(found + SIZE, INT64), INT64)
    return count


@device
def clear_padding(target: int, size: int) -> None:
    """Write zeros to the last `UNIT` of a value that will be copied to `target`, if it has less than `UNIT` bytes."""
    if size % UNIT != 0:
        for word in range(UNIT // 8):
            store_weak_as(target + footprint(size) - UNIT + 8 * word, 0, INT64)


def encode_values(
    addresses: int,
    sizes: int,
    lens: int,
    count: int,
    segment: int,
    end: int,
    limit: int,
    locs: int,
    out: int,
    room: int,
) -> int:
    """Write the locations of values after byte `end` of a segment, up to byte `limit`; return their number.

    Offsets are multiples of `UNIT`. The first value of a segment may exceed the limit. The values are copied to the
    `room` bytes at `out`, each padded to `UNIT`, up to the first one that does not fit or is large.
    If `out` is 0, no value is copied, and all values after the first end within `room` bytes.
    """
    first = footprint(end)
    for k in range(count):
        address = load_weak_as(addresses + 8 * k, INT64)
        size = load_weak_as(sizes + 8 * k, INT64)
        offset = footprint(end)
        if offset + size > limit and offset > SUPERBLOCK:
            return k
        if out == 0:
            if k > 0 and offset + size - first > room:
                return k
            crc = crc32c_at(address, size, 0)
        else:
            target, padded = out + offset - first, footprint(size)
            if size >= _LARGE or target + padded > out + room:
                return k
            clear_padding(target, size)
            crc = copy_crc32c(target, address, size, 0)
        store_weak_as(locs + 16 * k, first_word(segment, offset, size), INT64)
        length = int(load_weak_as(lens + k, UINT8))
        store_weak_as(locs + 16 * k + 8, crc << CRC_SHIFT | length << KEY_LEN_SHIFT | low_size(size), INT64)
        end = offset + size
    return count


@dataclass(slots=True)
class Chunk:
    """Values of one write: the number of values, their position in a segment, and their contents.

    `contents` has zeros after the values up to a multiple of `UNIT`, or no bytes after them.
    """

    count: int
    offset: int
    nbytes: int
    contents: NDArray[np.uint8]
    is_last: bool
    """Whether these are the last values to be appended to the shard."""

    def padded(self) -> NDArray[np.uint8]:
        """Return the values, with zeros up to a multiple of `UNIT`.

        The result is a copy if the values are in the caller's memory, which may change or be freed before the commit.
        """
        size = footprint(self.nbytes)
        return self.contents[:size] if self.contents.flags.owndata else np.pad(self.contents, (0, size - self.nbytes))


class ValueBuffers:
    """Values to be appended.

    Parameters
    ----------
    owner : object
        Keeps the memory alive.
    addresses, sizes : int64 [N]
    is_packed : bool
        True if values have the same layout in memory and in the file.

    Attributes
    ----------
    nbytes : int
        Bytes of all values.

    Raises
    ------
    ValueSizeError
        A value is larger than `MAX_VALUE`.
    """

    def __init__(
        self, owner: Any, addresses: NDArray[np.int64], sizes: NDArray[np.int64], *, is_packed: bool = False
    ) -> None:
        self._owner, self.addresses, self.sizes, self._is_packed = owner, addresses, sizes, is_packed
        self._next = 0  # the first value that is not placed
        self.nbytes = int(sizes.sum())
        if self.nbytes > MAX_VALUE and self.largest > MAX_VALUE:
            raise too_large(self.largest)

    @property
    def largest(self) -> int:
        """Bytes of the largest value."""
        return int(self.sizes.max(initial=0))

    @classmethod
    def of(cls, values: Any) -> ValueBuffers:
        """Return the buffers of a sequence of bytes-like objects, of uint8 [N, nbytes], or of a Ragged."""
        owner: Any
        if isinstance(values, Ragged):
            owner, starts = values._items
            has_zeros = values._is_padded or not (values.lengths[:-1] % UNIT).any()
            is_packed = has_zeros and np.array_equal(np.diff(starts), footprint(values.lengths[:-1]))
            return cls(owner, owner.ctypes.data + starts, values.lengths, is_packed=is_packed)
        if isinstance(values, np.ndarray) and values.ndim == 2:
            owner = np.ascontiguousarray(values).view(np.uint8)
            nbytes = owner.shape[1]
            addresses = owner.ctypes.data + nbytes * np.arange(len(values))
            return cls(owner, addresses, np.full(len(values), nbytes, np.int64), is_packed=nbytes % UNIT == 0)
        owner = list(values)
        addresses, sizes = np.empty((2, len(owner)), np.int64)
        arrays = address_of(addresses), address_of(sizes)
        if compiled(read_objects)(items_of(owner), len(owner), id(bytes), *arrays) < len(owner):
            owner = [v if type(v) is bytes else np.frombuffer(v, np.uint8) for v in owner]
            sizes[:], addresses[:] = list(map(len, owner)), list(map(_address, owner))
        return cls(owner, addresses, sizes)

    def take(self, rows: NDArray[np.intp]) -> ValueBuffers:
        """Return the values of some rows."""
        return ValueBuffers(self._owner, self.addresses[rows], self.sizes[rows])

    def encode(
        self, key_lens: NDArray[np.uint8], locs: NDArray[np.int64], segment: int, end: int, limit: int
    ) -> Chunk | None:
        """Place the next values, write their locations to `locs`, and return them; None if the segment is full.

        See `encode_values`.
        """
        first, total = self._next, len(self.sizes)
        address, size, count = int(self.addresses[first]), int(self.sizes[first]), total - first
        out = np.empty(0, np.uint8)
        if size >= _LARGE and not self._is_packed:
            count = 1
        elif not self._is_packed:
            out = np.empty(min(self.nbytes + UNIT * count, WRITE_BYTES), np.uint8)
        arrays = (
            address_of(self.addresses) + 8 * first,
            address_of(self.sizes) + 8 * first,
            address_of(key_lens) + first,
        )
        target = segment, end, limit, address_of(locs) + 16 * first
        copies = (address_of(out), len(out)) if len(out) else (0, WRITE_BYTES)
        count = compiled(encode_values)(*arrays, count, *target, *copies)
        if count == 0:
            return None
        last = self._next = first + count
        offset = footprint(end)
        nbytes = int(offset_of(locs[last - 1, 0])) + int(self.sizes[last - 1]) - offset
        return Chunk(count, offset, nbytes, out if len(out) else view_of(address, nbytes, np.uint8), last == total)


def _address(value: Any) -> int:
    return id(value) + CONTENTS if type(value) is bytes else address_of(value)


def too_large(nbytes: int, owner: str = "a value") -> errors.ValueSizeError:
    """Return the error for a value of `nbytes` bytes."""
    return errors.ValueSizeError(
        f"{owner} has {nbytes} bytes, but a store accepts at most {MAX_VALUE}: split it", name="values", nbytes=nbytes
    )
