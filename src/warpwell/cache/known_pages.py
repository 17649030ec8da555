"""Bulk kernels that publish pages which the host has read. They take no lock, so that no other kernel waits for them.

1. *Look*: record the word of each page that is INVALID; other pages are skipped.
2. The host reads those pages from the medium into staging (`warpwell.cache.prefetch`).
3. *Publish*: take a frame, turn exactly the recorded word BUSY, copy the page, publish it.

No page is locked between 1 and 3: kernels may read a page on demand, write to it, and evict it again. But each eviction
increments the generation, so the exchange in 3 fails: the bytes in staging may be older than the bytes on the medium.
As long as the word is unchanged, the page has not been in a frame, so no kernel has written it. A failed read or a
closed array publishes no page and leaves no state behind.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.targets import device, kernel
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    call_cold,
    compare_exchange,
    div,
    fetch_add,
    fetch_or,
    grid,
    load_acquire,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    syncwarp,
    warp_size,
)

from . import layout as at
from .frames import try_alloc_frame
from .lookup import converged_group, word_address
from .paging import evict_page, pin_page, unpin
from .stash import free_frame
from .transfer import fill, publish
from .word import BUSY, INVALID, REF, state_of, with_state

PRESENT = -1
"""Recorded instead of a word that is not INVALID. (An INVALID word has no frame, so it is not negative.)"""
MAX_STEPS = 256
"""Maximum number of clock steps for one page."""

# -- row: consecutive pages, which one command reads (device memory)  ------------------------------------------------
T_PAGE = 0
"""First page."""
T_COUNT = 1
T_POSITION = 2
"""Position of the first page in the source, in pages."""
ROW_WORDS = 3

# -- counters (device memory): pages by outcome ------------------------------------------------------------------------
LOADED = 0
CHANGED = 1
"""Pages whose words have changed: a kernel has loaded them in the meantime."""
NO_FRAME = 2
FAILED = 3
MISSED = 4
"""Pages that were loaded by a miss of `touch_rows`."""
COUNTERS = 5


@device
def row_word(table, row, word):
    """Return a word of a row (thread)."""
    return field(table, row * ROW_WORDS + word)


@device
def look(core, page):
    """Return a page's word if it is INVALID, else PRESENT (thread; acquire order)."""
    word = load_acquire(word_address(core, page), DEVICE)
    if state_of(word) == INVALID:
        return word
    return PRESENT


@device
def publish_known(core, space, page, recorded, source, limit, mark, mask, lane, leader):
    """Publish a page that was read to `source`, if its word is still `recorded` (all lanes).

    Return the outcome (the leader; other lanes LOADED or CHANGED). `mark` is REF, or 0. `limit` is the hand's position
    two rounds after the start of a set of pages. Up to then the clock passes each of these pages at most once, and only
    clears REF. So a set never evicts its own pages or the pages of the previous wave.
    """
    frame = -1
    result = CHANGED
    if lane == leader:
        word = word_address(core, page)
        if load_relaxed(word, DEVICE) == recorded:
            frame = try_alloc_frame(core, space, page, MAX_STEPS, limit)
            if frame < 0:
                result = NO_FRAME
            elif compare_exchange(word, recorded, with_state(recorded, BUSY), DEVICE) != recorded:
                free_frame(core, frame)
                frame = -1
    frame = shfl(mask, frame, leader)
    if frame >= 0:
        fill(core, frame, source, mask, lane)
        result = LOADED
        if lane == leader:
            publish(core, page, frame, 0)
            if mark != 0:
                fetch_or(word_address(core, page), mark, DEVICE)
    return result


@kernel
def look_rows(core, table, page_words, n, max_pages, compares, absent):
    """Record the result of `look` for the pages of a row; store in ``absent[row]`` how many are not in the cache.

    If `compares` is 1, record nothing, and count the pages that have not been in the cache since they were recorded.
    """
    row = grid(1)
    if row < n:
        page = row_word(table, row, T_PAGE)
        found = 0
        for j in range(row_word(table, row, T_COUNT)):
            address = page_words + 8 * (row * max_pages + j)
            recorded = look(core, page + j)
            if compares == 0:
                store_relaxed(address, recorded, DEVICE)
            if recorded >= 0 and load_relaxed(address, DEVICE) == recorded:
                found += 1
        store_relaxed(absent + 8 * row, found, SYSTEM)


@kernel
def publish_rows(core, space, table, page_words, first, n, max_pages, unit, source, limit, mark, counters):
    """Publish the pages of rows [first, first + n) from their positions in `source`; a warp takes `unit` pages."""
    mask, lane, leader = converged_group()
    groups = div(max_pages + unit - 1, unit)
    warp = div(grid(1), warp_size())
    if warp < n * groups:
        row = first + div(warp, groups)
        low = rem(warp, groups) * unit
        page = row_word(table, row, T_PAGE)
        position = row_word(table, row, T_POSITION)
        shift = field(core, at.C_PAGE_SHIFT)
        for j in range(low, min(low + unit, row_word(table, row, T_COUNT))):
            recorded = load_relaxed(page_words + 8 * (row * max_pages + j), DEVICE)
            if recorded >= 0:
                address = source + ((position + j) << shift)
                result = publish_known(core, space, page + j, recorded, address, limit, mark, mask, lane, leader)
                if lane == leader:
                    fetch_add(counters + 8 * result, 1, DEVICE)
                syncwarp(mask)


@kernel
def touch_rows(core, space, table, n, max_pages, counters):
    """Read the pages of rows on demand, one per warp: if rows are short, many warps are faster than the host."""
    mask, lane, leader = converged_group()
    warp = div(grid(1), warp_size())
    row = div(warp, max_pages)
    j = rem(warp, max_pages)
    if row < n and j < row_word(table, row, T_COUNT):
        page = row_word(table, row, T_PAGE) + j
        absent = 0
        if lane == leader and look(core, page) >= 0:
            absent = 1
        if shfl(mask, absent, leader) != 0:
            frame = call_cold(pin_page, core, space, page, -1, mask, lane, leader)
            if lane == leader:
                result = FAILED
                if frame >= 0:
                    result = MISSED
                    fetch_or(word_address(core, page), REF, DEVICE)
                    unpin(word_address(core, page), 0)
                fetch_add(counters + 8 * result, 1, DEVICE)
            syncwarp(mask)


@kernel
def evict_rows(core, space, table, n):
    """Evict pages of rows that are clean and not pinned; a warp processes a row."""
    mask, lane, leader = converged_group()
    row = div(grid(1), warp_size())
    if row < n:
        page = row_word(table, row, T_PAGE)
        for j in range(row_word(table, row, T_COUNT)):
            evict_page(core, space, page + j, mask, lane, leader)
