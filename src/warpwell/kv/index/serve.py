"""The function that a controller calls for a key-value command: it reads the value."""

from __future__ import annotations

from warpwell.kv.index.index import S_TABLE, enter, leave, lookup
from warpwell.kv.index.reader import ABSENT, FOUND, NO_LOCATION, count_reads, read_part, read_value
from warpwell.kv.log.format import size_of
from warpwell.nvme import KV_RETRIEVE, word0_opc, word5_key_size, word5_options, word5_value_size
from warpwell.nvme.status import (
    INVALID_FIELD,
    INVALID_OPCODE,
    KV_INVALID_KEY_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_UNRECOVERED_ERROR,
)
from warpwell.storage.commands import word
from warpwell.targets import device, native
from warpwell.targets.primitives import SYSTEM, load_acquire, store_relaxed

# -- words of a command (see `warpwell.nvme.key_value`) ------------------------------------------------------------
C_WORD0 = 0
C_KEY0 = 1
C_BUFFER = 3
C_SIZES = 5
C_FIRST = 6
"""cdw12, which the command set reserves: the first byte that a retrieve returns."""
C_KEY1 = 7

# -- pieces of a value -----------------------------------------------------------------------------------------
WITH_VERSION = 0x80
"""Warpwell's own option of a retrieve: write the value's location after the buffer if the value does not fit."""
VERSION_BYTES = 16
"""Size of a location, which is written to `version_at`. A changed value of a key has another location."""


@device
def version_at(buffer: int, nbytes: int) -> int:
    """Return the address of the location of a value whose piece is in a buffer of `nbytes` bytes."""
    return (buffer + nbytes + 7) & ~7


@device
def masked(word, nbytes):
    """Return the low 0 to 8 bytes of a word of a key, padded with zeros."""
    if nbytes >= 8:
        return word
    if nbytes <= 0:
        return 0
    return word & ((1 << (8 * nbytes)) - 1)


@device
def retrieve(state, key0, key1, length, buffer, nbytes, first, options, stripe):
    """Copy as much of a value as fits, from byte `first`; return status and size (see `kv_start`)."""
    epoch = enter(state, stripe)
    loc0, loc1 = lookup(load_acquire(state + 8 * S_TABLE, SYSTEM), key0, key1, length)
    size = size_of(loc0, loc1)
    status = ABSENT
    if loc0 != 0:
        if loc0 < 0:
            status = NO_LOCATION
        elif nbytes == 0:
            status = FOUND  # the command requests only the size
        elif size <= nbytes and first == 0:
            status = read_value(state, loc0, loc1, buffer)
        elif first >= size:
            status = FOUND
        else:
            status = read_part(state, loc0, loc1, buffer, first, min(nbytes, size - first))
    leave(state, stripe, epoch)
    if status == FOUND:
        count_reads(state, stripe, 1, 1, min(size, nbytes), 0)
        if options & WITH_VERSION != 0 and nbytes > 0 and (first > 0 or size > nbytes):
            version = version_at(buffer, nbytes)
            store_relaxed(version, loc0, SYSTEM)
            store_relaxed(version + 8, loc1, SYSTEM)
        return size << 16
    if status == ABSENT:
        count_reads(state, stripe, 1, 0, 0, 0)
        return KV_KEY_DOES_NOT_EXIST
    count_reads(state, stripe, 1, 0, 0, 1)
    return KV_UNRECOVERED_ERROR


@native
def kv_start(state: int, command: int, tag: int) -> int:
    """Execute a Retrieve; see `warpwell.storage.medium.NativeMedium`. No command is ever pending.

    Parameters
    ----------
    state : int
        Address of the store's state block.
    command : int
        Address of a command (`warpwell.nvme.key_value`), with the byte at which a retrieve starts in `C_FIRST`.
    tag : int
        At most 40 bits.

    Returns
    -------
    int
        ``status | dw0 << 16``.

    Notes
    -----
    A retrieve with the option `WITH_VERSION` whose buffer does not hold the whole value also writes the value's
    location to `version_at`, where the caller provides `VERSION_BYTES` more than the buffer and its alignment.
    """
    word5 = word(command, C_SIZES)
    if word0_opc(word(command, C_WORD0)) != KV_RETRIEVE:
        return INVALID_OPCODE
    length = word5_key_size(word5)
    nbytes = word5_value_size(word5)
    buffer = word(command, C_BUFFER)
    if buffer == 0 and nbytes > 0:
        return INVALID_FIELD
    if length < 1 or length > 16:
        return KV_INVALID_KEY_SIZE
    low = masked(word(command, C_KEY0), length)
    high = masked(word(command, C_KEY1), length - 8)
    first = word(command, C_FIRST) & 0xFFFFFFFF
    return retrieve(state, low, high, length, buffer, nbytes, first, word5_options(word5), tag >> 16)
