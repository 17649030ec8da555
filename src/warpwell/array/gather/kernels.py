"""Kernels that gather rows to a GPU's memory: of memory, of frames, of staging, and by misses.

Rows behind a cache are copied by three launches of one stream, `look_pages`, `copy_seen` and `settle_rows`. Together
they are the look of spans (`warpwell.array.spans.words`), with a launch's end in the place of its acquire and its
fence: who fills a frame anew makes the word of the page that lived there INVALID, executes a fence, and then stores.
Where `copy_seen` has loaded such a byte, `settle_rows` finds another word, and does not count the row as copied. So no
row pays for an order of its own.
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
    activemask,
    call_cold,
    device,
    div,
    fetch_add_as,
    ffs,
    grid,
    kernel,
    lane_id,
    load_acquire,
    load_pair,
    load_relaxed,
    load_relaxed_as,
    load_weak_as,
    popc,
    rem,
    store_pair,
    store_relaxed,
    store_weak_as,
    syncwarp,
    warp_size,
)
from .host import place_of, row_at

I1, I2, I4, I8 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))


@device
def copy_part(to, source, nbytes, unit, lane, lanes):
    """Copy what `lane` of `lanes` threads copies of a row, in units of 16, 8, 4, 2 or 1 bytes (thread).

    All of it is a multiple of the unit. Loads are relaxed, since others may store to a frame meanwhile.
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
def copy_listed(rows, width, places, n, shift, extent, source, stride, nbytes, out, unit, wrong):
    """Copy row ``rows[k]`` of memory to row ``places[k]`` of `out`; 2**`shift` threads take a row.

    Without `rows` that is row k. Where a number is out of range, 1 is stored in `wrong`, and no row is copied.
    """
    t = grid(1)
    k = t >> shift
    if k < n:
        row = k
        if rows != 0:
            row = row_at(rows, width, k)
        if row < 0 or row >= extent:
            store_relaxed(wrong, 1, SYSTEM)
        else:
            lanes = 1 << shift
            copy_part(out + place_of(places, k) * nbytes, source + row * stride, nbytes, unit, t & (lanes - 1), lanes)


@kernel
def look_pages(core, space, rows, width, n, most, extent, origin, stride, nbytes, seen, wrong):
    """Note in ``seen[k * most + j]`` the word of page j of row ``rows[k]``, or 0 (one thread a page).

    Where a number is out of range, 1 is stored in `wrong`.
    """
    t = grid(1)
    k = div(t, most)
    if k < n:
        shift = field(core, at.C_PAGE_SHIFT)
        row = row_at(rows, width, k)
        first = origin + row * stride
        page = (first >> shift) + rem(t, most)
        word = 0
        if row < 0 or row >= extent:
            store_relaxed(wrong, 1, DEVICE)
        elif page <= (first + nbytes - 1) >> shift:
            word = load_word(word_address(core, page + field(space, at.S_BASE)))
            if word & READABLE == 0:
                word = 0
        store_relaxed(seen + 8 * t, word, DEVICE)


@kernel
def copy_seen(core, rows, width, n, most, shift, origin, stride, nbytes, out, unit, seen):
    """Copy the pages of rows from the frames that `seen` names; 2**`shift` threads take a row."""
    t = grid(1)
    k = t >> shift
    if k < n:
        page_shift = field(core, at.C_PAGE_SHIFT)
        first = origin + row_at(rows, width, k) * stride
        end = first + nbytes
        to = out + k * nbytes
        word = seen + 8 * k * most
        begin = first
        lanes = 1 << shift
        while begin < end:
            inside = begin & ((1 << page_shift) - 1)
            part = min(end - begin, (1 << page_shift) - inside)
            found = load_relaxed(word, DEVICE)
            if found != 0:
                copy_part(to, frame_address(core, frame_of(found)) + inside, part, unit, t & (lanes - 1), lanes)
            word += 8
            to += part
            begin += part


@kernel
def settle_rows(core, space, rows, width, n, most, origin, stride, nbytes, seen, once, itemsize, missing):
    """List the rows of which a page was not in the cache all the time since `look_pages` (one thread a row).

    ``missing[0]`` counts them; ``missing[1 + i]`` is such a k. `once` is 1 if pages are read once, else 0;
    `itemsize` is 0 unless statistics are full.
    """
    k = grid(1)
    if k < n:
        shift = field(core, at.C_PAGE_SHIFT)
        first = origin + row_at(rows, width, k) * stride
        page = first >> shift
        last = (first + nbytes - 1) >> shift
        good = True
        word = seen + 8 * k * most
        while page <= last:
            found = load_relaxed(word, DEVICE)
            address = word_address(core, page + field(space, at.S_BASE))
            if not validate_read(address, found):
                good = False
            else:
                mark_referenced(address, found, once)
            page += 1
            word += 8
        if itemsize != 0:
            count_read(core, div(nbytes, itemsize), nbytes, good)
        if not good:
            i = fetch_add_as(missing, 1, I8)
            store_relaxed(missing + 8 + 8 * i, k, DEVICE)


@kernel
def take_missing(core, space, rows, places, n, origin, stride, nbytes, out, unit):
    """Copy row ``rows[k]`` to row ``places[k]`` of `out`, each page under a transient pin (a warp takes a row).

    A page that is not in the cache is read. If an error is latched, rows are left as they are.
    """
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    k = div(grid(1), warp_size())
    if k < n:
        shift = field(core, at.C_PAGE_SHIFT)
        begin = origin + load_weak_as(rows + 8 * k, I8) * stride
        end = begin + nbytes
        to = out + load_weak_as(places + 8 * k, I8) * nbytes
        last = (end - 1) >> shift
        rank = popc(mask & ((1 << lane) - 1))
        while begin < end:
            page = begin >> shift
            inside = begin - (page << shift)
            part = min(end - begin, (1 << shift) - inside)
            frame = call_cold(pin_run, space, page, last, mask, lane, leader)
            if frame < 0:
                begin = end
            else:
                word = word_address(core, page + field(space, at.S_BASE))
                load_acquire(word, DEVICE)
                copy_part(to, frame_address(core, frame) + inside, part, unit, rank, popc(mask))
                syncwarp(mask)
                if lane == leader:
                    unpin(word, 0)
                to += part
                begin += part
