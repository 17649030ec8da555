"""Rows of arrays behind a cache: their pages are read in batches that fit the frames, and a kernel copies the rows.

The host sorts the row indices, so that the pages of a batch are known, and reads the missing ones by long commands
while the rows of the previous batch are copied (`warpwell.cache.prefetch`). The kernel takes rows from the cache as any
kernel does, so it sees changes of other kernels that are not flushed, reads pages that are still missing by a miss, and
reports errors: a batch is a hint, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cache import (
    READABLE,
    batches_of,
    copy_part,
    count_read,
    frame_address,
    word_address,
)
from ...cache import layout as at
from ...queues import field
from ...targets import device, kernel
from ...targets.primitives import copy_bytes, div, grid, load_weak_as, scratch
from .host import expand, read_gap, require_in_range, row_bytes, runs_of

I8 = np.dtype(np.int64)
BUFFER_BYTES = 4096
"""Maximum bytes that a thread copies at once: they stay in the L1 cache of a core."""
MAX_LAUNCH_ROWS = 1 << 18
"""Maximum rows of a launch."""
MAX_KERNEL_FAULTS = 4
"""With at most this number of missing pages, nothing is read ahead, and the kernel faults."""


@device
def take_row(core, space, offset, nbytes, target, no_reuse, itemsize):
    """Copy `nbytes` bytes of an array from byte `offset` of its file to `target` (thread; `cpu` and `interp`).

    Only validated bytes reach `target`. Return 0 if an error is latched.
    """
    buffer = scratch(BUFFER_BYTES)
    shift = field(core, at.C_PAGE_SHIFT)
    base, frames = field(space, at.S_BASE), frame_address(core, 0)
    end = offset + nbytes
    last = (end - 1) >> shift
    while offset < end:
        page = offset >> shift
        inside = offset - (page << shift)
        first = inside & -8
        part = min(end - offset, min((1 << shift) - inside, BUFFER_BYTES - 8))
        padded = (inside - first + part + 7) & -8
        address = word_address(core, page + base)
        is_hit, is_copied = copy_part(space, address, frames, shift, page, first, padded, last, buffer, no_reuse)
        if itemsize != 0:
            count_read(core, div(part, itemsize), part, is_hit)
        if not is_copied:
            return 0
        copy_bytes(target, buffer + inside - first, part)
        target += part
        offset += part
    return 1


@kernel
def gather_rows(core, space, rows, out_rows, n, origin, stride, nbytes, out, no_reuse, itemsize):
    """Copy row ``rows[k]`` to row ``out_rows[k]`` of `out` (one thread a row; `cpu` and `interp`).

    Row numbers are in range. `no_reuse` is 1 if pages are read once; `itemsize` is 0 unless statistics are full.
    """
    k = grid(1)
    if k < n:
        offset = origin + load_weak_as(rows + 8 * k, I8) * stride
        take_row(core, space, offset, nbytes, out + load_weak_as(out_rows + 8 * k, I8) * nbytes, no_reuse, itemsize)


class PageBatch(NamedTuple):
    """Rows whose pages are read together: part [low, high) of the sorted list, and the pages that it adds."""

    low: int
    high: int
    pages: NDArray[np.int64]


def page_batches(starts: NDArray[np.int64], nbytes: int, page_size: int, max_pages: int) -> Iterator[PageBatch]:
    """Yield batches of rows that start at these ascending bytes of the file, with at most `max_pages` pages or one row.

    Each page is in one batch.
    """
    first, last = starts // page_size, (starts + nbytes - 1) // page_size
    before = np.empty_like(last)  # the last page of earlier rows
    before[0], before[1:] = -1, last[:-1]
    begin = np.maximum(first, before + 1)
    added = np.maximum(0, last - begin + 1)
    for part in batches_of(added, max_pages, MAX_LAUNCH_ROWS):
        yield PageBatch(part.start, part.stop, expand(begin[part], added[part]))


def fill_gaps(pages: NDArray[np.int64], max_gap: int) -> NDArray[np.int64]:
    """Return ascending pages, and the pages of gaps of at most `max_gap` pages between them."""
    _, begins, lengths = runs_of(pages, pages + 1, 1, max_gap)
    return expand(begins, lengths)


def missing_pages(array: Any, pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pages that were not in the cache at the call; on a GPU, all pages."""
    cache = array.cache
    if cache.device == "cuda" or not len(pages):
        return pages
    page_words = cache.page_words(array._nsid, int(pages[0]), int(pages[-1]) + 1)
    missing: NDArray[np.int64] = pages[page_words[pages - pages[0]] & READABLE == 0]
    return missing


class CachedRows:
    """Copies rows of an array behind a cache.

    Parameters
    ----------
    array : Array
    rows : ndarray
        Row indices, one dimension.
    out : int
        Address of the result.

    Attributes
    ----------
    bytes_read : int
        Bytes that were read ahead, gaps included.
    """

    chunks, inline = 1, False

    def __init__(self, array: Any, rows: Any, out: int) -> None:
        self._array, self._rows, self._gap = array, rows, read_gap()
        self._nbytes, self._stride, self._out = row_bytes(array), array._strides[0], out
        self._stopped = False
        self._pages_read = 0

    @property
    def bytes_read(self) -> int:
        """See the class."""
        return self._pages_read * int(self._array.cache.page_size)

    def stop(self) -> None:
        """Let `copy` end after the current batch."""
        self._stopped = True

    def run(self, chunk: int) -> None:
        """Copy all rows, by the threads of the cache."""
        del chunk
        require_in_range(self._array, self._rows)
        if self._rows.size and self._nbytes:
            self.copy(self._rows)

    def copy(self, rows: NDArray[Any], out_rows: NDArray[np.int64] | None = None) -> None:
        """Copy row ``rows[k]`` to row ``out_rows[k]`` of the result, by default row k; the rows are in range.

        Raises
        ------
        MediumError, StallError, ClosedError
        """
        with self._array.cache.layout_lock():  # opening another array on the cache would move the frames
            self._copy(rows, out_rows)

    def _copy(self, rows: NDArray[Any], out_rows: NDArray[np.int64] | None) -> None:
        array = self._array
        # as before a launch, although the cache does not count this copy as one
        array.cache.require_no_suspects(array._nsid)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order].astype(np.int64)
        targets = order.astype(np.int64) if out_rows is None else out_rows[order]
        max_pages = array.cache.wave_pages(array._nsid)
        starts = array._origin + ascending * self._stride
        batches, ahead = itertools.tee(page_batches(starts, self._nbytes, array.cache.page_size, max_pages))
        # A generator, so that missing pages are looked up when the previous batch is about to be copied.
        waves = ((batch.pages, self._pages_to_read(batch.pages, max_pages)) for batch in ahead)
        with contextlib.closing(array.cache.bulk.waves(array._nsid, waves, once=array.read_once)) as reads:
            for batch in batches:
                next(reads)
                if self._stopped:
                    return
                self._launch(ascending[batch.low : batch.high], targets[batch.low : batch.high])

    def _pages_to_read(self, pages: NDArray[np.int64], max_pages: int) -> NDArray[np.int64]:
        """Return the missing pages of a batch, with short gaps; none if the kernel reads them."""
        array = self._array
        missing = missing_pages(array, pages)
        if array.device == "interp" or array.tier != "storage" or len(missing) <= MAX_KERNEL_FAULTS:
            return pages[:0]
        merged = fill_gaps(missing, self._gap // array.cache.page_size)
        missing = merged if len(merged) <= max_pages else missing
        self._pages_read += len(missing)
        return missing

    def _launch(self, rows: NDArray[np.int64], out_rows: NDArray[np.int64]) -> None:
        """Run the kernel that copies rows, and wait for it."""
        array, n = self._array, len(rows)
        lists = rows.ctypes.data, out_rows.ctypes.data, n
        where = array._origin, self._stride, self._nbytes, self._out
        itemsize = array.dtype.itemsize if array.cache.full else 0
        array.cache.run(gather_rows, n, array._nsid, *lists, *where, int(array.read_once), itemsize)
