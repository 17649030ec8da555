"""Snapshots: all live records in one file, which a journal continues. It is the index that all processes map.

Stores of formats 1 to 3 have a list of slots in its place (``.snap``), which is read and never written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets.bus_error import map_guarded, unmap
from ..index.sealed import SealedIndex, block_counts, new_blocks
from .checksum import crc32c
from .files import Files, read_at, write_new
from .format import (
    INDEX_FILE,
    SLOT_BYTES,
    SNAPSHOT_FILE,
    SUFFIXES,
    SUPERBLOCK,
    Superblock,
    file_name,
    new_salt,
    size_of,
)

_PART_BYTES = 64 << 20


def snapshot_path(folder: str, id: int) -> str:
    """Return a snapshot's file: an index, or a list of slots if a store of an earlier format has one."""
    old = os.path.join(folder, file_name(SNAPSHOT_FILE, id))
    return old if os.path.lexists(old) else os.path.join(folder, file_name(INDEX_FILE, id))


def is_index(folder: str, id: int) -> bool:
    """Return whether a snapshot has the present format."""
    return snapshot_path(folder, id).endswith(SUFFIXES[INDEX_FILE])


def write_snapshot(
    files: Files, folder: str, uuid: bytes, id: int, slots: NDArray[np.int64], seq: int, chain: int
) -> None:
    """Write an index file. Its contents are durable, its name is not durable yet.

    Parameters
    ----------
    files : Files
    folder : str
    uuid : bytes
    id : int
    slots : int64 [N, 4]
        key0, key1, loc0, loc1; with different keys.
    seq, chain : int
        Number of its last record, and that record's checksum.
    """
    salt = new_salt() | 1  # so that no block ends with zeros
    block_type, positions, segments, blocks = new_blocks(slots, salt)
    block = Superblock(
        INDEX_FILE,
        uuid,
        id,
        seq,
        chain,
        salt,
        count=len(slots),
        positions=positions,
        value_bytes=int(size_of(slots[:, 2], slots[:, 3]).sum()),
        segments=segments,
        block_type=block_type,
    )
    parts = [blocks[at : at + _PART_BYTES] for at in range(0, len(blocks), _PART_BYTES)]
    files.close(write_new(files, os.path.join(folder, file_name(INDEX_FILE, id)), [block.pack(), *parts]))


def open_index(folder: str, uuid: bytes, id: int) -> tuple[SealedIndex, Superblock]:
    """Map an index; return it and its superblock. No block has been read.

    Raises
    ------
    CorruptionError
        The superblock is damaged, or the file is truncated.
    FileNotFoundError
    """
    path = os.path.join(folder, file_name(INDEX_FILE, id))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        block = Superblock.unpack(read_at(fd, SUPERBLOCK, 0), INDEX_FILE, uuid, id, path)
        size = os.fstat(fd).st_size
        nbytes = SUPERBLOCK * (1 + sum(block_counts(block.block_type, block.positions, block.segments)))
        if size != nbytes:
            raise errors.CorruptionError(
                f"{path} has {size} bytes, but {nbytes} are expected: restore it from a copy", path=path, offset=size
            )
        address = map_guarded(fd, nbytes)
        release: Callable[[], object]
        if address is None:  # the file system cannot map files: read a copy
            copied = np.frombuffer(read_at(fd, nbytes, 0), np.uint8)
            address, release = int(copied.ctypes.data), [copied].clear
        else:
            release = partial(unmap, address, nbytes)
    finally:
        os.close(fd)
    sealed = SealedIndex(
        path,
        address + SUPERBLOCK,
        block_type=block.block_type,
        positions=block.positions,
        segments=block.segments,
        salt=block.salt,
        count=block.count,
        value_bytes=block.value_bytes,
        release=release,
    )
    return sealed, block


def read_old_snapshot(folder: str, uuid: bytes, id: int) -> tuple[NDArray[np.int64], int, int]:
    """Return the slots of a snapshot of formats 1 to 3, its last sequence number and that record's checksum.

    Raises
    ------
    CorruptionError
        The file is damaged or truncated.
    FileNotFoundError
    """
    path = os.path.join(folder, file_name(SNAPSHOT_FILE, id))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        block = Superblock.unpack(read_at(fd, SUPERBLOCK, 0), SNAPSHOT_FILE, uuid, id, path)
        nbytes = os.fstat(fd).st_size - SUPERBLOCK
        if nbytes != SLOT_BYTES * block.count:
            raise errors.CorruptionError(
                f"{path} has {nbytes} bytes of records, but {SLOT_BYTES * block.count} are expected: "
                "restore it from a copy",
                path=path,
                offset=SUPERBLOCK,
            )
        slots = np.frombuffer(read_at(fd, nbytes, SUPERBLOCK), np.int64).reshape(-1, SLOT_BYTES // 8)
    finally:
        os.close(fd)
    if crc32c(slots) != block.body_crc:
        raise errors.CorruptionError(
            f"{path} is damaged: its {block.count} records do not match its checksum; "
            "restore it from a copy, or copy its undamaged records into a new store with `warpwell kv salvage`",
            path=path,
            offset=SUPERBLOCK,
        )
    return slots, block.seq, block.chain
