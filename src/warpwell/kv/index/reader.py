"""Read values: look keys up, read from the segments' files, check every CRC, in native code and for the host.

Small values are copied from mapped files: a copy takes about 30 ns, a pread 700 ns. Errors of mapped files are handled:
a file that is truncated or fails reads as zeros (`warpwell.targets.bus_error`), the CRC then differs, and the value is
read again by pread, which returns the error. Files that are not in the page cache are not mapped: pread fetches a value
at once, and page faults would fetch it page by page.

Before a batch is read from files that are not mapped, `read_ahead` requests all of its values from the system, so that
the drive has all reads in flight. A request only moves data into the page cache. The thread stays in its epoch during
the requests, and then reads and checks the values as without them. So no buffer of this process waits for a read of a
segment that was closed or deleted. A record takes 14.3 us for 64 random values of 8 KiB in a file of 800 MB; with one
pread after another it takes 49.7 us, with io_uring 17.0 us through the page cache and 13.1 us past it. For 256 values
the times are 13.7, 58.6, 14.3 and 15.0 us (a virtual drive, two cores). So Warpwell does not need io_uring, which
containers forbid.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import device, native
from ...targets.bus_error import map_guarded, unmap
from ...targets.primitives import (
    SYSTEM,
    call_foreign,
    copy_crc32c,
    crc32c,
    fetch_add,
    i64,
    load_acquire,
    load_relaxed,
    load_weak_as,
    prefetch,
    scratch,
    store_weak_as,
)
from ..keys import LONGEST_KEY, MAX_KEY, SUFFIX_BYTES, Keys, as_keys, long_key_in, one_key, suffix_of, words_of
from ..log.checksum import BAD_CRC, FAILED, FOUND, SHORT, read_chunks, read_exactly
from ..log.format import DAMAGED, LONG, crc_of, offset_of, segment_of, size_of
from ..native import (
    ARRAY_DATA,
    CONTENTS,
    INT64,
    SIZE,
    TYPE,
    UINT8,
    UINT32,
    address_of,
    compiled,
    method,
    python_function,
)
from .index import (
    C_BYTES,
    C_ERRORS,
    C_GETS,
    C_HITS,
    S_READS,
    S_SEGMENTS,
    S_TABLE,
    StoreState,
    addresses,
    enter,
    find_many,
    leave,
    look_up_all,
    lookup,
    lookup_many,
    publish,
    stripe_of,
)

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
PREFETCH_BYTES = 512
"""Number of bytes that are prefetched of each page of a value: the processor prefetches the rest of a page."""
MAX_MAPPED_BYTES = 32768
"""Largest value that is copied from a mapped file, in bytes. For larger values the cost of a system call is small."""
GAP_BYTES = 16 << 10
"""Longest gap between two values that are read ahead together, as in `warpwell.gather`."""
PART_BYTES = 32 << 10
"""Number of bytes of a value that are read at once, into memory of the thread, to check the rest of its CRC."""
MAX_AHEAD_BYTES = 128 << 10
"""Maximum size of a request to read ahead; the system shortens longer requests."""
MAX_BATCH_AHEAD_BYTES = 256 << 20
"""Maximum number of bytes of a batch that are read ahead, so that the page cache holds them until they are copied."""

# -- data of native methods, in words -------------------------------------------------------------------------------
P_STATE = 0
"""Address of the store's state."""
P_SLOW = 1
"""Address of the Python function that reads all other values."""
P_NONE = 2
P_INT = 3
"""Address of the type int."""
P_BYTES = 4
P_EXCEPTION = 5
"""Address of the type Exception."""
P_AS_WORD = 6
P_CLEAR_ERROR = 7
P_CALL = 8
P_TAKE = 9
P_DROP = 10
P_NEW_BYTES = 11
P_RELEASE_LOCK = 12
P_ACQUIRE_LOCK = 13
P_NEW_TEXT = 14
P_NEW_INT = 15
P_COPY_DICT = 16
P_SET_ITEM = 17
P_SET_VALUE = 18
P_MATCHES = 19
_PYTHON_FUNCTIONS = (
    "PyLong_AsLongLong",
    "PyErr_Clear",
    "PyObject_Vectorcall",
    "Py_IncRef",
    "Py_DecRef",
    "PyBytes_FromStringAndSize",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyUnicode_DecodeUTF8",
    "PyLong_FromLongLong",
    "PyDict_Copy",
    "PyList_SetItem",
    "PyDict_SetItem",
    "PyErr_ExceptionMatches",
)
"""Functions of Python's C API; the words from `P_AS_WORD` on are their addresses."""
P_UNPACK = 20
"""Address of the Python function that makes a record of bytes; 0 without a schema."""
P_TEMPLATE = 21
"""Address of a dict with the names of the fields, or 0 if no field has bytes or strings."""
P_FINISH = 22
"""Address of the Python function that adds arrays to such a dict, or 0; see `Schema`."""
P_FIXED_BYTES = 23
"""Size of the fixed part of a record."""
P_LENGTHS = 24
"""Offset of the lengths of ragged fields in a record."""
P_COUNT = 25
"""Number of ragged fields."""
P_RAGGED = 26
"""First of three words of each ragged field: address of its name, size of a row, and 1 for strings."""

_NO_ROWS = np.empty(0, np.intp)
_KEYS_AT_ONCE = 4096
"""Maximum number of long keys that are read at once."""
_ATTEMPTS = 100
"""Maximum number of look-ups of a value whose segment was removed. Each removal takes a whole refresh or compaction."""
_MAP_INTERVAL = 256
"""Number of batches, or of keys in a batch, between attempts to map one more segment."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_FADVISE = ctypes.cast(_libc.posix_fadvise, ctypes.c_void_p).value or 0
WILL_NEED = os.POSIX_FADV_WILLNEED
_MIN_RESIDENT = 0.9
"""Share of a file that must be in the page cache before it is mapped."""
_SAMPLES = 32
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
        prefetch_pages(source, source + size)


@device
def prefetch_pages(start: int, end: int) -> None:
    """Prefetch the beginnings of the pages of a value."""
    while start < end:
        for line in range(start, min(start + PREFETCH_BYTES, end), 64):
            prefetch(line)
        start = (start + 4096) & -4096


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
        if value_fd != fd or begin < start or begin > end + GAP_BYTES:  # `begin < start`: after a value above 32 MiB
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
def read_part(state: int, loc0: int, loc1: int, out: int, first: int, limit: int) -> int:
    """Read `limit` bytes from byte `first` of a value and check the CRC of all of it (inside of an epoch)."""
    entry = segment_entry(state, segment_of(loc0))
    if entry == 0:
        return STALE
    fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
    offset = offset_of(loc0)
    crc = crc_of(loc1)
    return read_chunks(fd, offset, size_of(loc0, loc1), crc, scratch(PART_BYTES), PART_BYTES, out, first, limit)


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
def bytes_word(address: int, nbytes: int) -> int:
    """Return up to 8 bytes as a word of a key."""
    if nbytes >= 8:
        return int(load_weak_as(address, INT64))
    word = 0
    for k in range(nbytes):
        word |= i64(load_weak_as(address + k, UINT8)) << (8 * k)
    return word


@device
def call_python(fields: int, function: int, a: int, b: int, c: int, d: int) -> int:
    """Call a function of Python's C API with up to four arguments."""
    return call_foreign(load_weak_as(fields + 8 * function, INT64), a, b, c, d, 0, 0, 0)


@device
def call_object(fields: int, function: int, argument: int) -> int:
    """Call a Python function with an argument, which is dropped; return a new reference, or 0 after an exception."""
    arguments = scratch(8)
    store_weak_as(arguments, argument, INT64)
    result: int = call_python(fields, P_CALL, load_weak_as(fields + 8 * function, INT64), arguments, 1, 0)
    call_python(fields, P_DROP, argument, 0, 0, 0)
    return result


@device
def set_field(fields: int, record: int, name: int, source: int, size: int, is_text: int, seed: int) -> int:
    """Set a field of a dict to a copy of memory, as bytes or a string; return the CRC, or -1 if it is impossible."""
    value = call_python(fields, P_NEW_BYTES, 0, size, 0, 0)
    if value == 0:
        return -1
    crc: int = copy_crc32c(value + CONTENTS, source, size, seed)
    if is_text != 0:
        text = call_python(fields, P_NEW_TEXT, value + CONTENTS, size, 0, 0)
        call_python(fields, P_DROP, value, 0, 0, 0)
        value = text
        if value == 0:
            return -1
    failed = call_python(fields, P_SET_VALUE, record, name, value, 0) & 0xFFFFFFFF
    call_python(fields, P_DROP, value, 0, 0, 0)
    return -1 if failed != 0 else crc


@device
def unpack_mapped(fields: int, record: int, source: int, size: int, crc: int) -> int:
    """Copy the ragged fields of a record at `source` into a dict; return FOUND, or an error that `P_SLOW` reports."""
    end = load_weak_as(fields + 8 * P_FIXED_BYTES, INT64)
    lengths = source + load_weak_as(fields + 8 * P_LENGTHS, INT64)
    if size < end:
        return BAD_RECORD
    if load_weak_as(fields + 8 * P_FINISH, INT64) != 0:
        found = set_field(fields, record, load_weak_as(fields + 8 * P_NONE, INT64), source, end, 0, 0)
    else:
        found = crc32c(source, end, 0)
    for k in range(load_weak_as(fields + 8 * P_COUNT, INT64)):
        field = fields + 8 * (P_RAGGED + 3 * k)
        start = (end + 7) & ~7
        nbytes = i64(load_weak_as(lengths + 4 * k, UINT32)) * load_weak_as(field + 8, INT64)
        if found < 0 or start + nbytes > size:
            return BAD_RECORD
        found = crc32c(source + end, start - end, found)
        name, is_text = load_weak_as(field, INT64), load_weak_as(field + 16, INT64)
        found = set_field(fields, record, name, source + start, nbytes, is_text, found)
        end = start + nbytes
    return FOUND if found == crc and end == size else BAD_RECORD


@native
def get_object(data: int, arguments: int, count: int, names: int) -> int:
    """Return a new reference to the value of a key, or to None (see `native.method`).

    It reads values of keys that are int or bytes; `P_SLOW` reads all others, and raises errors. It copies values of
    mapped files under the interpreter lock, and releases the lock for system calls. It leaves the epoch before it waits
    for the lock, and no Python code runs in the epoch.
    """
    fields = data + CONTENTS
    slow = load_weak_as(fields + 8 * P_SLOW, INT64)
    key = load_weak_as(arguments, INT64) if count == 1 and names == 0 else slow
    kind = load_weak_as(key + TYPE, INT64)
    key1 = 0
    length = 8
    if kind == load_weak_as(fields + 8 * P_INT, INT64):
        key0 = call_python(fields, P_AS_WORD, key, 0, 0, 0)
        if key0 == -1:  # the value -1, or an integer of more than 64 bits
            call_python(fields, P_CLEAR_ERROR, 0, 0, 0, 0)
            return call_python(fields, P_CALL, slow, arguments, count, names)
    elif kind == load_weak_as(fields + 8 * P_BYTES, INT64) and 0 < load_weak_as(key + SIZE, INT64) <= 16:
        length = load_weak_as(key + SIZE, INT64)
        key0 = bytes_word(key + CONTENTS, length)
        key1 = bytes_word(key + CONTENTS + 8, length - 8)
    else:
        return call_python(fields, P_CALL, slow, arguments, count, names)
    state = load_weak_as(fields, INT64)
    record = load_weak_as(fields + 8 * P_TEMPLATE, INT64)
    if record != 0:  # before the epoch, because garbage collection may run Python code
        record = call_python(fields, P_COPY_DICT, record, 0, 0, 0)
        if record == 0:
            call_python(fields, P_CLEAR_ERROR, 0, 0, 0, 0)
    epoch = enter(state, data >> 12)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size = size_of(loc0, loc1)
    status = ABSENT if loc0 == 0 else STALE
    entry = segment_entry(state, segment_of(loc0)) if loc0 > 0 else 0
    source = mapped_address(entry, loc0, size) if entry != 0 else 0
    if source != 0:
        prefetch_pages(source, source + size)
    thread = 0
    value = 0
    if record != 0 and source != 0:
        status = unpack_mapped(fields, record, source, size, crc_of(loc1))
    elif loc0 > 0:
        value = call_python(fields, P_NEW_BYTES, 0, size, 0, 0)
        if value != 0 and entry != 0:
            if source == 0 and size <= MAX_MAPPED_BYTES and fetch_add(state + 8 * S_READS, 1, SYSTEM) & 1023 == 1023:
                entry = 0  # `P_SLOW` may map the file
            elif source == 0:
                thread = call_python(fields, P_RELEASE_LOCK, 0, 0, 0, 0)
            if entry != 0:
                status = read_value(state, loc0, loc1, value + CONTENTS)
    leave(state, data >> 12, epoch)
    if thread != 0:
        call_python(fields, P_ACQUIRE_LOCK, thread, 0, 0, 0)
    function = P_UNPACK
    if record != 0 and value == 0 and status == FOUND:
        value = record
        function = P_FINISH
    elif record != 0:
        call_python(fields, P_DROP, record, 0, 0, 0)
    if status == ABSENT:
        count_reads(state, data >> 12, 1, 0, 0, 0)
        absent: int = load_weak_as(fields + 8 * P_NONE, INT64)
        call_python(fields, P_TAKE, absent, 0, 0, 0)
        return absent
    if status != FOUND and value != 0:
        call_python(fields, P_DROP, value, 0, 0, 0)
        value = 0
    if value != 0 and load_weak_as(fields + 8 * function, INT64) != 0:
        value = call_object(fields, function, value)
        error = load_weak_as(fields + 8 * P_EXCEPTION, INT64)
        if value == 0 and call_python(fields, P_MATCHES, error, 0, 0, 0) & 0xFFFFFFFF == 0:
            return 0  # KeyboardInterrupt, or another exception of a signal handler
    if value == 0:  # an error, or no memory; `P_SLOW` raises the error, or reads the value
        call_python(fields, P_CLEAR_ERROR, 0, 0, 0, 0)
        return call_python(fields, P_CALL, slow, arguments, count, names)
    count_reads(state, data >> 12, 1, 1, size, 0)
    return value


@device
def contents_of(arguments: int, k: int) -> int:
    """Return the address of the contents of an array among the arguments of a Python function."""
    return int(load_weak_as(load_weak_as(arguments + 8 * k, INT64) + ARRAY_DATA, INT64))


@native
def list_values(data: int, arguments: int, count: int, names: int) -> int:
    """Read the values of a batch into new bytes objects; return the number of errors as an int (see `native.method`).

    The arguments are a list of None, and the arrays of the keys' words, their lengths (or None), locations, starts and
    `found`, as for `read_many`.
    """
    fields = data + CONTENTS
    state = load_weak_as(fields, INT64)
    none_object = load_weak_as(fields + 8 * P_NONE, INT64)
    values = load_weak_as(arguments, INT64)
    number = load_weak_as(values + SIZE, INT64)
    keys = contents_of(arguments, 1)
    lengths = 0 if load_weak_as(arguments + 16, INT64) == none_object else contents_of(arguments, 2)
    locations = contents_of(arguments, 3)
    starts = contents_of(arguments, 4)
    found = contents_of(arguments, 5)
    thread = call_python(fields, P_RELEASE_LOCK, 0, 0, 0, 0)
    find_many(state, found >> 12, keys, lengths, number, locations)
    call_python(fields, P_ACQUIRE_LOCK, thread, 0, 0, 0)
    # Values are read directly into new objects before other code can see them, as C extensions do.
    for k in range(number):
        loc0 = load_weak_as(locations + 16 * k, INT64)
        if loc0 > 0:
            size = size_of(loc0, load_weak_as(locations + 16 * k + 8, INT64))
            value = call_python(fields, P_NEW_BYTES, 0, size, 0, 0)
            if value == 0:
                return 0
            store_weak_as(starts + 8 * k, value + CONTENTS, INT64)
            call_python(fields, P_SET_ITEM, values, k, value, 0)
    thread = call_python(fields, P_RELEASE_LOCK, 0, 0, 0, 0)
    wrong = read_many(state, found >> 12, 0, 0, number, locations, 0, starts, 0, found)
    count_reads(state, found >> 12, number, 0, 0, 0)
    call_python(fields, P_ACQUIRE_LOCK, thread, 0, 0, 0)
    return call_python(fields, P_NEW_INT, wrong, 0, 0, 0)


def has_one(state: int, stripe: int, key0: int, key1: int, length: int) -> int:
    """Return a positive number if a key exists, 0 if not, a negative number if its index block is damaged."""
    epoch = enter(state, stripe)
    loc0, _ = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    leave(state, stripe, epoch)
    return loc0


def has_long(state: int, stripe: int, key0: int, key1: int, suffix: int, nbytes: int) -> int:
    """Return 1 if a long key exists and 0 if not; -1 if another key has its hash, or the stored key cannot be read.

    `suffix` is the address of the `nbytes` bytes that follow the value of the key (`keys.suffix_of`).
    """
    stored = scratch(SUFFIX_BYTES)
    epoch = enter(state, stripe)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, LONG)
    status = 0 if loc0 == 0 else -1
    entry = segment_entry(state, segment_of(loc0)) if loc0 > 0 else 0
    size = size_of(loc0, loc1)
    if entry != 0 and size >= nbytes:
        source = mapped_address(entry, loc0, size)
        if source != 0:
            stored = source + size - nbytes
        fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
        if source != 0 or read_exactly(fd, stored, nbytes, offset_of(loc0) + size - nbytes) == FOUND:
            status = 1
            for k in range(nbytes):
                if load_weak_as(stored + k, UINT8) != load_weak_as(suffix + k, UINT8):
                    status = -1
    leave(state, stripe, epoch)
    return status


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
    """Store the offset (a multiple of 16) and the size of each value in one buffer; return the size of the buffer."""
    end = 0
    for k in range(count):
        loc0 = load_weak_as(locations + 16 * k, INT64)
        size = size_of(loc0, load_weak_as(locations + 16 * k + 8, INT64)) if loc0 > 0 else 0  # else absent or damaged
        store_weak_as(starts + 8 * k, end, INT64)
        store_weak_as(sizes + 8 * k, size, INT64)
        end += (size + 15) & -16  # the processor copies aligned memory faster
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
    file_of : callable, optional
        Return the file of a segment, for messages.
    mapped : bool
        Map segments that are in the page cache.
    """

    def __init__(
        self, state: StoreState, path: str, file_of: Callable[[int], str] | None = None, *, mapped: bool = True
    ) -> None:
        self._file_of = file_of
        self._mapped = mapped
        self._mappings: dict[int, tuple[int, int]] = {}
        self._unmapped: set[int] = set()  # open segments
        self._is_closed = False
        self._attempts = 0
        self._batches = 0
        self._state = state
        self._address = state.address
        self._path = path
        self._table = _SegmentTable(16)
        self._lock = threading.RLock()
        self._list_values = _method(list_values, "values", state)
        self._publish()

    # -- segments -------------------------------------------------------------------------------------------

    def on_segment(self, segment: int, fd: int) -> None:
        """Record that the log opened a segment as `fd`. With -1 the log will close it: wait until no reader uses it.

        At that time no location refers to the segment, but `values` may have looked up a location before.
        """
        with self._lock:
            if self._is_closed and fd < 0:  # `close` has waited for all readers
                return
            if segment >= self._table.count:
                self._grow(segment + 1)
            entry = self._table.entries[segment]
            if fd < 0:
                entry[G_MAPPED] = 0
                entry[G_FD] = 0
                self._unmapped.discard(segment)
                self._retire([self._mappings.pop(segment)] if segment in self._mappings else [])
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
            self._table.entries[segment, G_BASE], self._table.entries[segment, G_MAPPED] = mapping

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
            self._is_closed, self._mapped = True, False
            self._unmapped.clear()
            self._table.entries[:, [G_MAPPED, G_FD]] = 0
            mappings = list(self._mappings.values())
            self._mappings.clear()
        self._retire(mappings)

    def _retire(self, mappings: list[tuple[int, int]]) -> None:
        """Unmap files after all readers have left that may have loaded a mapping, or the descriptor of any file."""

        def unmap_all() -> None:
            for mapping in mappings:
                unmap(*mapping)

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
        """Return whether a key of at most 16 bytes exists."""
        key_and_length = (key, 0, 8) if isinstance(key, int) else words_of(key)
        found = compiled(has_one)(self._address, threading.get_ident() >> 12, *key_and_length)
        if found < 0:
            raise self.error(key, NO_LOCATION)
        return bool(found)

    def has_long(self, key: bytes) -> bool | None:
        """Return whether a long key exists; None if another key has its hash, or the stored key cannot be read."""
        suffix = np.frombuffer(suffix_of(key), np.uint8)
        arguments = (*words_of(key)[:2], address_of(suffix), suffix.size)
        found = compiled(has_long)(self._address, threading.get_ident() >> 12, *arguments)
        return None if found < 0 else bool(found)

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
        self._read_ahead(keys, locations)
        at = address_of(found)
        targets = (address_of(locations), address_of(out), 0, row_bytes, at)
        if compiled(read_many)(self._address, at >> 12, *addresses(keys), keys.size, *targets):
            self._raise_first(keys, found.view(np.uint8), locations, row_bytes)
        return out, found

    def get(self, key: Any) -> bytes | None:
        """Return one value, None for an absent key."""
        if self._unmapped:
            self._batches += _MAP_INTERVAL // 8
        keys = one_key(key) if type(key) is bytes and MAX_KEY < len(key) <= LONGEST_KEY else as_keys([key])
        return self.values(keys)[0][0]

    def getter(self, slow: Callable[..., Any], schema: Any = None) -> Callable[..., Any]:
        """Return a native function that reads a value, or a record, and calls `slow` in all other cases.

        For a single key, Python would take longer than the store.
        """
        if schema is None:
            return _method(get_object, "get", self._state, slow)
        unpack, finish, template = schema.unpack_one, schema.finish, schema.template
        objects = [id(unpack), id(template), 0 if schema.is_only_bytes else id(finish)]
        schema_words = [*objects, schema.nbytes, schema.ragged[0].offset if schema.ragged else 0, len(schema.ragged)]
        names = dict(zip(template, template, strict=True))
        for field in schema.ragged:
            schema_words += [id(names[field.name]), field.nbytes, int(field.item_type is str)]
        return _method(get_object, "get", self._state, slow, schema_words, (unpack, finish, template))

    def values(self, keys: Keys) -> tuple[list[bytes | None], NDArray[np.bool_]]:
        """Read values of any size; return them, None for absent keys, and a mask."""
        found, starts = np.empty(keys.size, np.bool_), np.empty(keys.size, np.int64)

        def read_list(locations: NDArray[np.int64]) -> tuple[list[bytes | None], NDArray[np.intp]]:
            listed: list[bytes | None] = [None] * keys.size
            self._read_ahead(keys, locations)
            wrong = self._list_values(listed, keys.words, keys.lengths, locations, starts, found)
            return listed, self._stale(keys, found, locations) if wrong else _NO_ROWS

        listed, _ = self.located(keys, read_list)
        if keys.full is not None:
            for k in np.flatnonzero(found).tolist():
                listed[k] = _without_suffix(listed[k], keys.full[k])
                found[k] = listed[k] is not None
        return listed, found

    def buffer(self, keys: Keys) -> ValueBuffer:
        """Read values of any size into one buffer."""
        bounds, found = np.empty((2, keys.size), np.int64), np.empty(keys.size, np.bool_)
        first, last = address_of(bounds), address_of(found)
        second = first + 8 * keys.size

        def read_buffer(locations: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
            at = address_of(locations)
            compiled(lookup_many)(self._address, at >> 12, *addresses(keys), keys.size, at)
            self._read_ahead(keys, locations, at)
            nbytes = compiled(place_values)(at, keys.size, first, second)
            buffer = np.empty(nbytes // 8, np.int64).view(np.uint8)
            to = address_of(buffer)
            wrong = compiled(read_many)(self._address, at >> 12, 0, 0, keys.size, at, to, first, 0, last)
            return buffer, self._stale(keys, found, locations) if wrong else _NO_ROWS

        buffer, _ = self.located(keys, read_buffer)
        starts, sizes = bounds
        if keys.full is not None:
            for k in np.flatnonzero(found).tolist():
                if keys.full[k] is None:
                    continue
                suffix, end = suffix_of(keys.full[k]), int(starts[k] + sizes[k])
                found[k] = buffer[end - len(suffix) : end].tobytes() == suffix
                sizes[k] -= len(suffix) if found[k] else sizes[k]
        return ValueBuffer(buffer, starts, sizes, found)

    def located(self, keys: Keys, read: Callable[[NDArray[np.int64]], Any]) -> tuple[Any, NDArray[np.int64]]:
        """Return the result of `read` and the locations that it has stored in an array, int64 [N, 2].

        `read` also returns the rows to look up again.
        """
        before: NDArray[np.int64] | None = None
        for _ in range(_ATTEMPTS):
            locations = np.empty((keys.size, 2), np.int64)
            result, stale = read(locations)
            if not stale.size:
                return result, locations
            # If a segment was removed between look-up and read, its keys have new locations. A key with an unchanged
            # location is in a segment that no attempt will find open: the store was closed, or is damaged.
            if before is not None and (locations[stale, 0] == before[stale, 0]).any():
                break
            before = locations
        raise self.error(keys.row(int(stale[0])), STALE)

    def long_keys(self, keys: Keys, locations: NDArray[np.int64]) -> tuple[NDArray[np.object_], NDArray[np.intp]]:
        """Return the long keys that are stored at locations; return also the rows to look up again.

        The array is object [N]: None for keys that are absent or not long, b"" for a stored key that is damaged.
        """
        stored = np.full(keys.size, None, np.object_)
        rows = np.flatnonzero(False if keys.lengths is None else (keys.lengths == LONG) & (locations[:, 0] != 0))
        for first in range(0, rows.size, _KEYS_AT_ONCE):
            batch = rows[first : first + _KEYS_AT_ONCE]
            ends, found = np.zeros((batch.size, SUFFIX_BYTES), np.uint8), np.empty(batch.size, np.uint8)
            chosen, at = np.ascontiguousarray(locations[batch]), address_of(found)
            arguments = (address_of(chosen), batch.size, address_of(ends), at)
            if compiled(read_ends)(self._address, at >> 12, *arguments) and (found == STALE).any():
                return stored, batch[found == STALE]
            for k, end in zip(batch.tolist(), ends, strict=True):
                stored[k] = long_key_in(end.tobytes(), keys.words[k].tobytes())
        return stored, _NO_ROWS

    def _stale(self, keys: Keys, found: NDArray[Any], locations: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the rows whose segment is not open; raise the first other error."""
        stale = np.flatnonzero(found.view(np.uint8) == STALE)
        if not stale.size:
            self._raise_first(keys, found.view(np.uint8), locations, 0)
        return stale

    def _read_ahead(self, keys: Keys, locations: NDArray[np.int64], located_at: int = 0) -> None:
        """Request the values of a batch from files that are not mapped; map a file from time to time.

        `located_at` is the address of `locations`, or 0 to look the keys up.
        """
        if self._batches >= _MAP_INTERVAL:
            self._batches = 0
            self.map_one_more()
        self._batches += 1 + keys.size // _MAP_INTERVAL
        if self._unmapped and keys.size > 1:  # a single value needs no read-ahead
            if not located_at:
                at = address_of(locations)
                compiled(find_many)(self._address, at >> 12, *addresses(keys), keys.size, at)
            ascending = locations[np.argsort(locations[:, 0])]
            at = address_of(ascending)
            compiled(read_ahead)(self._address, at >> 12, at, keys.size, _FADVISE)

    # -- errors ---------------------------------------------------------------------------------------------

    def _raise_first(
        self, keys: Keys, found: NDArray[np.uint8], locations: NDArray[np.int64], row_bytes: int
    ) -> NoReturn:
        k = int(np.flatnonzero(found > FOUND)[0])
        if found[k] == OTHER_SIZE:
            raise other_size(self._path, keys.row(k), int(size_of(locations[k, 0], locations[k, 1])), row_bytes)
        raise self.error(keys.row(k), int(found[k]), int(locations[k, 0]))

    def place_of(self, loc0: int) -> tuple[str, int | None]:
        """Return the file and the byte offset of a value; the store and None without a location."""
        if loc0 <= 0 or self._file_of is None:
            return self._path, None
        return self._file_of(segment_of(loc0)), offset_of(loc0)

    def error(self, key: int | bytes, status: int, loc0: int = 0) -> Exception:
        """Return the exception for an error code of a key; it names the file and the offset of a location."""
        path, offset = self.place_of(loc0)
        where = path if offset is None else f"{path}, byte {offset}"
        if status in _PROBLEMS:
            return errors.CorruptionError(f"{where}: {_PROBLEMS[status].format(key)}", path=path, offset=offset)
        code = status - FAILED
        return errors.MediumError(
            f"{where}: reading the value of key {key!r} failed ({os.strerror(code)}): check the drive", status=0x281
        )


def _without_suffix(value: bytes | None, key: bytes | None) -> bytes | None:
    """Return a value without the suffix of its long key, or None if it belongs to another key with this hash."""
    if value is None or key is None:
        return value
    suffix = suffix_of(key)
    return value[: -len(suffix)] if value.endswith(suffix) else None


def _method(
    function: Any,
    name: str,
    state: StoreState,
    slow: Any = None,
    schema_words: Sequence[int] = (0, 0),
    references: Any = (),
) -> Callable[..., Any]:
    """Return a native function as a Python function; its data begins with the words of `P_STATE` and so on."""
    objects = [id(slow), id(None), id(int), id(bytes), id(Exception)]
    functions = map(python_function, _PYTHON_FUNCTIONS)
    fields = np.array([state.address, *objects, *functions, *schema_words], np.int64)
    return method(function, name, fields.tobytes(), (state, slow, references))


def other_size(path: str, key: int | bytes, nbytes: int, row_bytes: int) -> errors.ValueSizeError:
    """Return the error for a value that is not as large as a row."""
    return errors.ValueSizeError(
        f"{path}: the value of key {key!r} has {nbytes} bytes, not {row_bytes}: omit out",
        name="out",
        nbytes=nbytes,
    )


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
        Offset, a multiple of 16, and size of each value in `buffer`.
    found : bool [N]
    """

    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    found: NDArray[np.bool_]


class _SegmentTable:
    """Descriptors and mappings by segment id."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._table: Any = np.zeros((SEGMENT_HEADER + SEGMENT_ENTRY * count) // 8, np.int64)
        self._table[0] = count
        self.entries = self._table[SEGMENT_HEADER // 8 :].reshape(count, SEGMENT_ENTRY // 8)
        self.address = address_of(self._table)

    def free(self) -> None:
        """Drop the memory."""
        self._table = None


def map_file(fd: int) -> tuple[int, int] | None:
    """Map a file that is in the page cache; return None if it is not cached or cannot be mapped.

    Otherwise, return the address and the size of the mapping. It exceeds the size of the file, which may grow.
    """
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        nbytes = -(-max(size, _MIN_MAPPED_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        address = map_guarded(fd, nbytes)
        if address is None:
            return None
        with contextlib.suppress(OSError):
            if _resident(address, size) if _may_ask(fd) else _sampled(fd, size):
                return address, nbytes
        unmap(address, nbytes)
    return None


def _may_ask(fd: int) -> bool:
    """Return whether mincore() reports residency; to users without write access it reports every page as resident."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _resident(address: int, size: int) -> bool:
    """Return whether a sample of a mapped file's pages is in the page cache."""
    pages = -(-size // mmap.PAGESIZE)
    count = min(_SAMPLES, pages)
    flags = np.zeros(count, np.uint8)
    at = address_of(flags)
    for k in range(count):
        page = address + k * pages // count * mmap.PAGESIZE
        if _libc.mincore(page, mmap.PAGESIZE, at + k) != 0:
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
