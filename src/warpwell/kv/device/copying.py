"""Copy values with all lanes of a group together, from staging, the device cache or a row."""

from __future__ import annotations

from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    bits_as,
    copy_wide,
    ffs,
    load_relaxed,
    popc,
    shfl,
    store_relaxed,
    store_relaxed_as,
)

from ..index.sealed import UINT8


@device
def copy_each(lanes, to, source, nbytes, mask, lane):
    """Copy a value for each of `lanes`, all lanes of `mask` together; the caller synchronizes before and after."""
    while lanes != 0:
        owner = ffs(lanes) - 1
        copy(shfl(mask, to, owner), shfl(mask, source, owner), shfl(mask, nbytes, owner), mask, lane)
        lanes &= lanes - 1


@device
def copy(to, source, nbytes, mask, lane):
    """Copy bytes with all lanes of `mask`, 16 at a time where both addresses allow it (nothing is ordered)."""
    lanes = popc(mask)
    rank = popc(mask & ((1 << lane) - 1))
    done = 0
    if (to | source) & 15 == 0:
        wide_bytes = nbytes & ~15
        stride = lanes << 4
        at = rank << 4
        while at < wide_bytes:
            pieces = 0
            reach = at
            while pieces < 4 and reach < wide_bytes:
                pieces += 1
                reach += stride
            copy_wide(to + at, source + at, stride, pieces)
            at = reach
        done = wide_bytes
    # staging is read in aligned words past the L1 cache, which may hold what was there before
    at = done + 8 * rank
    while at < nbytes:
        skew = (source + at) & 7
        word = load_relaxed(source + at - skew, SYSTEM)
        if skew != 0:
            word = (word >> (8 * skew)) & ((1 << (64 - 8 * skew)) - 1)
            if at + 8 - skew < nbytes:
                word |= load_relaxed(source + at - skew + 8, SYSTEM) << (64 - 8 * skew)
        if (to + at) & 7 == 0 and at + 8 <= nbytes:
            store_relaxed(to + at, word, DEVICE)
        else:
            for k in range(min(8, nbytes - at)):
                store_relaxed_as(to + at + k, bits_as((word >> (8 * k)) & 0xFF, UINT8), UINT8)
        at += 8 * lanes


@device
def wipe(to, nbytes):
    """Overwrite the bytes of an incomplete value with zeros (thread)."""
    at = to
    end = to + nbytes
    while at < end:
        if at & 7 == 0 and at + 8 <= end:
            store_relaxed(at, 0, DEVICE)
            at += 8
        else:
            store_relaxed_as(at, bits_as(0, UINT8), UINT8)
            at += 1
