"""Written: which pages were written since their array's last flush, so that a loss of the drive can be told of by page.

What a drive has taken is durable only after a Flush. Device code keeps the numbers of the pages that were written in a
ring behind the statistics, at the count of pages written (`lookup.note_written`). A successful flush of an array moves
its *mark* to the count as it was before the Flush was sent. After a loss everything behind the mark is in question:

- What is still in the cache is DIRTY again, and will be written again. A page that is VALID has the newest bytes.
- What is not, is *in doubt*: the drive may have its bytes, older ones, or both in part. The array refuses launches, and
  says so at each flush, until somebody has accepted that. A flush writes all the same: what it writes is newer.

If more pages were written than the ring holds, all pages of the array that are not in the cache are in doubt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .._ranges import Range, join_ranges, ranges_of
from ..targets import Block
from . import layout as at
from .partition import PageSpace
from .word import DIRTY, FRAME_SHIFT, STATE, VALID

"""First page and end of a range of an array's pages."""


class Written:
    """The marks of a cache's arrays, and their pages in doubt.

    Parameters
    ----------
    stats : Block
        Statistics and ring.
    """

    def __init__(self, stats: Block) -> None:
        self._stats = stats
        self._marks: dict[int, int] = {}
        self._doubts: dict[int, list[Range]] = {}

    def count(self) -> int:
        """Return how many pages were written so far."""
        return int(self._stats.read(8 * at.N_WRITEBACKS, 8).view(np.int64)[0])

    def begin(self, nsid: int) -> None:
        """Begin with an array."""
        self._doubts.pop(nsid, None)

    def renumbered(self, nsids: Iterable[int]) -> None:
        """Note that pages of these arrays, all others being gone, get new numbers: each was flushed."""
        self._marks = dict.fromkeys(nsids, self.count())

    @contextlib.contextmanager
    def flushing(self, nsid: int) -> Iterator[None]:
        """Send a Flush in the block: if it succeeds, what was written before the block is durable."""
        count = self.count()
        yield
        self._marks[nsid] = count

    def doubts(self, nsid: int) -> list[Range]:
        """Return the ranges of an array's pages that are in doubt, in order."""
        return list(self._doubts.get(nsid, ()))

    def accept(self, nsid: int) -> None:
        """Forget what is in doubt: somebody was told."""
        self._doubts.pop(nsid, None)

    def lost(self, spaces: Iterable[PageSpace], core: Block, words: NDArray[np.int64], frames: int) -> None:
        """Make pages that were written since the last flush DIRTY again, and those that are gone doubtful.

        The drive was lost; no command and no launch is in flight. `words` are those of the core record in `core`.
        """
        count = self.count()
        ring = self._stats.read(8 * at.STATS_WORDS, 8 * at.WRITTEN_WORDS).view(np.int64)
        for space in spaces:
            mark = self._marks.get(space.nsid, count)
            self._marks[space.nsid] = count
            if not space.writable or space.host or mark == count:
                continue
            first, end = space.base, space.base + space.pages
            if count - mark > at.WRITTEN_WORDS:
                kept = _dirty_again(partial(_inside, first, end), core, words, frames)
                edges = [first - 1, *np.sort(kept).tolist(), end]
                gone = [(before + 1, after) for before, after in pairwise(edges) if after > before + 1]
            else:
                pages = np.unique(ring[np.arange(mark, count) % at.WRITTEN_WORDS])
                pages = pages[(pages >= first) & (pages < end)]
                kept = _dirty_again(partial(np.isin, test_elements=pages), core, words, frames)
                gone = ranges_of(np.setdiff1d(pages, kept))
            doubts = [*self._doubts.get(space.nsid, ()), *((low - first, high - first) for low, high in gone)]
            if doubts:
                self._doubts[space.nsid] = join_ranges(doubts)


def _inside(first: int, end: int, pages: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (pages >= first) & (pages < end)


def _dirty_again(
    choose: Callable[[NDArray[np.int64]], NDArray[np.bool_]], core: Block, words: NDArray[np.int64], frames: int
) -> NDArray[np.int64]:
    """Make those pages DIRTY that are in the cache and that `choose` chooses of their numbers; return them."""

    def offset(word: int) -> int:
        return int(words[word]) - core.address

    owners = core.read(offset(at.C_OWNERS), 8 * frames).view(np.int64)
    owned = np.flatnonzero(owners > 0)
    of = (owners[owned] & at.OWNER_PAGE) - 1
    chosen = choose(of)
    found = []
    for frame, page in zip(owned[chosen].tolist(), of[chosen].tolist(), strict=True):
        where = offset(at.C_TABLE) + 8 * page
        word = int(core.read(where, 8).view(np.int64)[0])
        # an owner word may be older than the page's eviction
        if word & STATE == VALID and (word >> FRAME_SHIFT) & _FRAMES == frame:
            core.write(where, np.array([word | DIRTY], np.int64))
            found.append(page)
    return np.array(found, np.int64)


_FRAMES = (1 << (64 - FRAME_SHIFT)) - 1


def text_of(ranges: list[Range], most: int = 8) -> str:
    """Return ranges in words, the first ones: "3, 8-11 and 5 more ranges"."""
    said = ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ranges[:most])
    return said + (f" and {len(ranges) - most} more ranges" if len(ranges) > most else "")
