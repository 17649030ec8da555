"""Free list: a ring of frames that were returned unused or whose page was evicted.

Without the list, the clock's hand would have to reach such a frame, and would evict other pages first: a cache as large
as its data would never stop evicting. A thread first decrements a count, of frames or of room, and then takes a
position in the ring, so no thread waits for a frame or for room that does not exist; it waits at most for the thread
that is filling or emptying its position. Frames in the free list are HELD.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.queues.layout import I8
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    backoff,
    compare_exchange,
    exchange,
    fetch_add,
    fetch_add_as,
    load_relaxed,
    store_relaxed,
    store_release,
)

from . import layout as at
from .lookup import owner_address


@device
def pool_with(core, frame):
    """Return the record of the pool that a frame belongs to (thread)."""
    pool = field(core, at.C_POOLS)
    while frame < field(pool, at.F_FIRST) or frame >= field(pool, at.F_FIRST) + field(pool, at.F_COUNT):
        pool += 8 * at.POOL_WORDS
    return pool


@device
def free_frame(core, frame):
    """Put an unused frame into its pool's free list, unless it is a fixed frame (thread; release order)."""
    pool = pool_with(core, frame)
    if field(pool, at.F_RESIDENT) != 0:
        return
    store_relaxed(owner_address(core, frame), at.HELD_FRAME, DEVICE)
    room = pool + 8 * at.F_STASH_ROOM
    if fetch_add(room, -1, DEVICE) <= 0:
        fetch_add(room, 1, DEVICE)
        store_release(owner_address(core, frame), at.FREE_FRAME, DEVICE)  # the ring is full: the clock finds the frame
        return
    position = fetch_add(pool + 8 * at.F_STASH_TAIL, 1, DEVICE) & field(pool, at.F_RING_MASK)
    slot = field(pool, at.F_RING) + 8 * position
    attempt = 0
    while compare_exchange(slot, 0, frame + 1, DEVICE) != 0:
        backoff(attempt)
        attempt += 1
    fetch_add(pool + 8 * at.F_STASHED, 1, DEVICE)


@device
def clear_frame(core, frame):
    """Free the frame of an evicted page, after its word has become INVALID (thread)."""
    pool = pool_with(core, frame)
    if field(pool, at.F_RESIDENT) != 0:
        fetch_add_as(pool + 8 * at.F_PRESENT, -1, I8)
    else:
        free_frame(core, frame)


@device
def take_free(pool):
    """Take a frame, HELD, from a pool's free list; return -1 if it is empty (thread; acquire order)."""
    stashed = pool + 8 * at.F_STASHED
    if load_relaxed(stashed, DEVICE) <= 0:
        return -1
    if fetch_add(stashed, -1, DEVICE) <= 0:
        fetch_add(stashed, 1, DEVICE)
        return -1
    position = fetch_add(pool + 8 * at.F_STASH_HEAD, 1, DEVICE) & field(pool, at.F_RING_MASK)
    slot = field(pool, at.F_RING) + 8 * position
    attempt = 0
    found = exchange(slot, 0, DEVICE)
    while found == 0:
        backoff(attempt)
        attempt += 1
        found = exchange(slot, 0, DEVICE)
    fetch_add(pool + 8 * at.F_STASH_ROOM, 1, DEVICE)
    return found - 1
