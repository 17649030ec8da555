"""Read pages into the cache: the miss path, pins, prefetch and eviction.

No group waits while it holds a resource that another group needs: a frame is won before the page's word, a dirty victim
is written back before that, and if no frame or id is free, the group releases everything and backs off. A page is
published with a pin for its group, so each completed read serves at least one access even in a tiny cache.
"""

from __future__ import annotations

from warpwell.nvme import READ
from warpwell.queues import field, id_record, release_id, staging_of, state_word, take_id
from warpwell.queues.layout import ASYNC, Q_IN_USE, Q_N_IDS, Q_WORDS
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    any_sync,
    backoff,
    call_cold,
    clock_ns,
    compare_exchange,
    compare_exchange_acquire,
    load_acquire,
    load_relaxed,
    rem,
    shfl,
    store_relaxed,
    store_release,
    syncwarp,
)

from . import layout as at
from .frames import NO_LIMIT, alloc_frame, pool_of, try_alloc_frame, try_lock_page
from .latch import expired, failed_before, latch, latched, progress
from .lookup import count, owner_address, queue_of, word_address
from .stash import clear_frame, free_frame
from .transfer import abandon, fill, host_page, publish, serve, start, wait
from .word import (
    DIRTY,
    INVALID,
    PIN,
    PINS,
    PINS_MAX,
    READABLE,
    REF,
    VALID,
    evicted,
    frame_of,
    pins_of,
    state_of,
)

RETRY = -1
FAILED = -2

RUN = -2
"""`requested` is this minus a page if all pages up to that page are requested."""

RECENT_FRAMES = 1024
"""Minimum number of frames that the hand passes while a thread reads one page and proceeds to the next."""
MIN_FRAMES = 64
"""Number of frames below which no page is read ahead."""
SPARE_STEPS = 16
"""Maximum number of clock steps for the frame of each further page of a merged command."""


@device
def pin_page(core, space, page, requested, mask, lane, leader):
    """Pin a page for the group; read it from storage on a miss (all lanes of `mask`, `page` the same in all).

    Returns the page's frame, with one pin that the leader must release with `unpin`; or FAILED if an error is latched.
    `requested` is each lane's own page (or -1; or a run, see `RUN`), to merge adjacent pages into one command. After
    the call each lane must acquire the page's word itself before it reads the frame.
    """
    word = word_address(core, page)
    attempt = 0
    last_progress = 0
    since = 0
    merge = True
    while True:
        frame = RETRY
        absent = 0
        tried = False
        if lane == leader:
            old = load_acquire(word, DEVICE)
            state = state_of(old)
            if state == VALID and pin_valid(word, old, 0):
                frame = frame_of(old)
            elif state == INVALID:
                absent = 1
        frame = shfl(mask, frame, leader)
        if frame >= 0:
            return frame
        if shfl(mask, absent, leader) != 0:
            tried = True
            frame = call_cold(load_page, core, space, page, word, requested, merge, mask, lane, leader)
            if frame >= 0:
                return frame
            merge = frame != FAILED
        stop = 0
        if lane == leader and (tried or attempt & 7 == 7):
            if failed_before(space) or (attempt & 31 == 31 and latched(space) != at.CLEAR):
                stop = 1
            now = progress(core)
            if attempt <= 7 or now != last_progress:
                last_progress = now
                since = clock_ns()
            elif expired(core, since):
                latch(space, at.STALLED, field(space, at.S_NSID), page, 0)
                stop = 1
        if shfl(mask, stop, leader) != 0:
            return FAILED
        call_cold(serve, core, queue_of(core, page), mask, lane, leader)
        if attempt & 1 == 1:
            # prefetches of other queues may hold the frames
            queue = field(core, at.C_QUEUES) + rem(attempt >> 1, field(core, at.C_N_QUEUES)) * (8 * Q_WORDS)
            call_cold(serve, core, queue, mask, lane, leader)
        backoff(attempt)
        attempt += 1


@device
def pin_valid(word, old, dirty):
    """Add a pin to a VALID word that was seen as `old`; return whether that was done (thread; acquire).

    `dirty` is DIRTY or 0. A page with such a pin is not written back, so DIRTY may be set before the stores.
    """
    if pins_of(old) == PINS_MAX:
        return False
    return compare_exchange_acquire(word, old, (old + PIN) | REF | dirty, DEVICE) == old


@device
def unpin(word, dirty):
    """Release a pin (the leader; release order, after `syncwarp` if lanes stored under it).

    `dirty` is DIRTY or 0; it is set on the same word by the same operation, after the stores.
    """
    old = load_relaxed(word, DEVICE)
    while True:
        current = compare_exchange(word, old, (old - PIN) | dirty, DEVICE)
        if current == old:
            return
        old = current


@device
def load_page(core, space, page, word, requested, merge, mask, lane, leader):
    """Read an INVALID page from storage; return its frame, pinned once, or RETRY, or FAILED for a failed merge.

    A failed read of one page is latched. After a failed merged command the pages are read again one by one, so that the
    error is attributed to its page.
    """
    source = host_page(space, page, field(core, at.C_PAGE_SHIFT))
    queue = queue_of(core, page)
    short = 0
    if lane == leader and source == 0 and load_relaxed(queue + 8 * Q_IN_USE, DEVICE) >= field(queue, Q_N_IDS):
        # otherwise a frame would be returned unused after the clock has passed it
        short = 1
    if shfl(mask, short, leader) != 0:
        return RETRY
    frame = call_cold(alloc_frame, core, space, page, word, mask, lane, leader)
    if frame < 0:
        return RETRY
    cid = 0
    if lane == leader:
        if source == 0:
            cid = take_id(queue, 0)
        if cid >= 0 and not try_lock_page(core, word):
            if source == 0:
                release_id(queue, cid)
            cid = -1
        if cid < 0:
            free_frame(core, frame)
        else:
            count(core, at.N_MISSES, 1)
    cid = shfl(mask, cid, leader)
    if cid < 0:
        return RETRY
    if source != 0:
        fill(core, frame, source, mask, lane)
        if lane == leader:
            count(core, at.N_PAGES_READ, 1)
            publish(core, page, frame, 1)
        return frame
    pages = 1
    if lane == leader:
        store_relaxed(id_record(queue, cid) + 8 * at.ID_FRAMES, frame, DEVICE)
    if merge:
        pages = _gather_neighbors(core, space, page, queue, cid, requested, mask, lane, leader)
    submitted = 0
    if lane == leader and start(core, queue, cid, READ, page, pages, space):
        submitted = 1
    if shfl(mask, submitted, leader) == 0:
        status = 0x7FFF
    else:
        status = call_cold(wait, core, space, queue, cid, mask, lane, leader)
    if status < 0:
        return RETRY  # waiting is over; the orphaned id keeps page and frame until its completion
    if status == 0:
        page_shift = field(core, at.C_PAGE_SHIFT)
        for k in range(pages):
            # frames were stored by the leader, and a shuffle has no memory order: the leader sends them to all lanes
            into = frame
            if k > 0:
                if lane == leader:
                    into = load_relaxed(id_record(queue, cid) + 8 * (at.ID_FRAMES + k), DEVICE)
                into = shfl(mask, into, leader)
            fill(core, into, staging_of(queue, cid) + (k << page_shift), mask, lane)
            if lane == leader:
                pins = 0
                if k == 0:
                    pins = 1
                publish(core, page + k, into, pins)
        if lane == leader:
            release_id(queue, cid)
        return frame
    if lane == leader:
        _read_failed(core, space, page, pages, queue, cid, status)
    if pages > 1:
        return FAILED
    return RETRY


@device
def _read_failed(core, space, page, pages, queue, cid, status):
    """Release the resources of a failed command; latch the error of a single page (the leader)."""
    for k in range(pages):
        abandon(core, page + k, load_relaxed(id_record(queue, cid) + 8 * (at.ID_FRAMES + k), DEVICE))
    release_id(queue, cid)
    if pages == 1:
        latch(space, at.READ_ERROR, field(space, at.S_NSID), page, status)
    else:
        count(core, at.N_RETRIES, 1)


@device
def _gather_neighbors(core, space, page, queue, cid, requested, mask, lane, leader):
    """Lock the pages after `page` that lanes of the group request, for one command; return its number of pages.

    Take only pages that need no waiting: the group must not wait while the first page is BUSY. Further pages are read
    ahead, up to the number of pages directly before `page` that are in the cache: in a scan, commands grow.
    """
    max_pages = field(core, at.C_MERGE)
    ahead = 0
    if lane == leader and max_pages > 1:
        ahead = _run_before(core, space, page, max_pages)
    ahead = shfl(mask, ahead, leader)
    end = field(space, at.S_BASE) + field(space, at.S_PAGES)
    pages = 1
    while pages < max_pages:
        following = page + pages
        # adjacent pages of one queue are in one aligned group of eight
        if following >= end or following & 7 == 0:
            break
        needed = any_sync(mask, requested == following or (requested <= RUN and following <= RUN - requested))
        if not needed and pages > ahead:
            break
        won = 0
        if lane == leader:
            frame = try_alloc_frame(core, space, following, SPARE_STEPS, NO_LIMIT)
            if frame >= 0:
                if try_lock_page(core, word_address(core, following)):
                    store_relaxed(id_record(queue, cid) + 8 * (at.ID_FRAMES + pages), frame, DEVICE)
                    if needed:
                        count(core, at.N_MISSES, 1)
                    else:
                        count(core, at.N_PREFETCHED, 1)
                    won = 1
                else:
                    free_frame(core, frame)
        if shfl(mask, won, leader) == 0:
            break
        pages += 1
    return pages


@device
def _run_before(core, space, page, max_pages):
    """Return how many pages before `page`, without a gap and up to `max_pages`, are in the cache (thread).

    0 if the page before was not read recently: with random access, many pages have a neighbor in the cache, but the
    clock's hand has passed many frames since that page was read.
    """
    before = 0
    first = field(space, at.S_BASE)
    while before < max_pages and page - before > first:
        old = load_relaxed(word_address(core, page - before - 1), DEVICE)
        if state_of(old) & READABLE == 0:
            break
        if before == 0 and not _is_recent(core, space, frame_of(old)):
            break
        before += 1
    return before


@device
def _is_recent(core, space, frame):
    """Return whether the hand has passed a frame recently (thread).

    True in a resident pool, which has no hand; False in a small pool, because other threads need its frames.
    """
    pool = pool_of(core, space)
    frames = field(pool, at.F_COUNT)
    if field(pool, at.F_RESIDENT) != 0:
        return True
    if frames < MIN_FRAMES:
        return False
    distance = rem(load_relaxed(pool + 8 * at.F_HAND, DEVICE), frames) - (frame - field(pool, at.F_FIRST))
    if distance < 0:
        distance += frames
    return distance <= max(frames >> 4, RECENT_FRAMES)


@device
def prefetch_page(core, space, page, mask, lane, leader):
    """Start to read a page and return; False if no id or frame is free (all lanes of `mask`).

    The thread that drains the completion publishes the page.
    """
    word = word_address(core, page)
    queue = queue_of(core, page)
    call_cold(serve, core, queue, mask, lane, leader)
    absent = 0
    if lane == leader and state_of(load_relaxed(word, DEVICE)) == INVALID:
        absent = 1
    if shfl(mask, absent, leader) == 0:
        return True
    source = host_page(space, page, field(core, at.C_PAGE_SHIFT))
    frame = -1
    cid = -1
    if lane == leader:
        if source == 0:
            cid = take_id(queue, field(queue, Q_N_IDS) >> 2)
        if source != 0 or cid >= 0:
            frame = try_alloc_frame(core, space, page, 4 * SPARE_STEPS, NO_LIMIT)
            if frame >= 0 and not try_lock_page(core, word):
                free_frame(core, frame)
                frame = -1
            if frame < 0 and cid >= 0:
                release_id(queue, cid)
    frame = shfl(mask, frame, leader)
    if frame < 0:
        return False
    if source != 0:
        fill(core, frame, source, mask, lane)
        if lane == leader:
            publish(core, page, frame, 0)
            count(core, at.N_PAGES_READ, 1)
            count(core, at.N_PREFETCHED, 1)
        return True
    if lane == leader:
        record = id_record(queue, cid)
        store_relaxed(record + 8 * at.ID_FRAMES, frame, DEVICE)
        # no other thread uses the id before it is submitted
        store_release(record, state_word(queue, cid, ASYNC), DEVICE)
        count(core, at.N_PREFETCHED, 1)
        if not start(core, queue, cid, READ, page, 1, space):
            abandon(core, page, frame)
            release_id(queue, cid)
    syncwarp(mask)
    return True


@device
def evict_page(core, space, page, mask, lane, leader):
    """Evict a clean, unpinned page (the leader's work); return True if the page is no longer cached (all lanes).

    In a resident pool, a concurrent pin may be too late to keep the page: the next access reads it again.
    """
    is_evicted = 0
    if lane == leader:
        word = word_address(core, page)
        old = load_acquire(word, DEVICE)
        state = state_of(old)
        if state == INVALID:
            is_evicted = 1
        elif state == VALID and old & (PINS | DIRTY) == 0:
            frame = frame_of(old)
            owner = load_relaxed(owner_address(core, frame), DEVICE)
            if owner & at.OWNER_PAGE != page + 1:
                is_evicted = 1
            elif owner == page + 1 and compare_exchange(word, old, evicted(old), DEVICE) == old:
                count(core, at.N_EVICTIONS, 1)
                clear_frame(core, frame)
                is_evicted = 1
    return shfl(mask, is_evicted, leader) != 0
