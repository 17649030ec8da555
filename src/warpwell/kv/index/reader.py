"""Read values: look keys up, read from the segments' files, check every CRC, in native code and for the host.

Small values are copied from mapped files: a copy takes about 30 ns, a pread 700 ns. Errors of mapped files are handled:
a file that is truncated or fails reads as zeros (`warpwell.targets.bus_error`), the CRC then differs, and the value is
read again by pread, which returns the error. Files that are not in the page cache are not mapped: pread fetches a value
at once, and page faults would fetch it page by page.

Before a batch is read from files that are not mapped, the system is asked to read all of its values into the page cache
(`read_ahead`), so that the drive has all reads in flight. This only moves data into the page cache: the thread that
asks holds its epoch for the calls, reads and checks the values afterwards as if it had not asked, and no buffer of this
process waits for a read of a segment that was closed or deleted. It takes 14.3 us a record for 64 random values of
8 KiB in a file of 800 MB, one pread after another 49.7 us, io_uring 17.0 us through the page cache and 13.1 us past it;
for 256 values 13.7, 58.6, 14.3 and 15.0 us (a virtual drive, two cores). So no ring is needed, which containers forbid.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import device, native
from ...targets.bus_error import map_guarded, unmap
from ...targets.primitives import (
    SYSTEM,
    backoff,
    call_foreign,
    copy_crc32c,
    crc32c,
    exchange,
    fetch_add,
    i64,
    load_acquire,
    load_relaxed,
    load_weak_as,
    prefetch,
    store_release,
    store_weak_as,
)
from ..keys import SUFFIX_BYTES, Keys, as_key, long_key_in, suffix_of, words_of
from ..log.checksum import BAD_CRC, FAILED, FOUND, SHORT, read_chunks, read_exactly
from ..log.format import DAMAGED, LONG, crc_of, offset_of, segment_of, size_of
from ..native import CONTENTS, SIZE, TYPE, compiled, has_known_layout, method, python_function, with_objects
from .index import (
    C_BYTES,
    C_ERRORS,
    C_GETS,
    C_HITS,
    S_SCRATCH,
    S_SEGMENTS,
    S_TABLE,
    SCRATCH_BYTES,
    SCRATCHES,
    StoreState,
    addresses,
    enter,
    find_many,
    leave,
    look_up_all,
    lookup,
    publish,
    stripe_of,
)
from .sealed import INT64, UINT8

# -- results of a read, in addition to those of `log.checksum`; the low byte of `found` arrays --------------------
ABSENT = 0
STALE = 4
"""The location's segment is not open: look the key up again."""
OTHER_SIZE = 5
"""The value is not as large as a row."""
BAD_RECORD = 6
"""The lengths of the record's ragged fields differ from its size."""
NO_LOCATION = 7
"""A block of the index file is damaged."""

# -- segment table: the number of entries, padded to 8 words, then entries of 4 --------------------------------
SEGMENT_HEADER = 64
SEGMENT_ENTRY = 32
G_FD = 0
"""File descriptor plus 1; 0 if the segment is not open."""
G_BASE = 1
"""Address of the mapped file, 0 if it is not mapped."""
G_MAPPED = 2
"""Size of the mapping in bytes."""

VALUES_AHEAD = 2
"""Distance in a batch between a value that is read and the next prefetched value."""
PREFETCH_BYTES = 1024
MAX_MAPPED_BYTES = 32768
"""Largest value that is copied from a mapped file, in bytes. For larger values the cost of a system call is small."""
GAP_BYTES = 16 << 10
"""Longest gap between two values that are read ahead together, as in `warpwell.gather`."""
MAX_AHEAD_BYTES = 128 << 10
"""Size of a request to read ahead; the system shortens longer ones."""
MAX_BATCH_AHEAD_BYTES = 256 << 20
"""Maximum number of bytes of a batch that are read ahead, so that the page cache holds them until they are copied."""

# -- data of `get_object`, in words -------------------------------------------------------------------------------
P_STATE = 0
"""Address of the store's state."""
P_SLOW = 1
"""Address of the Python function that reads all other values."""
P_NONE = 2
P_INT = 3
"""Address of the type int."""
P_BYTES = 4
P_AS_WORD = 5
P_CLEAR_ERROR = 6
P_CALL = 7
P_TAKE = 8
P_DROP = 9
P_NEW_BYTES = 10
P_RELEASE_LOCK = 11
P_ACQUIRE_LOCK = 12
_PYTHON_FUNCTIONS = (
    "PyLong_AsLongLong",
    "PyErr_Clear",
    "PyObject_CallOneArg",
    "Py_IncRef",
    "Py_DecRef",
    "PyBytes_FromStringAndSize",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
"""Functions of Python's C API; the words from `P_AS_WORD` on are their addresses."""

_ERROR = 1 << 40
"""`get_one` returns errors below minus this number."""
_NO_ROWS = np.empty(0, np.intp)
_KEYS_AT_ONCE = 4096
"""Maximum number of long keys that are read at once."""
_MAP_INTERVAL = 256
"""Number of batches between attempts to map one more segment."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_FADVISE = ctypes.cast(_libc.posix_fadvise, ctypes.c_void_p).value or 0
WILL_NEED = os.POSIX_FADV_WILLNEED
_MIN_RESIDENT = 0.9
"""Share of a file that must be in the page cache before it is mapped."""
_SAMPLES = 64
"""Number of pages of a file that are sampled."""
_MIN_MAPPED_BYTES = 1 << 28
"""Minimum address space of a mapped file in bytes, because a file may grow."""


# -- values, in native code -------------------------------------------------------------------------------------


@device
def segment_entry(state: int, segment: int) -> int:
    """Return the address of a segment's entry, 0 if the segment is not open."""
    table = load_acquire(state + 8 * S_SEGMENTS, SYSTEM)
    if table == 0 or segment < 0 or segment >= load_relaxed(table, SYSTEM):
        return 0
    entry = table + SEGMENT_HEADER + SEGMENT_ENTRY * segment
    if load_acquire(entry + 8 * G_FD, SYSTEM) == 0:
        return 0
    return entry


@device
def mapped_address(entry: int, loc0: int, size: int) -> int:
    """Return the address of a value in a mapped file, or 0 if a system call must read it (inside of an epoch)."""
    offset: int = offset_of(loc0)
    if size > MAX_MAPPED_BYTES or offset + size > load_acquire(entry + 8 * G_MAPPED, SYSTEM):
        return 0
    return load_relaxed(entry + 8 * G_BASE, SYSTEM) + offset


@device
def read_value(state: int, loc0: int, loc1: int, out: int) -> int:
    """Read a whole value and check its CRC (inside of an epoch); return FOUND or an error."""
    if loc0 == DAMAGED:
        return NO_LOCATION
    entry = segment_entry(state, segment_of(loc0))
    if entry == 0:
        return STALE
    size = size_of(loc0, loc1)
    crc = crc_of(loc1)
    source = mapped_address(entry, loc0, size)
    if source != 0:
        if copy_crc32c(out, source, size, 0) == crc:
            return FOUND
        # Read the value again by a system call, which reports an error of the file.
    fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
    status = read_exactly(fd, out, size, offset_of(loc0))
    if status == FOUND and crc32c(out, size, 0) != crc:
        return BAD_CRC
    return status


@device
def prefetch_value(state: int, loc0: int, loc1: int) -> None:
    """Prefetch a value of a mapped file (inside of an epoch)."""
    entry = segment_entry(state, segment_of(loc0))
    if entry == 0:
        return
    size = size_of(loc0, loc1)
    source = mapped_address(entry, loc0, size)
    if source != 0:
        for line in range(source, source + min(size, PREFETCH_BYTES), 64):
            prefetch(line)


@device
def read_ahead(state: int, stripe: int, locations: int, count: int, fadvise: int) -> int:
    """Request values at ascending locations from the system in advance, if their segments are not mapped.

    `fadvise` is the address of posix_fadvise. One request covers values with gaps of at most `GAP_BYTES`. Return the
    number of requested bytes.
    """
    epoch = enter(state, stripe)
    total = 0
    fd = -1
    start = 0
    end = 0
    for k in range(count):
        loc0 = load_weak_as(locations + 16 * k, INT64)
        entry = segment_entry(state, segment_of(loc0))
        if loc0 == 0 or entry == 0 or load_acquire(entry + 8 * G_MAPPED, SYSTEM) != 0:
            continue
        begin = offset_of(loc0)
        value_fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
        if value_fd != fd or begin < start or begin > end + GAP_BYTES:  # below: after a value above 32 MiB
            total += request(fd, start, end, fadvise)
            fd = value_fd
            start = begin
            end = begin
        end = max(end, begin + size_of(loc0, load_weak_as(locations + 16 * k + 8, INT64)))
        if total + end - start > MAX_BATCH_AHEAD_BYTES:
            break
    total += request(fd, start, end, fadvise)
    leave(state, stripe, epoch)
    return total


@device
def request(fd: int, start: int, end: int, fadvise: int) -> int:
    """Request a range of a file; return its size in bytes."""
    for offset in range(start, end, MAX_AHEAD_BYTES):
        call_foreign(fadvise, fd, offset, min(MAX_AHEAD_BYTES, end - offset), WILL_NEED, 0, 0, 0)
    return end - start


@device
def read_part(state: int, loc0: int, loc1: int, out: int, first: int, limit: int, stripe: int) -> int:
    """Read `limit` bytes from byte `first` of a value and check the CRC of all of it (inside of an epoch)."""
    entry = segment_entry(state, segment_of(loc0))
    if entry == 0:
        return STALE
    fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
    offset = offset_of(loc0)
    crc = crc_of(loc1)
    lock = lock_scratch(state, stripe)
    status = read_chunks(fd, offset, size_of(loc0, loc1), crc, lock + 64, SCRATCH_BYTES, out, first, limit)
    store_release(lock, 0, SYSTEM)
    return status


@device
def lock_scratch(state: int, stripe: int) -> int:
    """Lock a scratch buffer; return the address of its lock, which is 64 bytes before the buffer."""
    base = load_relaxed(state + 8 * S_SCRATCH, SYSTEM)
    attempt = 0
    while True:
        lock = base + ((stripe + attempt) & (SCRATCHES - 1)) * (64 + SCRATCH_BYTES)
        if load_relaxed(lock, SYSTEM) == 0 and exchange(lock, 1, SYSTEM) == 0:
            return lock
        attempt += 1
        backoff(attempt // SCRATCHES)


@device
def count_reads(state: int, stripe: int, gets: int, hits: int, nbytes: int, failures: int) -> None:
    """Add to the counters of a stripe."""
    line = stripe_of(state, stripe)
    fetch_add(line + 8 * C_GETS, gets, SYSTEM)
    fetch_add(line + 8 * C_HITS, hits, SYSTEM)
    fetch_add(line + 8 * C_BYTES, nbytes, SYSTEM)
    if failures > 0:
        fetch_add(line + 8 * C_ERRORS, failures, SYSTEM)


@device
def get_one(block: int, key0: int, key1: int, length: int) -> int:
    """Read one value; `block` has the state's address, the stripe, and the buffer's address and size.

    Returns the value's size. If the value is larger than the buffer, nothing is read, and the result is ``-1 - size``.
    An error is ``-_ERROR - status``.
    """
    state = load_weak_as(block, INT64)
    stripe = load_weak_as(block + 8, INT64)
    limit = load_weak_as(block + 24, INT64)
    epoch = enter(state, stripe)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size: int = size_of(loc0, loc1)
    status = ABSENT
    if loc0 > 0 and size > limit:
        leave(state, stripe, epoch)
        return -1 - size
    if loc0 != 0:
        status = read_value(state, loc0, loc1, load_weak_as(block + 16, INT64))
    leave(state, stripe, epoch)
    if status == FOUND:
        count_reads(state, stripe, 1, 1, size, 0)
        return size
    count_reads(state, stripe, 1, 0, 0, 1 if status != ABSENT else 0)
    return -_ERROR - status


@device
def bytes_word(address: int, nbytes: int) -> int:
    """Return up to 8 bytes as a word of a key."""
    if nbytes >= 8:
        return int(load_weak_as(address, INT64))
    word = 0
    for k in range(nbytes):
        word |= i64(load_weak_as(address + k, UINT8)) << (8 * k)
    return word


@device
def call_python(fields: int, function: int, first_argument: int, second_argument: int) -> int:
    """Call a function of Python's C API."""
    return call_foreign(load_weak_as(fields + 8 * function, INT64), first_argument, second_argument, 0, 0, 0, 0, 0)


@native
def get_object(data: int, key: int) -> int:
    """Return a new reference to the value of a key as bytes, or to None (see `native.method`).

    It reads values of keys that are int or bytes; `P_SLOW` reads all others, and raises errors. It copies values of
    mapped files under the interpreter lock, and releases the lock for system calls. It leaves the epoch before it waits
    for the lock, and no Python code runs in the epoch.
    """
    fields = data + CONTENTS
    slow = load_weak_as(fields + 8 * P_SLOW, INT64)
    kind = load_weak_as(key + TYPE, INT64)
    key1 = 0
    length = 8
    if kind == load_weak_as(fields + 8 * P_INT, INT64):
        key0 = call_python(fields, P_AS_WORD, key, 0)
        if key0 == -1:  # the value -1, or an integer of more than 64 bits
            call_python(fields, P_CLEAR_ERROR, 0, 0)
            return call_python(fields, P_CALL, slow, key)
    elif kind == load_weak_as(fields + 8 * P_BYTES, INT64) and 0 < load_weak_as(key + SIZE, INT64) <= 16:
        length = load_weak_as(key + SIZE, INT64)
        key0 = bytes_word(key + CONTENTS, length)
        key1 = bytes_word(key + CONTENTS + 8, length - 8)
    else:
        return call_python(fields, P_CALL, slow, key)
    state = load_weak_as(fields, INT64)
    epoch = enter(state, data >> 12)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size = size_of(loc0, loc1)
    if loc0 == 0:
        leave(state, data >> 12, epoch)
        value: int = load_weak_as(fields + 8 * P_NONE, INT64)
        call_python(fields, P_TAKE, value, 0)
    else:
        value = 0
        if loc0 > 0:
            value = call_python(fields, P_NEW_BYTES, 0, size)
        status = STALE
        thread = 0
        if value != 0:
            entry = segment_entry(state, segment_of(loc0))
            if entry != 0 and mapped_address(entry, loc0, size) == 0:
                thread = call_python(fields, P_RELEASE_LOCK, 0, 0)
            status = read_value(state, loc0, loc1, value + CONTENTS)
        leave(state, data >> 12, epoch)
        if thread != 0:
            call_python(fields, P_ACQUIRE_LOCK, thread, 0)
        if value != 0 and status != FOUND:
            call_python(fields, P_DROP, value, 0)
            value = 0
    if value == 0:  # an error, or no memory; `P_SLOW` raises the error, or reads the value
        call_python(fields, P_CLEAR_ERROR, 0, 0)
        return call_python(fields, P_CALL, slow, key)
    hit = 1 if loc0 != 0 else 0
    count_reads(state, data >> 12, 1, hit, size * hit, 0)
    return value


@native
def new_values(values: int, locations: int, count: int, starts: int, new: int, contents: int, set_item: int) -> int:
    """Put a bytes object for each existing value into a list, and store the address of its contents in `starts`.

    The contents are not initialized. Returns -1 if no memory is left (see `native.with_objects`).
    """
    for k in range(count):
        loc0 = load_weak_as(locations + 16 * k, INT64)
        if loc0 == 0:
            continue
        size = size_of(loc0, load_weak_as(locations + 16 * k + 8, INT64))
        value = call_foreign(new, 0, size, 0, 0, 0, 0, 0)
        if value == 0:
            return -1
        store_weak_as(starts + 8 * k, call_foreign(contents, value, 0, 0, 0, 0, 0, 0), INT64)
        call_foreign(set_item, values, k, value, 0, 0, 0, 0)
    return 0


def has_one(state: int, stripe: int, key0: int, key1: int, length: int) -> int:
    """Return a positive number if a key exists, 0 if not, a negative number if its index block is damaged."""
    epoch = enter(state, stripe)
    loc0, _ = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    leave(state, stripe, epoch)
    return loc0


@device
def read_many(
    state: int,
    stripe: int,
    keys: int,
    lengths: int,
    count: int,
    locations: int,
    out: int,
    starts: int,
    row_bytes: int,
    found: int,
) -> int:
    """Read the values of a batch; return the number of errors.

    Parameters
    ----------
    keys, lengths : int
        Addresses of keys to look up first (`key_at`); their locations are stored in `locations`. With 0, `locations`
        already holds them.
    out, starts : int
        Value k goes to byte offset ``starts[k]`` of `out`. If `starts` is 0, all values must have `row_bytes` bytes
        and go to rows, and rows without a value become zero.
    found : int
        Address of one byte for each key: ABSENT, FOUND or an error.
    """
    epoch = enter(state, stripe)
    if keys != 0:
        look_up_all(load_acquire(state + 8 * S_TABLE, SYSTEM), keys, lengths, count, locations)
    hits = 0
    wrong = 0
    nbytes = 0
    for k in range(count):
        if k + VALUES_AHEAD < count:
            ahead = locations + 16 * (k + VALUES_AHEAD)
            if load_weak_as(ahead, INT64) > 0:
                prefetch_value(state, load_weak_as(ahead, INT64), load_weak_as(ahead + 8, INT64))
        loc0 = load_weak_as(locations + 16 * k, INT64)
        loc1 = load_weak_as(locations + 16 * k + 8, INT64)
        target = out + row_bytes * k
        if starts != 0:
            target = out + load_weak_as(starts + 8 * k, INT64)
        status = ABSENT
        if loc0 > 0 and starts == 0 and size_of(loc0, loc1) != row_bytes:
            status = OTHER_SIZE
        elif loc0 != 0:
            status = read_value(state, loc0, loc1, target)
        if status == FOUND:
            hits += 1
            nbytes += size_of(loc0, loc1)
        else:
            if status != ABSENT:
                wrong += 1
            if starts == 0:
                clear(target, row_bytes)
        store_weak_as(found + k, status, UINT8)
    leave(state, stripe, epoch)
    count_reads(state, stripe, count if keys != 0 else 0, hits, nbytes, wrong)
    return wrong


def read_ends(state: int, stripe: int, locations: int, count: int, ends: int, found: int) -> int:
    """Read the ends of values into rows of `SUFFIX_BYTES`, right-aligned; return the number of errors.

    `found` is the address of one byte for each value: ABSENT, FOUND or an error.
    """
    epoch = enter(state, stripe)
    wrong = 0
    for k in range(count):
        loc0 = load_weak_as(locations + 16 * k, INT64)
        status = ABSENT
        if loc0 != 0:
            size = size_of(loc0, load_weak_as(locations + 16 * k + 8, INT64))
            nbytes = min(size, SUFFIX_BYTES)
            entry = segment_entry(state, segment_of(loc0))
            status = STALE
            if entry != 0:
                fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
                target = ends + SUFFIX_BYTES * (k + 1) - nbytes
                status = read_exactly(fd, target, nbytes, offset_of(loc0) + size - nbytes)
        if status != ABSENT and status != FOUND:
            wrong += 1
        store_weak_as(found + k, status, UINT8)
    leave(state, stripe, epoch)
    return wrong


def place_values(locations: int, count: int, starts: int, sizes: int) -> int:
    """Store the offset (a multiple of 8) and the size of each value in one buffer; return the size of the buffer."""
    end = 0
    for k in range(count):
        size = size_of(load_weak_as(locations + 16 * k, INT64), load_weak_as(locations + 16 * k + 8, INT64))
        store_weak_as(starts + 8 * k, end, INT64)
        store_weak_as(sizes + 8 * k, size, INT64)
        end += (size + 7) & -8
    return end


@device
def clear(address: int, nbytes: int) -> None:
    """Zero a row, which no other thread reads."""
    end = address + nbytes
    while address + 8 <= end:
        store_weak_as(address, 0, INT64)
        address += 8
    while address < end:
        store_weak_as(address, 0, UINT8)
        address += 1


# -- segments and values, for the host --------------------------------------------------------------------------


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
        self._unmapped: set[int] = set()  # open segments
        self._attempts = 0
        self._batches = 0
        self._state = state
        self._address = state.address
        self._path = path
        self._table = _SegmentTable(16)
        self._lock = threading.RLock()
        self.get = _getter(state, path)
        """Return one value, None for an absent key. An int is the key of its 8 bytes, or raises OverflowError."""
        self._publish()

    # -- segments -------------------------------------------------------------------------------------------

    def on_segment(self, segment: int, fd: int) -> None:
        """Record that the log opened a segment as `fd`. With -1 the log will close it: wait until no reader uses it.

        At that time no location refers to the segment, but `values` may have looked up a location before.
        """
        with self._lock:
            if segment >= self._table.count:
                self._grow(segment + 1)
            entry = self._table.entries[segment]
            if fd < 0:
                entry[G_MAPPED] = 0
                entry[G_FD] = 0
                self._unmapped.discard(segment)
                mapping = self._mappings.pop(segment, None)
                if mapping is not None:
                    self._state.retire(mapping.close)
                self._state.drain()
                return
            entry[G_FD] = fd + 1
            self._map(segment, fd)

    def _map(self, segment: int, fd: int) -> None:
        mapping = map_file(fd) if self._mapped else None
        if mapping is None:
            self._unmapped.add(segment)
        else:
            self._unmapped.discard(segment)
            self._mappings[segment] = mapping
            self._table.entries[segment, G_BASE] = mapping.address
            self._table.entries[segment, G_MAPPED] = mapping.nbytes

    def map_one_more(self) -> None:
        """Map one more segment, if reads have loaded it into the page cache since the last attempt."""
        with self._lock:
            candidates = sorted(self._unmapped)
            if self._mapped and candidates:
                self._attempts += 1
                segment = candidates[self._attempts % len(candidates)]
                self._map(segment, int(self._table.entries[segment, G_FD]) - 1)

    def forked(self) -> None:
        """Continue in a forked child; the thread that held the lock exists only in the parent."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Stop reading, and wait until all readers have left."""
        with self._lock:
            self._mapped = False
            self._unmapped.clear()
            self._table.entries[:, [G_MAPPED, G_FD]] = 0
            mappings = list(self._mappings.values())
            self._mappings.clear()

        # `retire` waits for the readers that may have loaded a descriptor or a mapping.
        def unmap_all() -> None:
            for mapping in mappings:
                mapping.close()

        self._state.retire(unmap_all)
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
        """Return whether a key of at most 16 bytes exists, or one with the hash of a long key."""
        key_and_length = (key, 0, 8) if isinstance(key, int) else words_of(key)
        found = compiled(has_one)(self._address, threading.get_ident() >> 12, *key_and_length)
        if found < 0:
            raise read_error(self._path, key, NO_LOCATION)
        return bool(found)

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
        if out is None:
            out = np.empty((keys.size, row_bytes), np.uint8)
        found = np.empty(keys.size, np.bool_)
        locations = np.empty((keys.size, 2), np.int64)
        if self._read(keys, addresses(keys), locations, out.ctypes.data, 0, row_bytes, found.ctypes.data):
            self._raise_first(keys, found.view(np.uint8), locations, row_bytes)
        return out, found

    def values(self, keys: Keys, locations: NDArray[np.int64]) -> tuple[list[bytes | None], NDArray[np.intp]]:
        """Read the values at locations that were looked up; return them, and the rows whose segment is not open."""
        # Values are read directly into new bytes objects before other code can see them, as C extensions do.
        listed: list[bytes | None] = [None] * keys.size
        starts = np.empty(keys.size, np.int64)
        found = np.empty(keys.size, np.uint8)
        _values_maker()(listed, locations.ctypes.data, keys.size, starts.ctypes.data)
        stale = self._read_at(keys, locations, 0, starts.ctypes.data, found, found.ctypes.data)
        if keys.full is not None and not stale.size:
            for k in np.flatnonzero(found).tolist():
                listed[k] = _without_suffix(listed[k], keys.full[k])
        return listed, stale

    def buffer(self, keys: Keys, locations: NDArray[np.int64]) -> tuple[ValueBuffer, NDArray[np.intp]]:
        """Read the values at locations that were looked up into one buffer; return also the rows to look up again."""
        bounds, found = np.empty((2, keys.size), np.int64), np.empty(keys.size, np.bool_)
        starts, sizes = bounds
        first = bounds.ctypes.data  # each use of `ctypes` takes 1 us
        second = first + starts.nbytes
        nbytes = compiled(place_values)(locations.ctypes.data, keys.size, first, second)
        buffer = np.empty(nbytes // 8, np.int64).view(np.uint8)
        addresses = buffer.ctypes.data, first, second, found.ctypes.data
        stale = self._read_at(keys, locations, *addresses[:2], found, addresses[3])
        if keys.full is not None and not stale.size:
            for k in np.flatnonzero(found).tolist():
                if keys.full[k] is None:
                    continue
                suffix, end = suffix_of(keys.full[k]), int(starts[k] + sizes[k])
                found[k] = buffer[end - len(suffix) : end].tobytes() == suffix
                sizes[k] -= len(suffix) if found[k] else sizes[k]
        return ValueBuffer(buffer, starts, sizes, found, addresses), stale

    def long_keys(self, keys: Keys, locations: NDArray[np.int64]) -> tuple[NDArray[np.object_], NDArray[np.intp]]:
        """Return the long keys that are stored at locations; return also the rows to look up again.

        The array is object [N]: None for keys that are absent or not long, b"" for a stored key that is damaged.
        """
        stored = np.full(keys.size, None, np.object_)
        rows = np.flatnonzero(False if keys.lengths is None else (keys.lengths == LONG) & (locations[:, 0] != 0))
        for first in range(0, rows.size, _KEYS_AT_ONCE):
            batch = rows[first : first + _KEYS_AT_ONCE]
            ends, found = np.zeros((batch.size, SUFFIX_BYTES), np.uint8), np.empty(batch.size, np.uint8)
            chosen, at = np.ascontiguousarray(locations[batch]), found.ctypes.data
            arguments = (chosen.ctypes.data, batch.size, ends.ctypes.data, at)
            if compiled(read_ends)(self._address, at >> 12, *arguments) and (found == STALE).any():
                return stored, batch[found == STALE]
            for k, end in zip(batch.tolist(), ends, strict=True):
                stored[k] = long_key_in(end.tobytes(), keys.words[k].tobytes())
        return stored, _NO_ROWS

    def _read_at(
        self,
        keys: Keys,
        locations: NDArray[np.int64],
        base: int,
        starts: int,
        found: NDArray[Any],
        at: int,
    ) -> NDArray[np.intp]:
        """Read values to ``base + starts``; return the rows whose segment is not open.

        `starts` and `at` are the addresses of the starts and of `found`.
        """
        if not self._read(keys, (0, 0), locations, base, starts, 0, at):
            return _NO_ROWS
        found = found.view(np.uint8)
        stale = np.flatnonzero(found == STALE)
        if stale.size:
            return stale
        self._raise_first(keys, found, locations, 0)

    def _read(
        self,
        keys: Keys,
        to_look_up: tuple[int, int],
        locations: NDArray[np.int64],
        out: int,
        starts: int,
        row_bytes: int,
        at: int,
    ) -> int:
        """Call `read_many`, with `found` at an address; return the number of errors."""
        self._batches += 1
        if self._batches % _MAP_INTERVAL == 0:
            self.map_one_more()
        if self._unmapped:
            if to_look_up[0]:
                compiled(find_many)(self._address, at >> 12, *to_look_up, keys.size, locations.ctypes.data)
            ascending = locations[np.argsort(locations[:, 0])]
            compiled(read_ahead)(self._address, at >> 12, ascending.ctypes.data, keys.size, _FADVISE)
        targets = (locations.ctypes.data, out, starts, row_bytes, at)
        return int(compiled(read_many)(self._address, at >> 12, *to_look_up, keys.size, *targets))

    # -- errors ---------------------------------------------------------------------------------------------

    def _raise_first(
        self, keys: Keys, found: NDArray[np.uint8], locations: NDArray[np.int64], row_bytes: int
    ) -> NoReturn:
        k = int(np.flatnonzero(found > FOUND)[0])
        if found[k] == OTHER_SIZE:
            raise other_size(self._path, keys.row(k), int(size_of(locations[k, 0], locations[k, 1])), row_bytes)
        segment = None if found[k] == NO_LOCATION else int(segment_of(locations[k, 0]))
        raise read_error(self._path, keys.row(k), int(found[k]), segment)


def _without_suffix(value: bytes | None, key: bytes | None) -> bytes | None:
    """Return a value without the suffix of its long key, or None if it belongs to another key with this hash."""
    if value is None or key is None:
        return value
    suffix = suffix_of(key)
    return value[: -len(suffix)] if value.endswith(suffix) else None


@functools.cache
def _values_maker() -> Callable[..., int]:
    """Return `new_values` for the first four arguments."""
    call = with_objects(new_values, ctypes.py_object, *[ctypes.c_int64] * 6)
    functions = [python_function(name) for name in ("PyBytes_FromStringAndSize", "PyBytes_AsString", "PyList_SetItem")]
    return lambda *arguments: call(*arguments, *functions)


def _getter(state: StoreState, path: str) -> Callable[[Any], bytes | None]:
    """Return `Reader.get`. It is native code, because for a single record Python would take longer than the store."""

    def get_slowly(key: Any) -> bytes | None:
        """Read a value; raise its error."""
        fields = (key, 0, 8) if type(key) is int else words_of(as_key(key))
        out = np.empty(0, np.uint8)
        while True:
            address = out.ctypes.data
            block = np.array([state.address, address >> 12, address, out.nbytes], np.int64)
            size = int(compiled(get_one)(block.ctypes.data, *fields))
            if size >= 0:
                return _without_suffix(out[:size].tobytes(), key if fields[2] == LONG else None)
            if size == -_ERROR:
                return None
            if size < -_ERROR:
                raise read_error(path, key, -size - _ERROR)
            out = np.empty(-1 - size, np.uint8)

    if not has_known_layout():
        return get_slowly
    objects = [id(get_slowly), id(None), id(int), id(bytes)]
    fields = np.array([state.address, *objects, *map(python_function, _PYTHON_FUNCTIONS)], np.int64)
    return method(get_object, "get", fields.tobytes(), (state, get_slowly))


def other_size(path: str, key: int | bytes, nbytes: int, row_bytes: int) -> errors.ValueSizeError:
    """Return the error for a value that is not as large as a row."""
    return errors.ValueSizeError(
        f"{path}: the value of key {key!r} has {nbytes} bytes, not {row_bytes}: omit out",
        name="out",
        nbytes=nbytes,
    )


def read_error(path: str, key: int | bytes, status: int, segment: int | None = None) -> Exception:
    """Return the exception for an error code of a key."""
    where = path if segment is None else f"{path}, segment {segment}"
    if status in _PROBLEMS:
        return errors.CorruptionError(f"{where}: {_PROBLEMS[status].format(key)}", path=path)
    code = status - FAILED
    with contextlib.suppress(ValueError):
        return errors.MediumError(
            f"{where}: reading the value of key {key!r} failed ({os.strerror(code)}): check the drive", status=0x281
        )
    raise AssertionError(status)


_PROBLEMS = {
    BAD_CRC: "the value of key {!r} is damaged (its CRC-32C is wrong): run `warpwell kv verify`, and put the key again"
    " from its source",
    BAD_RECORD: "the record of key {!r} is damaged (the lengths of its fields differ from its size): put it again from"
    " its source",
    SHORT: "the file ends before the value of key {!r}: it was truncated; restore it from a copy",
    NO_LOCATION: "the block of the index that may hold key {!r} is damaged (its CRC-32C is wrong): copy the records"
    " into a new store with `warpwell kv salvage`, or restore a copy of the store",
    STALE: "the value of key {!r} is stored in a segment that is not open: open the store again",
}


class ValueBuffer(NamedTuple):
    """Values in one buffer. Its size and its address are multiples of 8.

    Attributes
    ----------
    buffer : uint8
    starts, sizes : int64 [N]
        Offset, a multiple of 8, and size of each value in `buffer`.
    found : bool [N]
    addresses : tuple of int
        Addresses of these four arrays.
    """

    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    found: NDArray[np.bool_]
    addresses: tuple[int, int, int, int]


class _SegmentTable:
    """Descriptors and mappings by segment id."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._table: Any = np.zeros((SEGMENT_HEADER + SEGMENT_ENTRY * count) // 8, np.int64)
        self._table[0] = count
        self.entries = self._table[SEGMENT_HEADER // 8 :].reshape(count, SEGMENT_ENTRY // 8)
        self.address = int(self._table.ctypes.data)

    def free(self) -> None:
        """Drop the memory."""
        self._table = None


class MappedFile:
    """A file in memory, for reading.

    Attributes
    ----------
    address : int
    nbytes : int
        May exceed the file's size, because the file may grow.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def close(self) -> None:
        """Unmap the file; no thread may be reading it."""
        unmap(self.address, self.nbytes)


def map_file(fd: int) -> MappedFile | None:
    """Map a file that is in the page cache; return None if it is not cached or cannot be mapped."""
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        nbytes = -(-max(size, _MIN_MAPPED_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        address = map_guarded(fd, nbytes)
        if address is None:
            return None
        mapping = MappedFile(address, nbytes)
        with contextlib.suppress(OSError):
            if _resident(mapping.address, size) if _may_ask(fd) else _sampled(fd, size):
                return mapping
        mapping.close()
    return None


def _may_ask(fd: int) -> bool:
    """Return whether mincore() reports residency; to users without write access it reports every page as resident."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _resident(address: int, size: int) -> bool:
    """Return whether a sample of a mapped file's pages is in the page cache."""
    pages = -(-size // mmap.PAGESIZE)
    count = min(_SAMPLES, pages)
    flags = np.zeros(count, np.uint8)
    for k in range(count):
        page = address + k * pages // count * mmap.PAGESIZE
        if _libc.mincore(page, mmap.PAGESIZE, flags.ctypes.data + k) != 0:
            return False
    return not count or bool((flags & 1).mean() >= _MIN_RESIDENT)


def _sampled(fd: int, size: int) -> bool:
    """Return whether a sample of a file's pages is in the page cache."""
    pages = -(-size // mmap.PAGESIZE)
    count = min(_SAMPLES, pages)
    absent = 0
    # Use a separate descriptor: POSIX_FADV_RANDOM disables readahead, which the reader's descriptor needs.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
        for k in range(count):
            try:
                os.preadv(own, [bytearray(1)], k * pages // count * mmap.PAGESIZE, os.RWF_NOWAIT)
            except BlockingIOError:
                absent += 1
                if absent > (1 - _MIN_RESIDENT) * count:
                    return False
    finally:
        os.close(own)
    return True
