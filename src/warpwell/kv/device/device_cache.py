"""Device cache: values in device memory, which threads read without a command; copies of values by all lanes.

A set has two entries. Each entry has a version, the key, the size and the bytes of one value. A filler makes the
version odd, writes, and makes the version even again. A reader copies the bytes and then checks the version again. So
no thread waits: a reader that was too slow has a miss, and an entry that is being filled is skipped. The filler copies
from the memory that the controller wrote (`requests`), never from a kernel's memory, which other threads may change.
The version of a value of several pieces stays odd until the last piece has arrived.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    ballot,
    bits_as,
    compare_exchange,
    copy_wide,
    div,
    fence,
    ffs,
    load_acquire,
    load_relaxed,
    popc,
    shfl,
    store_relaxed,
    store_relaxed_as,
    store_release,
    syncwarp,
)

from ..index.sealed import hash_of
from ..native import UINT8

# -- record, in words ------------------------------------------------------------------------------------------
D_MASK = 0
"""Number of sets, a power of two, minus 1."""
D_ENTRIES = 1
"""Address of the entries: two for each set, `W_WORDS` words each."""
D_DATA = 2
D_STRIDE = 3
"""Size of an entry's buffer in bytes, a multiple of 16."""
D_WORDS = 8

W_VERSION = 0
"""Version: 0 for an empty entry; odd while the entry is being filled."""
W_KEY0 = 1
W_KEY1 = 2
W_SIZE = 3
"""Size of the value, and the key's length from bit 32 on."""
W_WORDS = 4


@device
def holds(address, key0, key1, length):
    """Return whether an entry has this key and is not empty; may be wrong while the entry is being filled (thread)."""
    same = load_relaxed(address + 8 * W_KEY0, DEVICE) == key0
    same = same and load_relaxed(address + 8 * W_KEY1, DEVICE) == key1
    return same and load_relaxed(address + 8 * W_SIZE, DEVICE) >> 32 == length


@device
def look_up(cache, want, key0, key1, length, to, room, mask, lane):
    """Copy a value out of the cache for each lane with `want`; return its size, -1 for a miss.

    For all lanes of `mask`, converged. The lane's copy has acquire order.
    """
    entry = 0
    version = 0
    size = -1
    if want:
        first = (hash_of(key0, key1, length) & field(cache, D_MASK)) << 1
        for k in range(2):
            if size < 0:
                address = field(cache, D_ENTRIES) + (first + k) * (8 * W_WORDS)
                version = load_acquire(address + 8 * W_VERSION, DEVICE)
                if version & 1 == 0 and version != 0 and holds(address, key0, key1, length):
                    size = load_relaxed(address + 8 * W_SIZE, DEVICE) & 0xFFFFFFFF
                    entry = first + k
    found = ballot(mask, size >= 0)
    if found == 0:
        return size
    source = field(cache, D_DATA) + entry * field(cache, D_STRIDE)
    # one lane has acquired the version, and all lanes read the value
    syncwarp(mask)
    copy_each(found, to, source, min(max(size, 0), room), mask, lane)
    # the loads of all lanes precede the owner's second load of the version
    fence(DEVICE)
    syncwarp(mask)
    if size >= 0:
        address = field(cache, D_ENTRIES) + entry * (8 * W_WORDS)
        if load_acquire(address + 8 * W_VERSION, DEVICE) != version:
            size = -1
    return size


@device
def claim(cache, key0, key1, length, size):
    """Make the version of an entry odd for a value's bytes; return the entry, or 0 if none is available (thread).

    An entry that is being filled is skipped, and a value that is already cached is not stored again. All lanes that
    copy into the entry receive its address at a barrier, and fence (`DEVICE`); then `publish` or `abandon` follows.
    """
    if size > field(cache, D_STRIDE):
        return 0
    first = (hash_of(key0, key1, length) & field(cache, D_MASK)) << 1
    entries = field(cache, D_ENTRIES) + first * (8 * W_WORDS)
    # an empty entry; otherwise the entries alternate
    position = (load_relaxed(entries + 8 * W_VERSION, DEVICE) >> 1) & 1
    if load_relaxed(entries + 8 * W_VERSION, DEVICE) == 0:
        position = 0
    elif load_relaxed(entries + 8 * (W_WORDS + W_VERSION), DEVICE) == 0:
        position = 1
    entry = entries + position * (8 * W_WORDS)
    before = load_relaxed(entry + 8 * W_VERSION, DEVICE)
    for k in range(2):
        if holds(entries + k * (8 * W_WORDS), key0, key1, length):
            before = 1
    if before & 1 == 0 and compare_exchange(entry + 8 * W_VERSION, before, before + 1, DEVICE) == before:
        return entry
    return 0


@device
def bytes_of(cache, entry):
    """Return the address of an entry's value (thread)."""
    return field(cache, D_DATA) + div(entry - field(cache, D_ENTRIES), 8 * W_WORDS) * field(cache, D_STRIDE)


@device
def publish(entry, key0, key1, length, size):
    """Make a filled entry readable, after a barrier of the lanes that copied the value (thread)."""
    store_relaxed(entry + 8 * W_KEY0, key0, DEVICE)
    store_relaxed(entry + 8 * W_KEY1, key1, DEVICE)
    store_relaxed(entry + 8 * W_SIZE, size | (length << 32), DEVICE)
    store_release(entry + 8 * W_VERSION, load_relaxed(entry + 8 * W_VERSION, DEVICE) + 1, DEVICE)


@device
def abandon(entry):
    """Free an entry whose value will not arrive: with size and length 0, no key matches (thread)."""
    store_relaxed(entry + 8 * W_SIZE, 0, DEVICE)
    store_release(entry + 8 * W_VERSION, load_relaxed(entry + 8 * W_VERSION, DEVICE) + 1, DEVICE)


# -- copies of values by all lanes of a group --------------------------------------------------------------------


@device
def copy_each(lanes, to, source, nbytes, mask, lane):
    """Copy a value for each of `lanes`, all lanes of `mask` together; the caller synchronizes before and after."""
    while lanes != 0:
        owner = ffs(lanes) - 1
        copy(shfl(mask, to, owner), shfl(mask, source, owner), shfl(mask, nbytes, owner), mask, lane)
        lanes &= lanes - 1


@device
def copy(to, source, nbytes, mask, lane):
    """Copy bytes with all lanes of `mask`, 16 at a time where both addresses allow it (nothing is ordered)."""
    lanes = popc(mask)
    rank = popc(mask & ((1 << lane) - 1))
    done = 0
    if (to | source) & 15 == 0:
        wide_bytes = nbytes & ~15
        stride = lanes << 4
        at = rank << 4
        while at < wide_bytes:
            pieces = 0
            reach = at
            while pieces < 4 and reach < wide_bytes:
                pieces += 1
                reach += stride
            copy_wide(to + at, source + at, stride, pieces)
            at = reach
        done = wide_bytes
    # read staging in aligned words that bypass the L1 cache, which may have its previous contents
    at = done + 8 * rank
    while at < nbytes:
        skew = (source + at) & 7
        word = load_relaxed(source + at - skew, SYSTEM)
        if skew != 0:
            word = (word >> (8 * skew)) & ((1 << (64 - 8 * skew)) - 1)
            if at + 8 - skew < nbytes:
                word |= load_relaxed(source + at - skew + 8, SYSTEM) << (64 - 8 * skew)
        if (to + at) & 7 == 0 and at + 8 <= nbytes:
            store_relaxed(to + at, word, DEVICE)
        else:
            for k in range(min(8, nbytes - at)):
                store_relaxed_as(to + at + k, bits_as((word >> (8 * k)) & 0xFF, UINT8), UINT8)
        at += 8 * lanes


@device
def wipe(to, nbytes):
    """Overwrite the bytes of an incomplete value with zeros (thread)."""
    at = to
    end = to + nbytes
    while at < end:
        if at & 7 == 0 and at + 8 <= end:
            store_relaxed(at, 0, DEVICE)
            at += 8
        else:
            store_relaxed_as(at, bits_as(0, UINT8), UINT8)
            at += 1
