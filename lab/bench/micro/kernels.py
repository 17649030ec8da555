"""Kernels for one order of items and different means of reading: raw loads, subscripts, spans, BaM's protocol.

The first arguments of each kernel are the array, the address of a copy in device memory, and the address of BaM's
record. The last one is ``[sum, threads]``: each thread adds its items to the sum.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from warpwell.array import atomic_add, fold_warp, map_warp
from warpwell.targets import device, kernel
from warpwell.targets.primitives import (
    activemask,
    div,
    grid,
    lane_id,
    load_relaxed_as,
    shfl,
    store_relaxed_as,
    syncwarp,
    warp_size,
)

from .bam import bam_read, bam_write

I8 = np.dtype(np.int64)


@device
def raw(a, copy, bam, index):
    """Load an item of a plain copy of the array in device memory, past L1."""
    return load_relaxed_as(copy + 8 * index, I8)


@device
def subscript(a, copy, bam, index):
    """Read an item by subscript."""
    return a[index]


@device
def by_bam(a, copy, bam, index):
    """Read an item by BaM's protocol."""
    return bam_read(bam, 8 * index)


@device
def put_raw(a, copy, bam, index, item):
    """Store an item of a plain copy, past L1."""
    store_relaxed_as(copy + 8 * index, item, I8)


@device
def put_subscript(a, copy, bam, index, item):
    """Store an item by subscript."""
    a[index] = item


@device
def put_bam(a, copy, bam, index, item):
    """Store an item by BaM's protocol."""
    bam_write(bam, 8 * index, item)


READERS = {"raw": raw, "subscript": subscript, "BaM": by_bam}
WRITERS = {"raw": put_raw, "subscript": put_subscript, "BaM": put_bam}


def _named(function: Any, means: str) -> Any:
    function.__name__ = f"{function.__name__}_{means}".replace("_spans_", "_")
    return kernel(function)


@functools.cache
def walk(means: str) -> Any:
    """Return a kernel that adds up all items, `passes` times: a warp reads `run` adjacent items, a lane each."""
    if means == "span":

        def walking_spans(a, copy, bam, items, run, passes, total):
            warp = div(grid(1), warp_size())
            warps = div(total[1] + warp_size() - 1, warp_size())
            found = 0
            for _ in range(passes):
                first = warp * run
                while first < items:
                    found = fold_warp(operator.add, found, a, first, min(first + run, items))
                    first += warps * run
            atomic_add(total, 0, found)

        return _named(walking_spans, means)
    read = READERS[means]

    def walking(a, copy, bam, items, run, passes, total):
        width = warp_size()
        warp = div(grid(1), width)
        warps = div(total[1] + width - 1, width)
        found = 0
        for _ in range(passes):
            first = warp * run
            while first < items:
                at = first + lane_id()
                stop = min(first + run, items)
                while at < stop:
                    found += read(a, copy, bam, at)
                    at += width
                first += warps * run
        atomic_add(total, 0, found)

    return _named(walking, means)


@functools.cache
def pick(means: str) -> Any:
    """Return a kernel that adds up the items in `order`, `passes` times: adjacent lanes read adjacent entries."""
    read = READERS[means]

    def picking(a, copy, bam, order, passes, total):
        threads = total[1]
        found = 0
        for _ in range(passes):
            at = grid(1)
            while at < order.size:
                found += read(a, copy, bam, order[at])
                at += threads
        atomic_add(total, 0, found)

    return _named(picking, means)


@functools.cache
def pages(means: str) -> Any:
    """Return a kernel that adds up the pages of `run` items that `order` names, `passes` times: a warp takes a page."""
    if means == "span":

        def paging_spans(a, copy, bam, order, run, passes, total):
            warps = div(total[1] + warp_size() - 1, warp_size())
            found = 0
            for _ in range(passes):
                k = div(grid(1), warp_size())
                while k < order.size:
                    found = fold_warp(operator.add, found, a, order[k] * run, min((order[k] + 1) * run, a.size))
                    k += warps
            atomic_add(total, 0, found)

        return _named(paging_spans, means)
    read = READERS[means]

    def paging(a, copy, bam, order, run, passes, total):
        width = warp_size()
        warps = div(total[1] + width - 1, width)
        found = 0
        for _ in range(passes):
            k = div(grid(1), width)
            while k < order.size:
                at = order[k] * run + lane_id()
                stop = min((order[k] + 1) * run, a.size)
                while at < stop:
                    found += read(a, copy, bam, at)
                    at += width
                k += warps
        atomic_add(total, 0, found)

    return _named(paging, means)


@device
def plus(x, y):
    """Return the sum of two items."""
    return x + y


@device
def itself(x):
    """Return an item."""
    return x


@functools.cache
def vectors(means: str, sources: int) -> Any:
    """Return a kernel that stores the sums of two arrays, or the items of one, in a third.

    Its arguments: for the target and each source array, copy and BaM's record; items, items of a run, threads.
    """
    if means == "span":

        def storing_spans(c, c_copy, c_bam, a, a_copy, a_bam, b, b_copy, b_bam, items, run, threads):
            first = div(grid(1), warp_size()) * run
            while first < items:
                stop = min(first + run, items)
                if sources == 2:
                    map_warp(plus, c, (a, b), first, stop)
                else:
                    map_warp(itself, c, a, first, stop)
                first += div(threads + warp_size() - 1, warp_size()) * run

        return _named(storing_spans, f"{means}_{sources}")
    read, write = READERS[means], WRITERS[means]

    def storing(c, c_copy, c_bam, a, a_copy, a_bam, b, b_copy, b_bam, items, run, threads):
        width = warp_size()
        first = div(grid(1), width) * run
        while first < items:
            at = first + lane_id()
            stop = min(first + run, items)
            while at < stop:
                item = read(a, a_copy, a_bam, at)
                if sources == 2:
                    item += read(b, b_copy, b_bam, at)
                write(c, c_copy, c_bam, at, item)
                at += width
            first += div(threads + width - 1, width) * run

    return _named(storing, f"{means}_{sources}")


@functools.cache
def block_sums(means: str) -> Any:
    """Return a kernel that adds up each run of `run` items into an item of `sums` (a warp a run)."""
    read = READERS[means]

    def summing(a, copy, bam, items, run, sums, threads):
        width = warp_size()
        k = div(grid(1), width)
        while k * run < items:
            at = k * run + lane_id()
            stop = min((k + 1) * run, items)
            found = 0
            while at < stop:
                found += read(a, copy, bam, at)
                at += width
            atomic_add(sums, k, found)
            k += div(threads + width - 1, width)

    return _named(summing, means)


@functools.cache
def block_scans(means: str) -> Any:
    """Return a kernel that stores the sums up to each item, given those before each run (whole warps, a warp a run)."""
    read, write = READERS[means], WRITERS[means]

    def scanning(c, c_copy, c_bam, a, a_copy, a_bam, items, run, before, threads):
        mask = activemask()  # before the lanes can diverge
        width = warp_size()
        lane = lane_id()
        k = div(grid(1), width)
        while k * run < items:
            at = k * run
            stop = min(at + run, items)
            total = before[k]
            while at < stop:
                value = 0
                if at + lane < stop:
                    value = read(a, a_copy, a_bam, at + lane)
                syncwarp(mask)
                step = 1
                while step < width:
                    below = shfl(mask, value, max(lane - step, 0))
                    if lane >= step:
                        value += below
                    step *= 2
                if at + lane < stop:
                    write(c, c_copy, c_bam, at + lane, total + value)
                syncwarp(mask)
                total += shfl(mask, value, width - 1)
                at += width
            k += div(threads + width - 1, width)

    return _named(scanning, means)
