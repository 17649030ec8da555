"""Small device functions that every part of the cache uses: fields, words, the latch, the watchdog."""

from __future__ import annotations

from warpwell.queues.layout import I8, Q_PROGRESS, Q_WORDS
from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    SYSTEM,
    clock_ns,
    compare_exchange,
    device,
    fetch_add_as,
    interrupted,
    load_relaxed,
    rem,
    store_relaxed,
    store_release,
)

from . import layout as at

LOOK_NS = 10**6
"""Time between two looks at the latch in host memory."""


@device
def word_address(core, page):
    """Return the address of a page's word (thread).

    In a hashed table pages share words; whose page a VALID word holds is told by the owner of its frame.
    """
    mask = field(core, at.C_HASH_MASK)
    if mask == 0:
        return field(core, at.C_TABLE) + 8 * page
    return field(core, at.C_TABLE) + 8 * hashed(page, mask)


@device
def hashed(page, mask):
    """Return the word index of a page in a hashed table of mask + 1 words (thread).

    Multiplicative hash, folded; runs of pages spread without falling on one another.
    """
    mixed = (page & 0x7FFFFFFF) * 0x9E3779B1 + (page >> 31) * 0x85EBCA6B
    return ((mixed >> 15) ^ mixed) & mask


@device
def queue_of(core, page):
    """Return the queue record that serves a page (thread).

    Chosen by page, so that whoever waits for a BUSY page knows which queue to drain; neighbours that may
    travel in one command have the same queue.
    """
    group = page >> 3
    # neighbouring groups go to different queues, far ones in no lockstep
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
def nsid_of(core, page):
    """Return the namespace of a page, by which the host knows its array (thread)."""
    return field(space_of(core, page), at.S_NSID)


@device
def owner_address(core, frame):
    """Return the address of a frame's owner word (thread)."""
    return field(core, at.C_OWNERS) + 8 * frame


@device
def count(core, counter, n):
    """Add to a statistics counter (thread; relaxed)."""
    fetch_add_as(field(core, at.C_STATS) + 8 * counter, n, I8)


@device
def latch(space, kind, array, page, value):
    """Keep the first error of the launch that `space` belongs to, for the host (thread); later ones are dropped.

    The race is decided in device memory: host memory is stored to and never read-modified-written by a
    GPU, because many buses have no atomics. The kind is stored last, with release order.
    """
    launch = field(space, at.S_LAUNCH)
    if compare_exchange(launch + 8 * at.R_FAILED, 0, 1, DEVICE) == 0:
        store_relaxed(launch + 8 * at.R_KIND, kind, DEVICE)
        record = field(launch, at.R_LATCH)
        store_relaxed(record + 8 * at.L_ARRAY, array, SYSTEM)
        store_relaxed(record + 8 * at.L_PAGE, page, SYSTEM)
        store_relaxed(record + 8 * at.L_VALUE, value, SYSTEM)
        store_release(record + 8 * at.L_KIND, kind, SYSTEM)
        store_release(load_relaxed(record + 8 * at.L_FLAG, SYSTEM), 1, SYSTEM)


@device
def failed_before(space):
    """Tell whether the launch latched an error or saw the host's abort (thread; looks at device memory only)."""
    return load_relaxed(field(space, at.S_LAUNCH) + 8 * at.R_FAILED, DEVICE) != 0 or interrupted() != 0


@device
def latched(space):
    """Return the kind of the launch's latched error or ABORTED, CLEAR where there is none (thread).

    Of all that ask, one a millisecond looks at host memory: reads over the bus by everybody who waits take
    it from the data (measured on an H200: 0.1 M pages/s instead of 3.7 M with 16,384 warps waiting).
    """
    if interrupted() != 0:
        return at.ABORTED
    launch = field(space, at.S_LAUNCH)
    due = load_relaxed(launch + 8 * at.R_LOOK, DEVICE)
    now = clock_ns()
    if now >= due and compare_exchange(launch + 8 * at.R_LOOK, due, now + LOOK_NS, DEVICE) == due:
        kind = load_relaxed(field(launch, at.R_LATCH) + 8 * at.L_KIND, SYSTEM)
        if kind != at.CLEAR:
            # for all who look at device memory alone: an abort ends what misses, and not only what waits
            store_relaxed(launch + 8 * at.R_KIND, kind, DEVICE)
            store_relaxed(launch + 8 * at.R_FAILED, 1, DEVICE)
    return load_relaxed(launch + 8 * at.R_KIND, DEVICE)


@device
def gave_up(space):
    """Tell whether waiting is over for the launch: the host aborted it, or one of its waiters saw a stall (thread)."""
    kind = latched(space)
    return kind == at.ABORTED or kind == at.STALLED


@device
def progress(core):
    """Return the completions drained from all queues (thread; changes while anything progresses)."""
    return load_relaxed(field(field(core, at.C_QUEUES), Q_PROGRESS), DEVICE)


@device
def expired(core, since):
    """Tell whether `since` (from `clock_ns`) is longer ago than the time-out (thread)."""
    return clock_ns() - since > field(core, at.C_TIMEOUT)
