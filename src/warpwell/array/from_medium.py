"""Long runs of a file past the cache: from the medium to a GPU's memory by its copy engine, or to the host's.

Pages that are in the cache, or come into it meanwhile, may be newer there (see `warpwell.cache.prefetch.Bulk.copy`):
a kernel reads these again, through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..targets import ALIGNMENT
from ..targets.gpu.memory import address_of

LEAST = 1 << 20
"""Bytes below which kernels read them through the cache."""
PIECES = 256
"""Most pieces that are read again one by one; with more of them everything is."""


def applies(array: Any, nbytes: int) -> bool:
    """Return whether a run of the array's bytes is read this way."""
    return bool(array.device == "cuda" and array.tier == "storage" and nbytes >= LEAST)


def to_device(array: Any, start: int, nbytes: int, memory: Any, again: Callable[[int, int], None]) -> bool:
    """Read `nbytes` bytes of the array from byte `start` of its items to device memory; return False if nothing came.

    ``again(low, high)`` reads the bytes [low, high) of them through the cache.
    """
    array.cache.raise_pending_error(array._nsid)
    first, end, skip = _pages(array, start, nbytes)
    bulk, target = array.cache.bulk, address_of(memory)

    def copy(offset: int, source: int, count: int) -> None:
        low, high = max(offset, skip), min(offset + count, skip + nbytes)
        if low < high:
            bulk.stream.copy(target + low - skip, source + low - offset, high - low)

    return _mend(array, bulk.copy(array._nsid, first, end, to=copy), array._origin + start, nbytes, again)


def to_host(array: Any, start: int, nbytes: int, again: Callable[[NDArray[np.uint8], int, int], None]) -> Any:
    """Read bytes of the array into host memory; return them as a uint8 array, or None if nothing came.

    ``again(out, low, high)`` reads the bytes [low, high) of them through the cache.
    """
    array.cache.raise_pending_error(array._nsid)
    first, end, skip = _pages(array, start, nbytes)
    page = array.cache.page_size
    room = np.empty((end - first) * page + ALIGNMENT, np.uint8)
    into = room[-room.ctypes.data % ALIGNMENT :][: (end - first) * page]
    wrong = array.cache.bulk.copy(array._nsid, first, end, into=into)
    out = into[skip : skip + nbytes]
    return out if _mend(array, wrong, array._origin + start, nbytes, lambda low, high: again(out, low, high)) else None


def _pages(array: Any, start: int, nbytes: int) -> tuple[int, int, int]:
    """Return first and end of the pages of a run, and where in the first one it begins."""
    page, byte = array.cache.page_size, array._origin + start
    return byte // page, -(-(byte + nbytes) // page), byte % page


def _mend(
    array: Any, wrong: list[tuple[int, int]] | None, byte: int, nbytes: int, again: Callable[[int, int], None]
) -> bool:
    """Read pages that may be wrong through the cache; return False if all are better read that way."""
    if wrong is None or len(wrong) > PIECES:
        return False
    page = array.cache.page_size
    for low, high in wrong:
        again(max(low * page - byte, 0), min(high * page - byte, nbytes))
    return True
