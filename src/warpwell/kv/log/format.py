"""The log's structures on disk: superblocks, journal records, index slots and locations; no I/O."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...targets import device
from .checksum import crc32c

FORMAT_VERSION = 5
"""The format of new files. Stores of formats 2 to 4 are read, and become format 5 when a manifest is written."""
INLINE_VERSION = 5
"""The first format with `INLINE`."""

MAX_VALUE = (1 << 31) - 1
"""Bytes: the size of a value has 32 bits, and is signed in NVMe completions and on some file systems."""

SUPERBLOCK = 4096
"""Bytes at the start of every segment, journal, snapshot and index."""
UNIT = 64
"""Bytes; values start at multiples of it."""
MAX_SEGMENT_BYTES = 1 << 39
"""Values start before this byte of a segment: their offsets have 33 bits."""


def layout_of(nbytes: int, fields: list[tuple[str, Any, int]]) -> np.dtype[Any]:
    """Return the dtype of a record of the format: each field's name, type and byte offset, without gaps.

    Raise ImportError if they contradict each other: python -O must not switch the check off.
    """
    layout = np.dtype([(name, kind) for name, kind, _ in fields])
    offsets = [layout.fields[name][1] for name, _, _ in fields] if layout.fields else []
    if layout.itemsize != nbytes or offsets != [offset for _, _, offset in fields]:
        raise ImportError(f"a record must have {nbytes} bytes, got {layout.itemsize} bytes with offsets {offsets}")
    return layout


# -- location of a value: two words ---------------------------------------------------------------------------
SEGMENT_SHIFT = 40
SIZE_SHIFT = 33
"""Bits 33 to 39 of the first word are the high 7 bits of the value's size; formats 2 and 3 have zeros there."""
CRC_SHIFT = 32
KEY_LEN_SHIFT = 25
INTEGER = 32
"""Flag in addition to the length of a key: the key was passed as an integer, and is shown and ordered as an integer."""
LONG = 17
"""Length of a key whose 16 bytes are a hash. The key itself is stored after the value (`keys.suffix_of`)."""
MAX_SEGMENT = (1 << 23) - 1
JOURNAL_SEGMENT = 0
"""In memory: the value is in the journal. Segments are numbered from 1."""
TOMBSTONE = -1
DAMAGED = -2
"""In memory: the location cannot be read because a block of the index file is damaged."""

# -- journal record -------------------------------------------------------------------------------------------
MAGIC = 0x314B5757
"""The bytes WWK1."""
PUT = 1
DELETE = 2
COMMIT = 1
"""Flag: the last record of its group; without it the group does not count."""
ORDERED = 2
"""Flag of format 2: the values of the group, too, were durable before its first record was written."""
MOVED = 4
"""Flag: a copy that compaction made."""
SYNCED = 8
"""Flag: all groups before it, with their values, were durable before its first record was written."""
INLINE = 16
"""Flag of a group's last record: the values of its puts follow in the journal, in order, each padded to `UNIT`."""

RECORD_BYTES = 64
RECORD = layout_of(
    RECORD_BYTES,
    [
        ("magic", "<u4", 0),
        ("type", "u1", 4),
        ("key_len", "u1", 5),
        ("flags", "<u2", 6),
        ("seq", "<i8", 8),  # 1, 2, ... over the whole life of a store
        ("key", ("<i8", (2,)), 16),
        ("loc", ("<i8", (2,)), 32),
        ("ordinal", "<u4", 48),  # 0, 1, ... in the group
        ("salt", "<u4", 52),  # salt of the journal: a record of another file is not accepted
        ("previous", "<u4", 56),  # `crc` of the record before
        ("crc", "<u4", 60),  # CRC-32C of the 60 bytes before it
    ],
)


def slots_of(records: NDArray[Any]) -> NDArray[np.int64]:
    """Return key0, key1, loc0 and loc1 of records, int64 [N, 4], as a view; `records` are contiguous."""
    return records.view(np.int64).reshape(-1, RECORD_BYTES // 8)[:, 2:6]


SLOT_BYTES = 32
"""A live record in a snapshot of formats 2 and 3, or in an index: key0, key1, loc0, loc1."""

# -- superblock -----------------------------------------------------------------------------------------------
SEGMENT_FILE = 1
JOURNAL_FILE = 2
SNAPSHOT_FILE = 3
"""Of formats 2 and 3."""
INDEX_FILE = 4
KINDS = {SEGMENT_FILE: "segment", JOURNAL_FILE: "journal", SNAPSHOT_FILE: "snapshot", INDEX_FILE: "index"}
SUFFIXES = {SEGMENT_FILE: ".val", JOURNAL_FILE: ".jnl", SNAPSHOT_FILE: ".snap", INDEX_FILE: ".idx"}

SUPER = layout_of(
    SUPERBLOCK,
    [
        ("magic", "S8", 0),
        ("version", "<u4", 8),
        ("kind", "<u4", 12),
        ("uuid", "V16", 16),
        ("id", "<i8", 32),
        ("seq", "<i8", 40),  # last sequence number before a journal, or in a snapshot or index
        ("count", "<i8", 48),  # snapshot and index: records
        ("chain", "<u4", 56),  # `crc` of the record `seq`
        ("salt", "<u4", 60),
        ("body_crc", "<u4", 64),  # snapshot: CRC-32C of all slots
        ("alignment", "<u4", 68),
        ("positions", "<i8", 72),  # index: slots of its hash table, or locations of its array
        ("value_bytes", "<i8", 80),  # index: bytes of all values
        ("segments", "<i8", 88),  # index: segments that hold values
        ("block_type", "<u4", 96),  # index: see `index.sealed`
        ("reserved", "V3992", 100),
        ("crc", "<u4", 4092),  # CRC-32C of the 4092 bytes before it
    ],
)
SUPER_MAGIC = b"warpwkv1"


@dataclass(frozen=True)
class Superblock:
    """The contents of the first 4 KiB of a file; see `SUPER`."""

    kind: int
    uuid: bytes
    id: int
    seq: int = 0
    chain: int = 0
    salt: int = 0
    count: int = 0
    body_crc: int = 0
    positions: int = 0
    value_bytes: int = 0
    segments: int = 0
    block_type: int = 0

    def pack(self) -> bytes:
        """Return the 4096 bytes."""
        block = np.zeros(1, SUPER)
        block["magic"], block["version"], block["kind"] = SUPER_MAGIC, FORMAT_VERSION, self.kind
        block["uuid"] = np.void(self.uuid)
        block["alignment"] = UNIT
        for name in _NUMBERS:
            block[name] = getattr(self, name)
        block["crc"] = crc32c(block.view(np.uint8)[: SUPERBLOCK - 4])
        return block.tobytes()

    @classmethod
    def unpack(cls, data: bytes, kind: int, uuid: bytes, id: int, path: str) -> Superblock:
        """Check the 4096 bytes of a file and return its superblock.

        Raises
        ------
        StoreVersionError
            Written by a newer release.
        CorruptionError
            The file is truncated or damaged, or it belongs to another store or has another type.
        """
        file_type = KINDS[kind]
        if len(data) < SUPERBLOCK:
            raise corruption(
                path,
                f"{path} is truncated: it has {len(data)} bytes, but a {file_type} has at least {SUPERBLOCK}; "
                "restore it from a copy",
                len(data),
            )
        block = np.frombuffer(data, SUPER, 1)[0]
        if int(block["crc"]) != crc32c(data[: SUPERBLOCK - 4]) or block["magic"] != SUPER_MAGIC:
            raise corruption(path, f"{path}: the first {SUPERBLOCK} bytes are damaged; restore the file from a copy", 0)
        if int(block["version"]) > FORMAT_VERSION:
            raise newer(path, int(block["version"]))
        if int(block["kind"]) != kind or block["uuid"].tobytes() != uuid or int(block["id"]) != id:
            raise corruption(
                path,
                f"{path} is not the {file_type} {id} of this store, but another file with its name; restore the "
                "right file",
                0,
            )
        return cls(kind, uuid, **{name: int(block[name]) for name in _NUMBERS})


_NUMBERS = [field.name for field in fields(Superblock)][2:]
"""Names of the fields that are numbers in the file."""


def corruption(path: str, message: str, offset: int) -> errors.CorruptionError:
    """Return the error for damage at a byte of a file."""
    return errors.CorruptionError(message, path=path, offset=offset)


def newer(path: str, version: int) -> errors.StoreVersionError:
    """Return the error for a file of a later format."""
    return errors.StoreVersionError(
        f"{path} has format {version}, and this release knows formats up to {FORMAT_VERSION}: update warpwell",
        path=path,
        version=version,
    )


def file_name(kind: int, id: int) -> str:
    """Return the name of a file in the store's folder."""
    return f"{id:08d}{SUFFIXES[kind]}"


def new_salt() -> int:
    """Return 32 random bits for a journal."""
    return secrets.randbits(32)


@device
def first_word(segment: int, offset: Any, size: Any) -> Any:
    """Return the first word of a location (or an array of them)."""
    return segment << SEGMENT_SHIFT | size >> KEY_LEN_SHIFT << SIZE_SHIFT | offset // UNIT


@device
def low_size(size: Any) -> Any:
    """Return the bits of a value's size that are in the second word of its location."""
    return size & ((1 << KEY_LEN_SHIFT) - 1)


# The functions that are device code also take arrays on the host.


@device
def segment_of(loc0: Any) -> Any:
    """Return the segment of a location's first word."""
    return loc0 >> SEGMENT_SHIFT


@device
def offset_of(loc0: Any) -> Any:
    """Return the byte offset in its segment."""
    return (loc0 & ((1 << SIZE_SHIFT) - 1)) * UNIT


@device
def size_of(loc0: Any, loc1: Any) -> Any:
    """Return the bytes of the value; the location is not a `TOMBSTONE`."""
    return ((loc0 >> SIZE_SHIFT) & 127) << KEY_LEN_SHIFT | loc1 & ((1 << KEY_LEN_SHIFT) - 1)


@device
def key_len_of(loc1: Any) -> Any:
    """Return the bytes of the key."""
    return (loc1 >> KEY_LEN_SHIFT) & 31


def marked_len_of(loc1: Any) -> Any:
    """Return the bytes of the key, with the flag `INTEGER` if it is set."""
    return loc1 >> KEY_LEN_SHIFT & 63


@device
def crc_of(loc1: Any) -> Any:
    """Return the CRC-32C of the value."""
    return (loc1 >> CRC_SHIFT) & 0xFFFFFFFF


def extents_of(locations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return offset, size and CRC of values, int64 [N, 3]."""
    loc0, loc1 = locations[:, 0], locations[:, 1]
    return np.ascontiguousarray(np.column_stack([offset_of(loc0), size_of(loc0, loc1), crc_of(loc1)]))


@device
def footprint(sizes: Any) -> Any:
    """Return the bytes of a segment that values occupy."""
    return -(-sizes // UNIT) * UNIT
