"""Bounds checks of NumPy and device arrays in kernels: a switch for debugging, off by default.

`@kernel(check=True)` switches them on for one kernel, and ``WARPWELL_CHECK=1`` for all, as it is set when a kernel is
launched. Such a launch runs another kernel, which calls the user's kernel with `checked` arguments. For these, the
user's kernel is compiled with checks. The code for ordinary arrays does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import errors
from .._settings import settings
from .device import device
from .fault import LaunchFlag
from .interp.checked_numpy import CheckedNumPy, out_of_range
from .memory import Block, memory_for
from .primitives import DEVICE, SYSTEM, compare_exchange, load_relaxed, store_relaxed, store_release
from .signature import parameters

_FLAG, _CLAIMED, _ARGUMENT, _INDEX, _EXTENT = range(5)
SINK = 64
"""Offset of the memory that additions out of range change, after the record."""
_WORD_COUNT = 16


def checking(kernel: Any) -> bool:
    """Return True if launches of a kernel are checked now.

    Raises
    ------
    ArgumentError
        ``WARPWELL_CHECK`` is not 0 or 1.
    """
    if kernel.bounds is not False:
        return bool(kernel.bounds)  # None for kernels that call other kernels with checks
    if str(kernel.function.__module__).startswith("warpwell."):
        return False
    return settings.check


def checked(value: Any, record: int, number: int) -> Any:
    """Return an argument as one whose subscripts are checked (compiled targets; only arrays change)."""
    raise NotImplementedError


@device
def note(record, number, index, extent):  # type: ignore[no-untyped-def]
    """Record the first index that is out of range; later ones may be consequences of a failure (thread)."""
    flag = load_relaxed(record + 8 * _FLAG, SYSTEM)
    if load_relaxed(flag, SYSTEM) == 0 and compare_exchange(record + 8 * _CLAIMED, 0, 1, DEVICE) == 0:
        store_relaxed(record + 8 * _ARGUMENT, number, SYSTEM)
        store_relaxed(record + 8 * _INDEX, index, SYSTEM)
        store_relaxed(record + 8 * _EXTENT, extent, SYSTEM)
        store_release(flag, 1, SYSTEM)


class Record:
    """The record of a launch with checks, in memory that host and device share."""

    def __init__(self, target: str, flag: LaunchFlag) -> None:
        self._block: Block = memory_for(target).allocate_shared(8 * _WORD_COUNT)
        self._block.words[_FLAG] = flag.address
        self.address = self._block.address

    def error(self, kernel: Any) -> errors.IndexRangeError | None:
        """Return the exception for the recorded index, or None."""
        record = self._block.words
        if not record[_CLAIMED]:
            return None
        names = parameters(kernel)
        number, index, extent = (int(record[k]) for k in (_ARGUMENT, _INDEX, _EXTENT))
        name = names[number] if number < len(names) else f"argument {number}"
        return out_of_range(kernel.__name__, name, index, extent)


def for_interp(kernel: Any, values: Sequence[Any]) -> list[Any]:
    """Return a launch's arguments with its arrays checked."""
    out = list(values)
    for k, name in enumerate(parameters(kernel)[: len(out)]):
        if isinstance(out[k], np.ndarray):
            out[k] = out[k].view(CheckedNumPy)
            out[k].origin = kernel.__name__, name
    return out
