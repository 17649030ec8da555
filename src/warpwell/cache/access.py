"""Read, write or add to items of pages: the paths of ``a[i]`` that may wait.

Any set of lanes may call these together. A converged group takes its distinct pages one at a time; lanes
with the same page share its pin.
"""

from __future__ import annotations

import numpy as np

from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    activemask,
    as_bits,
    ballot,
    bits_as,
    call_cold,
    device,
    fence,
    fetch_add_as,
    ffs,
    i64,
    lane_id,
    linked,
    load_acquire,
    load_relaxed_as,
    shfl,
    store_relaxed_as,
    syncwarp,
)

from . import layout as at
from .latch import failed_before, latch
from .lookup import count, word_address
from .paging import pin_page, prefetch_page, unpin
from .pins import HELD, NOT_HELD, hold_page, hold_present, let_page_go
from .transfer import frame_address
from .word import DIRTY

LOAD = 0
STORE = 1
ADD_I4 = 2
ADD_I8 = 3
ADD_F4 = 4
ADD_F8 = 5

U1 = np.dtype(np.uint8)
U2 = np.dtype(np.uint16)
I4 = np.dtype(np.int32)
I8 = np.dtype(np.int64)
F4 = np.dtype(np.float32)
F8 = np.dtype(np.float64)


@linked
def access(space, page, item, bits):
    """Apply an operation to an item of a page; return the item's old bits.

    It has few parameters, because each takes a register in every caller's hot loop.

    Parameters
    ----------
    space : int
        Address of the array's space record.
    page : int
        Page, counted from the array's first.
    item : int
        Place and operation, see `item_of`.
    bits : int
        The value (bit pattern) of a STORE or an addition.

    Notes
    -----
    Returns 0 if an error is latched. The leader of each group holds the pin; each lane acquires the page's word itself,
    because the shuffle that broadcasts the frame has no memory order.
    """
    page += field(space, at.S_BASE)
    offset = item & 0xFFFFFFFF
    size = (item >> 32) & 0xFF
    operation = item >> 40
    mask = activemask()
    lane = lane_id()
    out = 0
    open_ = True
    first = 0
    if lane == ffs(mask) - 1 and failed_before(space):
        first = 1
    if shfl(mask, first, ffs(mask) - 1) != 0:
        return out
    while True:
        todo = ballot(mask, open_)
        if todo == 0:
            return out
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        # lanes of a group may hold different arrays, even of different caches: space and core are the leader's
        home = shfl(mask, space, leader)
        core = field(home, at.S_CORE)
        wanted = -1
        if open_ and space == home:
            wanted = page
        frame = call_cold(pin_page, core, home, current, wanted, mask, lane, leader)
        word = word_address(core, current)
        mine = open_ and page == current and space == home
        if mine:
            open_ = False
            if frame >= 0:
                load_acquire(word, DEVICE)
                if operation != LOAD:
                    # a reader that takes the new item for one of the frame's old page then sees that page's new word
                    fence(DEVICE)
                out = apply(frame_address(core, frame) + offset, bits, size, operation)
        changed = ballot(mask, mine and operation != LOAD)
        syncwarp(mask)
        if lane == leader and frame >= 0:
            dirty = 0
            if changed != 0:
                dirty = DIRTY
            unpin(word, dirty)


@device
def item_of(offset, size, operation):
    """Pack the argument `item` of `access`: byte offset in the page, size (1, 2, 4 or 8), operation (thread)."""
    return offset | (size << 32) | (operation << 40)


@device
def apply(address, bits, size, operation):
    """Apply the operation to the frame (thread, under a pin), with relaxed accesses of device scope."""
    if operation == LOAD:
        if size == 8:
            return load_relaxed_as(address, I8)
        if size == 4:
            return load_relaxed_as(address, I4) & 0xFFFFFFFF
        if size == 2:
            return as_bits(load_relaxed_as(address, U2), U2)
        return as_bits(load_relaxed_as(address, U1), U1)
    if operation == STORE:
        if size == 8:
            store_relaxed_as(address, bits, I8)
        elif size == 4:
            store_relaxed_as(address, bits_as(bits, I4), I4)
        elif size == 2:
            store_relaxed_as(address, bits_as(bits, U2), U2)
        else:
            store_relaxed_as(address, bits_as(bits, U1), U1)
        return 0
    if operation == ADD_I4:
        return as_bits(fetch_add_as(address, bits_as(bits, I4), I4), I4)
    if operation == ADD_I8:
        return fetch_add_as(address, bits, I8)
    if operation == ADD_F4:
        return as_bits(fetch_add_as(address, bits_as(bits, F4), F4), F4)
    return as_bits(fetch_add_as(address, bits_as(bits, F8), F8), F8)


@linked
def hold(space, page):
    """Try to take a long pin (all converged lanes, each on its own page); return 1 if this lane's page is held."""
    page += field(space, at.S_BASE)
    found = hold_present(field(space, at.S_CORE), space, page, at.KERNEL_PIN)
    if found != NOT_HELD:
        return i64(found == HELD)
    mask = activemask()
    lane = lane_id()
    open_ = True
    held = 0
    while True:
        todo = ballot(mask, open_)
        if todo == 0:
            return held
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        home = shfl(mask, space, leader)
        done = call_cold(hold_page, field(home, at.S_CORE), home, current, at.KERNEL_PIN, mask, lane, leader)
        # one lane, one pin: lanes that name the same page come round again
        if lane == leader:
            open_ = False
            if done:
                held = 1


@linked
def let_go(space, page):
    """Release a kernel's long pin (thread); if the page has none, latch an error and return 0."""
    core = field(space, at.S_CORE)
    page += field(space, at.S_BASE)
    if let_page_go(core, space, page, at.KERNEL_PIN):
        return 1
    latch(space, at.NOT_PINNED, field(space, at.S_NSID), page, 0)
    return 0


@linked
def not_pinned(space, page):
    """Latch that a kernel gave back a pin that no kernel has (thread); return 0."""
    latch(space, at.NOT_PINNED, field(space, at.S_NSID), page + field(space, at.S_BASE), 0)
    return 0


@linked
def prefetch(space, page):
    """Start to read pages into the cache (all converged lanes, each its own page; lanes without a page pass -1)."""
    mask = activemask()
    lane = lane_id()
    open_ = page >= 0
    page += field(space, at.S_BASE)
    while True:
        todo = ballot(mask, open_)
        if todo == 0:
            return 0
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        home = shfl(mask, space, leader)
        core = field(home, at.S_CORE)
        if not call_cold(prefetch_page, core, home, current, mask, lane, leader) and lane == leader:
            count(core, at.N_PREFETCH_DROPPED, 1)
        if page == current and space == home:
            open_ = False
