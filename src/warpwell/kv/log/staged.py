"""Staged records: puts of single records, which are appended as a group.

`Store.put` only keeps Python objects in a dict. One native call turns them into journal records and copies of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import device
from ...targets.primitives import copy_bytes, copy_crc32c, load_weak_as, store_weak_as
from ..native import CONTENTS, INT64, SIZE, TUPLE_ITEMS, TYPE, address_of, compiled, items_of
from .format import (
    COMMIT,
    CRC_SHIFT,
    INLINE,
    INTEGER,
    KEY_LEN_SHIFT,
    MAGIC,
    PUT,
    RECORD,
    RECORD_BYTES,
    SUPERBLOCK,
    SYNCED,
    UNIT,
    first_word,
    footprint,
    low_size,
)
from .journal import Journal, seal
from .segments import WRITE_BYTES, Chunk, clear_padding
from .shards import shard_of

Staged = dict[bytes, bytes | tuple[bytes]]
"""Records that are not in the log yet: the value of each key, in a tuple if the key was passed as an integer."""


class StagedEncoder:
    """Places staged records in segments, shard by shard.

    Parameters
    ----------
    staged : Staged
        Keys have at most 16 bytes, values and their padding at most `WRITE_BYTES`.
    nbytes : int
        Approximate bytes of the values and their padding.
    shards : int
        Number of shards.

    Attributes
    ----------
    records : list of numpy.ndarray
        RECORD [N]: the records of the chunks so far, without order and checksums.
    """

    def __init__(self, staged: Staged, nbytes: int, shards: int) -> None:
        self._keys, self._values, self._shards = list(staged), list(staged.values()), shards
        self._room, self._row = min(nbytes, WRITE_BYTES), 0
        self.records: list[NDArray[Any]] = []

    def encode(self, shard: int, segment: int, end: int, limit: int) -> Chunk | None:
        """Place the next records of a shard after byte `end` of a segment; return None if the segment is full."""
        count, state = len(self._keys), np.empty(2, np.int64)
        lists = items_of(self._keys), items_of(self._values), count, id(bytes), shard, self._shards
        while True:
            state[:] = self._row, end
            records, out = np.empty(count - self._row, RECORD), np.empty(self._room, np.uint8)
            arrays = address_of(state), address_of(records), address_of(out)
            placed = int(compiled(encode_staged)(*lists, segment, limit, *arrays, len(out)))
            row, new_end = state.tolist()
            if placed or row == count:
                break
            if self._room == WRITE_BYTES:
                return None
            self._room = WRITE_BYTES
        is_last = row == count
        self._row = 0 if is_last else row  # another shard starts with the first record
        if not placed:
            return Chunk(0, end, 0, out, is_last)
        self.records.append(records[:placed])
        offset = footprint(end)
        return Chunk(placed, offset, new_end - offset, out, is_last)


def sealed_group(
    staged: Staged, nbytes: int, segment: int, end: int, limit: int, journal: Journal
) -> tuple[NDArray[np.uint8], int, int] | None:
    """Return staged records as the next group of a journal, its size without the last padding, and its checksum.

    The journal is durable up to its position. The values are placed after byte `end` of a segment, up to byte `limit`.
    Returns None if they do not fit, or if `nbytes`, the approximate size of the group, is too small.
    """
    keys, values, position = list(staged), list(staged.values()), journal.position
    group = np.empty(max(nbytes, (RECORD_BYTES + UNIT) * len(keys)), np.uint8)
    location = segment, end, limit, address_of(group), len(group)
    link = position.chain, position.seq + 1, journal.salt
    sealed = compiled(encode_group)(items_of(keys), items_of(values), len(keys), id(bytes), *location, *link)
    return (group[: footprint(sealed >> 32)], sealed >> 32, sealed & 0xFFFFFFFF) if sealed else None


def encode_staged(
    keys: int,
    values: int,
    count: int,
    bytes_type: int,
    shard: int,
    shards: int,
    segment: int,
    limit: int,
    state: int,
    records: int,
    out: int,
    room: int,
) -> int:
    """Assign rows and places in the segment to staged records of a shard; return how many were assigned.

    `state` has the first row and the end of the last value in the segment; the call updates both.
    """
    row, end = load_weak_as(state, INT64), load_weak_as(state + 8, INT64)
    row, end, placed = _encode(
        keys, values, row, count, bytes_type, shard, shards, segment, end, limit, records, out, room
    )
    store_weak_as(state, row, INT64)
    store_weak_as(state + 8, end, INT64)
    return placed


def encode_group(
    keys: int,
    values: int,
    count: int,
    bytes_type: int,
    segment: int,
    end: int,
    limit: int,
    group: int,
    room: int,
    chain: int,
    seq: int,
    salt: int,
) -> int:
    """Write staged records as a group of the journal: sealed records, then values; return its size and checksum.

    The size is without the padding of the last value; the checksum is in the low 32 bits. The result is 0 if a value
    does not fit into the `room` bytes at `group`, which has room for the records, or would end after byte `limit` of
    the segment.
    """
    out = group + RECORD_BYTES * count
    row, last, _ = _encode(
        keys, values, 0, count, bytes_type, 0, 1, segment, end, limit, group, out, room - RECORD_BYTES * count
    )
    if row < count:
        return 0
    nbytes: int = RECORD_BYTES * count + last - footprint(end)
    return nbytes << 32 | seal(group, count, chain, seq, 0, salt, SYNCED, COMMIT | INLINE)


@device
def _encode(
    keys: int,
    values: int,
    row: int,
    count: int,
    bytes_type: int,
    shard: int,
    shards: int,
    segment: int,
    end: int,
    limit: int,
    records: int,
    out: int,
    room: int,
) -> tuple[int, int, int]:
    """Write records and values of a shard, from lists of Python objects that start at `row`.

    Values are copied to the `room` bytes at `out`, each padded to `UNIT`. The call stops at a value that does not fit
    there, or that would end after byte `limit` of the segment, unless it is the segment's first. Return the next row,
    the end of the last value in the segment, and the number of records.
    """
    first = footprint(end)
    placed = 0
    while row < count:
        key, value = load_weak_as(keys + 8 * row, INT64), load_weak_as(values + 8 * row, INT64)
        length = load_weak_as(key + SIZE, INT64)
        record = records + RECORD_BYTES * placed
        store_weak_as(record + 16, 0, INT64)
        store_weak_as(record + 24, 0, INT64)
        copy_bytes(record + 16, key + CONTENTS, length)
        key0, key1 = load_weak_as(record + 16, INT64), load_weak_as(record + 24, INT64)
        if shards > 1 and shard_of(key0, key1, length, shards) != shard:
            row += 1
            continue
        marked = length
        if load_weak_as(value + TYPE, INT64) != bytes_type:
            value = load_weak_as(value + TUPLE_ITEMS, INT64)
            marked |= INTEGER
        size = load_weak_as(value + SIZE, INT64)
        offset = footprint(end)
        if offset + size > limit and offset > SUPERBLOCK:
            break
        if offset - first + footprint(size) > room:
            break
        clear_padding(out + offset - first, size)
        crc = copy_crc32c(out + offset - first, value + CONTENTS, size, 0)
        store_weak_as(record, MAGIC | PUT << 32 | length << 40, INT64)
        store_weak_as(record + 32, first_word(segment, offset, size), INT64)
        store_weak_as(record + 40, crc << CRC_SHIFT | marked << KEY_LEN_SHIFT | low_size(size), INT64)
        end = offset + size
        placed += 1
        row += 1
    return row, end, placed
