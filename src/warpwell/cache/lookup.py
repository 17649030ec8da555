"""Lookup: the addresses of a page's word, queue, owner and array; the statistics counters."""

from __future__ import annotations

from warpwell.queues import field
from warpwell.queues.layout import I8, Q_WORDS
from warpwell.targets import device
from warpwell.targets.primitives import DEVICE, activemask, fetch_add_as, ffs, lane_id, rem, store_relaxed

from . import layout as at


@device
def converged_group():
    """Return the mask of the converged lanes, the number of the calling lane, and of the leader, the first lane."""
    mask = activemask()
    return mask, lane_id(), ffs(mask) - 1


@device
def word_address(core, page):
    """Return the address of a page's word (thread)."""
    return field(core, at.C_TABLE) + 8 * page


@device
def queue_of(core, page):
    """Return the queue record that serves a page (thread).

    The queue depends on the page, so that a thread that waits for a BUSY page knows which queue to drain; neighbors
    that may share a command have the same queue.
    """
    group = page >> 3
    # map neighboring groups to different queues, and strided groups to all queues
    index = rem((group ^ (group >> 7) ^ (group >> 13)) & 0x7FFFFFFF, field(core, at.C_N_QUEUES))
    return field(core, at.C_QUEUES) + index * (8 * Q_WORDS)


@device
def space_of(core, page):
    """Return the record of the space that a page belongs to (thread)."""
    spaces = field(core, at.C_SPACES)
    for k in range(field(core, at.C_N_SPACES)):
        space = spaces + k * (8 * at.SPACE_WORDS)
        base = field(space, at.S_BASE)
        if page >= base and page < base + field(space, at.S_PAGES):
            return space
    return spaces


@device
def owner_address(core, frame):
    """Return the address of a frame's owner word (thread)."""
    return field(core, at.C_OWNERS) + 8 * frame


@device
def record_written(core, page):
    """Count a written page, and record its number for a loss of the drive (thread; before its word changes)."""
    stats = field(core, at.C_STATS)
    position = fetch_add_as(stats + 8 * at.N_WRITEBACKS, 1, I8)
    store_relaxed(stats + 8 * (at.STATS_WORDS + (position & (at.WRITTEN_WORDS - 1))), page, DEVICE)


@device
def count(core, counter, n):
    """Add to a statistics counter (thread; relaxed)."""
    fetch_add_as(field(core, at.C_STATS) + 8 * counter, n, I8)
