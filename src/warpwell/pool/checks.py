"""`extents`, `seconds`, `whole`, `kind_of`: what callers may give, checked before anything is sent."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .. import errors


def extents(shape: Any) -> tuple[int, ...]:
    """Return a shape as integers. Raises `ArgumentError`."""
    try:
        if isinstance(shape, Iterable) and not isinstance(shape, str | bytes):
            found = tuple(operator.index(n) for n in shape)
        else:
            found = (operator.index(shape),)
    except TypeError:
        raise errors.ArgumentError(f"shape {shape!r:.60}: give an integer, or a tuple of them", name="shape") from None
    if any(n < 0 for n in found):
        raise errors.ArgumentError(f"shape {shape} has a negative extent", name="shape")
    if math.prod(found) >= 1 << 59:
        raise MemoryError(f"shape {shape} has more items than any device has room for")
    return found


def kind_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype of items that can be on a device. Raises `DTypeError`."""
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise errors.DTypeError(f"dtype {dtype!r:.60}: {error}") from None
    if kind.hasobject:
        raise errors.DTypeError(f"{kind} holds Python objects, which live in one process only")
    return kind


def seconds(timeout: float | None) -> float | None:
    """Return a time-out. Raises `ArgumentError` for what is no time."""
    if timeout is None:
        return None
    if isinstance(timeout, int | float | np.number) and math.isfinite(timeout) and timeout >= 0:
        return float(timeout)
    raise errors.ArgumentError(
        f"timeout={timeout!r:.60}: give seconds, 0 or more; without it WARPWELL_POOL_STALL counts, or an hour",
        name="timeout",
    )


def whole(value: Any, name: str, least: int = 0, most: int = 1 << 30) -> int:
    """Return an integer between two bounds. Raises `ArgumentError`."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or not least <= found <= most:
        raise errors.ArgumentError(f"{name}={value!r:.60}: give an integer from {least} to {most}", name=name)
    return found
