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
from ..ragged import Ragged
from .checksum import crc32c, crc32c_many
from .files import Files, closing_on_error, read_at, write_new
from .format import (
    MAX_SEGMENT,
    MAX_SEGMENT_BYTES,
    MAX_VALUE,
    SEGMENT_FILE,
    SUPERBLOCK,
    UNIT,
    Superblock,
    crc_of,
    file_name,
    first_word,
    locations,
    offset_of,
    segment_of,
    size_of,
)

_WRITE_BYTES = 8 << 20
"""Values are gathered to writes of at most so many bytes, or one value."""
_BATCH = 1 << 17
"""Values that are placed at once."""
_LARGE = 1 << 18
"""Bytes from which a value is written from where it lies."""

_GAPS = [bytes(n) for n in range(UNIT)]
"""Zeros between values, by their length."""

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
        The segment that a shard's values are appended to, and the bytes of it that are taken.
    missing : set of int
        Shards whose folder was not found, where damaged stores are read as far as possible.
    """

    def __init__(self, files: Files, folders: Sequence[SegmentFolder], segment_bytes: int, *, writable: bool) -> None:
        # less a unit: a value of 0 bytes may be placed at the end
        self._segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES - UNIT)
        self._files, self._writable = files, writable
        self.paths, self._uuids = [path for path, _ in folders], [uuid for _, uuid in folders]
        self._fds: dict[int, int] = {}
        self._callbacks: list[Callback] = []
        self.heads, self.ends = [0] * len(folders), [SUPERBLOCK] * len(folders)
        self.missing: set[int] = set()
        self._dirty: set[int] = set()

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
        return segment_path(self.paths, segment)

    def fd(self, segment: int) -> int:
        """Return the descriptor of a segment.

        Raises
        ------
        KeyError
            The segment is not open.
        """
        return self._fds[segment]

    def on_segment(self, callback: Callback) -> None:
        """Call ``callback(segment, fd)`` for each segment, now and later; fd is -1 when one is closed."""
        self._callbacks.append(callback)
        for segment in self.ids():
            callback(segment, self._fds[segment])

    def open(self, segment: int) -> None:
        """Open a segment that exists.

        Raises
        ------
        CorruptionError
            The file is damaged, or is another file.
        FileNotFoundError
        """
        if segment in self._fds:
            return
        path = self.path(segment)
        fd = self._files.open(path, self._writable)
        with closing_on_error(self._files, fd):
            uuid, number = self._uuids[self.shard_of(segment)], segment // len(self.paths)
            Superblock.unpack(read_at(fd, SUPERBLOCK, 0), SEGMENT_FILE, uuid, number, path)
            self._adopt(segment, fd)

    def create(self, segment: int) -> None:
        """Create a durable segment file, whose name is durable too; the manifest does not name it yet.

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
        """Close descriptors; of all segments by default."""
        for segment in self.ids() if segments is None else segments:
            fd = self._fds.pop(segment, -1)
            self._dirty.discard(segment)
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
        """Return the value at a location, int64 [2], in an open segment."""
        loc0, loc1 = location.tolist()
        segment = segment_of(loc0)
        return StoredValue(self.path(segment), self._fds[segment], offset_of(loc0), size_of(loc0, loc1), crc_of(loc1))

    def set_head(self, segment: int, end: int) -> None:
        """Append the values of a segment's shard to it, from byte `end`."""
        shard = self.shard_of(segment)
        self.heads[shard], self.ends[shard] = segment, end

    def append(
        self, shard: int, values: ValueBuffers, key_lens: NDArray[np.uint8], roll: Callable[[int], object]
    ) -> NDArray[np.int64]:
        """Append values to a shard and return their locations; `roll` starts a new segment of a shard."""
        locs = np.empty((len(values.sizes), 2), np.int64)
        at = 0
        while at < len(locs):
            sizes, end = values.sizes[at : at + _BATCH], self.ends[shard]
            offsets = place(sizes, end)
            ends = offsets + sizes
            count = int(np.searchsorted(ends, self._segment_bytes, "right"))
            if count == 0 and end > SUPERBLOCK:
                roll(shard)
                continue
            count, head = max(count, 1), self.heads[shard]
            self._dirty.add(head)
            crcs = values.write(self._files, self._fds[head], at, offsets[:count])
            until = at + count
            locs[at:until] = locations(head, offsets[:count], crcs, key_lens[at:until], sizes[:count])
            self.ends[shard] = int(ends[count - 1])
            at = until
        return locs

    def append_one(self, shard: int, value: Any, nbytes: int, roll: Callable[[int], object]) -> int:
        """Append one value to a shard; return the first word of its location."""
        offset = -(-self.ends[shard] // UNIT) * UNIT
        if offset + nbytes > self._segment_bytes and self.ends[shard] > SUPERBLOCK:
            roll(shard)
            offset = SUPERBLOCK
        head = self.heads[shard]
        if nbytes:
            self._dirty.add(head)
            self._files.pwrite(self._fds[head], value, offset)
        self.ends[shard] = offset + nbytes
        return int(first_word(head, offset, nbytes))

    def take_unsynced(self) -> list[int]:
        """Return the segments with values that may not be durable, and forget them: the caller syncs them.

        A signal handler may append to them meanwhile.
        """
        taken, self._dirty = self._dirty, set()
        return sorted(taken)

    def mark_unsynced(self, segments: Sequence[int]) -> None:
        """Note that values of segments may not be durable."""
        self._dirty.update(segments)


def segment_path(folders: Sequence[str], segment: int) -> str:
    """Return the file of a segment in the folders of a store's shards."""
    number, shard = divmod(segment, len(folders))
    return os.path.join(folders[shard], file_name(SEGMENT_FILE, number))


@dataclass(frozen=True)
class StoredValue:
    """A value in a segment; `ValueBuffers` copies it in pieces, so that it need not fit into memory."""

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
        return errors.CorruptionError(
            f"{self.path}: the value of {self.nbytes} bytes at byte {self.offset} is damaged; "
            "`warpwell kv verify` lists all damaged values; restore a copy of the store",
            path=self.path,
            offset=self.offset,
        )


class ValueBuffers:
    """Values to be appended: a sequence of buffers, rows of one array, or items of one buffer.

    Parameters
    ----------
    values : sequence of bytes-like or StoredValue, uint8 [N, nbytes], or Ragged of uint8

    Raises
    ------
    ValueSizeError
        A value is larger than `MAX_VALUE`.
    """

    def __init__(self, values: Any) -> None:
        self._rows: NDArray[np.uint8] | None = None
        self._items: Ragged | None = None
        self._list: list[Any] = []
        if isinstance(values, Ragged):
            self._items, self.sizes = values, values.lengths
        elif isinstance(values, np.ndarray) and values.ndim == 2:
            self._rows = np.ascontiguousarray(values).view(np.uint8)
            self.sizes = np.full(len(values), self._rows.shape[1], np.int64)
        else:
            self._list = [v if type(v) is bytes or type(v) is StoredValue else memoryview(v).cast("B") for v in values]
            self.sizes = np.fromiter(map(len, self._list), np.int64, len(self._list))
        if len(self.sizes) and int(self.sizes.max()) > MAX_VALUE:
            raise too_large(int(self.sizes.max()))

    def write(self, files: Files, fd: int, first: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write values `first` ... at `offsets`; return their checksums."""
        sizes = self.sizes[first : first + len(offsets)]
        ends = offsets + sizes
        crcs = np.empty(len(offsets), np.int64)
        at = 0
        while at < len(offsets):
            until = max(at + 1, int(np.searchsorted(ends, offsets[at] + _WRITE_BYTES, "right")))
            if self._list and type(value := self._list[first + at]) is StoredValue:
                value.copy(files, fd, int(offsets[at]))
                crcs[at], at = value.crc, at + 1
                continue
            data, base = self._gather(first + at, first + until, offsets[at:until])
            nbytes = int(ends[until - 1] - offsets[at])
            address = base.ctypes.data if nbytes else 0
            crcs[at:until] = crc32c_many(address + offsets[at:until] - offsets[at], sizes[at:until])
            if nbytes:
                files.pwrite(fd, data[:nbytes], int(offsets[at]))
            at = until
        return crcs

    def _gather(self, start: int, stop: int, offsets: NDArray[np.int64]) -> tuple[memoryview, NDArray[np.uint8]]:
        """Return one buffer with the layout of the values in the file."""
        sizes = self.sizes[start:stop]
        nbytes = int(offsets[-1] - offsets[0] + sizes[-1])
        base: NDArray[np.uint8]
        if self._rows is not None:
            row = self._rows.shape[1]
            stride = int(offsets[1] - offsets[0]) if len(offsets) > 1 else row
            if row in (0, stride):
                base = self._rows[start:stop].reshape(-1)
            else:
                base = np.zeros((len(offsets), stride), np.uint8)
                base[:, :row] = self._rows[start:stop]
                base = base.reshape(-1)
        elif self._items is not None:
            base = np.zeros(nbytes, np.uint8)
            self._items[start:stop].copy_to(base, offsets - offsets[0])
        elif nbytes == 0:
            base = np.empty(0, np.uint8)
        elif stop - start == 1:
            base = np.frombuffer(self._list[start], np.uint8)
        elif nbytes > 64 * len(offsets) and int(sizes.max()) >= _LARGE:
            base = np.zeros(nbytes, np.uint8)
            for value, at, size in zip(self._list[start:stop], offsets - offsets[0], sizes, strict=True):
                base[at : at + size] = np.frombuffer(value, np.uint8) if size else 0
        else:
            gaps = np.zeros(len(offsets), np.int64)
            gaps[:-1] = offsets[1:] - offsets[:-1] - sizes[:-1]
            parts: list[Any] = [b""] * (2 * len(offsets))
            parts[0::2] = self._list[start:stop]
            parts[1::2] = [_GAPS[gap] for gap in gaps.tolist()]
            base = np.frombuffer(b"".join(parts), np.uint8)
        return base.data, base


def place(sizes: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the offsets of values after byte `end`: multiples of 64 B."""
    padded = -(-sizes // UNIT) * UNIT
    offsets: NDArray[np.int64] = np.cumsum(padded) - padded + -(-end // UNIT) * UNIT
    return offsets


def too_large(nbytes: int, what: str = "a value") -> errors.ValueSizeError:
    """Return the error for a value of `nbytes` bytes."""
    return errors.ValueSizeError(
        f"{what} has {nbytes} bytes, but a store accepts at most {MAX_VALUE}: split it", name="values", nbytes=nbytes
    )
