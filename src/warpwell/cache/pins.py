"""Long pins: pages that kernels or the host keep in the cache until they unpin them.

They are counted in the owner word of the page's frame, so that no holder can release the pin of another: neither of the
host, nor of a group that is storing. All holders of a page together have one pin of the page word, which the first
takes and the last releases; and the page counts once in its pool.
"""

from __future__ import annotations

from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    backoff,
    call_cold,
    compare_exchange,
    device,
    fetch_add,
    load_acquire,
    load_relaxed,
    shfl,
)

from . import layout as at
from .frames import pool_of
from .lookup import owner_address, word_address
from .paging import pin_page, unpin
from .word import READABLE, frame_of, state_of

NOT_HELD = 0
HELD = 1
FULL = 2
TRIES = 8
"""Looks at a full pool, for places that are given back at once."""


@device
def hold_page(core, space, page, pin, mask, lane, leader):
    """Try to add a long pin of a page, reading it on a miss; return whether it is held (all lanes of `mask`).

    `pin` is KERNEL_PIN or HOST_PIN. It may fail, because one frame of the pool must stay free for misses. In a hashed
    table a held page would block the other pages of its word.
    """
    found = FULL
    if lane == leader and field(core, at.C_HASH_MASK) == 0:
        found = hold_again(core, page, pin)
        attempt = 0
        while found == NOT_HELD and room(core, space) <= 0 and attempt <= TRIES:
            # the last places may be those of others who hold this very page in a moment
            backoff(attempt)
            attempt += 1
            found = hold_again(core, page, pin)
        if attempt > TRIES and found == NOT_HELD:
            found = FULL
    found = shfl(mask, found, leader)
    if found != NOT_HELD:
        return found == HELD
    frame = call_cold(pin_page, core, space, page, -1, mask, lane, leader)
    held = 0
    if lane == leader and frame >= 0 and keep(core, space, page, frame, pin):
        held = 1
    return shfl(mask, held, leader) != 0


@device
def keep(core, space, page, frame, pin):
    """Turn the caller's pin of the page word into a long pin, or release it and return False (thread)."""
    word = word_address(core, page)
    owner = owner_address(core, frame)
    old = load_relaxed(owner, DEVICE)
    attempt = 0
    while attempt <= TRIES:
        first = old <= at.OWNER_PAGE
        if first and not reserve(core, space):
            backoff(attempt)
            attempt += 1
            old = load_relaxed(owner, DEVICE)
            continue
        seen = compare_exchange(owner, old, old + pin, DEVICE)
        if seen == old:
            if not first:
                unpin(word, 0)  # the first holder's is enough
            return True
        if first:
            fetch_add(pool_of(core, space) + 8 * at.F_PINNED, -1, DEVICE)
        old = seen
    unpin(word, 0)
    return False


@device
def hold_again(core, page, pin):
    """Add a long pin of a page that is already held; return HELD, NOT_HELD, or FULL (thread)."""
    word = load_acquire(word_address(core, page), DEVICE)
    if state_of(word) & READABLE == 0:
        return NOT_HELD
    owner = owner_address(core, frame_of(word))
    old = load_relaxed(owner, DEVICE)
    # while it is held it stays in this frame; a page that has left it is in no owner word any more, or is not held
    while old & at.OWNER_PAGE == page + 1 and old > at.OWNER_PAGE:
        if pin == at.KERNEL_PIN and old >> at.KERNEL_SHIFT == at.KERNEL_PINS_MAX:
            return FULL
        seen = compare_exchange(owner, old, old + pin, DEVICE)
        if seen == old:
            return HELD
        old = seen
    return NOT_HELD


@device
def let_page_go(core, space, page, pin):
    """Release one pin of the kernels or the host; return False if they have none of that page (thread)."""
    word = load_acquire(word_address(core, page), DEVICE)
    if field(core, at.C_HASH_MASK) != 0 or state_of(word) & READABLE == 0:
        return False
    owner = owner_address(core, frame_of(word))
    old = load_relaxed(owner, DEVICE)
    while old & at.OWNER_PAGE == page + 1 and holds(old, pin):
        seen = compare_exchange(owner, old, old - pin, DEVICE)
        if seen == old:
            if old - pin <= at.OWNER_PAGE:
                give_word_back(core, space, page)
            return True
        old = seen
    return False


@device
def holds(owner, pin):
    """Return whether kernels (KERNEL_PIN) or the host (HOST_PIN) have a pin of a page (thread)."""
    if pin == at.HOST_PIN:
        return owner & at.HOST_PIN != 0
    return owner >> at.KERNEL_SHIFT != 0


@device
def give_word_back(core, space, page):
    """Release the holders' pin of the page word, and the page's place in the pool's count (thread)."""
    unpin(word_address(core, page), 0)
    fetch_add(pool_of(core, space) + 8 * at.F_PINNED, -1, DEVICE)


@device
def room(core, space):
    """Return how many more pages of a pool may be held (thread)."""
    pool = pool_of(core, space)
    return field(pool, at.F_COUNT) - 1 - load_relaxed(pool + 8 * at.F_PINNED, DEVICE)


@device
def reserve(core, space):
    """Count one more held page of a pool, unless only one frame would be left (thread)."""
    pool = pool_of(core, space)
    if fetch_add(pool + 8 * at.F_PINNED, 1, DEVICE) >= field(pool, at.F_COUNT) - 1:
        fetch_add(pool + 8 * at.F_PINNED, -1, DEVICE)
        return False
    return True
