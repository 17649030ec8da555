"""Kernels that read the same items in the same order by different means: raw loads, subscripts, BaM's protocol."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...array import atomic_add
from ...targets import device, div, grid, kernel, lane_id, load_relaxed_as, warp_size
from .bam import bam_read

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


READERS = {"raw": raw, "subscript": subscript, "BaM": by_bam}


@functools.cache
def walk(means: str) -> Any:
    """Return a kernel that adds up all items, `passes` times: a warp walks runs of `run` items, its lanes neighbours.

    Its arguments: array, address of the copy, of BaM's record, items, items of a run, passes, sum (1 item).
    """
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

    walking.__name__ = f"walk_{means}"
    return kernel(walking)


@functools.cache
def pick(means: str) -> Any:
    """Return a kernel that adds up the items that `order` names, `passes` times: neighbouring lanes take neighbours.

    Its arguments: array, address of the copy, of BaM's record, order, passes, sum (1 item), threads.
    """
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

    picking.__name__ = f"pick_{means}"
    return kernel(picking)


@functools.cache
def pages(means: str) -> Any:
    """Return a kernel that adds up whole pages, each read by a warp, in the order that `order` names.

    Its arguments: array, address of the copy, of BaM's record, order of pages, items of a page, sum (1 item), threads.
    """
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

    paging.__name__ = f"pages_{means}"
    return kernel(paging)
