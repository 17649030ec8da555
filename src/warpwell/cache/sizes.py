"""Sizes in bytes, such as "256MiB": parse and format them; batches of things that have sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .layout import BLOCK

_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12,
          "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip


def parse_size(value: int | str, name: str = "size") -> int:
    """Return a number of bytes from an integer or a string such as "256MiB", "1.5 GB" or "4096".

    Raises
    ------
    ArgumentError
        The value is not a size, or not positive.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        nbytes = int(value)
    else:
        text = value if isinstance(value, str) else ""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise errors.ArgumentError(f'{name} {value!r} is not a size: write bytes, or "256MiB", "2GB"')
        nbytes = int(Fraction(match[1]) * unit)  # exact, and without the overflow of a float
    if nbytes <= 0:
        raise errors.ArgumentError(f"{name} {value!r} is not a positive number of bytes")
    return nbytes


def parse_page_size(value: int | str) -> int:
    """Return the bytes of a page from an integer or a string such as "4KiB".

    Raises
    ------
    ArgumentError
        The value is not a power of two from 512 bytes to 1 MiB.
    """
    known = isinstance(value, int | np.integer | str) and not isinstance(value, bool)
    nbytes = parse_size(value, "page_size") if known else 0
    if nbytes < BLOCK or nbytes & (nbytes - 1):
        raise errors.ArgumentError(
            f"page_size {value!r} is not a power of two of at least {BLOCK} bytes (the block size): "
            "take 512, 4096 or 8192"
        )
    if nbytes > 1 << 20:
        raise errors.ArgumentError(f"page_size {value} is above 1 MiB: take a smaller one")
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
