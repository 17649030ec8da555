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

from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    SYSTEM,
    activemask,
    compare_exchange,
    device,
    div,
    fetch_or,
    ffs,
    grid,
    kernel,
    lane_id,
    load_acquire,
    load_relaxed,
    shfl,
    store_relaxed,
    syncwarp,
    warp_size,
)

from . import layout as at
from .frames import evict_at_hand, own_frame, pool_of
from .lookup import word_address
from .paging import evict_page
from .stash import give_back, take_free
from .transfer import fill, publish
from .word import BUSY, INVALID, state_of, with_state

PRESENT = -1
"""What was found of a page: it is not INVALID. (An INVALID word has no frame, so it is not negative.)"""
CAME = -2
CHANGED = -3
"""Its word is another one: somebody else has read it meanwhile."""
NO_FRAME = -4
FAILED = -5
"""The read failed (stored by the host)."""
STEPS = 256
"""Most clock steps for one page."""


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
    """Publish a page that was read to `source`, if its word is still `seen`; return what became of it (all lanes)."""
    frame = -1
    result = CHANGED
    if lane == leader:
        word = word_address(core, page)
        if load_relaxed(word, DEVICE) == seen:
            frame = own_frame(space, page)
            if frame < 0:
                frame = frame_until(core, pool_of(core, space), limit)
            if frame < 0:
                result = NO_FRAME
            elif compare_exchange(word, seen, with_state(seen, BUSY), DEVICE) != seen:
                give_back(core, frame)
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
def look_pages(core, first, pages, words, n):
    """Store in ``words[k]`` what `look` finds of page ``first + pages[k]``."""
    k = grid(1)
    if k < n:
        store_relaxed(words + 8 * k, look(core, first + load_relaxed(pages + 8 * k, SYSTEM)), SYSTEM)


@kernel
def publish_pages(core, space, pages, words, places, n, each, source, limit, mark):
    """Publish ``words[k]`` of page ``base + pages[k]`` from ``places[k]`` of `source`; a warp takes `each` pages.

    The result is stored in ``words[k]``; negative words are left alone.
    """
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    width = warp_size()
    first = div(grid(1), width) * each
    base = field(space, at.S_BASE)
    shift = field(core, at.C_PAGE_SHIFT)
    page = 0
    seen = -1
    place = 0
    result = 0
    for j in range(each):
        inside = j & (width - 1)
        if inside == 0:
            # each lane one page of the next `width`: one read over the bus for all of them
            k = first + j + lane
            seen = -1
            if k < n and j + lane < each:
                page = base + load_relaxed(pages + 8 * k, SYSTEM)
                seen = load_relaxed(words + 8 * k, SYSTEM)
                place = load_relaxed(places + 8 * k, SYSTEM)
            result = seen
        word = shfl(mask, seen, inside)
        if word >= 0:
            at_page = shfl(mask, page, inside)
            from_place = source + (shfl(mask, place, inside) << shift)
            found = publish_known(core, space, at_page, word, from_place, limit, mark, mask, lane, leader)
            found = shfl(mask, found, leader)
            if lane == inside:
                result = found
        if inside == width - 1 or j == each - 1:
            k = first + j - inside + lane
            if seen >= 0:
                store_relaxed(words + 8 * k, result, SYSTEM)
            syncwarp(mask)


@kernel
def leave_pages(core, space, pages, n):
    """Evict pages ``base + pages[k]`` that are clean and that nobody holds, one a warp."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    k = div(grid(1), warp_size())
    if k < n:
        page = field(space, at.S_BASE) + load_relaxed(pages + 8 * k, SYSTEM)
        evict_page(core, space, page, mask, lane, leader)
