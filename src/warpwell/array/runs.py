"""`Runs`: the places in the file of the items of an index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..targets import to_host


@dataclass
class Runs:
    """Pieces of the file, all of one length, that hold the items of an index in the order of the result.

    Attributes
    ----------
    shape : tuple of int
        Shape of the result, before `axis` is moved.
    count, nbytes : int
        Number of runs, and bytes of each.
    step : int
        A divisor of every start (0 if all are 0).
    starts : callable
        ``starts(low, high)`` returns the bytes, counted from item 0, at which runs [low, high) start.
    scalar : bool
        Whether the result is an item, or the row of one index.
    inner : bool
        Whether dimensions after the first are indexed.
    repeats : bool
        Whether several runs may start at one place, as with index arrays.
    axis : int
        Position of the first dimension of `shape`: NumPy puts the dimensions of separated index arrays first.
    """

    shape: tuple[int, ...]
    count: int
    nbytes: int
    step: int
    starts: Callable[[int, int], NDArray[np.int64]]
    scalar: bool = False
    inner: bool = False
    repeats: bool = False
    axis: int = 0


def runs_of(array: Any, index: Any) -> Runs:
    """Return the runs of ``array[index]``.

    Raises
    ------
    IndexRangeError, IndexError, ArgumentError, DTypeError
    """
    parts = _parts(array, index)
    first, rest = (parts[0], parts[1:]) if parts else (slice(None), ())
    if all(map(_is_basic, parts)):
        runs = _basic(array, parts)
        runs.scalar = _is_integer(first) or (isinstance(index, tuple) and not index and not array.shape)
    elif _is_basic(first):
        runs = _gathered_inside(array, first, rest)
    else:
        runs = _gathered(array, first, rest)
    runs.inner = bool(rest) or not array.shape
    return runs


def _parts(array: Any, index: Any) -> tuple[Any, ...]:
    """Return an index as a tuple without an ellipsis."""
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    used = sum(p is not None and p is not Ellipsis for p in parts)
    if used > array.ndim:
        raise IndexError(f"{used} indices for array {array.name!r} of {array.ndim} dimensions")
    places = [k for k, p in enumerate(parts) if p is Ellipsis]
    if len(places) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not places:
        return parts
    filled: tuple[Any, ...] = (slice(None),) * (array.ndim - used)
    return parts[: places[0]] + filled + parts[places[0] + 1 :]


def _is_integer(part: Any) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool)


def _is_basic(part: Any) -> bool:
    return part is None or isinstance(part, slice) or _is_integer(part)


def _affine(array: Any, parts: Sequence[Any], dimension: int) -> tuple[int, list[int], list[int]]:
    """Return offset, shape and strides (bytes) of integers, slices and new axes from a dimension."""
    offset, shape, strides = 0, list[int](), list[int]()
    for part in parts:
        if part is None:
            shape.append(1)
            strides.append(0)
            continue
        extent, stride = array.shape[dimension], array._strides[dimension]
        dimension += 1
        if isinstance(part, slice):
            start, stop, by = part.indices(extent)
            n = len(range(start, stop, by))
            offset += start * stride if n else 0
            shape.append(n)
            strides.append(by * stride)
        else:
            if not -extent <= part < extent:
                raise _outside(array, int(part))
            offset += int(part) % extent * stride
    return offset, shape + list(array.shape[dimension:]), strides + list(array._strides[dimension:])


def _outside(array: Any, index: int) -> errors.IndexRangeError:
    return errors.IndexRangeError(
        f"index {index} is out of range for array {array.name!r} of shape {array.shape}", array=array.name, index=index
    )


def _contiguous(array: Any, shape: list[int], strides: list[int]) -> int:
    """Remove the last dimensions without gaps; return their bytes."""
    nbytes = int(array.dtype.itemsize)
    while shape and (strides[-1] == nbytes or shape[-1] == 1):
        strides.pop()
        nbytes *= shape.pop()
    return nbytes


def _places(low: int, high: int, shape: Sequence[int], strides: Sequence[int]) -> NDArray[np.int64]:
    """Return the byte offsets of items [low, high), in C order, of a strided array."""
    left = np.arange(low, high, dtype=np.int64)
    out = np.zeros(high - low, np.int64)
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        left, here = np.divmod(left, extent)
        here *= stride
        out += here
    return out


def _basic(array: Any, parts: Sequence[Any]) -> Runs:
    offset, shape, strides = _affine(array, parts, 0)
    outer, steps = list(shape), list(strides)
    nbytes = _contiguous(array, outer, steps)

    def starts(low: int, high: int) -> NDArray[np.int64]:
        return _places(low, high, outer, steps) + offset

    return Runs(tuple(shape), math.prod(outer), nbytes, math.gcd(offset, *steps), starts)


def _gathered(array: Any, first: Any, rest: Sequence[Any]) -> Runs:
    """Return the runs of an index array, or a mask, in the first dimension."""
    if not all(isinstance(p, slice) or _is_integer(p) for p in rest):
        # NumPy pairs index arrays with one another
        raise errors.ArgumentError(
            f"array {array.name!r} takes an index array in its first dimension alone: gather a[idx] first, "
            "then index the result"
        )
    if not array.shape:
        raise IndexError(f"1 indices for array {array.name!r} of 0 dimensions")
    indices = _row_indices(array, first)
    extent = array.shape[0]
    flat = indices.reshape(-1)
    offset, shape, strides = _affine(array, rest, 1)
    outer, steps = list(shape), list(strides)
    nbytes = _contiguous(array, outer, steps)
    each = math.prod(outer)
    row = array._strides[0]

    def starts(low: int, high: int) -> NDArray[np.int64]:
        from_row, to_row = low // each, -(-high // each)
        rows = flat[from_row:to_row].astype(np.int64)
        rows[rows < 0] += extent
        rows *= row
        rows += offset
        if each == 1:
            return rows
        inside = _places(0, each, outer, steps)
        return (rows[:, np.newaxis] + inside).reshape(-1)[low - from_row * each : high - from_row * each]

    step = math.gcd(row, offset, *steps)
    return Runs((*indices.shape, *shape), flat.size * each, nbytes, step, starts, repeats=True)


def _row_indices(array: Any, first: Any) -> NDArray[Any]:
    extent = array.shape[0]
    indices = to_host(first)
    if indices.dtype == np.bool_:
        if indices.shape != (extent,):
            raise errors.ArgumentError(f"a mask of shape {indices.shape} for {extent} rows")
        indices = np.flatnonzero(indices)
    if indices.size == 0:
        indices = indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise errors.DTypeError(f"array {array.name!r} is indexed by integers, slices or masks, not {indices.dtype}")
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    if low < -extent or high >= extent:
        raise _outside(array, low if low < -extent else high)
    return indices


def _gathered_inside(array: Any, first: Any, rest: Sequence[Any]) -> Runs:
    """Return the runs of index arrays within each row of a slice."""
    if not isinstance(first, slice):
        raise errors.ArgumentError(
            f"array {array.name!r} takes an index array in its first dimension alone: gather a[idx] first, "
            "then index the result"
        )
    start, stop, by = first.indices(array.shape[0])
    rows, row = len(range(start, stop, by)), array._strides[0]
    shape = array.shape[1:]
    # NumPy says what the index means: where the items of a row lie, and where the rows are in the result
    inside: NDArray[np.int64] = np.zeros((), np.int64)
    for k, (extent, stride) in enumerate(zip(shape, array._strides[1:], strict=True)):
        places = np.arange(extent, dtype=np.int64).reshape(-1, *(1,) * (len(shape) - 1 - k)) * stride
        inside = inside + np.broadcast_to(places, shape)[tuple(rest)]
    probe = np.zeros((), np.uint8)
    one, two = (np.broadcast_to(probe, (n, *shape))[(slice(None), *rest)].shape for n in (1, 2))
    axis = next(k for k, (m, n) in enumerate(zip(one, two, strict=True)) if m != n)
    offsets = inside.reshape(-1)
    each = offsets.size

    def starts(low: int, high: int) -> NDArray[np.int64]:
        from_row, to_row = low // each, -(-high // each)
        places = (start + by * np.arange(from_row, to_row, dtype=np.int64)) * row
        out: NDArray[np.int64] = (places[:, np.newaxis] + offsets).reshape(-1)
        return out[low - from_row * each : high - from_row * each]

    step = math.gcd(row * start, row * by, int(np.gcd.reduce(offsets)) if each else 0)
    nbytes = int(array.dtype.itemsize)
    return Runs((rows, *inside.shape), rows * each, nbytes, step, starts, repeats=True, axis=axis)
