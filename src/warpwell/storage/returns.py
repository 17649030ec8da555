"""Return value queue: places for values, in shared memory, that the controller assigns when it answers.

A retrieve without a buffer requests a place. The controller takes the next free place and returns its number in the low
half of dw1 of the completion; the reader of the value frees the place by clearing its word. There are fewer places than
command ids: if all are taken, the command completes with "namespace not ready" and must be submitted again after values
have been taken.
"""

from __future__ import annotations

from warpwell.queues import field
from warpwell.queues import layout as at
from warpwell.targets import SYSTEM, compare_exchange, device, load_acquire, load_relaxed, store_relaxed, store_release


@device
def alloc_return_slot(port, cid):
    """Take a place for a command's value; return its address, or 0 if all are taken (any service thread)."""
    record = field(port, at.P_RETURNS)
    count = field(record, at.R_COUNT)
    first = load_relaxed(record + 8 * at.R_NEXT, SYSTEM)
    for k in range(count):
        place = (first + k) & (count - 1)
        flag = field(record, at.R_FLAGS) + 8 * place
        if load_acquire(flag, SYSTEM) == 0 and compare_exchange(flag, 0, 1, SYSTEM) == 0:
            store_relaxed(record + 8 * at.R_NEXT, place + 1, SYSTEM)
            store_relaxed(field(record, at.R_OF) + 8 * cid, place + 1, SYSTEM)
            return field(record, at.R_PLACES) + place * field(record, at.R_PLACE_BYTES)
    return 0


@device
def with_place(port, cid, status, result):
    """Return dw0 and dw1 of a completion; free the place if it holds no value (any service thread).

    `result` is dw0. Bits 15:0 of dw1 are the number of the place, from 1, or 0.
    """
    words = result & 0xFFFFFFFF
    record = field(port, at.P_RETURNS)
    if record == 0:
        return words
    of = field(record, at.R_OF) + 8 * cid
    place = load_relaxed(of, SYSTEM)
    if place == 0:
        return words
    store_relaxed(of, 0, SYSTEM)
    if status != 0 or words == 0:
        store_release(field(record, at.R_FLAGS) + 8 * (place - 1), 0, SYSTEM)
        return words
    return words | (place << 32)
