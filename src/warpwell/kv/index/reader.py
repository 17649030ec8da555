"""Reader: reads values with native code, from the segments that the log has open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import private_memory, view_of
from ..keys import Keys, as_key
from ..log.format import SEGMENT_SHIFT
from ..native import compiled
from .fetch import (
    BAD_CRC,
    FAILED,
    FOUND,
    OTHER_SIZE,
    SCRATCH_BYTES,
    SHORT,
    STALE,
    get_int,
    get_one,
    get_rows,
    has_one,
    read_many,
)
from .index import words_of
from .layout import (
    G_BASE,
    G_FD,
    G_MAPPED,
    S_SEGMENTS,
    SEGMENT_ENTRY,
    SEGMENT_HEADER,
    SIZE_MASK,
    StoreState,
    publish,
)
from .mapped_file import MappedFile, map_file

_ERROR = 1 << 40
_LARGE = 1024
"""Bytes of values that are worth a bytes object made in advance."""
_CONTENTS = bytes.__basicsize__ - 1
"""Where the contents of a bytes object begin."""
_FILLS = (
    sys.implementation.name == "cpython"
    and ctypes.string_at(id(b"contents") + _CONTENTS, 9) == b"contents\0"
    and bytes(1) is not bytes(1)  # no small object is shared (the empty one may be)
)
BLOCK_BYTES = 32
"""Of the words that `get_one` takes."""
_NO_ROWS = np.empty(0, np.intp)
_LOOK = 255
"""A batch of so many looks whether a segment can be mapped by now."""


class Reader:
    """Reads values of one store.

    Parameters
    ----------
    state : StoreState
    path : str
        The store, for messages.
    mapped : bool
        Map segments that are in the page cache.
    """

    def __init__(self, state: StoreState, path: str, *, mapped: bool = True) -> None:
        self._mapped = mapped
        self._mappings: dict[int, MappedFile] = {}
        self._looked = 0
        self._calls = 0
        self._state = state
        self._address = state.address
        self._path = path
        self._table = _SegmentTable(16)
        self._lock = threading.RLock()
        self.get = _getter(state.address, path)
        """Return one value, None for an absent key. An int of 64 bits (OverflowError for others) is its 8 bytes."""
        self._publish()

    # -- segments -------------------------------------------------------------------------------------------

    def on_segment(self, segment: int, fd: int) -> None:
        """Note that the log opened a segment as `fd`, or is about to close it (-1) when no reader is inside."""
        with self._lock:
            if segment >= self._table.count:
                self._grow(segment + 1)
            entry = self._table.entries[segment]
            if fd < 0:
                entry[G_MAPPED] = 0
                entry[G_FD] = 0
                mapping = self._mappings.pop(segment, None)
                if mapping is not None:
                    mapping.close()
                return
            entry[G_FD] = fd + 1
            self._map(segment, fd)

    def _map(self, segment: int, fd: int) -> None:
        mapping = map_file(fd) if self._mapped else None
        if mapping is not None:
            self._mappings[segment] = mapping
            self._table.entries[segment, G_BASE] = mapping.address
            self._table.entries[segment, G_MAPPED] = mapping.nbytes

    def look_again(self) -> None:
        """Map one more segment, if reads have loaded it into the page cache since the last check."""
        with self._lock:
            fds = self._table.entries[:, G_FD]
            candidates = np.flatnonzero((fds > 0) & (self._table.entries[:, G_MAPPED] == 0))
            if self._mapped and candidates.size:
                self._looked += 1
                segment = int(candidates[self._looked % candidates.size])
                self._map(segment, int(fds[segment]) - 1)

    def forked(self) -> None:
        """Continue in a forked child; the thread that held the lock exists only in the parent."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Stop reading, and wait for readers that are inside."""
        with self._lock:
            self._mapped = False
            self._table.entries[:, [G_MAPPED, G_FD]] = 0
            mappings = list(self._mappings.values())
            self._mappings.clear()

        # Whoever could have seen a descriptor or a mapping leaves before they go.
        def unmap() -> None:
            for mapping in mappings:
                mapping.close()

        self._state.retire(unmap)
        self._state.drain()

    def _grow(self, count: int) -> None:
        old, self._table = self._table, _SegmentTable(max(count, 2 * self._table.count))
        self._table.entries[: old.count] = old.entries
        self._publish()
        self._state.retire(old.free)

    def _publish(self) -> None:
        compiled(publish)(self._state.address, S_SEGMENTS, self._table.address)

    # -- values ---------------------------------------------------------------------------------------------

    def contains(self, key: bytes | int) -> bool:
        """Return whether a key exists."""
        key0, key1 = (key, 0) if isinstance(key, int) else words_of(key)
        length = 8 if isinstance(key, int) else len(key)
        return bool(compiled(has_one)(self._address, threading.get_ident() >> 12, key0, key1, length))

    def rows(
        self, keys: Keys, row_bytes: int, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Read values of `row_bytes` bytes each; return uint8 [N, row_bytes] (absent: zeros) and a mask.

        Raises
        ------
        CorruptionError
            A value's CRC is wrong, or its file ends before the value.
        ValueSizeError
            A value has another size.
        MediumError
            A read failed.
        """
        count = keys.size
        self._calls += 1
        if self._calls & _LOOK == 0:
            self.look_again()
        if out is None:
            out = np.empty((count, row_bytes), np.uint8)
        found = np.empty(count, np.bool_)
        locations = np.empty((count, 2), np.int64)
        at = out.ctypes.data
        wrong = compiled(get_rows)(
            self._state.address,
            at >> 12,
            keys.words.ctypes.data,
            0 if keys.lengths is None else keys.lengths.ctypes.data,
            count,
            at,
            row_bytes,
            found.ctypes.data,
            locations.ctypes.data,
        )
        if wrong:
            self._raise_first(keys, found.view(np.uint8), locations, row_bytes)
        return out, found

    def values(self, keys: Keys, locations: NDArray[np.int64]) -> tuple[list[bytes | None], NDArray[np.intp]]:
        """Read the values at locations that were looked up; return them, and the rows whose segment is not open."""
        self._calls += 1
        if self._calls & _LOOK == 0:
            self.look_again()
        sizes = locations[:, 1] & SIZE_MASK
        sizes[locations[:, 0] == 0] = 0
        found = np.empty(keys.size, np.uint8)
        listed: list[bytes | None]
        if _FILLS and keys.size and int(sizes.sum()) >= _LARGE * keys.size:
            # Large values go straight into their bytes objects, which nobody else has seen yet (C extensions
            # make them like that): another copy would take as long as the read.
            listed = [bytes(n) for n in sizes.tolist()]
            places = np.fromiter(map(id, listed), np.int64, keys.size) + _CONTENTS
            stale = self._read(keys, locations, 0, places, found)
            if found.all():
                return listed, stale
            return [v if ok else None for v, ok in zip(listed, found.tolist(), strict=True)], stale
        ends = np.cumsum(sizes)
        starts = ends - sizes
        out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        stale = self._read(keys, locations, out.ctypes.data, starts, found)
        raw: Any = out.tobytes() if out.nbytes < 1 << 16 else out.data
        pairs = zip(starts.tolist(), ends.tolist(), found.tolist(), strict=True)
        return [bytes(raw[a:b]) if ok else None for a, b, ok in pairs], stale

    def _read(
        self,
        keys: Keys,
        locations: NDArray[np.int64],
        base: int,
        starts: NDArray[np.int64],
        found: NDArray[np.uint8],
    ) -> NDArray[np.intp]:
        """Read values to ``base + starts``; return the rows whose segment is not open."""
        wrong = compiled(read_many)(
            self._address,
            found.ctypes.data >> 12,
            locations.ctypes.data,
            keys.size,
            base,
            starts.ctypes.data,
            found.ctypes.data,
        )
        if not wrong:
            return _NO_ROWS
        stale = np.flatnonzero(found == STALE)
        if stale.size:
            return stale
        self._raise_first(keys, found, locations, 0)

    # -- errors ---------------------------------------------------------------------------------------------

    def _raise_first(
        self, keys: Keys, found: NDArray[np.uint8], locations: NDArray[np.int64], row_bytes: int
    ) -> NoReturn:
        k = int(np.flatnonzero(found > FOUND)[0])
        if found[k] == OTHER_SIZE:
            size = int(locations[k, 1]) & SIZE_MASK
            raise errors.ValueSizeError(
                f"{self._path}: the value of key {keys.row(k)!r} has {size} bytes, not {row_bytes}: leave out away",
                name="out",
                nbytes=size,
            )
        raise read_error(self._path, keys.row(k), int(found[k]), int(locations[k, 0]) >> SEGMENT_SHIFT)


def _getter(state: int, path: str) -> Callable[[Any], bytes | None]:
    """Return `Reader.get`, which is optimized: for a single record Python takes longer than the store."""
    # Buffers that nobody uses. A call takes one, so that whoever reads in the middle of it gets another: other threads,
    # and signal handlers and finalizers in this one.
    unused: list[tuple[Any, int, Any]] = []
    take, give = unused.pop, unused.append

    def get(key: Any) -> bytes | None:
        try:
            buffer = take()
        except IndexError:
            buffer = _buffer(state)
        call, block, contents = buffer
        if type(key) is int:
            size = call(block, key)
        elif len(key) == 8:
            size = call(block, int.from_bytes(key, "little", signed=True))
        else:
            size = compiled(get_one)(block, *words_of(as_key(key)), len(key))
        if size >= 0:
            value: bytes = contents[:size]
            give(buffer)
            return value
        give(buffer)
        return None if size == -_ERROR else _get_hard(state, path, key, int(size))

    return get


def _buffer(state: int) -> tuple[Any, int, Any]:
    """Return the function that reads an int key, its argument words, and the memory for the value."""
    raw = private_memory(SCRATCH_BYTES + BLOCK_BYTES)
    address = int(np.frombuffer(raw, np.uint8).ctypes.data)
    block = address + SCRATCH_BYTES
    view_of(block, BLOCK_BYTES, np.int64)[:] = state, address >> 12, address, SCRATCH_BYTES
    # a slice of an mmap object is bytes, made in one step
    return compiled(get_int), block, raw


def _get_hard(state: int, path: str, given: int | bytes, size: int) -> bytes | None:
    """Return a value that is larger than the buffer, or raise the error of a read."""
    key = as_key(given)
    while -_ERROR < size < 0:
        out = np.empty(-1 - size, np.uint8)
        address = out.ctypes.data
        block = np.array([state, address >> 12, address, out.nbytes], np.int64)
        size = int(compiled(get_one)(block.ctypes.data, *words_of(key), len(key)))
        if size >= 0:
            return out[:size].tobytes()
    if size == -_ERROR:
        return None
    raise read_error(path, given, -size - _ERROR)


def read_error(path: str, key: int | bytes, status: int, segment: int | None = None) -> Exception:
    """Return the exception for an error code of a key."""
    where = path if segment is None else f"{path}, segment {segment}"
    if status == BAD_CRC:
        return errors.CorruptionError(
            f"{where}: the value of key {key!r} is damaged (its CRC-32C is wrong): run `warpwell kv verify`, and"
            " put the key again from its source",
            path=path,
        )
    if status == SHORT:
        return errors.CorruptionError(
            f"{where}: the file ends before the value of key {key!r}: it was cut, restore it from a copy",
            path=path,
        )
    if status == STALE:
        return errors.CorruptionError(
            f"{where}: the value of key {key!r} lies in a segment that is not open: open the store again",
            path=path,
        )
    code = status - FAILED
    with contextlib.suppress(ValueError):
        return errors.MediumError(
            f"{where}: reading the value of key {key!r} failed ({os.strerror(code)}): check the drive", status=0x281
        )
    raise AssertionError(status)


class _SegmentTable:
    """Descriptors by segment id."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._words: Any = np.zeros((SEGMENT_HEADER + SEGMENT_ENTRY * count) // 8, np.int64)
        self._words[0] = count
        self.entries = self._words[SEGMENT_HEADER // 8 :].reshape(count, SEGMENT_ENTRY // 8)
        self.address = int(self._words.ctypes.data)

    def free(self) -> None:
        """Drop the memory."""
        self._words = None
