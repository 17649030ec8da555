"""Unflushed log: the pages written since their array's last flush, which are uncertain if a drive is lost.

Written bytes are durable only after a Flush. Device code records the numbers of written pages in a ring after the
statistics, at the count of pages written (`lookup.record_written`). A successful flush of an array moves its *mark* to
the count as it was before the Flush was sent. If the drive is lost, all pages recorded after the mark are uncertain:

- A page that is still in the cache becomes DIRTY, and is written again. A page that is VALID has the newest bytes.
- Any other page is *suspect*: the drive may have its bytes, older ones, or parts of both. The array refuses launches,
  and each flush raises an error, until the caller accepts the loss. A flush still writes: its bytes are newer.

If more pages were written than the ring has words, all pages of the array that are not in the cache are suspect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from .._ranges import Range, ranges_of
from ..targets import Block
from . import layout as at
from .partition import PageSpace
from .word import DIRTY, FRAME_MAX, FRAME_SHIFT, STATE, VALID


class UnflushedLog:
    """The marks of a cache's arrays, and their suspect pages.

    Parameters
    ----------
    stats : Block
        Statistics and ring.
    """

    def __init__(self, stats: Block) -> None:
        self._stats = stats
        self._marks: dict[int, int] = {}
        self._suspects: dict[int, list[Range]] = {}

    def count(self) -> int:
        """Return how many pages were written so far."""
        return int(self._stats.read(8 * at.N_WRITEBACKS, 8).view(np.int64)[0])

    def renumber(self, nsids: Iterable[int]) -> None:
        """Assign new numbers to the pages of these arrays, which are flushed; all other arrays are closed."""
        self._marks = dict.fromkeys(nsids, self.count())

    @contextlib.contextmanager
    def flushing(self, nsid: int) -> Iterator[None]:
        """Send a Flush in the block: if it succeeds, all pages written before the block are durable."""
        count = self.count()
        yield
        self._marks[nsid] = count

    def suspects(self, nsid: int) -> list[Range]:
        """Return the ranges of an array's suspect pages, in order."""
        return list(self._suspects.get(nsid, ()))

    def forget(self, nsid: int) -> None:
        """Drop an array's suspect pages, because the caller accepts the loss or the array is new."""
        self._suspects.pop(nsid, None)

    def record_loss(self, spaces: Iterable[PageSpace], core: Block, owners_address: int, frames: int) -> None:
        """Make pages written since the last flush DIRTY if they are in the cache, else suspect.

        The drive was lost; no command and no launch is in flight. `core` has the page table and the owner words.
        """
        count = self.count()
        ring = self._stats.read(8 * at.STATS_WORDS, 8 * at.WRITTEN_WORDS).view(np.int64)
        owners = core.read(owners_address - core.address, 8 * frames).view(np.int64)
        for space in spaces:
            mark = self._marks.get(space.nsid, count)
            self._marks[space.nsid] = count
            if not space.writable or space.host or mark == count:
                continue
            is_suspect = np.full(space.pages, count - mark > at.WRITTEN_WORDS)
            if not is_suspect.all():
                pages = ring[np.arange(mark, count) % at.WRITTEN_WORDS] - space.base
                is_suspect[pages[(pages >= 0) & (pages < space.pages)]] = True
            _redirty_cached(space, is_suspect, core, owners)
            for first, end in self.suspects(space.nsid):
                is_suspect[first:end] = True
            self._suspects[space.nsid] = ranges_of(np.flatnonzero(is_suspect))


def _redirty_cached(space: PageSpace, is_suspect: NDArray[np.bool_], core: Block, owners: NDArray[np.int64]) -> None:
    """Make suspect pages of an array DIRTY if they are in the cache; they are not suspect."""
    pages = (owners & at.OWNER_PAGE) - 1 - space.base
    owned = np.flatnonzero((owners > 0) & (pages >= 0) & (pages < space.pages))
    for frame in owned[is_suspect[pages[owned]]].tolist():
        offset = space.words["table"] - core.address + 8 * int(pages[frame])
        word = int(core.read(offset, 8).view(np.int64)[0])
        # an owner word may be older than the page's eviction
        if word & STATE == VALID and (word >> FRAME_SHIFT) & FRAME_MAX == frame:
            core.write(offset, np.array([word | DIRTY], np.int64))
            is_suspect[pages[frame]] = False


def text_of(ranges: list[Range], max_ranges: int = 8) -> str:
    """Return ranges as text, the first ones: "3, 8-11 and 5 more ranges"."""
    text = ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ranges[:max_ranges])
    return text + (f" and {len(ranges) - max_ranges} more ranges" if len(ranges) > max_ranges else "")
