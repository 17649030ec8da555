"""Maintenance kernels, which the host launches: flush, pin, evict, drop, settle. A warp processes one page.

`space` is a space record of the launch, which refers to the record of the launch's error.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.queues.layout import Q_WORDS
from warpwell.targets import kernel
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    compare_exchange,
    div,
    fetch_add,
    ffs,
    grid,
    lane_id,
    load_acquire,
    shfl,
    store_relaxed,
    syncwarp,
    warp_size,
)

from . import layout as at
from .frames import clean, fixed_frame
from .lookup import converged_group, word_address
from .paging import evict_page
from .pins import pin_page_long, return_credit, unpin_page_long
from .stash import clear_frame
from .transfer import serve
from .word import INVALID, VALID, evicted, frame_of, pins_of, state_of


@kernel
def flush_frames(core, space, first_page, end_page, pinned_too, left):
    """Write back dirty pages in [first_page, end_page); add pages that could not be written to ``[left]``."""
    frame = div(grid(1), warp_size())
    mask, lane, leader = converged_group()
    owner = load_acquire(field(core, at.C_OWNERS) + 8 * frame, DEVICE)
    page = -1
    if owner != at.FREE_FRAME and owner != at.HELD_FRAME:
        page = (owner & at.OWNER_PAGE) - 1
    page = shfl(mask, page, leader)
    if page >= first_page and page < end_page:
        done = clean(core, space, page, pinned_too != 0, mask, lane, leader)
        if lane == leader and not done:
            fetch_add(left, 1, DEVICE)


@kernel
def settle_queues(core, space):
    """Serve every queue until no completion is ready (bounded)."""
    index = div(grid(1), warp_size())
    mask, lane, leader = converged_group()
    if index < field(core, at.C_N_QUEUES):
        queue = field(core, at.C_QUEUES) + index * (8 * Q_WORDS)
        for _ in range(16):
            serve(core, queue, mask, lane, leader)


@kernel
def pin_pages(core, space, first_page, done):
    """Read one page a warp into the cache, wait for it and pin it for the host. Counts in ``[done]``."""
    mask, lane, leader = converged_group()
    page = first_page + div(grid(1), warp_size())
    if pin_page_long(core, space, page, at.HOST_PIN, mask, lane, leader) and lane == leader:
        fetch_add(done, 1, DEVICE)


@kernel
def unpin_pages(core, space, first_page, end_page, done):
    """Release the host's pin of each page; skip pages without one. Counts in ``[done]``."""
    page = first_page + grid(1)
    if page < end_page and unpin_page_long(core, space, page, at.HOST_PIN):
        fetch_add(done, 1, DEVICE)


@kernel
def drop_frames(core, space, first_page, end_page, left):
    """Free one frame a warp of pages [first_page, end_page), with its changes and long pins.

    Frames in use are added to ``[left]``.
    """
    frame = div(grid(1), warp_size())
    mask = activemask()
    if lane_id() == ffs(mask) - 1:
        owner = load_acquire(field(core, at.C_OWNERS) + 8 * frame, DEVICE)
        page = (owner & at.OWNER_PAGE) - 1
        if owner > 0 and page >= first_page and page < end_page:
            word = word_address(core, page)
            old = load_acquire(word, DEVICE)
            own = fixed_frame(space, page) >= 0
            held = 0
            if owner > at.OWNER_PAGE and not own:
                held = 1
            dropped = state_of(old) == VALID and frame_of(old) == frame and pins_of(old) == held
            if dropped and compare_exchange(word, old, evicted(old), DEVICE) == old:
                if held == 1:
                    return_credit(core, space, page)
                if own:
                    store_relaxed(field(core, at.C_OWNERS) + 8 * frame, page + 1, DEVICE)
                clear_frame(core, frame)
            elif state_of(old) != INVALID:
                fetch_add(left, 1, DEVICE)
    syncwarp(mask)


@kernel
def evict_pages(core, space, first_page, left):
    """Write back and evict one page a warp; pages that were not evicted are added to ``[left]``."""
    mask, lane, leader = converged_group()
    page = first_page + div(grid(1), warp_size())
    is_evicted = clean(core, space, page, False, mask, lane, leader)
    if is_evicted:
        is_evicted = evict_page(core, space, page, mask, lane, leader)
    if lane == leader and not is_evicted:
        fetch_add(left, 1, DEVICE)
    syncwarp(mask)
