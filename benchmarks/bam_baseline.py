"""BaM's read protocol on the cache's own frames, as the baseline of the hit path.

Every converged group of lanes with the same page takes references with one atomic addition to the page's
state, reads the frame number, reads the item, and gives the references back with another (page_cache.h of
BaM: seq_read, coalesce_page, acquire_page, release_page). The array-wide counters that BaM also updates on
each access are left out, which favours it.
"""

from __future__ import annotations

import numpy as np

from warpwell.targets import (
    DEVICE,
    activemask,
    device,
    fetch_add,
    ffs,
    lane_id,
    load_relaxed,
    load_relaxed_as,
    match_any,
    popc,
    shfl,
    syncwarp,
)

I8 = np.dtype(np.int64)
VALID = 1 << 40


@device
def bam_read(states, slots, frames, shift, offset):
    """Return the item at byte `offset` of an array whose pages are all resident (converged lanes)."""
    page = offset >> shift
    mask = activemask()
    equal = match_any(mask, page)
    leader = ffs(equal) - 1
    slot = 0
    if lane_id() == leader:
        fetch_add(states + 8 * page, popc(equal), DEVICE)
        slot = load_relaxed(slots + 8 * page, DEVICE)
    slot = shfl(equal, slot, leader)
    item = load_relaxed_as(frames + (slot << shift) + (offset - (page << shift)), I8)
    syncwarp(equal)
    if lane_id() == leader:
        fetch_add(states + 8 * page, -popc(equal), DEVICE)
    return item
