"""Move pages between frames and staging buffers, and settle commands that no thread waits for.

All functions here are for a converged group: every lane of `mask` calls with the same arguments.
"""

from __future__ import annotations

from warpwell.nvme import READ, WRITE, command_word0, command_word6
from warpwell.queues import drain, field, id_record, orphan, poll, prp2_of, release_id, staging_of, submit, take_ready
from warpwell.queues.layout import FOUND, I8, ID_COUNT, ID_OPCODE, ID_PAGE, ID_STATE, ID_STATUS, KIND, ORPHAN
from warpwell.targets import chosen, device
from warpwell.targets.primitives import (
    DEVICE,
    backoff,
    call_cold,
    clock_ns,
    compare_exchange,
    copy_foreign,
    copy_wide,
    fence,
    fetch_add_as,
    load_relaxed,
    popc,
    shfl,
    store_relaxed,
    store_release,
    syncwarp,
)

from . import layout as at
from .latch import expired, latch, progress, should_abort
from .lookup import count, owner_address, space_of, word_address
from .stash import free_frame, pool_with
from .word import DIRTY, INVALID, STATE, VALID, generation_of, loaded, pack


@device
def frame_address(core, frame):
    """Return the address of a frame (thread)."""
    return field(core, at.C_FRAMES) + (frame << field(core, at.C_PAGE_SHIFT))


def copy(dst, src, nbytes, mask, lane):
    """Copy a page with all lanes of `mask`.

    The copy has no memory order: the caller synchronizes the group before and after.
    """
    _copy_shared(dst, src, nbytes, mask, lane)


@device
def _copy_shared(dst, src, nbytes, mask, lane):
    """Copy 16 bytes a lane, with four pieces in flight."""
    lanes = popc(mask)
    stride = lanes << 4
    at = popc(mask & ((1 << lane) - 1)) << 4
    while at < nbytes:
        pieces = 0
        reach = at
        while pieces < 4 and reach < nbytes:
            pieces += 1
            reach += stride
        copy_wide(dst + at, src + at, stride, pieces)
        at = reach


@device
def _copy_alone(dst, src, nbytes, mask, lane):
    """Copy as wide as the processor can: a warp is one thread."""
    copy_foreign(dst, src, nbytes)


chosen(copy, lambda target, *kinds: _copy_alone if target == "cpu" else _copy_shared)


@device
def fill(core, frame, source, mask, lane):
    """Copy a page from `source` into a frame that was evicted or free.

    The caller's leader has won the frame. Every lane that writes into it first executes a fence: the word of the
    frame's previous page is INVALID before any byte changes, so a reader that saw new bytes also sees the new word. On
    return, all lanes' stores are ordered before the leader's next accesses.
    """
    syncwarp(mask)
    fence(DEVICE)
    copy(frame_address(core, frame), source, 1 << field(core, at.C_PAGE_SHIFT), mask, lane)
    syncwarp(mask)


@device
def start(core, queue, cid, opcode, page, pages, space):
    """Submit the command of an id for `pages` pages (the leader). Returns False if the ring is stuck."""
    record = id_record(queue, cid)
    store_relaxed(record + 8 * ID_PAGE, page, DEVICE)
    store_relaxed(record + 8 * ID_COUNT, pages, DEVICE)
    store_relaxed(record + 8 * ID_OPCODE, opcode, DEVICE)
    blocks_shift = field(core, at.C_PAGE_SHIFT) - field(space, at.S_BLOCK_SHIFT)
    word0 = command_word0(opcode, cid, field(space, at.S_WIRE))
    slba = (page - field(space, at.S_BASE)) << blocks_shift
    control = command_word6((pages << blocks_shift) - 1, 0)
    if opcode == READ:
        count(core, at.N_READ_COMMANDS, 1)
        count(core, at.N_PAGES_READ, pages)
    else:
        count(core, at.N_WRITE_COMMANDS, 1)
    prp2 = prp2_of(queue, cid, pages << field(core, at.C_PAGE_SHIFT))
    return submit(queue, word0, staging_of(queue, cid), prp2, slba, control)


@device
def serve(core, queue, mask, lane, leader):
    """Serve a queue once: drain it, and settle one id that no thread waits for."""
    syncwarp(mask)
    drain(queue, mask, lane, leader)
    settle_one(core, queue, mask, lane, leader)


@device
def wait(core, space, queue, cid, mask, lane, leader):
    """Wait for a command; return its status, or -1 after a timeout or abort (the id is then an orphan).

    `space` belongs to the launch that waits, and need not be the page's.
    """
    attempt = 0
    last_progress = 0
    since = 0
    while True:
        status = 0
        if lane == leader:
            status = poll(queue, cid)
            if status < 0 and attempt & 15 == 15:
                over = False
                now = progress(core)
                if attempt == 15 or now != last_progress:
                    last_progress = now
                    since = clock_ns()
                elif expired(core, since):
                    page = load_relaxed(id_record(queue, cid) + 8 * ID_PAGE, DEVICE)
                    latch(space, at.STALLED, field(space_of(core, page), at.S_NSID), page, 0)
                    over = True  # even if another error was latched first
                if over or should_abort(space):
                    status = orphan(queue, cid, ORPHAN)
                    if status < 0:
                        status = -2
        status = shfl(mask, status, leader)
        if status != -1:
            syncwarp(mask)
            if status == -2:
                return -1
            return status
        call_cold(serve, core, queue, mask, lane, leader)
        backoff(attempt)
        attempt += 1


@device
def settle_one(core, queue, mask, lane, leader):
    """Publish a prefetched page, or release the resources of an orphan; do nothing if none is ready."""
    cid = 0
    if lane == leader:
        cid = take_ready(queue)
    cid = shfl(mask, cid, leader)
    if cid < 0:
        return
    syncwarp(mask)
    record = id_record(queue, cid)
    page = load_relaxed(record + 8 * ID_PAGE, DEVICE)
    pages = load_relaxed(record + 8 * ID_COUNT, DEVICE)
    good = load_relaxed(record + 8 * ID_STATUS, DEVICE) == 0
    if load_relaxed(record + 8 * ID_STATE, DEVICE) & KIND == ORPHAN | FOUND:
        good = False
    if load_relaxed(record + 8 * ID_OPCODE, DEVICE) == WRITE:
        # the page stayed in WRITEBACK, so no thread has changed it: it must be written again
        if lane == leader:
            redirty(word_address(core, page))
    else:
        for k in range(pages):
            frame = load_relaxed(record + 8 * (at.ID_FRAMES + k), DEVICE)
            if good:
                source = staging_of(queue, cid) + (k << field(core, at.C_PAGE_SHIFT))
                fill(core, frame, source, mask, lane)
            if lane == leader:
                if good:
                    publish(core, page + k, frame, 0)
                else:
                    abandon(core, page + k, frame)
    syncwarp(mask)
    if lane == leader:
        release_id(queue, cid)


@device
def publish(core, page, frame, pins):
    """Publish a filled frame as the page's (the leader, after `fill`; release order)."""
    owner = owner_address(core, frame)
    if load_relaxed(owner, DEVICE) & at.OWNER_PAGE != page + 1:  # a fixed frame may have received pins in the meantime
        store_relaxed(owner, page + 1, DEVICE)
    pool = pool_with(core, frame)
    if field(pool, at.F_RESIDENT) != 0:
        fetch_add_as(pool + 8 * at.F_PRESENT, 1, I8)
    word = word_address(core, page)
    store_release(word, loaded(load_relaxed(word, DEVICE), frame, pins), DEVICE)


@device
def abandon(core, page, frame):
    """Return a BUSY page to INVALID and its frame to the stash (the leader)."""
    word = word_address(core, page)
    busy = load_relaxed(word, DEVICE)
    store_release(word, pack(0, generation_of(busy), INVALID), DEVICE)
    free_frame(core, frame)


@device
def redirty(word):
    """Return a page from WRITEBACK to VALID and DIRTY after a failed write-back (the leader)."""
    leave_writeback(word, VALID | DIRTY)


@device
def leave_writeback(word, low):
    """Replace state and DIRTY of a word in WRITEBACK; return the new word (the leader; release order).

    Only REF bits can change concurrently, so each failed attempt is progress of a reader.
    """
    old = load_relaxed(word, DEVICE)
    while True:
        new = (old & ~(STATE | DIRTY)) | low
        current = compare_exchange(word, old, new, DEVICE)
        if current == old:
            return new
        old = current


@device
def host_page(space, page, page_shift):
    """Return the address of a page in pinned host memory, or 0 if it is read through the queues (thread)."""
    base = field(space, at.S_HOST)
    if base == 0:
        return 0
    return base + ((page - field(space, at.S_BASE)) << page_shift)
