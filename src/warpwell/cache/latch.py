"""Latch: the first error of a launch, for the host to raise, and the watchdog that ends waits."""

from __future__ import annotations

from warpwell.queues import field, lost
from warpwell.queues.layout import Q_PROGRESS
from warpwell.targets import device, linked
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    clock_ns,
    compare_exchange,
    interrupted,
    load_relaxed,
    store_relaxed,
    store_release,
)

from . import layout as at

POLL_NS = 10**6
"""Time between two polls of the latch in host memory, in nanoseconds."""


@device
def latch(space, kind, array, page, value):
    """Keep the first error of the launch that `space` belongs to, for the host (thread); later ones are dropped.

    The first error is chosen by an atomic in device memory: a GPU only stores to host memory, because many buses have
    no atomics. The kind is stored last, with release order.
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


@linked
def latch_index(space, index, extent):
    """Latch an index out of range of a dimension (thread)."""
    latch(space, at.INDEX_ERROR, field(space, at.S_NSID), extent, index)
    return 0


@linked
def latch_read_only(space):
    """Latch a write to a read-only array (thread)."""
    latch(space, at.READ_ONLY, field(space, at.S_NSID), field(space, at.S_BASE), 0)
    return 0


@device
def failed_before(space):
    """Return whether the launch latched an error or saw the host's abort (thread; reads device memory only)."""
    return load_relaxed(field(space, at.S_LAUNCH) + 8 * at.R_FAILED, DEVICE) != 0 or interrupted() != 0


@device
def latched(space):
    """Return the kind of the launch's latched error, ABORTED, or CLEAR (thread).

    LOST has priority over an error of the launch, so that no thread waits for a lost controller.

    One caller a millisecond reads host memory: reads by every waiting thread would take bus bandwidth from the data
    (measured on an H200: 0.1 M pages/s instead of 3.7 M with 16,384 warps waiting).
    """
    if interrupted() != 0:
        return at.ABORTED
    launch = field(space, at.S_LAUNCH)
    due = load_relaxed(launch + 8 * at.R_NEXT_POLL, DEVICE)
    now = clock_ns()
    if now >= due and compare_exchange(launch + 8 * at.R_NEXT_POLL, due, now + POLL_NS, DEVICE) == due:
        if lost(field(field(space, at.S_CORE), at.C_QUEUES)):
            latch(space, at.LOST, field(space, at.S_NSID), field(space, at.S_BASE), 0)
            kind = at.LOST
        else:
            kind = load_relaxed(field(launch, at.R_LATCH) + 8 * at.L_KIND, SYSTEM)
        if kind != at.CLEAR:
            # store the kind for threads that read only device memory: an abort ends misses too, not only waits
            store_relaxed(launch + 8 * at.R_KIND, kind, DEVICE)
            store_relaxed(launch + 8 * at.R_FAILED, 1, DEVICE)
    return load_relaxed(launch + 8 * at.R_KIND, DEVICE)


@device
def should_abort(space):
    """Return whether the launch must stop waiting: the host aborted it, a waiter timed out, or all is lost (thread)."""
    kind = latched(space)
    return kind == at.ABORTED or kind == at.STALLED or kind == at.LOST


@device
def progress(core):
    """Return the completions drained from all queues (thread; changes while anything progresses)."""
    return load_relaxed(field(field(core, at.C_QUEUES), Q_PROGRESS), DEVICE)


@device
def expired(core, since):
    """Return whether the timeout since `since` (from `clock_ns`) is over (thread)."""
    return clock_ns() - since > field(core, at.C_TIMEOUT)
