"""Known pages: bring pages into the cache that the host has read, without ever holding one that a kernel waits for.

1. *Look*: note the word of each page that is INVALID; other pages are left alone.
2. The host reads those pages from the medium into staging (`warpwell.cache.prefetch`).
3. *Publish*: take a frame, turn exactly the word that was noted BUSY, copy the page, publish it.

Between 1 and 3 nothing is held: kernels may read a page on demand, write to it, and evict it again. But then its
generation has changed, because each eviction makes the next one, and the exchange in 3 fails: the bytes in staging may
be older than those on the medium. While the word is the same, nobody has had the page in a frame, so nobody has
written it. A failed read or a closed array publishes nothing, and leaves nothing behind.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.targets import (
    DEVICE,
    SYSTEM,
    activemask,
    call_cold,
    compare_exchange,
    device,
    div,
    fetch_add,
    fetch_or,
    ffs,
    grid,
    kernel,
    lane_id,
    load_acquire,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    syncwarp,
    warp_size,
)

from . import layout as at
from .frames import evict_at_hand, fixed_frame, pool_of
from .lookup import word_address
from .paging import evict_page, pin_page, unpin
from .stash import free_frame, take_free
from .transfer import fill, publish
from .word import BUSY, INVALID, REF, state_of, with_state

PRESENT = -1
"""What was found of a page: it is not INVALID. (An INVALID word has no frame, so it is not negative.)"""
STEPS = 256
"""Most clock steps for one page."""

# -- row: neighbouring pages, which one command reads (device memory) ------------------------------------------------
T_PAGE = 0
"""First page."""
T_COUNT = 1
T_PLACE = 2
"""Where the first page is in its source, in pages."""
ROW_WORDS = 3

# -- counters (device memory): what became of pages -------------------------------------------------------------------
CAME = 0
CHANGED = 1
"""Their words are other ones: somebody else has read them meanwhile."""
NO_FRAME = 2
FAILED = 3
TOUCHED = 4
"""They came by a miss of `touch_rows`."""
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
def frame_until(core, pool, limit):
    """Win a frame from the stash, or by the clock up to hand position `limit`; return -1 if there is none (thread).

    Two rounds from where a set of pages began: by then the clock has passed each of them once at most, and has only
    taken their REF away. So a set never evicts its own pages, nor those of the wave before it.
    """
    frame = take_free(pool)
    steps = 0
    while frame < 0 and steps < STEPS and load_relaxed(pool + 8 * at.F_HAND, DEVICE) < limit:
        frame = evict_at_hand(core, pool, True)
        steps += 1
    return max(frame, -1)


@device
def publish_known(core, space, page, seen, source, limit, mark, mask, lane, leader):
    """Publish a page that was read to `source`, if its word is still `seen` (all lanes).

    Return what became of it (the leader; others CAME or CHANGED). `mark` is REF, or 0.
    """
    frame = -1
    result = CHANGED
    if lane == leader:
        word = word_address(core, page)
        if load_relaxed(word, DEVICE) == seen:
            frame = fixed_frame(space, page)
            if frame < 0:
                frame = frame_until(core, pool_of(core, space), limit)
            if frame < 0:
                result = NO_FRAME
            elif compare_exchange(word, seen, with_state(seen, BUSY), DEVICE) != seen:
                free_frame(core, frame)
                frame = -1
    frame = shfl(mask, frame, leader)
    if frame >= 0:
        fill(core, frame, source, mask, lane)
        result = CAME
        if lane == leader:
            publish(core, page, frame, 0)
            if mark != 0:
                fetch_or(word_address(core, page), mark, DEVICE)
    return result


@kernel
def look_rows(core, table, words, n, most, absent):
    """Keep what `look` finds of the pages of a row; store in ``absent[row]`` how many are not in the cache."""
    row = grid(1)
    if row < n:
        page = row_word(table, row, T_PAGE)
        found = 0
        for j in range(row_word(table, row, T_COUNT)):
            seen = look(core, page + j)
            store_relaxed(words + 8 * (row * most + j), seen, DEVICE)
            if seen >= 0:
                found += 1
        store_relaxed(absent + 8 * row, found, SYSTEM)


@kernel
def compare_rows(core, table, words, n, most, same):
    """Store in ``same[row]`` how many pages of a row were not in the cache at `look_rows`, nor ever since."""
    row = grid(1)
    if row < n:
        page = row_word(table, row, T_PAGE)
        found = 0
        for j in range(row_word(table, row, T_COUNT)):
            seen = load_relaxed(words + 8 * (row * most + j), DEVICE)
            if seen >= 0 and look(core, page + j) == seen:
                found += 1
        store_relaxed(same + 8 * row, found, SYSTEM)


@kernel
def publish_rows(core, space, table, words, first, n, most, unit, source, limit, mark, counters):
    """Publish the pages of rows [first, first + n) from their places in `source`; a warp takes `unit` of a row."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    groups = div(most + unit - 1, unit)
    warp = div(grid(1), warp_size())
    if warp < n * groups:
        row = first + div(warp, groups)
        low = rem(warp, groups) * unit
        page = row_word(table, row, T_PAGE)
        place = row_word(table, row, T_PLACE)
        shift = field(core, at.C_PAGE_SHIFT)
        for j in range(low, min(low + unit, row_word(table, row, T_COUNT))):
            seen = load_relaxed(words + 8 * (row * most + j), DEVICE)
            if seen >= 0:
                at_place = source + ((place + j) << shift)
                result = publish_known(core, space, page + j, seen, at_place, limit, mark, mask, lane, leader)
                if lane == leader:
                    fetch_add(counters + 8 * result, 1, DEVICE)
                syncwarp(mask)


@kernel
def touch_rows(core, space, table, n, most, counters):
    """Read the pages of rows on demand, one a warp: where rows are short, many warps are faster than one host."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    warp = div(grid(1), warp_size())
    row = div(warp, most)
    j = rem(warp, most)
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
                    result = TOUCHED
                    fetch_or(word_address(core, page), REF, DEVICE)
                    unpin(word_address(core, page), 0)
                fetch_add(counters + 8 * result, 1, DEVICE)
            syncwarp(mask)


@kernel
def leave_rows(core, space, table, n):
    """Evict pages of rows that are clean and that nobody holds; a warp takes a row."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    row = div(grid(1), warp_size())
    if row < n:
        page = row_word(table, row, T_PAGE)
        for j in range(row_word(table, row, T_COUNT)):
            evict_page(core, space, page + j, mask, lane, leader)
