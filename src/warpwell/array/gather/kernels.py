"""Copy rows of memory, and rows behind a cache, to memory of a GPU.

A warp, or a part of it, takes a row, and its lanes load neighboring units. `copy_cached` has two uses: to copy the rows
that are in the cache and list the missing ones, and to copy rows whose pages were read ahead, each under a pin if its
validated read fails.
"""

from __future__ import annotations

import numpy as np

from ...cache import (
    READABLE,
    count_read,
    frame_address,
    frame_of,
    load_word,
    mark_referenced,
    pin_run,
    unpin,
    validate_read,
    word_address,
)
from ...cache import layout as at
from ...queues import field
from ...targets import (
    DEVICE,
    SYSTEM,
    any_sync,
    call_cold,
    device,
    div,
    fence,
    fetch_add_as,
    ffs,
    grid,
    kernel,
    lane_id,
    load_acquire,
    load_pair,
    load_relaxed_as,
    store_pair,
    store_relaxed,
    store_weak_as,
    syncwarp,
)
from .host import out_row_at, row_at

I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))


@device
def copy_part(to, source, nbytes, unit, lane, lanes):
    """Copy the share of one of `lanes` lanes of a part of a row, in units of 16, 8, 4, 2 or 1 bytes (thread).

    Addresses and sizes are multiples of the unit. Loads are relaxed, because other threads may store to a frame.
    """
    step = lanes * unit
    where = lane * unit
    if unit == 16:
        while where + 3 * step < nbytes:
            a, b = load_pair(source + where)
            c, d = load_pair(source + where + step)
            e, f = load_pair(source + where + 2 * step)
            g, h = load_pair(source + where + 3 * step)
            store_pair(to + where, a, b)
            store_pair(to + where + step, c, d)
            store_pair(to + where + 2 * step, e, f)
            store_pair(to + where + 3 * step, g, h)
            where += 4 * step
        if where + step < nbytes:
            a, b = load_pair(source + where)
            c, d = load_pair(source + where + step)
            store_pair(to + where, a, b)
            store_pair(to + where + step, c, d)
            where += 2 * step
        if where < nbytes:
            a, b = load_pair(source + where)
            store_pair(to + where, a, b)
    elif unit == 8:
        while where < nbytes:
            store_weak_as(to + where, load_relaxed_as(source + where, I8), I8)
            where += step
    elif unit == 4:
        while where < nbytes:
            store_weak_as(to + where, load_relaxed_as(source + where, I4), I4)
            where += step
    elif unit == 2:
        while where < nbytes:
            store_weak_as(to + where, load_relaxed_as(source + where, I2), I2)
            where += step
    else:
        while where < nbytes:
            store_weak_as(to + where, load_relaxed_as(source + where, I1), I1)
            where += step


@kernel
def copy_from_memory(rows, width, out_rows, n, shift, extent, source, stride, nbytes, out, unit, out_of_range):
    """Copy row ``rows[k]`` of memory to row ``out_rows[k]`` of `out`; 2**`shift` lanes take a row.

    Without `rows` or `out_rows` (0), that is row k. If a row number is out of range, 1 is stored in `out_of_range`, and
    the row is not copied.
    """
    t = grid(1)
    k = t >> shift
    if k < n:
        row = k
        if rows != 0:
            row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            store_relaxed(out_of_range, 1, SYSTEM)
        else:
            lanes = 1 << shift
            to = out + out_row_at(out_rows, k) * nbytes
            copy_part(to, source + row * stride, nbytes, unit, t & (lanes - 1), lanes)


@device
def copy_validated(core, base, page, inside, part, to, unit, lane, lanes, no_reuse):
    """Copy a part of a page from its frame, by a validated read; return whether the bytes are the page's (thread).

    The read is described in `warpwell.cache.hit`. Each lane calls this for its share of the part, with a fence of its
    own, and the part is copied if all of them return True. Otherwise the bytes at `to` are of no use.
    """
    address = word_address(core, page + base)
    word = load_word(address)
    if word & READABLE == 0:
        return False
    copy_part(to, frame_address(core, frame_of(word)) + inside, part, unit, lane, lanes)
    fence(DEVICE)
    good = validate_read(address, word)
    if good and lane == 0:
        mark_referenced(address, word, no_reuse)
    return good


@device
def copy_pinned(core, space, page, last, inside, part, to, unit, mask, lane, lanes):
    """Copy a part of a page under a transient pin, which reads the page if it must (all lanes of `mask`).

    Return False if an error is latched. `last` is the last page of the run, as for `fault_in`.
    """
    leader = ffs(mask) - 1
    frame = call_cold(pin_run, space, page, last, mask, lane_id(), leader)
    if frame < 0:
        return False
    word = word_address(core, page + field(space, at.S_BASE))
    load_acquire(word, DEVICE)
    copy_part(to, frame_address(core, frame) + inside, part, unit, lane, lanes)
    syncwarp(mask)
    if lane == 0:
        unpin(word, 0)
    return True


@kernel
def copy_cached(
    core, space, rows, width, out_rows, n, shift, extent, origin, stride, nbytes, out, unit, no_reuse, itemsize, missing
):
    """Copy row ``rows[k]`` of an array behind a cache to row ``out_rows[k]`` of `out`; 2**`shift` lanes take a row.

    Parameters
    ----------
    core, space : int
    rows, width, out_rows : int
        As for `copy_from_memory`.
    n, shift, extent : int
        Number of rows to copy; log2 of the lanes of a row; number of rows of the array.
    origin, stride, nbytes : int
        Byte of row 0 in the array's file; bytes between rows; bytes of a row.
    out, unit : int
        Address of the result; bytes of a load, see `copy_part`.
    no_reuse, itemsize : int
        1 if pages are read once, else 0; bytes of an item to count reads in the statistics, or 0.
    missing : int
        Address of two words and a list: 1 if a row number is out of range; the number of rows that were not copied
        because a page was not in the cache all the time; their k, in any order. If it is 0, such a page is read and
        copied under a pin, and rows are left as they are after an error is latched; a warp must take a row then.
    """
    t = grid(1)
    k = t >> shift
    if k < n:
        page_shift = field(core, at.C_PAGE_SHIFT)
        base = field(space, at.S_BASE)
        lanes = 1 << shift
        lane = t & (lanes - 1)
        mask = ((1 << lanes) - 1) << (lane_id() - lane)
        row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            store_relaxed(missing, 1, DEVICE)
        else:
            begin = origin + row * stride
            end = begin + nbytes
            last = (end - 1) >> page_shift
            to = out + out_row_at(out_rows, k) * nbytes
            good = True
            while begin < end:
                page = begin >> page_shift
                inside = begin - (page << page_shift)
                part = min(end - begin, (1 << page_shift) - inside)
                if good:
                    good = copy_validated(core, base, page, inside, part, to, unit, lane, lanes, no_reuse)
                if missing == 0 and any_sync(mask, not good):
                    good = copy_pinned(core, space, page, last, inside, part, to, unit, mask, lane, lanes)
                    if not good:
                        end = begin
                to += part
                begin += part
            if missing != 0:
                failed = any_sync(mask, not good)
                if lane == 0 and itemsize != 0:
                    count_read(core, div(nbytes, itemsize), nbytes, not failed)
                if lane == 0 and failed:
                    i = fetch_add_as(missing + 8, 1, I8)
                    store_relaxed(missing + 16 + 8 * i, k, DEVICE)
