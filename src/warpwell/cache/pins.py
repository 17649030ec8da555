"""Long pins: pages that kernels or the host keep in the cache until they unpin them.

They are counted in the owner word of the page's frame, so that no holder can release the pin of the host, of another
kernel or of a group that is storing.

A resident pool (see `cache.frames`) needs nothing else. In other pools all holders of a page together have one pin of
the page word, which the first takes and the last releases; and the page takes one of F - 1 credits. So at least one of
F frames has no long pins: it is free, BUSY, in WRITEBACK or pinned by a group that stores, and each of these states
ends without another frame. Credits are spread over several words to reduce contention. A thread has taken a credit if
the word was above 0 before it subtracted 1, so the sum of free and taken credits is constant.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.queues.layout import I8
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    backoff,
    call_cold,
    compare_exchange,
    fetch_add_as,
    load_acquire,
    load_relaxed,
    shfl,
)

from . import layout as at
from .frames import fixed_frame, pool_of
from .lookup import owner_address, word_address
from .paging import pin_page, pin_valid, unpin
from .word import PINS_MAX, READABLE, VALID, frame_of, pins_of, state_of

NOT_HELD = 0
HELD = 1
FULL = 2
TRIES = 8
"""Number of attempts to pin in a full pool, because other threads may return credits soon."""


@device
def pin_page_long(core, space, page, pin, mask, lane, leader):
    """Try to add a long pin of a page, reading it on a miss; return whether it is held (all lanes of `mask`).

    `pin` is KERNEL_PIN or HOST_PIN. It may fail, because one frame of the pool must stay free for misses.
    """
    found = FULL
    if lane == leader:
        found = pin_present_long(core, space, page, pin)
        attempt = 0
        while found == NOT_HELD and fixed_frame(space, page) < 0 and not credit_left(core, space) and attempt <= TRIES:
            # the threads that took the last credits may be about to pin the same page
            backoff(attempt)
            attempt += 1
            found = pin_present_long(core, space, page, pin)
        if attempt > TRIES and found == NOT_HELD:
            found = FULL
    found = shfl(mask, found, leader)
    if found != NOT_HELD:
        return found == HELD
    frame = call_cold(pin_page, core, space, page, -1, mask, lane, leader)
    held = 0
    if lane == leader and frame >= 0 and make_pin_long(core, space, page, frame, pin):
        held = 1
    return shfl(mask, held, leader) != 0


@device
def pin_present_long(core, space, page, pin):
    """Add a long pin of a page that is in the cache, without waiting; return HELD, NOT_HELD, or FULL (thread).

    NOT_HELD also if the page has no long pin yet and its word has changed.
    """
    address = word_address(core, page)
    word = load_acquire(address, DEVICE)
    if state_of(word) & READABLE == 0:
        return NOT_HELD
    owner = owner_address(core, frame_of(word))
    if fixed_frame(space, page) >= 0:
        return add_pin(owner, pin)
    found = join_long_pin(page, owner, pin)
    if found != NOT_HELD or state_of(word) != VALID or load_relaxed(owner, DEVICE) != page + 1:
        return found
    if pins_of(word) == PINS_MAX:
        return FULL
    if not take_credit(core, space, page):
        return NOT_HELD
    if pin_valid(address, word, 0):
        if compare_exchange(owner, page + 1, page + 1 + pin, DEVICE) == page + 1:
            return HELD
        unpin(address, 0)
    return_credit(core, space, page)
    return NOT_HELD


@device
def add_pin(owner, pin):
    """Add a long pin in a resident pool; return HELD or FULL (thread; relaxed)."""
    if fetch_add_as(owner, pin, I8) >> at.KERNEL_SHIFT >= at.KERNEL_PINS_MAX - at.KERNEL_PINS_SLACK:
        fetch_add_as(owner, -pin, I8)
        return FULL
    return HELD


@device
def remove_pin(owner, pin):
    """Remove a long pin in a resident pool; return whether there was one (thread; relaxed)."""
    if holds(fetch_add_as(owner, -pin, I8), pin):
        return True
    fetch_add_as(owner, pin, I8)
    return False


@device
def join_long_pin(page, owner, pin):
    """Add a long pin of a page that has one; return HELD, NOT_HELD, or FULL (thread)."""
    old = load_relaxed(owner, DEVICE)
    # a pinned page stays in this frame; the owner word of a frame that it has left names another page, or has no pins
    while old & at.OWNER_PAGE == page + 1 and old > at.OWNER_PAGE:
        if pin == at.KERNEL_PIN and old >> at.KERNEL_SHIFT == at.KERNEL_PINS_MAX:
            return FULL
        current = compare_exchange(owner, old, old + pin, DEVICE)
        if current == old:
            return HELD
        old = current
    return NOT_HELD


@device
def make_pin_long(core, space, page, frame, pin):
    """Turn the caller's pin of the page word into a long pin, or release it and return False (thread)."""
    word = word_address(core, page)
    owner = owner_address(core, frame)
    if fixed_frame(space, page) >= 0:
        found = add_pin(owner, pin)
        unpin(word, 0)
        return found == HELD
    attempt = 0
    while attempt <= TRIES:
        if join_long_pin(page, owner, pin) == HELD:
            break  # the first holder's pin of the word is enough
        if take_credit(core, space, page):
            if compare_exchange(owner, page + 1, page + 1 + pin, DEVICE) == page + 1:
                return True
            return_credit(core, space, page)
        backoff(attempt)
        attempt += 1
    unpin(word, 0)
    return attempt <= TRIES


@device
def unpin_page_long(core, space, page, pin):
    """Release one pin of the kernels or the host; return False if the page has no such pin (thread)."""
    own = fixed_frame(space, page)
    if own >= 0:
        return remove_pin(owner_address(core, own), pin)
    word = load_acquire(word_address(core, page), DEVICE)
    if state_of(word) & READABLE == 0:
        return False
    owner = owner_address(core, frame_of(word))
    old = load_relaxed(owner, DEVICE)
    while old & at.OWNER_PAGE == page + 1 and holds(old, pin):
        current = compare_exchange(owner, old, old - pin, DEVICE)
        if current == old:
            if old - pin <= at.OWNER_PAGE:
                unpin(word_address(core, page), 0)
                return_credit(core, space, page)
            return True
        old = current
    return False


@device
def holds(owner, pin):
    """Return whether kernels (KERNEL_PIN) or the host (HOST_PIN) have a pin of a page (thread)."""
    if pin == at.HOST_PIN:
        return owner & at.HOST_PIN != 0
    return owner >> at.KERNEL_SHIFT > 0


# -- credits -------------------------------------------------------------------------------------------------


@device
def credits_of(pool, page):
    """Return the address of the credits that are tried first for a page (thread)."""
    return field(pool, at.F_CREDITS) + (page & field(pool, at.F_CREDIT_MASK)) * at.CREDIT_BYTES


@device
def take_credit(core, space, page):
    """Take a credit, from the first word that has one; return whether there was one (thread; relaxed)."""
    pool = pool_of(core, space)
    for k in range(field(pool, at.F_CREDIT_MASK) + 1):
        word = credits_of(pool, page + k)
        # check first: thousands of failing threads that subtract and add at once would hide free credits
        if load_relaxed(word, DEVICE) > 0:
            if fetch_add_as(word, -1, I8) > 0:
                return True
            fetch_add_as(word, 1, I8)
    return False


@device
def return_credit(core, space, page):
    """Return a credit, after the pin of the page word (thread; relaxed)."""
    fetch_add_as(credits_of(pool_of(core, space), page), 1, I8)


@device
def credit_left(core, space):
    """Return whether a pool has a credit at this moment (thread)."""
    pool = pool_of(core, space)
    for k in range(field(pool, at.F_CREDIT_MASK) + 1):
        if load_relaxed(credits_of(pool, k), DEVICE) > 0:
            return True
    return False
