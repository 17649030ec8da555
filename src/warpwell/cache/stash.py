"""Stash: a ring of frames that were won and given back unused, or whose page was put out.

Without it the clock's hand would have to come round to such a frame, and would evict resident pages on the
way: a cache as large as its data would never come to rest. Two counts, of frames and of room, are taken
before a place of the ring is, so nobody waits for a frame or for room that is not there; whoever has a place
waits at most for the thread that is storing into it or emptying it. Frames in the stash are HELD.
"""

from __future__ import annotations

from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    backoff,
    compare_exchange,
    device,
    exchange,
    fetch_add,
    load_relaxed,
    store_relaxed,
    store_release,
)

from . import layout as at
from .lookup import owner_address


@device
def give_back(core, frame):
    """Put a frame that is in no word into its pool's stash (thread; releases what it did to the frame before)."""
    pool = field(core, at.C_POOLS)
    while frame < field(pool, at.F_FIRST) or frame >= field(pool, at.F_FIRST) + field(pool, at.F_COUNT):
        pool += 8 * at.POOL_WORDS
    store_relaxed(owner_address(core, frame), at.HELD_FRAME, DEVICE)
    room = pool + 8 * at.F_STASH_ROOM
    if fetch_add(room, -1, DEVICE) <= 0:
        fetch_add(room, 1, DEVICE)
        store_release(owner_address(core, frame), at.FREE_FRAME, DEVICE)  # full: the clock will find it
        return
    place = fetch_add(pool + 8 * at.F_STASH_TAIL, 1, DEVICE) & field(pool, at.F_RING_MASK)
    slot = field(pool, at.F_RING) + 8 * place
    attempt = 0
    while compare_exchange(slot, 0, frame + 1, DEVICE) != 0:
        backoff(attempt)
        attempt += 1
    fetch_add(pool + 8 * at.F_STASHED, 1, DEVICE)


@device
def take_free(pool):
    """Take a frame out of a pool's stash, HELD; -1 where it is empty (thread; acquires)."""
    stashed = pool + 8 * at.F_STASHED
    if load_relaxed(stashed, DEVICE) <= 0:
        return -1
    if fetch_add(stashed, -1, DEVICE) <= 0:
        fetch_add(stashed, 1, DEVICE)
        return -1
    place = fetch_add(pool + 8 * at.F_STASH_HEAD, 1, DEVICE) & field(pool, at.F_RING_MASK)
    slot = field(pool, at.F_RING) + 8 * place
    attempt = 0
    found = exchange(slot, 0, DEVICE)
    while found == 0:
        backoff(attempt)
        attempt += 1
        found = exchange(slot, 0, DEVICE)
    fetch_add(pool + 8 * at.F_STASH_ROOM, 1, DEVICE)
    return found - 1
