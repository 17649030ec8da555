"""`InMemory`: the bytes of a file in host or device memory, and which pages are not yet written."""

from __future__ import annotations

import hashlib
import os
import threading

import numpy as np
from numpy.typing import NDArray

from .._ranges import ranges_of
from ..cache import Cache
from ..storage import Medium
from ..targets import Block
from .header import Header

_STEP = 16 << 20
"""Number of bytes that are copied at a time."""
_THREAD_BYTES = 1 << 20
"""Minimum number of bytes for each additional thread: with fewer, the thread costs more time than it saves."""
_DIGEST = 16
"""Bytes of a digest: the chance that a change is overlooked is 2^-128."""


class InMemory:
    """A whole file in memory (tiers "host-cached", "host" and "device").

    Kernels write to this memory directly, so changes are found by comparison: a digest of each page on storage is kept.
    Only pages that differ are written, so that data which another writer put elsewhere in the file is kept.

    Parameters
    ----------
    medium : Medium
    header : Header
        Kernels may write the items; other bytes of the file (the header) never change.
    cache : Cache
        Its memory; the size of the block is a multiple of its page size.
    tier : {"host-cached", "host", "device"}
    writable : bool

    Attributes
    ----------
    block : Block
    """

    def __init__(self, medium: Medium, header: Header, cache: Cache, tier: str, *, writable: bool) -> None:
        self._medium = medium
        self._page_size = page_size = cache.page_size
        self._start, self._end = header.origin, header.origin + header.nbytes
        nbytes = -(-max(medium.nbytes, 1) // page_size) * page_size
        allocate = cache.memory.allocate if tier == "device" else cache.memory.allocate_shared
        self.block: Block = allocate(nbytes)
        pages = -(-self._end // page_size)
        self._digests = np.zeros((pages if writable else 0, _DIGEST), np.uint8)
        self._load(writable)

    def _load(self, writable: bool) -> None:
        step = max(_STEP, self._page_size)
        for offset in range(0, self._medium.nbytes, step):
            data = self._medium.read(offset, min(step, self._medium.nbytes - offset))
            self.block.write(offset, data)
            if writable:
                digests = self._digests[offset // self._page_size :]
                now = self._digests_of(offset, data)[: len(digests)]
                digests[: len(now)] = now

    def _digests_of(self, offset: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the digests of the pages of `data`, which is at byte `offset`, over the bytes that may change."""
        pages = -(-len(data) // self._page_size)
        out = np.empty((pages, _DIGEST), np.uint8)
        each = max(_THREAD_BYTES // self._page_size, -(-pages // min(4, os.cpu_count() or 1)))
        helpers = []
        for first in range(each, pages, each):
            part = (offset, data, out, first, min(first + each, pages))
            helper = threading.Thread(target=self._digest, args=part, daemon=True)
            try:
                helper.start()
                helpers.append(helper)
            except RuntimeError:  # no thread can be started while the interpreter exits
                self._digest(*part)
        self._digest(offset, data, out, 0, min(each, pages))
        for helper in helpers:
            helper.join()
        return out

    def _digest(self, offset: int, data: NDArray[np.uint8], out: NDArray[np.uint8], first: int, end: int) -> None:
        size, raw = self._page_size, data.data
        for page in range(first, end):
            low = max(page * size, self._start - offset)
            high = min((page + 1) * size, self._end - offset)
            digest = hashlib.sha256(raw[low:high] if low < high else b"", usedforsecurity=False).digest()
            out[page] = memoryview(digest)[:_DIGEST]

    def write_back(self) -> None:
        """Write the pages that differ from storage, and make them durable.

        Kernels may continue to write: the same bytes are compared and written, and later changes are found by the next
        call. If a write fails, all pages count as unwritten.

        Raises
        ------
        MediumError, StorageFullError, FormatError
        """
        size = self._page_size
        step = max(_STEP, size)
        written: list[tuple[int, NDArray[np.uint8]]] = []
        for offset in range(self._start // size * size, self._end, step):
            data = self.block.read(offset, min(step, self._end - offset))
            now = self._digests_of(offset, data)
            first = offset // size
            changed = np.flatnonzero((now != self._digests[first : first + len(now)]).any(1))
            for start, end in ranges_of(changed):
                low, high = max(start * size, self._start - offset), min(end * size, len(data))
                self._medium.write(offset + low, data[low:high])
                written.append((first + start, now[start:end]))
        if written:
            self._medium.sync()
        for first, digests in written:
            self._digests[first : first + len(digests)] = digests
