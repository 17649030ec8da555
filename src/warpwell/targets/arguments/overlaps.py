"""`together`, `Span`: NumPy arguments of one launch that share memory share it on the device that they are copied to.

One rule for all targets: arguments that share memory on the host share it in the launch. If arrays are copied to a
device and back, overlapping arrays become one copy, and the kernel receives views of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from ..memory import view_of

_EFFORT = 100_000
"""Maximum effort of a search for an item that two interleaved arrays share; beyond it, the arrays count as
overlapping."""

_ALIGNMENT = 64


def together(values: Sequence[Any]) -> list[list[NDArray[Any]]]:
    """Return the NumPy arrays among launch arguments that share memory, one list for each piece of memory.

    An array that is passed twice is in a list, too. An array that shares no memory is in no list.
    """
    arrays = [v for v in values if isinstance(v, np.ndarray) and v.size and not v.dtype.hasobject]
    groups: list[list[NDArray[Any]]] = []
    if len(arrays) < 2:
        return groups
    for array in arrays:
        joined, separate = [array], []
        for group in groups:
            if any(overlap(array, member) for member in group):
                joined += group
            else:
                separate.append(group)
        groups = [*separate, joined]
    return [group for group in groups if len(group) > 1]


def overlap(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Return True if two arrays have an item in common, or if that would take too long to find out."""
    if first is second:
        return True
    if not np.may_share_memory(first, second):
        return False
    try:
        return bool(np.shares_memory(first, second, max_work=_EFFORT))  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:
        return True


class Span:
    """The host memory from the first to the last byte of arrays that are `together`.

    Attributes
    ----------
    bytes : ndarray of uint8
        That memory.
    pad : int
        Bytes before it in a copy, so that items are aligned in the copy as on the host.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        bounds = [byte_bounds(array) for array in arrays]
        self._first = min(first for first, _ in bounds)
        nbytes = max(end for _, end in bounds) - self._first
        self.arrays = list({id(array): array for array in arrays}.values())
        self.bytes = view_of(self._first, nbytes, np.uint8)
        self.pad = self._first % _ALIGNMENT

    def offset_of(self, array: NDArray[Any]) -> int:
        """Return the offset in bytes of the first item of an array in a copy, after `pad` bytes."""
        return self.pad + int(array.ctypes.data) - self._first

    def copy_back(self, copy: NDArray[np.uint8]) -> None:
        """Write the values of a copy to the arrays that may be written, and to no byte between their items."""
        for array, values in self.changed(copy):
            array[...] = values

    def changed(self, copy: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the arrays that may be written, each with its new values in a copy."""
        for array in self.arrays:
            if array.flags.writeable:
                yield array, np.ndarray(array.shape, array.dtype, copy, self.offset_of(array), array.strides)
