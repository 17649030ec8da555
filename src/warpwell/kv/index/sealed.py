"""The sealed index: the locations of all records of a snapshot, in a file that processes map and never change.

A file has blocks of 4 KiB. A block ends with its number, the file's salt and a CRC-32C, which native code checks at the
first look-up of a process in the block. A look-up in a damaged block returns `DAMAGED`, so its keys never seem absent.
If a page cannot be read later, it reads as zeros (`warpwell.targets.bus_error`), which no valid block ends with.

Blocks of records have two types: a hash table with the slots of `index`, and an array for keys 0, 1, ..., N - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import device, view_of
from ...targets.primitives import (
    SYSTEM,
    crc32c,
    fetch_or,
    i64,
    load_relaxed,
    load_weak_as,
    prefetch,
    store_weak_as,
)
from ..log.checksum import crc32c_many
from ..log.format import DAMAGED, KEY_LEN_SHIFT, SLOT_BYTES, Superblock, key_len_of, offset_of, segment_of, size_of
from ..native import INT64, UINT32, address_of, compiled, huge_words

# -- slot of a hash table --------------------------------------------------------------------------------------
SLOT = SLOT_BYTES
SLOT_KEY0 = 0
SLOT_KEY1 = 8
SLOT_LOC0 = 16
SLOT_LOC1 = 24

# -- block -----------------------------------------------------------------------------------------------------
BLOCK = 4096
HASHED, ARRAY, ENDS = 1, 2, 3
"""Types of blocks: slots of a hash table; locations of keys 0, 1, ...; segments with the ends of their values."""
BLOCK_SLOTS = 127
BLOCK_PAIRS = 255
"""Number of pairs in a block: locations, or segments with their ends."""
TAG_BYTE = 4080
"""Offset of a word with the block's number, and the file's salt in the upper half."""
TYPE_BYTE = 4088
CRC_BYTE = 4092

# -- descriptor of a mapped file, in words: then a bit for each block that was checked -----------------------------
B_DATA = 0
"""Address of the first block, or 0 after the file was closed: then every look-up returns `DAMAGED`."""
B_TYPE = 1
B_POSITIONS = 2
"""Number of slots or locations."""
B_TAG = 3
DESCRIPTOR_WORDS = 8

MAX_POSITIONS = (1 << 31) - 1
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 2, 3
"""Share of slots that are used."""

_MIX1 = -0x00AE502812AA7333  # 0xFF51AFD7ED558CCD as a signed word
_MIX2 = -0x3B314601E57A13AD  # 0xC4CEB9FE1A85EC53
_LOW = 0x7FFFFFFF


@device
def hash_of(key0: int, key1: int, length: int) -> int:
    """Return the hash of a key. It is part of the format: it never changes."""
    h = i64(key0 ^ i64(i64(key1 + length) * _MIX2))
    h = i64((h ^ ((h >> 33) & _LOW)) * _MIX1)
    h = i64((h ^ ((h >> 33) & _LOW)) * _MIX2)
    return h ^ ((h >> 33) & _LOW)


@device
def has_key(slot: int, loc1: int, key0: int, key1: int, length: int) -> bool:
    """Return whether a used slot has a key; `loc1` is the slot's second location word."""
    same = load_relaxed(slot + SLOT_KEY0, SYSTEM) == key0 and load_relaxed(slot + SLOT_KEY1, SYSTEM) == key1
    return same and (loc1 >> KEY_LEN_SHIFT) & 31 == length


@device
def first_position(hashed: int, positions: int) -> int:
    """Return the first slot to probe for a hash."""
    return (((hashed >> 32) & 0xFFFFFFFF) * positions) >> 32


@device
def position_address(data: int, position: int, per_block: int, nbytes: int) -> int:
    """Return the address of a slot or location of `nbytes` bytes."""
    block = position // per_block
    return data + BLOCK * block + nbytes * (position - per_block * block)


@device
def is_intact(address: int, tag: int, block_type: int) -> bool:
    """Return whether a block has the expected number, salt, type and checksum."""
    last: int = load_weak_as(address + TYPE_BYTE, INT64)
    if load_weak_as(address + TAG_BYTE, INT64) != tag or last & 0xFFFFFFFF != block_type:
        return False
    found: int = crc32c(address, CRC_BYTE, 0)
    return found == (last >> 32) & 0xFFFFFFFF


@device
def is_checked(sealed: int, data: int, block: int, block_type: int) -> bool:
    """Return whether a block is intact; check it at the first call of a process."""
    bits = sealed + 8 * (DESCRIPTOR_WORDS + (block >> 6))
    if (load_relaxed(bits, SYSTEM) >> (block & 63)) & 1 != 0:
        return True
    if not is_intact(data + BLOCK * block, load_relaxed(sealed + 8 * B_TAG, SYSTEM) | block, block_type):
        return False
    fetch_or(bits, i64(1 << (block & 63)), SYSTEM)
    return True


@device
def look_up_sealed(sealed: int, key0: int, key1: int, length: int, hashed: int) -> tuple[int, int]:
    """Return the location of a key, as two words; (0, 0) if it is absent, (`DAMAGED`, 0) if its block is damaged."""
    data = load_relaxed(sealed + 8 * B_DATA, SYSTEM)
    positions = load_relaxed(sealed + 8 * B_POSITIONS, SYSTEM)
    if data == 0:
        return DAMAGED, 0
    if load_relaxed(sealed + 8 * B_TYPE, SYSTEM) == ARRAY:
        if length != 8 or key0 < 0 or key0 >= positions:
            return 0, 0
        if not is_checked(sealed, data, key0 // BLOCK_PAIRS, ARRAY):
            return DAMAGED, 0
        location = position_address(data, key0, BLOCK_PAIRS, 16)
        loc0 = load_relaxed(location, SYSTEM)
        loc1 = load_relaxed(location + 8, SYSTEM)
        if loc0 <= 0 or loc1 == 0:  # the page could not be read again
            return DAMAGED, 0
        return loc0, loc1
    position = first_position(hashed, positions)
    block = position // BLOCK_SLOTS
    slot = position_address(data, position, BLOCK_SLOTS, SLOT)
    while is_checked(sealed, data, block, HASHED):
        end = data + BLOCK * block + BLOCK_SLOTS * SLOT
        while slot < end:
            loc1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
            if loc1 == 0:
                tag = load_relaxed(sealed + 8 * B_TAG, SYSTEM) | block
                if load_relaxed(data + BLOCK * block + TAG_BYTE, SYSTEM) != tag:  # the page could not be read again
                    return DAMAGED, 0
                return 0, 0
            if has_key(slot, loc1, key0, key1, length):
                loc0 = load_relaxed(slot + SLOT_LOC0, SYSTEM)
                if loc0 <= 0:
                    return DAMAGED, 0
                return loc0, loc1
            slot += SLOT
        block += 1
        if BLOCK_SLOTS * block == positions:
            block = 0
        slot = data + BLOCK * block
    return DAMAGED, 0


@device
def prefetch_sealed(sealed: int, key0: int, hashed: int) -> None:
    """Prefetch the slot or location of a key."""
    data = load_relaxed(sealed + 8 * B_DATA, SYSTEM)
    if load_relaxed(sealed + 8 * B_TYPE, SYSTEM) == ARRAY:
        prefetch(position_address(data, key0, BLOCK_PAIRS, 16))
    else:
        position = first_position(hashed, load_relaxed(sealed + 8 * B_POSITIONS, SYSTEM))
        slot = position_address(data, position, BLOCK_SLOTS, SLOT)
        prefetch(slot)
        prefetch(slot + 64)


# -- writing and reading whole files ------------------------------------------------------------------------------


def fill_blocks(data: int, block_type: int, positions: int, slots: int, count: int) -> int:
    """Store slots with different keys in zeroed blocks."""
    for k in range(count):
        slot = slots + SLOT * k
        key0 = load_weak_as(slot + SLOT_KEY0, INT64)
        key1 = load_weak_as(slot + SLOT_KEY1, INT64)
        loc1 = load_weak_as(slot + SLOT_LOC1, INT64)
        if block_type == ARRAY:
            target = position_address(data, key0, BLOCK_PAIRS, 16) - SLOT_LOC0
        else:
            position = first_position(hash_of(key0, key1, (loc1 >> KEY_LEN_SHIFT) & 31), positions)
            target = position_address(data, position, BLOCK_SLOTS, SLOT)
            while load_weak_as(target + SLOT_LOC1, INT64) != 0:
                position += 1
                if position == positions:
                    position = 0
                target = position_address(data, position, BLOCK_SLOTS, SLOT)
            store_weak_as(target + SLOT_KEY0, key0, INT64)
            store_weak_as(target + SLOT_KEY1, key1, INT64)
        store_weak_as(target + SLOT_LOC0, load_weak_as(slot + SLOT_LOC0, INT64), INT64)
        store_weak_as(target + SLOT_LOC1, loc1, INT64)
    return 0


def end_blocks(data: int, first: int, count: int, tag: int, block_type: int) -> int:
    """Store numbers, type and checksums of blocks; `first` is the number of the block at `data`."""
    for k in range(count):
        address = data + BLOCK * k
        store_weak_as(address + TAG_BYTE, tag | (first + k), INT64)
        store_weak_as(address + TYPE_BYTE, block_type, UINT32)
        store_weak_as(address + CRC_BYTE, crc32c(address, CRC_BYTE, 0), UINT32)
    return 0


def tag_of(salt: int) -> int:
    """Return the tag of the block 0 of a file."""
    return (salt - (salt >> 31 << 32)) << 32


def block_counts(block_type: int, positions: int, segments: int) -> tuple[int, int]:
    """Return the numbers of blocks of records and of blocks of segments."""
    return -(-positions // (BLOCK_PAIRS if block_type == ARRAY else BLOCK_SLOTS)), -(-segments // BLOCK_PAIRS)


def new_blocks(slots: NDArray[np.int64], salt: int) -> tuple[int, int, int, memoryview]:
    """Return type, positions, number of segments, and blocks for slots (int64 [N, 4]) with different keys."""
    count = len(slots)
    numbers = slots[:, 0]
    is_array = bool((key_len_of(slots[:, 3]) == 8).all()) and (
        not count or (int(numbers.min()) == 0 and int(numbers.max()) == count - 1)
    )
    block_type, positions = ARRAY, count
    if not is_array:
        block_type = HASHED
        positions = -(-(count * _LOAD_DENOMINATOR // _LOAD_NUMERATOR + 1) // BLOCK_SLOTS) * BLOCK_SLOTS
    if positions > MAX_POSITIONS:
        raise errors.StorageFullError(f"an index holds at most {MAX_POSITIONS} slots: use another store")
    ends = segment_ends(slots[:, 2:])
    blocks, end_count = block_counts(block_type, positions, len(ends))
    pages = huge_words(max(1, blocks + end_count) * BLOCK)
    data = address_of(pages)
    slots = np.ascontiguousarray(slots)
    compiled(fill_blocks)(data, block_type, positions, address_of(slots), count)
    compiled(end_blocks)(data, 0, blocks, tag_of(salt), block_type)
    for k in range(end_count):
        part = ends[k * BLOCK_PAIRS : (k + 1) * BLOCK_PAIRS].reshape(-1)
        at = (blocks + k) * (BLOCK // 8)
        pages[at : at + len(part)] = part
    compiled(end_blocks)(data + BLOCK * blocks, blocks, end_count, tag_of(salt), ENDS)
    return block_type, positions, len(ends), pages.data.cast("B")[: (blocks + end_count) * BLOCK]


def segment_ends(locations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the segments with values, and the byte after the last value of each, int64 [N, 2]."""
    loc0 = locations[:, 0]
    sizes = size_of(loc0, locations[:, 1])
    ids = segment_of(loc0)
    ends = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
    np.maximum.at(ends, ids, np.where(sizes > 0, offset_of(loc0) + sizes, 0))
    used = np.flatnonzero(ends)
    return np.column_stack([used, ends[used]])


def block_slots(rows: NDArray[np.int64], block_type: int) -> NDArray[np.int64]:
    """Return the slots in blocks, int64 [N, 4]; `rows` is int64 [blocks, 512]."""
    if block_type == HASHED:
        slots = rows[:, : BLOCK_SLOTS * 4].reshape(-1, 4)
    else:
        locations = rows[:, : BLOCK_PAIRS * 2].reshape(-1, 2)
        slots = np.zeros((len(locations), 4), np.int64)
        numbers = rows[:, TAG_BYTE // 8] & 0xFFFFFFFF
        slots[:, 0] = (numbers[:, None] * BLOCK_PAIRS + np.arange(BLOCK_PAIRS)).reshape(-1)
        slots[:, 2:] = locations
    used: NDArray[np.int64] = slots[slots[:, 3] != 0]
    return used


def check_blocks(rows: NDArray[np.int64], first: int, tag: int | None) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which blocks have the expected number, tag and checksum, and the types of all blocks.

    Parameters
    ----------
    rows : int64 [blocks, 512]
        C order.
    first : int
        Number of the first block.
    tag : int or None
        The file's (`tag_of`), if it is known.
    """
    numbers, tags, ends = first + np.arange(len(rows)), rows[:, TAG_BYTE // 8], rows[:, TYPE_BYTE // 8]
    crcs = crc32c_many(address_of(rows) + BLOCK * np.arange(len(rows)), np.full(len(rows), CRC_BYTE))
    found = tags & 0xFFFFFFFF if tag is None else tags - tag
    return (ends >> 32 & 0xFFFFFFFF == crcs) & (found == numbers), ends & 0xFFFFFFFF


def read_damaged(data: bytes, salt: int | None, block_type: int | None) -> tuple[NDArray[np.int64], list[int]]:
    """Return possible slots in the blocks of a damaged file, int64 [N, 4], and the numbers of damaged blocks.

    `salt` and `block_type` are from the superblock, None if it is damaged.
    """
    rows = np.frombuffer(data, np.int64, len(data) // BLOCK * (BLOCK // 8)).reshape(-1, BLOCK // 8).copy()
    good, types = check_blocks(rows, 0, None if salt is None else tag_of(salt))
    if block_type is None:
        block_type = ARRAY if (types[good] == ARRAY).any() else HASHED
    rows[:, TAG_BYTE // 8] = np.arange(len(rows))
    return block_slots(rows[~good | (types == block_type)], block_type), np.flatnonzero(~good).tolist()


class SealedIndex:
    """An index file that is mapped.

    Parameters
    ----------
    path : str
    data : int
        Address of the blocks.
    block : Superblock
    release : callable
        Releases the memory at `data`.

    Attributes
    ----------
    address : int
        Address of the descriptor, for native code.
    nbytes : int
        Size of the blocks in bytes.
    """

    def __init__(self, path: str, data: int, block: Superblock, release: Callable[[], object]) -> None:
        self.path, self.count, self.value_bytes = path, block.count, block.value_bytes
        self._segments, self._release = block.segments, release
        self._blocks, self._end_blocks = block_counts(block.block_type, block.positions, block.segments)
        self.nbytes = BLOCK * (self._blocks + self._end_blocks)
        self._descriptor = np.zeros(DESCRIPTOR_WORDS + -(-self._blocks // 64), np.int64)
        self._descriptor[[B_DATA, B_TYPE, B_POSITIONS, B_TAG]] = (
            data,
            block.block_type,
            block.positions,
            tag_of(block.salt),
        )
        self.address = address_of(self._descriptor)

    def ends(self) -> NDArray[np.int64]:
        """Return segments and the byte after the last value in each, int64 [N, 2].

        Raises
        ------
        CorruptionError
        """
        rows, intact = self._read(self._blocks, self._end_blocks, ENDS)
        if not intact.all():
            raise self.damage(self._blocks + int(np.argmin(intact)))
        return rows[:, : BLOCK_PAIRS * 2].reshape(-1, 2)[: self._segments].copy()

    def slots(self, damaged: list[errors.CorruptionError] | None = None) -> NDArray[np.int64]:
        """Return all records, int64 [N, 4]: key0, key1, loc0, loc1. With `damaged`, append errors instead.

        Raises
        ------
        CorruptionError
        """
        block_type = int(self._descriptor[B_TYPE])
        rows, intact = self._read(0, self._blocks, block_type)
        if intact.all():
            return block_slots(rows, block_type)
        bad = [self.damage(block) for block in np.flatnonzero(~intact).tolist()]
        if damaged is None:
            raise bad[0]
        damaged += bad
        return block_slots(rows[intact], block_type)

    def _read(self, first: int, count: int, block_type: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return blocks, int64 [N, 512], and which are intact."""
        data = int(self._descriptor[B_DATA])
        if data == 0:
            raise self.damage(first)
        rows = view_of(data + BLOCK * first, BLOCK * count, np.int64).reshape(count, BLOCK // 8)
        good, types = check_blocks(rows, first, int(self._descriptor[B_TAG]))
        return rows, good & (types == block_type)

    def damage(self, block: int | None = None) -> errors.CorruptionError:
        """Return the error for a damaged block; without a number for a block that native code has found."""
        where = "a block" if block is None else f"the block {block}"
        return errors.CorruptionError(
            f"{self.path}: {where} of the index is damaged (its CRC-32C is wrong): copy the records into a new store "
            "with `warpwell kv salvage`, or restore a copy of the store",
            path=self.path,
            offset=None if block is None else BLOCK * (1 + block),
        )

    def disable(self) -> None:
        """Make every later look-up return `DAMAGED`."""
        self._descriptor[B_DATA] = 0

    def close(self) -> None:
        """Release the memory (idempotent). All readers must have left."""
        self.disable()
        release, self._release = self._release, lambda: None
        release()
