"""Kernels that the host runs on a cache: flush, residency, settling. A warp takes one page."""

from __future__ import annotations

from warpwell.queues.layout import Q_WORDS
from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    activemask,
    div,
    fetch_add,
    ffs,
    grid,
    kernel,
    lane_id,
    load_acquire,
    load_relaxed,
    shfl,
    syncwarp,
    warp_size,
)

from .core import word_address
from .frames import clean, pool_of
from .layout import C_N_QUEUES, C_OWNERS, C_QUEUES, F_PINNED
from .paging import FAILED, evict_page, pin_page, prefetch_page, unpin
from .transfer import serve
from .word import VALID, pins_of, state_of


@kernel
def flush_frames(core, first_page, end_page, pinned_too, left):
    """Write back what is dirty in pages [first_page, end_page); add pages that could not be to ``[left]``."""
    frame = div(grid(1), warp_size())
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    page = load_acquire(field(core, C_OWNERS) + 8 * frame, DEVICE) - 1
    page = shfl(mask, page, leader)
    if page >= first_page and page < end_page:
        done = clean(core, page, pinned_too != 0, mask, lane, leader)
        if lane == leader and not done:
            fetch_add(left, 1, DEVICE)


@kernel
def settle_queues(core):
    """Serve every queue until nothing of it is ready (bounded)."""
    index = div(grid(1), warp_size())
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    if index < field(core, C_N_QUEUES):
        queue = field(core, C_QUEUES) + index * (8 * Q_WORDS)
        for _ in range(16):
            serve(core, queue, mask, lane, leader)


@kernel
def prefetch_pages(core, space, first_page, dropped):
    """Start to bring one page a warp in; count in ``[dropped]`` those for which there was no id or frame."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    page = first_page + div(grid(1), warp_size())
    if not prefetch_page(core, space, page, mask, lane, leader) and lane == leader:
        fetch_add(dropped, 1, DEVICE)


@kernel
def load_pages(core, space, first_page, keep, done):
    """Bring one page a warp in and wait for it; keep its pin where `keep` is set. Counts in ``[done]``."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    page = first_page + div(grid(1), warp_size())
    frame = pin_page(core, space, page, -1, mask, lane, leader)
    if frame != FAILED and lane == leader:
        if keep == 0:
            unpin(word_address(core, page), 0)
        else:
            fetch_add(pool_of(core, space) + 8 * F_PINNED, 1, DEVICE)
        fetch_add(done, 1, DEVICE)


@kernel
def unpin_pages(core, space, first_page, end_page, done):
    """Give one long-held pin of each page back; pages without one are left alone. Counts in ``[done]``."""
    page = first_page + grid(1)
    if page < end_page:
        word = word_address(core, page)
        old = load_relaxed(word, DEVICE)
        if state_of(old) & VALID != 0 and pins_of(old) > 0:
            unpin(word, 0)
            fetch_add(pool_of(core, space) + 8 * F_PINNED, -1, DEVICE)
            fetch_add(done, 1, DEVICE)


@kernel
def evict_pages(core, space, first_page, left):
    """Write back and evict one page a warp; pages that stay are added to ``[left]``."""
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    page = first_page + div(grid(1), warp_size())
    gone = clean(core, page, False, mask, lane, leader)
    if gone:
        gone = evict_page(core, space, page, mask, lane, leader)
    if lane == leader and not gone:
        fetch_add(left, 1, DEVICE)
    syncwarp(mask)

