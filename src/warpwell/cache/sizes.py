"""Sizes in bytes: pages, sizes as text, and batches of items that have sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_nbytes
from .layout import BLOCK


def parse_page_size(value: int | str) -> int:
    """Return the bytes of a page from an integer or a string such as "4KiB".

    Raises
    ------
    ArgumentError
        The value is not a power of two from 512 bytes to 1 MiB.
    """
    nbytes = checked_nbytes(value, "page_size", minimum=BLOCK, maximum=1 << 20)
    if nbytes & (nbytes - 1):
        raise errors.ArgumentError(f"page_size must be a power of two, got {value!r}: give 4096, for example")
    return nbytes


def format_size(nbytes: float) -> str:
    """Return a size as readable text: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def batches_of(sizes: NDArray[np.int64], most: int, count: int) -> Iterator[slice]:
    """Yield slices of a list of sizes whose sum is `most` at most, or that are one, with `count` sizes at most."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
        stop = min(stop, start + count)
        yield slice(start, stop)
        start = stop
