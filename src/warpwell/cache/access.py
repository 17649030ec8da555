"""Read, write or add to items of pages: the paths of ``a[i]`` that may wait.

Any set of lanes may call these together. A converged group processes its distinct pages one at a time; lanes with the
same page share its pin.
"""

from __future__ import annotations

import numpy as np

from warpwell.queues import field
from warpwell.targets import device, linked
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    as_bits,
    ballot,
    bits_as,
    call_cold,
    copy_foreign,
    fence,
    fetch_add_as,
    ffs,
    i64,
    lane_id,
    load_acquire,
    load_relaxed_as,
    load_weak_as,
    shfl,
    store_pair,
    store_relaxed_as,
    syncwarp,
)

from . import layout as at
from .latch import failed_before, latch
from .lookup import count, word_address
from .paging import RUN, pin_page, pin_valid, prefetch_page, unpin
from .pins import HELD, NOT_HELD, pin_page_long, pin_present_long, unpin_page_long
from .transfer import frame_address
from .word import DIRTY, VALID, frame_of, state_of

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

    The function has few parameters, because each takes a register in every caller's hot loop.

    Parameters
    ----------
    space : int
        Address of the array's space record.
    page : int
        Page, counted from the array's first.
    item : int
        Offset and operation, see `item_of`.
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
    is_open = True
    first = 0
    if lane == ffs(mask) - 1 and failed_before(space):
        first = 1
    if shfl(mask, first, ffs(mask) - 1) != 0:
        return out
    while True:
        todo = ballot(mask, is_open)
        if todo == 0:
            return out
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        # lanes of a group may use different arrays, even of different caches: space and core are the leader's
        home = shfl(mask, space, leader)
        core = field(home, at.S_CORE)
        requested = -1
        if is_open and space == home:
            requested = page
        frame = call_cold(pin_page, core, home, current, requested, mask, lane, leader)
        word = word_address(core, current)
        is_own = is_open and page == current and space == home
        if is_own:
            is_open = False
            if frame >= 0:
                load_acquire(word, DEVICE)
                if operation != LOAD:
                    # a reader that mistakes the new item for one of the frame's old page then sees that page's new word
                    fence(DEVICE)
                out = apply(frame_address(core, frame) + offset, bits, size, operation)
        changed = ballot(mask, is_own and operation != LOAD)
        syncwarp(mask)
        if lane == leader and frame >= 0:
            dirty = 0
            if changed != 0:
                dirty = DIRTY
            unpin(word, dirty)


@device
def read_pinned(space, page, offset, size):
    """Return the bits of an aligned item of a page, read under a pin (all converged lanes, each its own item)."""
    return access(space, page, item_of(offset, size, LOAD), 0)


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
def pin_long(space, page):
    """Try to take a long pin (all converged lanes, each on its own page); return 1 if this lane's page is pinned."""
    page += field(space, at.S_BASE)
    found = pin_present_long(field(space, at.S_CORE), space, page, at.KERNEL_PIN)
    if found != NOT_HELD:
        return i64(found == HELD)
    mask = activemask()
    lane = lane_id()
    is_open = True
    held = 0
    while True:
        todo = ballot(mask, is_open)
        if todo == 0:
            return held
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        home = shfl(mask, space, leader)
        done = call_cold(pin_page_long, field(home, at.S_CORE), home, current, at.KERNEL_PIN, mask, lane, leader)
        # one pin per lane: lanes with the same page repeat the loop
        if lane == leader:
            is_open = False
            if done:
                held = 1


@linked
def fault_in(space, page, last):
    """Read a page into the cache, where it may stay only for a moment; return 0 if an error is latched.

    All converged lanes call it, each for its own page. `last` is the last page of the caller's run: the same command
    reads pages up to it if that needs no waiting.
    """
    mask = activemask()
    lane = lane_id()
    is_open = True
    good = 0
    while True:
        todo = ballot(mask, is_open)
        if todo == 0:
            return good
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        home = shfl(mask, space, leader)
        frame = call_cold(pin_run, home, current, shfl(mask, last, leader), mask, lane, leader)
        if page == current and space == home:
            is_open = False
            if frame >= 0:
                good = 1
        if lane == leader and frame >= 0:
            unpin(word_address(field(home, at.S_CORE), current + field(home, at.S_BASE)), 0)


@device
def pin_run(space, page, last, mask, lane, leader):
    """Pin a page of a run; return its frame, or a negative number if an error is latched (all lanes of `mask`).

    The pin is *transient*: its holders never wait and run no code of users. So, unlike a long pin, it needs no count.
    """
    first = 0
    if lane == leader and failed_before(space):
        first = 1
    if shfl(mask, first, leader) != 0:
        return -1
    base = field(space, at.S_BASE)
    return call_cold(pin_page, field(space, at.S_CORE), space, page + base, RUN - last - base, mask, lane, leader)


@device
def pin_present(word, leads):
    """Try once to pin the page of a word; return its frame, or -1 if it is not in the cache (the leader)."""
    if not leads:
        return -1
    old = load_acquire(word, DEVICE)
    if state_of(old) == VALID and pin_valid(word, old, 0):
        return frame_of(old)
    return -1


@linked
def store_groups(space, table, frames, begin, step, rows, shape, bounds, a, b, c, d, e, f, g, h):
    """Store up to four groups, `step` bytes apart, under a transient pin of each page (all converged lanes).

    Parameters
    ----------
    space : int
    table, frames : int
        Addresses of the word of the array's first page, and of frame 0. They are arguments because all warps would
        read them from one cache line at once.
    begin : int
        Offset of the first group from the start of the array's first page.
    step, rows : int
    shape : int
        Size of an item in bytes, size of a group << 8, and log2 of the size of a page << 16.
    bounds : int
        Number of bytes that are not stored: at the start of the first group, and << 8 at the end of the last group.
    a, b, c, d, e, f, g, h : int
        The groups, two words each.

    Notes
    -----
    Returns 0 if an error is latched. As in `access`, each lane acquires the page's word, executes a fence, then stores.
    """
    mask = activemask()
    lane = lane_id()
    shift = shape >> 16
    head = bounds & 0xFF
    while True:
        todo = ballot(mask, rows > 0)
        if todo == 0:
            return i64(rows == 0)
        leader = ffs(todo) - 1
        current = shfl(mask, begin >> shift, leader)
        home = shfl(mask, space, leader)
        word = shfl(mask, table, leader) + 8 * current
        frame = shfl(mask, pin_present(word, lane == leader), leader)
        if frame < 0:
            frame = call_cold(pin_run, home, current, current, mask, lane, leader)
        target = shfl(mask, frames, leader) + (frame << shift)
        if rows > 0 and begin >> shift == current and space == home:
            if frame < 0:
                rows = -1
            else:
                load_acquire(word, DEVICE)
                # a reader that mistakes a new item for one of the frame's old page then sees that page's new word
                fence(DEVICE)
            while rows > 0 and begin >> shift == current:
                rows -= 1
                tail = 0
                if rows == 0:
                    tail = bounds >> 8
                put_group(target + begin - (current << shift), a, b, shape, head, tail)
                head = 0
                begin += step
                a, b, c, d, e, f = c, d, e, f, g, h
        syncwarp(mask)
        if lane == leader and frame >= 0:
            unpin(word, DIRTY)


@linked
def copy_run(space, page, inside, nbytes, last, buffer, stores):
    """Copy bytes of a page between its frame and `buffer`, under a transient pin (thread; `cpu` and `interp`).

    Called by `array.spans.buffers` and by `cache.hit.copy_part`.

    Parameters
    ----------
    space, page : int
        The page is counted from the array's first.
    inside, nbytes : int
        First byte in the page, and number of bytes.
    last : int
        Last page of the run, as for `fault_in`.
    buffer : int
        Address of the caller's memory. If it is stored, it begins at the same byte of a word as the bytes of the page.
    stores : int
        0 to read the page, else 1.

    Notes
    -----
    Returns 0 if an error is latched. As in `access`, the thread acquires the page's word, and executes a fence before
    it stores.
    """
    frame = pin_run(space, page, last, 1, 0, 0)
    if frame < 0:
        return 0
    core = field(space, at.S_CORE)
    word = word_address(core, page + field(space, at.S_BASE))
    load_acquire(word, DEVICE)
    address = frame_address(core, frame) + inside
    if stores == 0:
        copy_foreign(buffer, address, nbytes)
        unpin(word, 0)
        return 1
    # a reader that mistakes a new item for one of the frame's old page then sees that page's new word
    fence(DEVICE)
    # whole words are copied, and the bytes before and after them stored one by one
    head = min(nbytes, -address & 7)
    tail = (nbytes - head) & 7
    for k in range(head):
        store_relaxed_as(address + k, load_weak_as(buffer + k, U1), U1)
    copy_foreign(address + head, buffer + head, nbytes - head - tail)
    for k in range(nbytes - tail, nbytes):
        store_relaxed_as(address + k, load_weak_as(buffer + k, U1), U1)
    unpin(word, DIRTY)
    return 1


@device
def put_group(address, a, b, shape, head, tail):
    """Store a group except its first `head` and last `tail` bytes, by one store if possible (thread, under a pin)."""
    size = shape & 0xFF
    nbytes = shape >> 8 & 0xFF
    if head == 0 and tail == 0 and nbytes == 16:
        store_pair(address, a, b)
        return
    if head == 0 and tail == 0 and nbytes == 8:
        store_relaxed_as(address, a, I8)
        return
    at_ = head
    while at_ < nbytes - tail:
        bits = a
        if at_ >= 8:
            bits = b
        apply(address + at_, bits >> (8 * (at_ & 7)), size, STORE)
        at_ += size


@linked
def unpin_long(space, page):
    """Release a kernel's long pin (thread); if the page has no such pin, latch an error and return 0."""
    core = field(space, at.S_CORE)
    page += field(space, at.S_BASE)
    if unpin_page_long(core, space, page, at.KERNEL_PIN):
        return 1
    latch(space, at.NOT_PINNED, field(space, at.S_NSID), page, 0)
    return 0


@linked
def prefetch_pages(space, page):
    """Start to read pages into the cache (all converged lanes, each its own page; lanes without a page pass -1)."""
    mask = activemask()
    lane = lane_id()
    is_open = page >= 0
    page += field(space, at.S_BASE)
    while True:
        todo = ballot(mask, is_open)
        if todo == 0:
            return 0
        leader = ffs(todo) - 1
        current = shfl(mask, page, leader)
        home = shfl(mask, space, leader)
        core = field(home, at.S_CORE)
        if not call_cold(prefetch_page, core, home, current, mask, lane, leader) and lane == leader:
            count(core, at.N_PREFETCH_DROPPED, 1)
        if page == current and space == home:
            is_open = False
