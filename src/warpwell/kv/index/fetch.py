"""Read values in native code: look keys up, read from the segments' files, check every CRC."""

from __future__ import annotations

from warpwell.kv.index.layout import (
    C_BYTES,
    C_ERRORS,
    C_GETS,
    C_HITS,
    G_BASE,
    G_FD,
    G_MAPPED,
    INT64,
    OFFSET_MASK,
    S_SCRATCH,
    S_SEGMENTS,
    S_TABLE,
    SCRATCH_BYTES,
    SCRATCHES,
    SEGMENT_ENTRY,
    SEGMENT_HEADER,
    SIZE_MASK,
    UINT8,
    UNIT_SHIFT,
    enter,
    leave,
    stripe_of,
)
from warpwell.kv.index.slots import look_up_all, lookup
from warpwell.kv.log.format import SEGMENT_SHIFT
from warpwell.targets import device
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    copy_bytes,
    crc32c,
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    load_weak_as,
    pread,
    prefetch,
    store_release,
    store_weak_as,
)

# What became of a key; the low byte of `found` arrays.
ABSENT = 0
FOUND = 1
BAD_CRC = 2
SHORT = 3
"""The file ends before the value does."""
STALE = 4
"""The location's segment is gone: look the key up again."""
OTHER_SIZE = 5
"""The value is not as large as a row."""
FAILED = 100
"""Plus errno."""

EINTR = 4
LATER = 2
"""Values of a batch between the one that is read and the one that is called from memory."""
LINES = 16
"""Cache lines of it."""
MAPPED_MOST = 32768
"""Bytes of values that are copied out of mapped files; a system call costs larger ones next to nothing."""


@device
def segment_entry(state, segment):
    """Return the address of a segment's entry, 0 where there is none."""
    table = load_acquire(state + 8 * S_SEGMENTS, SYSTEM)
    if table == 0 or segment >= load_relaxed(table, SYSTEM):
        return 0
    entry = table + SEGMENT_HEADER + SEGMENT_ENTRY * segment
    if load_acquire(entry + 8 * G_FD, SYSTEM) == 0:
        return 0
    return entry


@device
def read_all(fd, buffer, nbytes, offset):
    """Read all bytes of a range; return FOUND or an error."""
    done = 0
    while done < nbytes:
        got = pread(fd, buffer + done, nbytes - done, offset + done)
        if got > 0:
            done += got
        elif got == 0:
            return SHORT
        elif got != -EINTR:
            return FAILED - got
    return FOUND


@device
def read_value(state, loc0, loc1, out):
    """Read a whole value and check its CRC (inside of an epoch); return FOUND or an error."""
    entry = segment_entry(state, loc0 >> SEGMENT_SHIFT)
    if entry == 0:
        return STALE
    size = loc1 & SIZE_MASK
    crc = (loc1 >> 32) & 0xFFFFFFFF
    offset = (loc0 & OFFSET_MASK) << UNIT_SHIFT
    if size <= MAPPED_MOST and offset + size <= load_acquire(entry + 8 * G_MAPPED, SYSTEM):
        copy_bytes(out, load_relaxed(entry + 8 * G_BASE, SYSTEM) + offset, size)
        if crc32c(out, size, 0) == crc:
            return FOUND
        # The system call says what is wrong with the file, if anything is.
    status = read_all(load_relaxed(entry + 8 * G_FD, SYSTEM) - 1, out, size, offset)
    if status == FOUND and crc32c(out, size, 0) != crc:
        return BAD_CRC
    return status


@device
def call_ahead(state, locations, k, count):
    """Prefetch a value that follows a little later in a batch, if it is in a mapped file."""
    loc0 = load_weak_as(locations + 16 * (k + LATER), INT64) if k + LATER < count else 0
    if loc0 == 0:
        return
    entry = segment_entry(state, loc0 >> SEGMENT_SHIFT)
    size = load_weak_as(locations + 16 * (k + LATER) + 8, INT64) & SIZE_MASK
    offset = (loc0 & OFFSET_MASK) << UNIT_SHIFT
    if entry == 0 or size > MAPPED_MOST or offset + size > load_acquire(entry + 8 * G_MAPPED, SYSTEM):
        return
    at = load_relaxed(entry + 8 * G_BASE, SYSTEM) + offset
    for line in range(at, at + min(size, LINES * 64), 64):
        prefetch(line)


@device
def read_part(state, loc0, loc1, out, first, limit, stripe):
    """Read `limit` bytes from byte `first` of a value and check the CRC of all of it (inside of an epoch)."""
    entry = segment_entry(state, loc0 >> SEGMENT_SHIFT)
    if entry == 0:
        return STALE
    size = loc1 & SIZE_MASK
    offset = (loc0 & OFFSET_MASK) << UNIT_SHIFT
    fd = load_relaxed(entry + 8 * G_FD, SYSTEM) - 1
    status = FOUND
    crc = 0
    lock = take_scratch(state, stripe)
    done = 0
    while done < size and status == FOUND:
        count = min(SCRATCH_BYTES, size - done)
        into = lock + 64
        if done == first:
            count = limit
            into = out
        elif done < first:
            count = min(count, first - done)
        status = read_all(fd, into, count, offset + done)
        if status == FOUND:
            crc = crc32c(into, count, crc)
        done += count
    store_release(lock, 0, SYSTEM)
    if status == FOUND and crc != (loc1 >> 32) & 0xFFFFFFFF:
        return BAD_CRC
    return status


@device
def take_scratch(state, stripe):
    """Take a scratch buffer: return the address of its lock, which stands 64 bytes before it."""
    base = load_relaxed(state + 8 * S_SCRATCH, SYSTEM)
    attempt = 0
    while True:
        lock = base + ((stripe + attempt) & (SCRATCHES - 1)) * (64 + SCRATCH_BYTES)
        if load_relaxed(lock, SYSTEM) == 0 and exchange(lock, 1, SYSTEM) == 0:
            return lock
        attempt += 1
        backoff(attempt // SCRATCHES)


@device
def count_reads(state, stripe, gets, hits, nbytes, errors):
    """Add to the counters of a stripe."""
    line = stripe_of(state, stripe)
    fetch_add(line + 8 * C_GETS, gets, SYSTEM)
    fetch_add(line + 8 * C_HITS, hits, SYSTEM)
    fetch_add(line + 8 * C_BYTES, nbytes, SYSTEM)
    if errors > 0:
        fetch_add(line + 8 * C_ERRORS, errors, SYSTEM)


@device
def get_value(block, key0, key1, length):
    """Read one value as `get_one` does."""
    state = load_weak_as(block, INT64)
    stripe = load_weak_as(block + 8, INT64)
    limit = load_weak_as(block + 24, INT64)
    epoch = enter(state, stripe)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size = loc1 & SIZE_MASK
    status = ABSENT
    if loc0 != 0 and size > limit:
        leave(state, stripe, epoch)
        return -1 - size
    if loc0 != 0:
        status = read_value(state, loc0, loc1, load_weak_as(block + 16, INT64))
    leave(state, stripe, epoch)
    if status == FOUND:
        count_reads(state, stripe, 1, 1, size, 0)
        return size
    count_reads(state, stripe, 1, 0, 0, 1 if status != ABSENT else 0)
    return -(1 << 40) - status


def get_one(block, key0, key1, length):
    """Read one value; `block` has the state's address, the stripe, and the buffer's address and size.

    Returns the value's size, ``-1 - size`` of one that is larger than the buffer (nothing was read), or
    ``-(1 << 40) - status``.
    """
    return get_value(block, key0, key1, length)


def get_int(block, key):
    """Read the value of an 8-byte key, as `get_one` with fewer arguments: that makes Python's call faster."""
    return get_value(block, key, 0, 8)


def has_one(state, stripe, key0, key1, length):
    """Return 1 where a key is there, else 0."""
    epoch = enter(state, stripe)
    loc0, _ = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    leave(state, stripe, epoch)
    return 1 if loc0 != 0 else 0


def get_rows(state, stripe, keys, lengths, count, out, row_bytes, found, locations):
    """Read values of `row_bytes` bytes each into rows; absent rows become zero.

    `found` (uint8) receives ABSENT, FOUND or an error; `locations` is scratch memory of two words a key. Return the
    number of errors.
    """
    epoch = enter(state, stripe)
    look_up_all(load_acquire(state + 8 * S_TABLE, SYSTEM), keys, lengths, count, locations)
    hits = 0
    wrong = 0
    for k in range(count):
        call_ahead(state, locations, k, count)
        loc0 = load_weak_as(locations + 16 * k, INT64)
        loc1 = load_weak_as(locations + 16 * k + 8, INT64)
        row = out + row_bytes * k
        status = ABSENT
        if loc0 != 0:
            status = OTHER_SIZE
            if loc1 & SIZE_MASK == row_bytes:
                status = read_value(state, loc0, loc1, row)
        if status == FOUND:
            hits += 1
        else:
            clear(row, row_bytes)
            if status != ABSENT:
                wrong += 1
        store_weak_as(found + k, status, UINT8)
    leave(state, stripe, epoch)
    count_reads(state, stripe, count, hits, hits * row_bytes, wrong)
    return wrong


def read_many(state, stripe, locations, count, out, starts, found):
    """Read the values at locations to byte offsets of `out`; return the number of errors."""
    epoch = enter(state, stripe)
    hits = 0
    wrong = 0
    nbytes = 0
    for k in range(count):
        call_ahead(state, locations, k, count)
        loc0 = load_weak_as(locations + 16 * k, INT64)
        loc1 = load_weak_as(locations + 16 * k + 8, INT64)
        status = ABSENT
        if loc0 != 0:
            status = read_value(state, loc0, loc1, out + load_weak_as(starts + 8 * k, INT64))
            if status == FOUND:
                hits += 1
                nbytes += loc1 & SIZE_MASK
            else:
                wrong += 1
        store_weak_as(found + k, status, UINT8)
    leave(state, stripe, epoch)
    count_reads(state, stripe, 0, hits, nbytes, wrong)
    return wrong


@device
def clear(address, nbytes):
    """Zero a row (no other thread reads it)."""
    at = address
    end = address + nbytes
    while at + 8 <= end:
        store_weak_as(at, 0, INT64)
        at += 8
    while at < end:
        store_weak_as(at, 0, UINT8)
        at += 1
