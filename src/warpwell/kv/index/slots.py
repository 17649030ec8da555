"""The index as device code: open addressing over 32-byte slots, one writer, readers without locks.

A slot's keys never change once it is used, and a deleted key keeps its slot (a tombstone) until the table is
replaced. Locations are never reused, so a reader that reads the same loc0 before and after loc1 has a consistent pair.
"""

from __future__ import annotations

from warpwell.kv.index.layout import (
    C_GETS,
    INT64,
    S_TABLE,
    SLOT,
    SLOT_KEY0,
    SLOT_KEY1,
    SLOT_LOC0,
    SLOT_LOC1,
    T_LIVE,
    T_MASK,
    T_USED,
    TABLE_HEADER,
    UINT8,
    enter,
    leave,
    stripe_of,
)
from warpwell.kv.log.format import KEY_LEN_SHIFT, TOMBSTONE
from warpwell.targets import device
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    fetch_add,
    i64,
    load_acquire,
    load_relaxed,
    load_weak_as,
    prefetch,
    store_relaxed,
    store_release,
    store_weak_as,
)

_MIX1 = -0x00AE502812AA7333  # 0xFF51AFD7ED558CCD as a signed word
_MIX2 = -0x3B314601E57A13AD  # 0xC4CEB9FE1A85EC53
_LOW = 0x7FFFFFFF

AHEAD = 8
"""Keys of a batch whose slots are on their way from memory while one is looked up."""


@device
def hash_of(key0, key1, length):
    """Return the hash of a key; its low bits are the first slot to probe."""
    h = i64(key0 ^ i64(i64(key1 + length) * _MIX2))
    h = i64((h ^ ((h >> 33) & _LOW)) * _MIX1)
    h = i64((h ^ ((h >> 33) & _LOW)) * _MIX2)
    return h ^ ((h >> 33) & _LOW)


@device
def lookup(table, key0, key1, length):
    """Return the location of a key, as two words; (0, 0) where it is absent."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    at = hash_of(key0, key1, length) & mask
    for _ in range(mask + 1):
        slot = table + TABLE_HEADER + SLOT * at
        loc0 = load_acquire(slot + SLOT_LOC0, SYSTEM)
        loc1 = load_acquire(slot + SLOT_LOC1, SYSTEM)
        if loc1 == 0:
            return 0, 0
        if (
            load_relaxed(slot + SLOT_KEY0, SYSTEM) == key0
            and load_relaxed(slot + SLOT_KEY1, SYSTEM) == key1
            and (loc1 >> KEY_LEN_SHIFT) & 31 == length
        ):
            attempt = 0
            while loc0 == 0 or load_relaxed(slot + SLOT_LOC0, SYSTEM) != loc0:
                backoff(attempt)
                attempt += 1
                loc0 = load_acquire(slot + SLOT_LOC0, SYSTEM)
                loc1 = load_acquire(slot + SLOT_LOC1, SYSTEM)
            if loc0 == TOMBSTONE:
                return 0, 0
            return loc0, loc1
        at = (at + 1) & mask
    return 0, 0


@device
def slot_of(table, key0, key1, length):
    """Return the slot of a key, or the free slot for it (the writer; the table is never full)."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    at = hash_of(key0, key1, length) & mask
    while True:
        slot = table + TABLE_HEADER + SLOT * at
        loc1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
        if loc1 == 0 or (
            load_relaxed(slot + SLOT_KEY0, SYSTEM) == key0
            and load_relaxed(slot + SLOT_KEY1, SYSTEM) == key1
            and (loc1 >> KEY_LEN_SHIFT) & 31 == length
        ):
            return slot
        at = (at + 1) & mask


@device
def put(table, key0, key1, length, loc0, loc1):
    """Give a key a location, `TOMBSTONE` to delete it; return the one it had, as two words (the writer)."""
    slot = slot_of(table, key0, key1, length)
    old1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
    old0 = load_relaxed(slot + SLOT_LOC0, SYSTEM)
    live = load_relaxed(table + 8 * T_LIVE, SYSTEM)
    if loc0 == TOMBSTONE:
        if old1 == 0 or old0 == TOMBSTONE:
            return 0, 0
        store_relaxed(table + 8 * T_LIVE, live - 1, SYSTEM)
        store_release(slot + SLOT_LOC0, TOMBSTONE, SYSTEM)
        return old0, old1
    if old1 == 0:
        store_relaxed(slot + SLOT_KEY0, key0, SYSTEM)
        store_relaxed(slot + SLOT_KEY1, key1, SYSTEM)
        store_relaxed(table + 8 * T_USED, load_relaxed(table + 8 * T_USED, SYSTEM) + 1, SYSTEM)
    else:
        store_relaxed(slot + SLOT_LOC0, 0, SYSTEM)
    if old1 == 0 or old0 == TOMBSTONE:
        store_relaxed(table + 8 * T_LIVE, live + 1, SYSTEM)
    store_release(slot + SLOT_LOC1, loc1, SYSTEM)
    store_release(slot + SLOT_LOC0, loc0, SYSTEM)
    if old1 == 0 or old0 == TOMBSTONE:
        return 0, 0
    return old0, old1


@device
def key_at(keys, lengths, k):
    """Return key0, key1 and length of one key of a batch; `lengths` is 0 for flat 8-byte keys."""
    if lengths == 0:
        return load_weak_as(keys + 8 * k, INT64), 0, 8
    return (
        load_weak_as(keys + 16 * k, INT64),
        load_weak_as(keys + 16 * k + 8, INT64),
        int(load_weak_as(lengths + k, UINT8)),
    )


@device
def look_up_all(table, keys, lengths, count, locations):
    """Write the locations of keys, two words each, (0, 0) for absent ones; return how many were found."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    found = 0
    for k in range(count):
        if k + AHEAD < count:
            key0, key1, length = key_at(keys, lengths, k + AHEAD)
            prefetch(table + TABLE_HEADER + SLOT * (hash_of(key0, key1, length) & mask))
        key0, key1, length = key_at(keys, lengths, k)
        loc0, loc1 = lookup(table, key0, key1, length)
        store_weak_as(locations + 16 * k, loc0, INT64)
        store_weak_as(locations + 16 * k + 8, loc1, INT64)
        if loc0 != 0:
            found += 1
    return found


def lookup_many(state, stripe, keys, lengths, count, locations):
    """Write the locations of keys, two words each, (0, 0) for absent ones; return how many were found."""
    epoch = enter(state, stripe)
    found = look_up_all(load_acquire(state + 8 * S_TABLE, SYSTEM), keys, lengths, count, locations)
    leave(state, stripe, epoch)
    fetch_add(stripe_of(state, stripe) + 8 * C_GETS, count, SYSTEM)
    return found


def put_many(table, keys, lengths, count, locations, replaced):
    """Put keys at locations in order; write the locations they had (0, 0: none) to `replaced` (the writer)."""
    for k in range(count):
        key0, key1, length = key_at(keys, lengths, k)
        loc0 = load_weak_as(locations + 16 * k, INT64)
        old0, old1 = put(table, key0, key1, length, loc0, load_weak_as(locations + 16 * k + 8, INT64))
        if replaced != 0:
            store_weak_as(replaced + 16 * k, old0, INT64)
            store_weak_as(replaced + 16 * k + 8, old1, INT64)
    return 0


def move_many(table, keys, lengths, count, before, after, moved):
    """Move keys from one location to another; only those whose location is still the old one (the writer)."""
    total = 0
    for k in range(count):
        key0, key1, length = key_at(keys, lengths, k)
        slot = slot_of(table, key0, key1, length)
        same = load_relaxed(slot + SLOT_LOC0, SYSTEM) == load_weak_as(before + 16 * k, INT64)
        if same and load_relaxed(slot + SLOT_LOC1, SYSTEM) != 0:
            store_relaxed(slot + SLOT_LOC0, 0, SYSTEM)
            store_release(slot + SLOT_LOC1, load_weak_as(after + 16 * k + 8, INT64), SYSTEM)
            store_release(slot + SLOT_LOC0, load_weak_as(after + 16 * k, INT64), SYSTEM)
            total += 1
        else:
            same = False
        store_weak_as(moved + k, 1 if same else 0, UINT8)
    return total


def rehash(table, other):
    """Put the live keys of a table into another, empty one (the writer)."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    for at in range(mask + 1):
        slot = table + TABLE_HEADER + SLOT * at
        loc0 = load_relaxed(slot + SLOT_LOC0, SYSTEM)
        if loc0 > 0:
            loc1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
            put(
                other,
                load_relaxed(slot + SLOT_KEY0, SYSTEM),
                load_relaxed(slot + SLOT_KEY1, SYSTEM),
                (loc1 >> KEY_LEN_SHIFT) & 31,
                loc0,
                loc1,
            )
    return 0
