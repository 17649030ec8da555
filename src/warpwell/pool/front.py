"""`to_device` and the like: buffers on the current device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import errors
from .buffer import Buffer
from .devices import current_device


def to_device(array: ArrayLike) -> Buffer:
    """Return a copy of an array on the current device; see `Device.to_device`."""
    return current_device().to_device(array)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> Buffer:
    """Return a buffer on the current device whose items are not set."""
    return current_device().empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> Buffer:
    """Return a buffer of zeros on the current device."""
    return current_device().zeros(shape, dtype)


def empty_like(other: Any) -> Buffer:
    """Return a buffer of the shape and dtype of an array or buffer: on the buffer's device, else on the current one."""
    if not hasattr(other, "shape") or not hasattr(other, "dtype"):
        raise errors.ArgumentError(f"{other!r:.60} has no shape and dtype: give an array or a buffer", name="other")
    place = getattr(other, "warpwell_place", None) or current_device()
    buffer: Buffer = place.empty(other.shape, other.dtype)
    return buffer
