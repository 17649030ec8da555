"""CRC-32C on the host: of buffers, of many values at once, of journal records in a chain, and of values in files."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import device, native
from ...targets.primitives import crc32c as crc32c_at
from ...targets.primitives import load_weak_as, pread, store_weak_as
from ..native import compiled

I8 = np.dtype(np.int64)
U2 = np.dtype(np.uint16)
U4 = np.dtype(np.uint32)

# -- words of a scan over journal records ---------------------------------------------------------------------
SCAN_SEQ = 0
"""Sequence number that is expected next."""
SCAN_CHAIN = 1
"""`crc` of the last good record."""
SCAN_ORDINAL = 2
"""Ordinal that is expected next."""
SCAN_SALT = 3
SCAN_COMMITTED = 4
"""Good records of this call up to and with the last commit mark."""
SCAN_COMMITTED_CHAIN = 5
SCAN_FLOOR_SEQ = 6
SCAN_FLOOR_CRC = 7
SCAN_FLOOR_WRONG = 8
"""1 if the record `SCAN_FLOOR_SEQ` differs from the durable record with that number."""
SCAN_WORDS = 16

# -- results of a read ----------------------------------------------------------------------------------------
FOUND = 1
BAD_CRC = 2
SHORT = 3
"""The file ends before the value does."""
FAILED = 100
"""Plus errno."""

EINTR = 4
_RECORD = 64
_MAGIC = 0x314B5757
_COMMIT = 1
_COMMIT_AND_SYNCED = 9
_ORDERED_OR_SYNCED = 10
_CHUNK = 1 << 20


@native
def crc_one(address: int, nbytes: int, seed: int) -> int:
    """Return the CRC of memory."""
    return crc32c_at(address, nbytes, seed)


def crc_many(addresses: int, lengths: int, out: int, count: int) -> int:
    """Store the CRC of each buffer as a word."""
    for k in range(count):
        found = crc32c_at(load_weak_as(addresses + 8 * k, I8), load_weak_as(lengths + 8 * k, I8), 0)
        store_weak_as(out + 8 * k, found, I8)
    return 0


def seal(records: int, count: int, chain: int, seq: int, ordinal: int, salt: int, synced: int, last: int) -> int:
    """Number, chain and checksum records; return the last checksum.

    `synced` is the flag `SYNCED` or 0, and `last` the flag `COMMIT` or 0, of the last record.
    """
    for k in range(count):
        at = records + _RECORD * k
        flags = int(load_weak_as(at + 6, U2)) & ~_COMMIT_AND_SYNCED | synced
        store_weak_as(at + 6, flags | last if k == count - 1 else flags, U2)
        store_weak_as(at + 8, seq + k, I8)
        store_weak_as(at + 48, ordinal + k, U4)
        store_weak_as(at + 52, salt, U4)
        store_weak_as(at + 56, chain, U4)
        chain = crc32c_at(at, 60, 0)
        store_weak_as(at + 60, chain, U4)
    return chain


def scan(state: int, records: int, count: int) -> int:
    """Return the number of leading records that continue the chain."""
    seq = load_weak_as(state + 8 * SCAN_SEQ, I8)
    chain = load_weak_as(state + 8 * SCAN_CHAIN, I8)
    ordinal = load_weak_as(state + 8 * SCAN_ORDINAL, I8)
    salt = load_weak_as(state + 8 * SCAN_SALT, I8)
    floor = load_weak_as(state + 8 * SCAN_FLOOR_SEQ, I8)
    committed = 0
    good = 0
    while good < count:
        at = records + _RECORD * good
        first = load_weak_as(at, I8)
        ordinal_and_salt = load_weak_as(at + 48, I8)
        link = load_weak_as(at + 56, I8)
        if first & 0xFFFFFFFF != _MAGIC or load_weak_as(at + 8, I8) != seq or link & 0xFFFFFFFF != chain:
            break
        if ordinal_and_salt & 0xFFFFFFFF != ordinal or (ordinal_and_salt >> 32) & 0xFFFFFFFF != salt:
            break
        found = crc32c_at(at, 60, 0)
        if (link >> 32) & 0xFFFFFFFF != found:
            break
        chain = found
        if seq == floor and chain != load_weak_as(state + 8 * SCAN_FLOOR_CRC, I8):
            store_weak_as(state + 8 * SCAN_FLOOR_WRONG, 1, I8)
        seq += 1
        ordinal += 1
        good += 1
        if (first >> 48) & _COMMIT != 0:
            ordinal = 0
            committed = good
            store_weak_as(state + 8 * SCAN_COMMITTED_CHAIN, chain, I8)
    store_weak_as(state + 8 * SCAN_SEQ, seq, I8)
    store_weak_as(state + 8 * SCAN_CHAIN, chain, I8)
    store_weak_as(state + 8 * SCAN_ORDINAL, ordinal, I8)
    store_weak_as(state + 8 * SCAN_COMMITTED, committed, I8)
    return good


def find_later(records: int, count: int, salt: int, seq: int) -> int:
    """Return the index of a valid record that proves that the record `seq` was durable, or -1.

    The proof is a flag of the record's group, if the group starts after `seq`.
    """
    for k in range(count):
        at = records + _RECORD * k
        first = load_weak_as(at, I8)
        ordinal_and_salt = load_weak_as(at + 48, I8)
        if (
            first & 0xFFFFFFFF == _MAGIC
            and (ordinal_and_salt >> 32) & 0xFFFFFFFF == salt
            and (first >> 48) & _ORDERED_OR_SYNCED != 0
        ):
            group_start = load_weak_as(at + 8, I8) - (ordinal_and_salt & 0xFFFFFFFF)
            if group_start > seq and crc32c_at(at, 60, 0) == (load_weak_as(at + 56, I8) >> 32) & 0xFFFFFFFF:
                return k
    return -1


@device
def read_exactly(fd: int, buffer: int, nbytes: int, offset: int) -> int:
    """Read all bytes of a range; return FOUND or an error."""
    done = 0
    while done < nbytes:
        count = pread(fd, buffer + done, nbytes - done, offset + done)
        if count > 0:
            done += count
        elif count == 0:
            return SHORT
        elif count != -EINTR:
            return FAILED - count
    return FOUND


@device
def read_chunks(
    fd: int, offset: int, size: int, crc: int, chunk: int, chunk_bytes: int, out: int, first: int, limit: int
) -> int:
    """Read a value in chunks and check its CRC; return FOUND or an error.

    Bytes `first` to ``first + limit`` go to `out`, all others to the buffer `chunk`, which has `chunk_bytes` bytes.
    """
    computed = 0
    done = 0
    while done < size:
        count = min(chunk_bytes, size - done)
        target = chunk
        if done == first and limit > 0:
            count = limit
            target = out
        elif done < first:
            count = min(count, first - done)
        status = read_exactly(fd, target, count, offset + done)
        if status != FOUND:
            return status
        computed = crc32c_at(target, count, computed)
        done += count
    if computed != crc:
        return BAD_CRC
    return FOUND


def check_values(fd: int, entries: int, count: int, chunk: int, out: int) -> int:
    """Read and check values (offset, size, CRC); store the result of `read_chunks` for each."""
    for k in range(count):
        offset = load_weak_as(entries + 24 * k, I8)
        size, crc = load_weak_as(entries + 24 * k + 8, I8), load_weak_as(entries + 24 * k + 16, I8)
        store_weak_as(out + 8 * k, read_chunks(fd, offset, size, crc, chunk, _CHUNK, 0, 0, 0), I8)
    return 0


@functools.cache
def _crc_of_bytes() -> Any:
    """Return `crc_one` with the address of a bytes object, which ctypes finds faster than NumPy."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)(crc_one.address)


def crc32c(data: Any, seed: int = 0) -> int:
    """Return the CRC-32C of a C-contiguous buffer; `seed` is the CRC of the bytes before it."""
    if type(data) is bytes:
        return int(_crc_of_bytes()(data, len(data), seed))
    view = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return int(crc_one(view.ctypes.data, view.nbytes, seed)) if view.nbytes else seed


def crc32c_many(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the CRC-32C of each of many buffers, int64 [N]."""
    out = np.empty(len(addresses), np.int64)
    compiled(crc_many)(addresses.ctypes.data, lengths.ctypes.data, out.ctypes.data, len(addresses))
    return out


def seal_records(records: NDArray[Any], chain: int, seq: int, ordinal: int, salt: int, synced: int, last: int) -> int:
    """Number and checksum records that continue after `chain`; return the last `crc`; see `seal`."""
    return int(compiled(seal)(records.ctypes.data, len(records), chain, seq, ordinal, salt, synced, last))


def scan_records(state: NDArray[np.int64], records: NDArray[Any]) -> int:
    """Return the number of leading records that continue the chain in `state`, and update `state`."""
    return int(compiled(scan)(state.ctypes.data, records.ctypes.data, len(records)))


def later_record(records: NDArray[Any], salt: int, seq: int) -> int:
    """Return the index of a record that proves that the record `seq` had been durable, or -1."""
    return int(compiled(find_later)(records.ctypes.data, len(records), salt, seq))


def check_file(fd: int, entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read and check values of a file; return 0, 1 (damaged or truncated) or -errno for each.

    `entries`, int64 [N, 3], has the offset, size and CRC of each value (`format.extents_of`).
    """
    status = np.empty(len(entries), np.int64)
    chunk = np.empty(_CHUNK, np.uint8)
    compiled(check_values)(fd, entries.ctypes.data, len(entries), chunk.ctypes.data, status.ctypes.data)
    return np.where(status > FAILED, FAILED - status, (status != FOUND).astype(np.int64))
