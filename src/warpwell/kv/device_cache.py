"""Device cache: values in device memory that threads answer themselves.

Two ways a set; each way has a version, the key, the size and the bytes of one value. A filler makes the
version odd, writes, and makes it even again; a reader copies the bytes and then looks at the version once
more. So nobody waits and nobody holds anything: a reader that was too slow has a miss, and a way that is being
filled is left alone.
"""

from __future__ import annotations

from warpwell.kv.slots import hash_of
from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    ballot,
    compare_exchange,
    device,
    fence,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
    syncwarp,
)

from .requests import copy_each

# -- record, in words ------------------------------------------------------------------------------------------
D_MASK = 0
"""Sets less one (a power of two)."""
D_WAYS = 1
"""Address of the ways, `W_WORDS` each, two a set."""
D_DATA = 2
D_STRIDE = 3
"""Bytes of a way's place, a multiple of 16."""
D_WORDS = 8

W_VERSION = 0
"""0: empty; odd: being filled."""
W_KEY0 = 1
W_KEY1 = 2
W_SIZE = 3
"""Value's size, and the key's length above bit 32."""
W_WORDS = 4


@device
def holds(address, key0, key1, length):
    """Tell whether a way that is not empty has this key, or seems to while it is being filled (thread)."""
    same = load_relaxed(address + 8 * W_KEY0, DEVICE) == key0
    same = same and load_relaxed(address + 8 * W_KEY1, DEVICE) == key1
    return same and load_relaxed(address + 8 * W_SIZE, DEVICE) >> 32 == length


@device
def look_up(cache, want, key0, key1, length, to, room, mask, lane):
    """Copy a value out of the cache for each lane that wants one; return its size, -1 for a miss.

    All lanes of `mask`, converged. The copy is acquired by the lane.
    """
    way = 0
    version = 0
    size = -1
    if want:
        first = (hash_of(key0, key1, length) & field(cache, D_MASK)) << 1
        for k in range(2):
            if size < 0:
                address = field(cache, D_WAYS) + (first + k) * (8 * W_WORDS)
                version = load_acquire(address + 8 * W_VERSION, DEVICE)
                if version & 1 == 0 and version != 0 and holds(address, key0, key1, length):
                    size = load_relaxed(address + 8 * W_SIZE, DEVICE) & 0xFFFFFFFF
                    way = first + k
    found = ballot(mask, size >= 0)
    if found == 0:
        return size
    source = field(cache, D_DATA) + way * field(cache, D_STRIDE)
    # one lane acquired the version, and all read what it covers
    syncwarp(mask)
    copy_each(found, to, source, min(max(size, 0), room), mask, lane)
    # every lane's loads come before the owner's second look
    fence(DEVICE)
    syncwarp(mask)
    if size >= 0:
        address = field(cache, D_WAYS) + way * (8 * W_WORDS)
        if load_acquire(address + 8 * W_VERSION, DEVICE) != version:
            size = -1
    return size


@device
def keep(cache, want, key0, key1, length, source, size, mask, lane):
    """Put a value into the cache for each lane that has one, unless its way is being filled (all of `mask`)."""
    way = 0
    version = -1
    if want and size <= field(cache, D_STRIDE) and source & 15 == 0:
        mixed = hash_of(key0, key1, length)
        first = (mixed & field(cache, D_MASK)) << 1
        ways = field(cache, D_WAYS) + first * (8 * W_WORDS)
        # an empty way, else one that changes from filler to filler; none where the value stands already
        other = (load_relaxed(ways + 8 * W_VERSION, DEVICE) >> 1) & 1
        if load_relaxed(ways + 8 * W_VERSION, DEVICE) == 0:
            other = 0
        elif load_relaxed(ways + 8 * (W_WORDS + W_VERSION), DEVICE) == 0:
            other = 1
        way = first + other
        address = field(cache, D_WAYS) + way * (8 * W_WORDS) + 8 * W_VERSION
        before = load_relaxed(address, DEVICE)
        for k in range(2):
            if holds(ways + k * (8 * W_WORDS), key0, key1, length):
                before = 1
        if before & 1 == 0 and compare_exchange(address, before, before + 1, DEVICE) == before:
            version = before
    mine = ballot(mask, version >= 0)
    if mine == 0:
        return
    # a reader that sees one of the new bytes sees the odd version as well: each lane learns of it, and then fences
    syncwarp(mask)
    fence(DEVICE)
    copy_each(mine, field(cache, D_DATA) + way * field(cache, D_STRIDE), source, size, mask, lane)
    syncwarp(mask)
    if version >= 0:
        address = field(cache, D_WAYS) + way * (8 * W_WORDS)
        store_relaxed(address + 8 * W_KEY0, key0, DEVICE)
        store_relaxed(address + 8 * W_KEY1, key1, DEVICE)
        store_relaxed(address + 8 * W_SIZE, size | (length << 32), DEVICE)
        store_release(address + 8 * W_VERSION, version + 2, DEVICE)
