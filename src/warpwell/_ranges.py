"""Ranges of integers, ``[first, end)``, such as pages of a cache and rows of an array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

Range = tuple[int, int]


def ranges_of(numbers: ArrayLike) -> list[Range]:
    """Return ascending integers as ranges."""
    array = np.asarray(numbers, np.int64)
    if not array.size:
        return []
    starts = np.flatnonzero(np.diff(array, prepend=array[0]) != 1)
    ends = np.append(starts[1:], array.size) - 1
    return list(zip(array[starts].tolist(), (array[ends] + 1).tolist(), strict=True))


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in ascending order, and join those that touch or overlap."""
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined
