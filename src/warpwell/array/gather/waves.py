"""Rows of arrays behind a cache: their pages are read in waves that fit into the frames, and a kernel copies the rows.

The host sorts the row numbers, so that the pages of a wave are known, and has those that are not in the cache read by
long commands while the rows of the wave before are copied (`warpwell.cache.prefetch`). The kernel takes rows from the
cache as any kernel does, so it sees what others have stored and not yet flushed, reads pages that did not come by a
miss, and reports what fails: a wave is a hint, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cache import (
    READABLE,
    Prefetch,
    batches_of,
    copy_run,
    count_read,
    frame_address,
    frame_of,
    load_word,
    mark_referenced,
    validate_read,
    word_address,
)
from ...cache import layout as at
from ...queues import field
from ...targets import (
    DEVICE,
    copy_bytes,
    copy_foreign,
    device,
    div,
    fence,
    grid,
    kernel,
    load_weak_as,
    scratch,
)

I8 = np.dtype(np.int64)
BUFFER = 4096
"""Maximum bytes that a thread copies at once: they stay in the first-level cache of a core."""
ROWS = 1 << 18
"""Maximum rows of a launch."""
FEW = 4
"""Pages that are not in the cache up to which the kernel reads them alone."""


@device
def take_row(core, space, place, nbytes, target, once, itemsize):
    """Copy `nbytes` bytes of an array from byte `place` of its file on to `target` (thread; `cpu` and `interp`).

    The look at a page is that of spans (`warpwell.array.spans.buffers`): acquire its word, copy, fence, load the word
    again; if that is another page's by now, or no page's, copy under a transient pin, which reads the page if it must.
    Nothing that was not looked at twice reaches `target`. Return 0 if an error is latched.
    """
    buffer = scratch(BUFFER)
    shift = field(core, at.C_PAGE_SHIFT)
    base = field(space, at.S_BASE)
    end = place + nbytes
    last = (end - 1) >> shift
    while place < end:
        page = place >> shift
        inside = place - (page << shift)
        first = inside & -8
        part = min(end - place, min((1 << shift) - inside, BUFFER - 8))
        whole = (inside - first + part + 7) & -8
        word = word_address(core, page + base)
        seen = load_word(word)
        good = seen & READABLE != 0
        if good:
            copy_foreign(buffer, frame_address(core, frame_of(seen)) + first, whole)
            fence(DEVICE)
            good = validate_read(word, seen)
        if itemsize != 0:
            count_read(core, div(part, itemsize), part, good)
        if good:
            mark_referenced(word, seen, once)
        elif copy_run(space, page, first, whole, last, buffer, 0) == 0:
            return 0
        copy_bytes(target, buffer + inside - first, part)
        target += part
        place += part
    return 1


@kernel
def gather_rows(core, space, rows, places, n, origin, stride, nbytes, out, once, itemsize):
    """Copy row ``rows[k]`` to row ``places[k]`` of `out` (one thread a row; `cpu` and `interp`).

    Row numbers are in range. `once` is 1 if pages are read once; `itemsize` is 0 unless statistics are full.
    """
    k = grid(1)
    if k < n:
        place = origin + load_weak_as(rows + 8 * k, I8) * stride
        take_row(core, space, place, nbytes, out + load_weak_as(places + 8 * k, I8) * nbytes, once, itemsize)


class Wave(NamedTuple):
    """Rows whose pages are read together: part [low, high) of the sorted list, and the pages that it adds."""

    low: int
    high: int
    pages: NDArray[np.int64]


def waves(starts: NDArray[np.int64], nbytes: int, page: int, most: int) -> Iterator[Wave]:
    """Yield waves of rows that start at these ascending bytes of the file, of `most` pages each if a row has no more.

    Each page is in one wave.
    """
    first, last = starts // page, (starts + nbytes - 1) // page
    before = np.empty_like(last)  # the last page that rows before have
    before[0], before[1:] = -1, last[:-1]
    begin = np.maximum(first, before + 1)
    fresh = np.maximum(0, last - begin + 1)
    for some in batches_of(fresh, most, ROWS):
        counts = fresh[some]
        number = int(counts.sum())
        # of each row, its pages that are new: begin, begin + 1, ...
        pages = np.repeat(begin[some] - (np.cumsum(counts) - counts), counts) + np.arange(number)
        yield Wave(some.start, some.stop, pages)


def over_gaps(pages: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return ascending pages, and the pages of gaps of at most `most` pages between them."""
    lengths = np.diff(pages) - 1
    few = np.flatnonzero((lengths > 0) & (lengths <= most))
    if not len(few):
        return pages
    counts = lengths[few]
    number = int(counts.sum())
    gaps = np.repeat(pages[few] + 1 - (np.cumsum(counts) - counts), counts) + np.arange(number)
    return np.sort(np.concatenate((pages, gaps)))


def absent(array: Any, pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which pages were not in the cache a moment ago; on a GPU, all of them."""
    cache = array.cache
    if cache.device == "cuda" or not len(pages):
        return pages
    words = cache.page_words(array._nsid, int(pages[0]), int(pages[-1]) + 1)
    missing: NDArray[np.int64] = pages[words[pages - pages[0]] & READABLE == 0]
    return missing


class CachedRows:
    """Copies rows of an array behind a cache.

    Parameters
    ----------
    array : Array
    nbytes, stride, out : int
        Bytes of a row; bytes between rows; address of the result.
    take : callable, optional
        ``take(rows, places)`` copies rows whose pages were read ahead. Default: `gather_rows` of `cpu` and `interp`.

    Attributes
    ----------
    pages, asked : int
        Pages that the rows have; pages that were asked for ahead, gaps included.
    """

    def __init__(
        self,
        array: Any,
        *,
        nbytes: int,
        stride: int,
        out: int,
        take: Callable[[NDArray[np.int64], NDArray[np.int64]], None] | None = None,
    ) -> None:
        self._array = array
        self._take = take or self._gather
        self._nbytes, self._stride, self._out = nbytes, stride, out
        self._stopped = False
        self.pages = self.asked = 0

    def stop(self) -> None:
        """Let `copy` end after the wave that it is at."""
        self._stopped = True

    def copy(self, rows: NDArray[Any], gap: int, places: NDArray[np.int64] | None = None) -> None:
        """Copy row ``rows[k]`` to row ``places[k]`` of the result, by default row k; the numbers are in range.

        Raises
        ------
        MediumError, StallError, ClosedError
        """
        with self._array.cache.layout_lock():  # opening another array on the cache would move the frames
            self._copy(rows, gap, places)

    def _copy(self, rows: NDArray[Any], gap: int, places: NDArray[np.int64] | None) -> None:
        array = self._array
        array.cache.require_no_doubt(array._nsid)  # as for a launch, which this is not for the cache
        order = np.argsort(rows, kind="stable")
        ascending = rows[order].astype(np.int64)
        target = order.astype(np.int64) if places is None else places[order]
        ahead = array.device != "interp" and array.tier == "storage"
        most = array.cache.wave_pages(array._nsid)
        tickets: list[Prefetch] = []
        taken: list[Wave] = []
        coming = waves(array._origin + ascending * self._stride, self._nbytes, array.cache.page_size, most)
        try:
            for wave in coming:
                taken.append(wave)
                self.pages += len(wave.pages)
                tickets.append(self._read(taken, tickets, gap, most) if ahead else Prefetch())
                if len(taken) > 1:
                    self._rows(taken[-2], tickets[-2], ascending, target)
                if self._stopped:
                    return
            self._rows(taken[-1], tickets[-1], ascending, target)
        finally:
            if tickets:
                tickets[-1].cancel()

    def _read(self, taken: list[Wave], tickets: list[Prefetch], gap: int, most: int) -> Prefetch:
        """Begin to read what is not there of the last wave."""
        array, pages = self._array, taken[-1].pages
        wanted = absent(array, pages)
        if len(wanted) <= FEW:
            return Prefetch()
        merged = over_gaps(wanted, gap // array.cache.page_size)
        wanted = merged if len(merged) <= most else wanted
        self.asked += len(wanted)
        ticket: Prefetch = array.cache.bulk.prefetch(
            array._nsid,
            wanted,
            once=array.read_once,
            after=tickets[-1] if tickets else None,
            leave=taken[-3].pages if len(taken) > 2 and len(taken[-3].pages) else None,
        )
        return ticket

    def _rows(self, wave: Wave, ticket: Prefetch, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Copy the rows of a wave when its pages have come."""
        ticket.exception()
        self._take(rows[wave.low : wave.high], places[wave.low : wave.high])

    def _gather(self, some: NDArray[np.int64], where: NDArray[np.int64]) -> None:
        cache = self._array.cache
        cache.run(
            gather_rows,
            len(some),
            self._array._nsid,
            some.ctypes.data,
            where.ctypes.data,
            len(some),
            self._array._origin,
            self._stride,
            self._nbytes,
            self._out,
            int(self._array.read_once),
            self._array.dtype.itemsize if cache.full else 0,
        )
