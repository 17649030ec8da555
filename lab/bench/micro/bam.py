"""BaM's protocol over the same queues and medium: each access counts a reference, and a miss waits for its page.

After page_cache.h of BaM (seq_read, coalesce_page, acquire_page, find_slot, release_page): converged lanes of one page
add to its reference count with one atomic operation, read the slot's number, read their items, and take the references
off with another. A miss takes the next slot of a clock without second chance, submits its command, and waits. Other
work of BaM is left out, which favors it: counters of the whole array, its second read that orders GPUDirect, and its
queues, which deliver completions in order.
"""

from __future__ import annotations

import numpy as np

from warpwell.array import Array
from warpwell.cache import VALID as CACHED
from warpwell.cache import queue_of, word
from warpwell.cache.transfer import copy, serve, start, wait
from warpwell.cache.word import STATE
from warpwell.errors import WarpwellError
from warpwell.nvme import READ, WRITE
from warpwell.queues import field, release_id, staging_of, take_id
from warpwell.targets import device, kernel, linked, memory_for
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    backoff,
    ballot,
    clock_ns,
    compare_exchange,
    div,
    fetch_add,
    fetch_or,
    ffs,
    grid,
    lane_id,
    load_acquire,
    load_relaxed,
    load_relaxed_as,
    match_any,
    popc,
    rem,
    shfl,
    store_relaxed,
    store_relaxed_as,
    store_release,
    syncwarp,
    warp_size,
)

I8 = np.dtype(np.int64)

VALID = 1 << 40
BUSY = 1 << 41
DIRTY = 1 << 42
"""Of a page's state; its lower bits count references."""
LOCKED = -1
"""Of a slot whose page is being replaced; 0 is a free slot, otherwise it is the page + 1."""
GAVE_UP = -2
PATIENCE = 10**10
"""Timeout of a miss without a free slot, in nanoseconds. BaM itself has no timeout."""

# -- record of a cache
STATES, SLOTS, OWNERS, FRAMES, SHIFT, COUNT, TICKET, CORE, SPACE, FAILED, MISSES = range(11)
RECORD_WORDS = 16


@device
def acquire(record, page, mask, equal, leader):
    """Count references of the lanes `equal` on their page; return its slot (all lanes of `mask`, each its own page)."""
    lane = lane_id()
    slot = 0
    if lane == leader:
        if fetch_add(field(record, STATES) + 8 * page, popc(equal), DEVICE) & (VALID | BUSY) == VALID:
            slot = load_relaxed(field(record, SLOTS) + 8 * page, DEVICE) + 1
    slot = shfl(equal, slot, leader) - 1
    missing = ballot(mask, slot < 0)
    while missing != 0:
        first = ffs(missing) - 1
        page_to_read = shfl(mask, page, first)
        found = bam_miss(record, page_to_read, mask, lane, first)
        if page == page_to_read:
            slot = found
        missing = ballot(mask, slot == -1)
    return slot


@device
def bam_read(record, offset):
    """Return the 8-byte item at byte `offset` of the array (converged lanes)."""
    shift = field(record, SHIFT)
    page = offset >> shift
    mask = activemask()
    equal = match_any(mask, page)
    leader = ffs(equal) - 1
    slot = acquire(record, page, mask, equal, leader)
    item = 0
    if slot >= 0:
        item = load_relaxed_as(field(record, FRAMES) + (slot << shift) + (offset - (page << shift)), I8)
    syncwarp(equal)
    if lane_id() == leader:
        fetch_add(field(record, STATES) + 8 * page, -popc(equal), DEVICE)
    return item


@device
def bam_write(record, offset, item):
    """Store an 8-byte item at byte `offset` of the array, after reading its page (converged lanes)."""
    shift = field(record, SHIFT)
    page = offset >> shift
    mask = activemask()
    equal = match_any(mask, page)
    leader = ffs(equal) - 1
    slot = acquire(record, page, mask, equal, leader)
    if slot >= 0:
        store_relaxed_as(field(record, FRAMES) + (slot << shift) + (offset - (page << shift)), item, I8)
    syncwarp(equal)
    if lane_id() == leader:
        fetch_or(field(record, STATES) + 8 * page, DIRTY, DEVICE)
        fetch_add(field(record, STATES) + 8 * page, -popc(equal), DEVICE)


@linked
def bam_miss(record, page, mask, lane, leader):
    """Return the slot of a page on which the group holds a reference; read the page unless another group does so."""
    state = field(record, STATES) + 8 * page
    core = field(record, CORE)
    queue = queue_of(core, page)
    attempt = 0
    since = clock_ns()
    while True:
        slot = -1
        if lane == leader:
            old = load_acquire(state, DEVICE)
            if old & (VALID | BUSY) == VALID:
                slot = load_relaxed(field(record, SLOTS) + 8 * page, DEVICE)
            elif old & BUSY == 0 and fetch_or(state, BUSY, DEVICE) & (VALID | BUSY) == 0:
                slot = -3
            elif clock_ns() - since > PATIENCE:
                slot = GAVE_UP
        slot = shfl(mask, slot, leader)
        if slot == -3:
            return bam_load(record, page, mask, lane, leader)
        if slot != -1:
            if slot == GAVE_UP and lane == leader:
                fetch_add(record + 8 * FAILED, 1, DEVICE)
            return slot
        serve(core, queue, mask, lane, leader)
        backoff(attempt)
        attempt += 1


@device
def bam_load(record, page, mask, lane, leader):
    """Read a page that the group has made BUSY; return its slot, or GAVE_UP."""
    state = field(record, STATES) + 8 * page
    found = 0
    if lane == leader:
        found = bam_slot(record)
    found = shfl(mask, found, leader)
    slot = found & 0xFFFFFFFF
    good = found >= 0
    if good and found >> 32 != 0:
        good = transfer(record, WRITE, (found >> 32) - 1, slot, mask, lane, leader)
    if good:
        good = transfer(record, READ, page, slot, mask, lane, leader)
    if good:
        if lane == leader:
            store_relaxed(field(record, SLOTS) + 8 * page, slot, DEVICE)
            store_release(field(record, OWNERS) + 8 * slot, page + 1, DEVICE)
            fetch_add(record + 8 * MISSES, 1, DEVICE)
            fetch_add(state, VALID - BUSY, DEVICE)
        return slot
    if lane == leader:
        fetch_add(record + 8 * FAILED, 1, DEVICE)
        fetch_add(state, -BUSY, DEVICE)
    return GAVE_UP


@device
def transfer(record, opcode, page, slot, mask, lane, leader):
    """Read a page into a slot, or write the slot's dirty page and make it INVALID; return True on success."""
    core = field(record, CORE)
    space = field(record, SPACE)
    queue = queue_of(core, page)
    shift = field(record, SHIFT)
    frame = field(record, FRAMES) + (slot << shift)
    cid = -1
    attempt = 0
    while cid < 0:
        if lane == leader:
            cid = take_id(queue, 0)
        cid = shfl(mask, cid, leader)
        if cid < 0:
            serve(core, queue, mask, lane, leader)
            backoff(attempt)
            attempt += 1
    if opcode == WRITE:
        syncwarp(mask)
        copy(staging_of(queue, cid), frame, 1 << shift, mask, lane)
        syncwarp(mask)
    status = -1
    submitted = 0
    if lane == leader and start(core, queue, cid, opcode, page, 1, space):
        submitted = 1
    if shfl(mask, submitted, leader) != 0:
        status = wait(core, space, queue, cid, mask, lane, leader)
    if status == 0 and opcode == READ:
        syncwarp(mask)
        copy(frame, staging_of(queue, cid), 1 << shift, mask, lane)
        syncwarp(mask)
    if lane == leader:
        if status >= 0:
            release_id(queue, cid)
        if opcode == WRITE:
            # The references remain, so a waiting thread reads the page again.
            fetch_add(field(record, STATES) + 8 * page, -(VALID | DIRTY | BUSY), DEVICE)
    return status == 0


@device
def bam_slot(record):
    """Claim the next slot of the clock whose page has no references (the leader); return GAVE_UP after `PATIENCE`.

    The upper half of the result is 0, or the page + 1 that must be written first; that page is BUSY.
    """
    count = field(record, COUNT)
    since = clock_ns()
    attempt = 0
    while True:
        slot = rem(fetch_add(record + 8 * TICKET, 1, DEVICE) & 0x7FFFFFFFFFFFFFFF, count)
        owner = field(record, OWNERS) + 8 * slot
        old = load_acquire(owner, DEVICE)
        if old >= 0 and compare_exchange(owner, old, LOCKED, DEVICE) == old:
            if old == 0:
                return slot
            # valid, not busy, no references: the page's state is exactly that
            state = field(record, STATES) + 8 * (old - 1)
            if compare_exchange(state, VALID, 0, DEVICE) == VALID:
                return slot
            if compare_exchange(state, VALID | DIRTY, VALID | DIRTY | BUSY, DEVICE) == VALID | DIRTY:
                return slot | (old << 32)
            store_release(owner, old, DEVICE)
        attempt += 1
        if attempt & 255 == 0 and clock_ns() - since > PATIENCE:
            return GAVE_UP


@kernel
def _flush(array, record):
    """Write the dirty pages of all slots, a warp each; no other kernel uses the cache. `array` keeps its queues."""
    slot = div(grid(1), warp_size())
    if slot < field(record, COUNT):
        mask = activemask()
        old = load_acquire(field(record, OWNERS) + 8 * slot, DEVICE)
        if old > 0 and load_acquire(field(record, STATES) + 8 * (old - 1), DEVICE) == VALID | DIRTY:
            lane = lane_id()
            good = transfer(record, WRITE, old - 1, slot, mask, lane, 0)
            if lane == 0:
                store_release(field(record, OWNERS) + 8 * slot, 0, DEVICE)
                if not good:
                    fetch_add(record + 8 * FAILED, 1, DEVICE)


class BamCache:
    """Slots and page states of BaM's protocol, over the queues and the medium of an array.

    Parameters
    ----------
    array : Array
        An array of the tier "storage", alone in its cache; no other kernel may use the array.
    frame_bytes : int
        Bytes of all slots.
    """

    def __init__(self, array: Array, frame_bytes: int) -> None:
        pages = -(-array.nbytes // array.cache.page_size)
        slots = max(1, min(pages, frame_bytes // array.cache.page_size))
        self._frames = memory_for(array.device).allocate(slots * array.cache.page_size + 512)
        self._lay_out(array, pages, slots, -(-self._frames.address // 512) * 512)
        self.clear()

    @classmethod
    def resident(cls, array: Array) -> BamCache:
        """Return a cache whose slots are the frames of an array that has all its pages in them: all reads hit."""
        made = cls.__new__(cls)
        space = array.cache.space(array._nsid)
        page_words = array.cache.page_words(array._nsid)
        if not np.all((page_words & STATE) == CACHED):
            raise WarpwellError("not all pages of the array are in its cache")
        made._lay_out(array, space.pages, array.cache.frames, space.words["frames"])
        made._states.write(0, np.full(space.pages, VALID))
        made._slots.write(0, (page_words >> word.FRAME_SHIFT) & word.FRAME_MAX)
        made._owners.write(0, np.full(array.cache.frames, LOCKED))
        return made

    def _lay_out(self, array: Array, pages: int, slots: int, frames: int) -> None:
        memory = memory_for(array.device)
        if array.cache.space(array._nsid).base != 0:
            raise WarpwellError("the array shares its cache, so its pages do not begin at 0")
        self._array, self._count = array, slots
        self._record, self._states = memory.allocate(8 * RECORD_WORDS), memory.allocate(8 * pages)
        self._slots, self._owners = memory.allocate(8 * pages), memory.allocate(8 * slots)
        view = array.cache.view_words(array._nsid)
        record_words = np.zeros(RECORD_WORDS, np.int64)
        record_words[: SPACE + 1] = (
            self._states.address,
            self._slots.address,
            self._owners.address,
            frames,
            array.cache.page_size.bit_length() - 1,
            slots,
            0,
            view["core"],
            view["space"],
        )
        self._record.write(0, record_words)
        self.address = self._record.address

    def _word(self, index: int) -> int:
        return int(self._record.read(8 * index, 8).view(np.int64)[0])

    def clear(self) -> None:
        """Forget all pages, between launches."""
        for block in (self._states, self._slots, self._owners):
            block.write(0, np.zeros(block.nbytes // 8, np.int64))

    @property
    def misses(self) -> int:
        """Number of pages that were read."""
        return self._word(MISSES)

    def flush(self) -> None:
        """Write dirty pages to the medium."""
        width = 32 if self._array.device == "cuda" else 1
        _flush[self._count * width](self._array, self.address, device=self._array.device)

    def check(self) -> None:
        """Raise if a read gave up."""
        if self._word(FAILED):
            raise WarpwellError(
                "BaM's protocol found no slot for ten seconds: more pages are referenced at a time than the cache has; "
                "pass a larger --cache or fewer --threads"
            )
