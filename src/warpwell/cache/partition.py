"""Partition: the split of a cache's memory into core records, page table, owner words and frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..targets import ALIGNMENT
from . import layout as at
from .statistics import format_size
from .word import FRAME_MAX

SMALL_TABLE = 64 * 1024
"""Bytes of page table that are not counted in the budget, so that a cache of one page is possible."""
TABLE_FRACTION = 2
"""A larger page table may take at most one half of the budget; the frames get the other half."""


@dataclass(eq=False)
class FramePool:
    """A share of a cache's frames: of one array, or of all arrays without a share.

    Attributes
    ----------
    index, first, frames : int
        Position among the pools; first frame and number of frames.
    pages : int
        Pages of the arrays that use the pool.
    address : int
        Address of the pool's record.
    fully_resident : bool
        Whether each page had a frame of its own and was in the cache at the last residency check.
    """

    index: int
    first: int
    frames: int
    pages: int = 0
    address: int = 0
    fully_resident: bool = False
    _launches: int = 0

    @property
    def direct_mapped(self) -> bool:
        """Whether the pool has a frame for each page of its arrays: then each page has a frame of its own."""
        return self.pages <= self.frames

    def schedule_residency_check(self, *, evicts: bool = False) -> None:
        """Check after the next launch; until then, pages may be missing if the caller evicts pages."""
        self._launches = 0
        if evicts:
            self.fully_resident = False

    def is_residency_check_due(self, max_launches: int) -> bool:
        """Count a launch; return whether to check after it.

        A check may cost a copy from the device, so it follows launches 1, 2, 4 and so on, with a maximum distance of
        `max_launches` launches.
        """
        if self.fully_resident or not self.direct_mapped:
            return False
        self._launches += 1
        return not self._launches & (self._launches - 1) or self._launches % max_launches == 0


@dataclass(eq=False)
class PageSpace:
    """An array's part of a cache: its page numbers, its share of the frames, the address of its data.

    Attributes
    ----------
    share : float or None
        Fraction of the frames that is the array's own; None for the common rest.
    host : int
        Address of the data in shared memory ("host-cached" tier), or 0.
    writable : bool
        Whether it has pages to write back.
    wire : (int, int)
        Namespace id in commands, and log2 of the bytes of a block.
    index, base : int
        Position among the cache's arrays; first page number of the array.
    words : dict
        Members of the array's views: addresses of the core record, of the array's space record, of the word of its
        first page, and of frame 0. `direct_mapped` is 1 if each page has a frame of its own: then `data` is the address
        of the first page's frame, and `owned` the address of its owner word.
    """

    name: str
    nsid: int
    pages: int
    share: float | None
    host: int
    writable: bool = False
    wire: tuple[int, int] = (0, 9)
    index: int = 0
    base: int = 0
    pool: FramePool = field(default_factory=lambda: FramePool(0, 0, 0))
    words: dict[str, int] = field(default_factory=dict)


class Partition:
    """Sizes and offsets of a cache for its arrays; sets `index`, `base`, `pool` and `words` of their spaces.

    Attributes
    ----------
    frames, table_bytes, nbytes : int
        Number of frames; bytes of the table, and of everything.
    pools : list of FramePool

    Raises
    ------
    ArgumentError
        The page table does not fit into the budget, or a share of the frames would have no frame.
    """

    def __init__(self, spaces: Sequence[PageSpace], *, budget: int, page_size: int) -> None:
        self.spaces = list(spaces)
        self.page_size = page_size
        base = 0
        for index, space in enumerate(self.spaces):
            # groups of eight pages share a queue and never two arrays
            space.index, space.base = index, base
            base += -(-max(space.pages, 1) // at.MERGE_MAX) * at.MERGE_MAX
        self.table_bytes = 8 * base
        if self.table_bytes > max(budget // TABLE_FRACTION, SMALL_TABLE):
            raise errors.ArgumentError(
                f"a page table of {base:,} pages of {page_size} bytes takes {format_size(self.table_bytes)}, more than "
                f"half of the cache of {format_size(budget)}: choose a larger page_size, or a cache of at least "
                f"{-(-TABLE_FRACTION * self.table_bytes // 1024)} KiB"
            )
        counted = 0 if self.table_bytes <= SMALL_TABLE else self.table_bytes
        all_pages = max(1, sum(space.pages for space in self.spaces))
        self.frames = max(1, min((budget - counted) // (page_size + 8), all_pages, FRAME_MAX))
        self.pools = split(self.spaces, self.frames)
        self._pools_at = 8 * (at.CORE_WORDS + at.SPACE_WORDS * len(self.spaces))
        self._offsets: dict[str, int] = {}
        self.nbytes = self._pools_at + 8 * at.POOL_WORDS * len(self.pools)
        for part, nbytes in (
            ("rings", 8 * sum(ring_words(pool.frames) for pool in self.pools)),
            ("credits", at.CREDIT_BYTES * sum(credit_words(pool.frames) for pool in self.pools)),
            ("table", self.table_bytes),
            ("owners", 8 * self.frames),
            ("frames", page_size * self.frames),
        ):
            self._offsets[part] = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
            self.nbytes = self._offsets[part] + nbytes

    def records(self, address: int) -> NDArray[np.int64]:
        """Return the core, space and pool records for memory that starts at `address`.

        The caller fills in the other words: queues, statistics, latch, timeout.
        """
        rings, credits, table, owners, frames = (address + offset for offset in self._offsets.values())
        memory = np.zeros((table - address) // 8, np.int64)
        memory[at.C_PAGE_SHIFT] = self.page_size.bit_length() - 1
        memory[at.C_TABLE], memory[at.C_OWNERS], memory[at.C_FRAMES] = table, owners, frames
        memory[at.C_SPACES], memory[at.C_N_SPACES] = address + 8 * at.CORE_WORDS, len(self.spaces)
        memory[at.C_POOLS] = address + self._pools_at
        for space in self.spaces:
            offset = at.CORE_WORDS + at.SPACE_WORDS * space.index
            frame = self._first_frame(space)
            record = memory[offset:]
            record[at.S_BASE], record[at.S_PAGES] = space.base, space.pages
            record[at.S_NSID], record[at.S_POOL] = space.nsid, space.pool.index
            record[at.S_HOST] = space.host
            record[at.S_CORE], record[at.S_FRAME] = address, frame
            record[at.S_WIRE], record[at.S_BLOCK_SHIFT] = space.wire
            space.words = {
                "core": address,
                "record": address + 8 * offset,
                "table": table + 8 * space.base,
                "frames": frames,
                "direct_mapped": int(frame >= 0),
                "data": frames + frame * self.page_size,
                "owned": owners + 8 * frame,
            }
        for pool in self.pools:
            offset = self._pools_at + 8 * at.POOL_WORDS * pool.index
            pool.address = address + offset
            record = memory[offset // 8 :]
            record[at.F_FIRST], record[at.F_COUNT] = pool.first, pool.frames
            room, n = ring_words(pool.frames), credit_words(pool.frames)
            record[at.F_RING], record[at.F_RING_MASK], record[at.F_STASH_ROOM] = rings, room - 1, room
            record[at.F_CREDITS], record[at.F_CREDIT_MASK] = credits, n - 1
            record[at.F_RESIDENT] = int(pool.direct_mapped)
            share, remainder = divmod(pool.frames - 1, n)
            credits_of_cores = memory[(credits - address) // 8 :: at.CREDIT_BYTES // 8]
            credits_of_cores[:n] = share + (np.arange(n) < remainder)
            rings += 8 * room
            credits += at.CREDIT_BYTES * n
        return memory

    def _first_frame(self, space: PageSpace) -> int:
        """Return the frame of an array's first page if each page has a frame of its own, else -1."""
        if not space.pool.direct_mapped:
            return -1
        before = self.spaces[: space.index]
        return space.pool.first + sum(earlier.pages for earlier in before if earlier.pool is space.pool)


def ring_words(frames: int) -> int:
    """Return the size of the free list of a pool."""
    return min(1 << max(0, frames - 1).bit_length(), at.RING_MAX)


def credit_words(frames: int) -> int:
    """Return over how many words the credits of a pool are spread."""
    return min(1 << max(0, (frames // at.FRAMES_PER_CREDIT_WORD).bit_length() - 1), at.CREDIT_WORDS_MAX)


def split(spaces: Sequence[PageSpace], frames: int) -> list[FramePool]:
    """Split frames into the arrays' own pools and the common rest; sets `pool` of the spaces.

    Raises
    ------
    ArgumentError
        A share, or the rest, would have no frame.
    """
    pools: list[FramePool] = []
    first = 0
    for space in spaces:
        if space.share is not None:
            space.pool = FramePool(len(pools), first, max(1, int(space.share * frames)), pages=space.pages)
            pools.append(space.pool)
            first += space.pool.frames
    common = [space for space in spaces if space.share is None]
    if (common and first >= frames) or first > frames:
        raise errors.ArgumentError(
            f"{frames} frames are too few for these shares: enlarge cache or take a smaller page_size"
        )
    if common:
        pools.append(FramePool(len(pools), first, frames - first, pages=sum(space.pages for space in common)))
        for space in common:
            space.pool = pools[-1]
    return pools
