"""Small device functions that every part of the cache uses: fields, words, the latch, the watchdog."""

from __future__ import annotations

from warpwell.queues.layout import I8, Q_PROGRESS, Q_WORDS
from warpwell.queues.submission import field
from warpwell.targets import (
    DEVICE,
    FAULT_PAGE,
    SYSTEM,
    clock_ns,
    compare_exchange,
    device,
    fetch_add_as,
    load_relaxed,
    rem,
    store_relaxed,
    store_release,
)

from .layout import (
    ABORTED,
    C_FAILED,
    C_HASH_MASK,
    C_KIND,
    C_LATCH,
    C_LOOK,
    C_N_QUEUES,
    C_N_SPACES,
    C_OWNERS,
    C_QUEUES,
    C_SPACES,
    C_STATS,
    C_TABLE,
    C_TIMEOUT,
    CLEAR,
    L_ARRAY,
    L_KIND,
    L_PAGE,
    L_VALUE,
    S_BASE,
    S_NSID,
    S_PAGES,
    SPACE_WORDS,
    STALLED,
)

LOOK_NS = 10**6
"""Time between two looks at the latch in host memory."""


@device
def word_address(core, page):
    """Return the address of a page's word (thread).

    In a hashed table pages share words; whose page a VALID word holds is told by the owner of its frame.
    """
    mask = field(core, C_HASH_MASK)
    if mask == 0:
        return field(core, C_TABLE) + 8 * page
    return field(core, C_TABLE) + 8 * hashed(page, mask)


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
    index = rem((group ^ (group >> 7) ^ (group >> 13)) & 0x7FFFFFFF, field(core, C_N_QUEUES))
    return field(core, C_QUEUES) + index * (8 * Q_WORDS)


@device
def space_of(core, page):
    """Return the record of the space that a page belongs to (thread)."""
    spaces = field(core, C_SPACES)
    for k in range(field(core, C_N_SPACES)):
        space = spaces + k * (8 * SPACE_WORDS)
        base = field(space, S_BASE)
        if page >= base and page < base + field(space, S_PAGES):
            return space
    return spaces


@device
def nsid_of(core, page):
    """Return the namespace of a page, by which the host knows its array (thread)."""
    return field(space_of(core, page), S_NSID)


@device
def owner_address(core, frame):
    """Return the address of a frame's owner word (thread)."""
    return field(core, C_OWNERS) + 8 * frame


@device
def count(core, counter, n):
    """Add to a statistics counter (thread; relaxed)."""
    fetch_add_as(field(core, C_STATS) + 8 * counter, n, I8)


@device
def latch(core, kind, array, page, value):
    """Keep the first error for the host (thread); later ones are dropped.

    The race is decided in device memory: host memory is stored to and never read-modified-written by a
    GPU, because many buses have no atomics. The kind is stored last, with release order.
    """
    if compare_exchange(core + 8 * C_FAILED, 0, 1, DEVICE) == 0:
        store_relaxed(core + 8 * C_KIND, kind, DEVICE)
        record = field(core, C_LATCH)
        store_relaxed(record + 8 * L_ARRAY, array, SYSTEM)
        store_relaxed(record + 8 * L_PAGE, page, SYSTEM)
        store_relaxed(record + 8 * L_VALUE, value, SYSTEM)
        store_release(record + 8 * L_KIND, kind, SYSTEM)
        store_release(FAULT_PAGE, 1, SYSTEM)


@device
def failed_before(core):
    """Tell whether device code latched an error (thread; device memory only, so the host's abort is not seen)."""
    return load_relaxed(core + 8 * C_FAILED, DEVICE) != 0


@device
def latched(core):
    """Return the kind of the latched error or ABORTED, CLEAR where there is none (thread).

    Of all that ask, one a millisecond looks at host memory: reads over the bus by everybody who waits take
    it from the data (measured on an H200: 0.1 M pages/s instead of 3.7 M with 16,384 warps waiting).
    """
    due = load_relaxed(core + 8 * C_LOOK, DEVICE)
    now = clock_ns()
    if now >= due and compare_exchange(core + 8 * C_LOOK, due, now + LOOK_NS, DEVICE) == due:
        kind = load_relaxed(field(core, C_LATCH) + 8 * L_KIND, SYSTEM)
        if kind != CLEAR:
            store_relaxed(core + 8 * C_KIND, kind, DEVICE)
            # the host may have cleared the latch, and then this word, in between
            if load_relaxed(field(core, C_LATCH) + 8 * L_KIND, SYSTEM) == CLEAR:
                store_relaxed(core + 8 * C_KIND, CLEAR, DEVICE)
    return load_relaxed(core + 8 * C_KIND, DEVICE)


@device
def gave_up(core):
    """Tell whether waiting is over: the host aborted, or a waiter saw a stall (thread)."""
    kind = latched(core)
    return kind == ABORTED or kind == STALLED


@device
def progress(core):
    """Return the completions drained from all queues (thread; changes while anything progresses)."""
    return load_relaxed(field(field(core, C_QUEUES), Q_PROGRESS), DEVICE)


@device
def expired(core, since):
    """Tell whether `since` (from `clock_ns`) is longer ago than the time-out (thread)."""
    return clock_ns() - since > field(core, C_TIMEOUT)
