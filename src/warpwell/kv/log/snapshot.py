"""Snapshots: all live records in one file, which a journal continues."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from .checksum import crc32c
from .files import Files, read_at, write_new
from .format import SLOT_BYTES, SNAPSHOT_FILE, SUPERBLOCK, Superblock, file_name


def snapshot_path(folder: str, id: int) -> str:
    """Return a snapshot's file."""
    return os.path.join(folder, file_name(SNAPSHOT_FILE, id))


def write_snapshot(
    files: Files, folder: str, uuid: bytes, id: int, slots: NDArray[np.int64], seq: int, chain: int
) -> None:
    """Write a durable snapshot, whose name is not durable yet.

    Parameters
    ----------
    files : Files
    folder : str
    uuid : bytes
    id : int
    slots : int64 [N, 4]
        key0, key1, loc0, loc1.
    seq, chain : int
        Number of its last record, and that record's checksum.
    """
    body: Any = np.ascontiguousarray(slots).view(np.uint8).reshape(-1)
    block = Superblock(SNAPSHOT_FILE, uuid, id, seq, chain, 0, len(slots), crc32c(body))
    parts = [body[at : at + (64 << 20)] for at in range(0, len(body), 64 << 20)]
    files.close(write_new(files, snapshot_path(folder, id), [block.pack(), *parts]))


def read_snapshot(folder: str, uuid: bytes, id: int) -> tuple[NDArray[np.int64], int, int]:
    """Return the slots of a snapshot, its last sequence number and that record's checksum.

    Raises
    ------
    CorruptionError
        The file is damaged or truncated.
    FileNotFoundError
    """
    path = snapshot_path(folder, id)
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
        slots = np.empty((block.count, 4), np.int64)
        view = slots.reshape(-1).view(np.uint8).data
        at = 0
        while at < nbytes:
            got = os.preadv(fd, [view[at : at + (1 << 30)]], SUPERBLOCK + at)
            if got == 0:
                break
            at += got
        if at < nbytes or crc32c(slots) != block.body_crc:
            raise errors.CorruptionError(
                f"{path} is damaged: its {block.count} records do not match its checksum; "
                "restore it from a copy, or copy its undamaged records into a new store with `warpwell kv salvage`",
                path=path,
                offset=SUPERBLOCK,
            )
        return slots, block.seq, block.chain
    finally:
        os.close(fd)
