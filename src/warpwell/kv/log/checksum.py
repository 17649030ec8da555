"""CRC-32C on the host: of buffers, of many buffers at once, and of values in files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import device
from ...targets.primitives import crc32c as crc32c_at
from ...targets.primitives import load_weak_as, pread, store_weak_as
from ..native import CONTENTS, INT64, address_of, compiled

# -- results of a read ----------------------------------------------------------------------------------------
FOUND = 1
BAD_CRC = 2
SHORT = 3
"""The file ends before the value does."""
FAILED = 100
"""Plus errno."""

EINTR = 4
_CHUNK = 1 << 20


def crc_one(address: int, nbytes: int, seed: int) -> int:
    """Return the CRC of memory; `seed` is the CRC of the bytes before it."""
    return crc32c_at(address, nbytes, seed)


def crc_many(addresses: int, lengths: int, out: int, count: int) -> int:
    """Store the CRC of each buffer as a word."""
    for k in range(count):
        found = crc32c_at(load_weak_as(addresses + 8 * k, INT64), load_weak_as(lengths + 8 * k, INT64), 0)
        store_weak_as(out + 8 * k, found, INT64)
    return 0


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
        offset = load_weak_as(entries + 24 * k, INT64)
        size, crc = load_weak_as(entries + 24 * k + 8, INT64), load_weak_as(entries + 24 * k + 16, INT64)
        store_weak_as(out + 8 * k, read_chunks(fd, offset, size, crc, chunk, _CHUNK, 0, 0, 0), INT64)
    return 0


def crc32c(data: Any, seed: int = 0) -> int:
    """Return the CRC-32C of a C-contiguous buffer; `seed` is the CRC of the bytes before it."""
    if type(data) is bytes:
        return int(compiled(crc_one)(id(data) + CONTENTS, len(data), seed))
    view = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return int(compiled(crc_one)(address_of(view), view.nbytes, seed)) if view.nbytes else seed


def crc32c_many(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the CRC-32C of each of many buffers, int64 [N]."""
    out = np.empty(len(addresses), np.int64)
    compiled(crc_many)(addresses.ctypes.data, lengths.ctypes.data, out.ctypes.data, len(addresses))
    return out


def check_file(fd: int, entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read and check values of a file; return 0, 1 (damaged or truncated) or -errno for each.

    `entries`, int64 [N, 3], has the offset, size and CRC of each value (`format.extents_of`).
    """
    status = np.empty(len(entries), np.int64)
    chunk = np.empty(_CHUNK, np.uint8)
    compiled(check_values)(fd, entries.ctypes.data, len(entries), chunk.ctypes.data, status.ctypes.data)
    return np.where(status > FAILED, FAILED - status, (status != FOUND).astype(np.int64))
