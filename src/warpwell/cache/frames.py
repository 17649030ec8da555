"""Frames: allocation by a clock with second chance, and the write-back of dirty victims; resident pools.

A *resident* pool has a frame for each page of its arrays, so no page is evicted to make room, and a frame stores bytes
of one page only. A reader that has seen its page VALID may therefore read the frame without validation: an eviction on
request does not change the bytes, and a later read of the page stores the same bytes or newer ones.
"""

from __future__ import annotations

from warpwell.nvme import WRITE
from warpwell.queues import field, release_id, staging_of, take_id
from warpwell.queues.layout import I8
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    call_cold,
    compare_exchange,
    fetch_add_as,
    fetch_and,
    load_acquire,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    syncwarp,
)

from . import layout as at
from .latch import latch
from .lookup import count, owner_address, queue_of, record_written, space_of, word_address
from .stash import take_free
from .transfer import copy, frame_address, host_page, leave_writeback, redirty, start, wait
from .word import (
    BUSY,
    DIRTY,
    INVALID,
    PINS,
    REF,
    VALID,
    WRITEBACK,
    evicted,
    frame_of,
    state_of,
    with_state,
)

NO_FRAME = -1
NO_LIMIT = -1
"""The clock hand may advance to any position."""
DIRTY_VICTIM = -2
"""`sweep` found a dirty page and put it in WRITEBACK."""


@device
def pool_of(core, space):
    """Return the record of the pool of frames of a space (thread)."""
    return field(core, at.C_POOLS) + field(space, at.S_POOL) * (8 * at.POOL_WORDS)


@device
def fixed_frame(space, page):
    """Return the fixed frame of a page, or -1 if pages of its pool share frames (thread)."""
    first = field(space, at.S_FRAME)
    if first < 0:
        return NO_FRAME
    return first + page - field(space, at.S_BASE)


@device
def evict_at_hand(core, pool, clean_only):
    """Advance the clock hand by one frame (thread). Return the frame that was won, NO_FRAME, or DIRTY_VICTIM - frame.

    A won frame is HELD: no page's word refers to it. A dirty victim's word is in state WRITEBACK.
    """
    hand = fetch_add_as(pool + 8 * at.F_HAND, 1, I8) & 0x7FFFFFFFFFFFFFFF
    frame = field(pool, at.F_FIRST) + rem(hand, field(pool, at.F_COUNT))
    owner = owner_address(core, frame)
    page = load_acquire(owner, DEVICE) - 1
    if page == at.FREE_FRAME - 1:
        if compare_exchange(owner, at.FREE_FRAME, at.HELD_FRAME, DEVICE) == at.FREE_FRAME:
            return frame
        return NO_FRAME
    if page < 0 or page >= at.OWNER_PAGE:
        return NO_FRAME  # allocated by a group, or its page has long pins
    address = word_address(core, page)
    word = load_relaxed(address, DEVICE)
    if state_of(word) != VALID or frame_of(word) != frame or word & PINS != 0:
        return NO_FRAME
    if word & REF != 0:
        # the second chance: the page was used since the last round of the hand
        fetch_and(address, ~REF, DEVICE)
        return NO_FRAME
    if word & DIRTY != 0:
        if not clean_only and compare_exchange(address, word, with_state(word, WRITEBACK), DEVICE) == word:
            return DIRTY_VICTIM - frame
        return NO_FRAME
    if compare_exchange(address, word, evicted(word), DEVICE) != word:
        return NO_FRAME
    store_relaxed(owner, at.HELD_FRAME, DEVICE)
    count(core, at.N_EVICTIONS, 1)
    return frame


@device
def try_alloc_frame(core, space, page, steps, limit):
    """Win a frame for a page without a write-back; or return NO_FRAME (thread).

    The frame is the page's own, or comes from the free list or from a number of clock steps, up to hand position
    `limit`.
    """
    frame = fixed_frame(space, page)
    if frame >= 0:
        return frame
    pool = pool_of(core, space)
    frame = take_free(pool)
    while frame < 0 and steps > 0 and (limit < 0 or load_relaxed(pool + 8 * at.F_HAND, DEVICE) < limit):
        frame = evict_at_hand(core, pool, True)
        steps -= 1
    return frame


@device
def alloc_frame(core, space, page, missing_word, mask, lane, leader):
    """Win a frame for a page, writing a dirty victim back first; return it, or NO_FRAME (all lanes of `mask`).

    Only the page uses a fixed frame, once its word is BUSY; any other frame is HELD. Gives up after two rounds of the
    clock, after a failed write, and as soon as `missing_word` is not INVALID: only one of the groups that miss a page
    needs a frame, and the others would evict pages in use.
    """
    own = fixed_frame(space, page)
    if own >= 0:
        return own
    pool = pool_of(core, space)
    left = 2 * field(pool, at.F_COUNT) + 2
    while True:
        found = NO_FRAME
        if lane == leader:
            found = take_free(pool)
            while left > 0 and found == NO_FRAME and state_of(load_relaxed(missing_word, DEVICE)) == INVALID:
                found = evict_at_hand(core, pool, False)
                left -= 1
        found = shfl(mask, found, leader)
        if found > DIRTY_VICTIM:
            return found
        frame = DIRTY_VICTIM - found
        victim = 0
        if lane == leader:
            victim = load_relaxed(owner_address(core, frame), DEVICE) - 1
        victim = shfl(mask, victim, leader)
        if not call_cold(write_back, core, space, victim, frame, mask, lane, leader):
            return NO_FRAME
        if lane == leader:
            word = word_address(core, victim)
            old = load_relaxed(word, DEVICE)
            while True:
                current = compare_exchange(word, old, evicted(old), DEVICE)
                if current == old:
                    break
                old = current
            store_relaxed(owner_address(core, frame), at.HELD_FRAME, DEVICE)
            count(core, at.N_EVICTIONS, 1)
        return frame


@device
def write_back(core, launched, page, frame, mask, lane, leader):
    """Write a page in WRITEBACK to storage and wait for it (all lanes of `mask`).

    Return True if the page was written; its word is still in WRITEBACK, and the caller settles it. Return False if the
    page is VALID and DIRTY as before (or stays in WRITEBACK until the completion of an orphan): an error was latched
    for the launch of the space `launched`, or no command id was free.
    """
    space = space_of(core, page)
    shift = field(core, at.C_PAGE_SHIFT)
    word = word_address(core, page)
    target = host_page(space, page, shift)
    if target != 0:
        syncwarp(mask)
        copy(target, frame_address(core, frame), 1 << shift, mask, lane)
        syncwarp(mask)
        if lane == leader:
            record_written(core, page)
        return True
    queue = queue_of(core, page)
    cid = -1
    if lane == leader:
        cid = take_id(queue, 0)
        if cid < 0:
            redirty(word)
    cid = shfl(mask, cid, leader)
    if cid < 0:
        return False
    syncwarp(mask)
    copy(staging_of(queue, cid), frame_address(core, frame), 1 << shift, mask, lane)
    syncwarp(mask)
    submitted = 0
    if lane == leader and start(core, queue, cid, WRITE, page, 1, space):
        submitted = 1
    status = -1
    if shfl(mask, submitted, leader) != 0:
        status = call_cold(wait, core, launched, queue, cid, mask, lane, leader)
        if status < 0:
            return False
    if lane == leader:
        release_id(queue, cid)
        if status != 0:
            latch(launched, at.WRITE_ERROR, field(space, at.S_NSID), page, status)
            redirty(word)
        else:
            record_written(core, page)
    return status == 0


@device
def try_lock_page(core, word):
    """Turn an INVALID word BUSY; return whether this thread did it."""
    old = load_relaxed(word, DEVICE)
    if state_of(old) != INVALID:
        return False
    return compare_exchange(word, old, with_state(old, BUSY), DEVICE) == old


@device
def clean(core, space, page, pinned_too, mask, lane, leader):
    """Write a page back if it is dirty and no thread writes to it (all lanes of `mask`); return True if it is clean.

    The flush of one page: afterwards the page is VALID and clean. `pinned_too` includes pinned pages: their pins are
    long pins, under which no thread writes; only the host knows this, when no launch is in flight. `space` belongs to
    the launch, and need not be the page's.
    """
    word = word_address(core, page)
    action = 0
    frame = 0
    if lane == leader:
        old = load_acquire(word, DEVICE)
        if state_of(old) == WRITEBACK or (state_of(old) == VALID and old & DIRTY != 0):
            action = 1
            if state_of(old) == VALID and (pinned_too or old & PINS == 0):
                claimed = with_state(old, WRITEBACK)
                if compare_exchange(word, old, claimed, DEVICE) == old:
                    action = 2
                    frame = frame_of(old)
    action = shfl(mask, action, leader)
    if action == 0:
        return True
    if action == 1:
        return False
    frame = shfl(mask, frame, leader)
    if not call_cold(write_back, core, space, page, frame, mask, lane, leader):
        return False
    if lane == leader:
        leave_writeback(word, VALID)
    return True
