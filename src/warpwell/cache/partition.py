"""Partition: the split of a cache's memory into core records, page table, owner words and frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..targets import ALIGNMENT
from . import layout as at
from .sizes import format_size
from .word import FRAME_MAX

SMALL_TABLE = 64 * 1024
"""Bytes of page table that are not counted in the budget, so that a cache of one page is possible."""
TABLE_FRACTION = 2
"""A larger page table may take one half of the budget at most: the frames get the rest."""


@dataclass
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
        What commands say: the namespace's id there, and log2 of the bytes of a block.
    base : int
        First page number of the array.
    pool : int
        Index of the pool of frames that it uses.
    frame : int
        Frame of the first page where the pool has a frame for each page, else -1.
    """

    name: str
    nsid: int
    pages: int
    nbytes: int
    share: float | None
    host: int
    writable: bool = False
    wire: tuple[int, int] = (0, 9)
    base: int = 0
    pool: int = 0
    frame: int = -1


class ResidentPool:
    """What the host knows of a resident pool: whether all its pages are in the cache.

    Parameters
    ----------
    pages : int
        Pages of the pool's arrays.
    rarest : int
        Launches between two looks, at most. To look may cost a copy from the device, so it is done after one launch,
        two more, four more, and so on.
    """

    def __init__(self, pages: int, rarest: int = 1) -> None:
        self.pages = pages
        self.rarest = rarest
        self.complete = False
        self.soon()

    def soon(self) -> None:
        """Look after the next launch."""
        self._next = self._launches = 1

    def due(self) -> bool:
        """Count a launch; return whether to look after it."""
        if self.complete:
            return False
        self._launches -= 1
        if self._launches > 0:
            return False
        self._next = min(2 * self._next, self.rarest)
        self._launches = self._next
        return True


class Partition:
    """Sizes and offsets of a cache for its arrays; sets `base` and `pool` of their spaces.

    Attributes
    ----------
    frames, table_bytes, nbytes : int
        Number of frames; bytes of the table, and of everything.
    pools : list of (int, int)
        First frame and number of frames of each share.
    resident : list of bool
        Which pools have a frame for each page of their arrays.

    Raises
    ------
    ArgumentError
        The page table does not fit into the budget, or a share of the frames would have no frame.
    """

    def __init__(self, spaces: Sequence[PageSpace], *, budget: int, page_size: int) -> None:
        self.spaces = list(spaces)
        self.page_size = page_size
        base = 0
        for space in self.spaces:
            # groups of eight pages share a queue and never two arrays
            space.base = base
            base += -(-max(space.pages, 1) // at.MERGE_MAX) * at.MERGE_MAX
        self.table_bytes = 8 * base
        if self.table_bytes > max(budget // TABLE_FRACTION, SMALL_TABLE):
            raise errors.ArgumentError(
                f"a page table of {base:,} pages of {page_size} bytes takes {format_size(self.table_bytes)}, more than "
                f"half of the cache of {format_size(budget)}: choose a larger page_size or a larger cache"
            )
        counted = 0 if self.table_bytes <= SMALL_TABLE else self.table_bytes
        wanted = max(1, sum(space.pages for space in self.spaces))
        self.frames = max(1, min((budget - counted) // (page_size + 8), wanted, FRAME_MAX))
        self.pools = split(self.spaces, self.frames)
        self.resident = self._place()
        records = at.CORE_WORDS + at.SPACE_WORDS * len(self.spaces) + at.POOL_WORDS * len(self.pools)
        self._rings_at = _aligned(8 * records, ALIGNMENT)
        self._credits_at = _aligned(self._rings_at + 8 * sum(ring_words(n) for _, n in self.pools), ALIGNMENT)
        credit_bytes = at.CREDIT_BYTES * sum(credit_words(n) for _, n in self.pools)
        self._table_at = _aligned(self._credits_at + credit_bytes, ALIGNMENT)
        self._owners_at = _aligned(self._table_at + self.table_bytes, ALIGNMENT)
        self._frames_at = self._owners_at + _aligned(8 * self.frames, ALIGNMENT)
        self.nbytes = self._frames_at + self.frames * page_size

    def records(self, address: int) -> NDArray[np.int64]:
        """Return the core, space and pool records for memory that starts at `address`.

        The caller fills in the other words: queues, statistics, latch, timeout.
        """
        words = np.zeros(self._table_at // 8, np.int64)
        spaces_at = at.CORE_WORDS
        pools_at = spaces_at + at.SPACE_WORDS * len(self.spaces)
        words[at.C_PAGE_SHIFT] = self.page_size.bit_length() - 1
        words[at.C_TABLE] = address + self._table_at
        words[at.C_OWNERS] = address + self._owners_at
        words[at.C_FRAMES] = address + self._frames_at
        words[at.C_SPACES] = address + 8 * spaces_at
        words[at.C_N_SPACES] = len(self.spaces)
        words[at.C_POOLS] = address + 8 * pools_at
        for k, space in enumerate(self.spaces):
            record = words[spaces_at + k * at.SPACE_WORDS :]
            record[at.S_BASE], record[at.S_PAGES] = space.base, space.pages
            record[at.S_NSID], record[at.S_POOL] = space.nsid, space.pool
            record[at.S_HOST], record[at.S_BYTES] = space.host, space.nbytes
            record[at.S_CORE], record[at.S_FRAME] = address, space.frame
            record[at.S_WIRE], record[at.S_BLOCK_SHIFT] = space.wire
        ring, credits = self._rings_at, self._credits_at
        for k, (first, number) in enumerate(self.pools):
            record = words[pools_at + k * at.POOL_WORDS :]
            record[at.F_FIRST], record[at.F_COUNT] = first, number
            room = ring_words(number)
            record[at.F_RING], record[at.F_RING_MASK], record[at.F_STASH_ROOM] = address + ring, room - 1, room
            ring += 8 * room
            number_of_words = credit_words(number)
            record[at.F_CREDITS], record[at.F_CREDIT_MASK] = address + credits, number_of_words - 1
            record[at.F_RESIDENT] = int(self.resident[k])
            for j in range(number_of_words):
                share = (number - 1) // number_of_words + (j < (number - 1) % number_of_words)
                words[(credits + at.CREDIT_BYTES * j) // 8] = share
            credits += at.CREDIT_BYTES * number_of_words
        return words

    def _place(self) -> list[bool]:
        """Give each page a frame of its own where a pool has one for each; return which pools those are."""
        resident = []
        for k, (first, number) in enumerate(self.pools):
            members = [space for space in self.spaces if space.pool == k]
            resident.append(sum(space.pages for space in members) <= number)
            for space in members:
                space.frame = first if resident[k] else -1
                first += space.pages
        return resident


def ring_words(frames: int) -> int:
    """Return the size of the stash of a pool."""
    return min(1 << max(0, frames - 1).bit_length(), at.RING_MAX)


def credit_words(frames: int) -> int:
    """Return over how many words the credits of a pool are spread."""
    return min(1 << max(0, (frames // at.FRAMES_PER_CREDIT_WORD).bit_length() - 1), at.CREDIT_WORDS_MAX)


def split(spaces: Sequence[PageSpace], frames: int) -> list[tuple[int, int]]:
    """Split frames into the arrays' own pools and the common rest; sets `pool` of the spaces.

    Raises
    ------
    ArgumentError
        A share, or the rest, would have no frame.
    """
    pools: list[tuple[int, int]] = []
    first = 0
    for space in spaces:
        if space.share is not None:
            number = max(1, int(space.share * frames))
            space.pool = len(pools)
            pools.append((first, number))
            first += number
    common = [space for space in spaces if space.share is None]
    if (common and first >= frames) or first > frames:
        raise errors.ArgumentError(
            f"{frames} frames are too few for these shares: enlarge cache or take a smaller page_size"
        )
    if common:
        for space in common:
            space.pool = len(pools)
        pools.append((first, frames - first))
    return pools


def _aligned(value: int, unit: int) -> int:
    return -(-value // unit) * unit
