"""Reductions of arrays on storage, such as ``a.sum(axis=0)``: block by block, in bounded memory.

An array of at most `BLOCK_BYTES` is read, and NumPy reduces it. The items of a larger one are read in blocks. Memory is
needed for a block and for the result, as large as `axis` makes it. Floats of less than 8 bytes are added up in 8 bytes,
so sums of many blocks are at least as accurate as NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.typing import NDArray

from .. import errors
from .items import is_bits

BLOCK_BYTES = 8 << 20
"""Bytes of items that are read at a time. A block has at least one item of every dimension."""

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}
_MOMENTS = ("mean", "var", "std")
_POSITIONS = ("argmin", "argmax")
NAMES = (*UFUNCS, *_MOMENTS, *_POSITIONS)
"""Methods of arrays that reduce in bounded memory."""

_Blocks = Iterator[tuple[tuple[slice, ...], NDArray[Any]]]


def reduce(array: Any, name: str, axis: Any = None, *positional: Any, **options: Any) -> Any:
    """Return the result of the method `name` of `numpy.ndarray`.

    Parameters
    ----------
    array : OnStorage
    name : str
        One of `NAMES`.
    axis : int or tuple of int, optional
    *positional, **options
        ``dtype``, ``out``, ``keepdims`` and, for "var" and "std", ``ddof`` as for NumPy. Arrays of at most
        `BLOCK_BYTES` take all options of NumPy.

    Raises
    ------
    TypeError
        The array is larger, and an option needs all of its items.
    DTypeError
        Its items are bfloat16, and NumPy sees only their bits.
    """
    if is_bits(array.dtype):
        raise errors.DTypeError(
            f"items of array {array.name!r} are bfloat16, which NumPy cannot add or compare: install ml_dtypes before "
            "the array is opened, or use a kernel"
        )
    if array.nbytes <= BLOCK_BYTES:
        return getattr(np.asarray(array), name)(axis, *positional, **options)
    has_dtype = name in ("sum", "prod", *_MOMENTS)
    options |= dict(zip(("dtype", "out") if has_dtype else ("out",), positional, strict=False))
    keepdims, out = bool(options.pop("keepdims", False)), options.pop("out", None)
    dtype = options.pop("dtype", None) if has_dtype else None
    ddof = options.pop("ddof", 0) if name in ("var", "std") else 0
    if options:
        _refuse(array, f"np.asarray(a).{name}({', '.join(f'{option}=...' for option in options)})")
    axes = tuple(range(array.ndim)) if axis is None else normalize_axis_tuple(axis, array.ndim)
    if name in _POSITIONS:
        result = _positions(array, name, axis if axis is None else axes[0])
    elif name in UFUNCS:
        result = _folded(array, UFUNCS[name], axes, dtype)
    else:
        result = _moments(array, name, axes, dtype, ddof)
    if not keepdims:
        result = np.squeeze(result, axes)
    if out is None:
        return result[()]
    out[...] = result
    return out


def _refuse(array: Any, instead: str) -> NoReturn:
    array._refuse(instead)
    raise AssertionError


def _blocks(array: Any) -> _Blocks:
    """Yield the slices, one a dimension, and the items of each block, in C order."""
    shape = array.shape
    inner = [math.prod(shape[k + 1 :]) * array.dtype.itemsize for k in range(len(shape))]
    split = next((k for k, nbytes in enumerate(inner) if nbytes <= BLOCK_BYTES), len(shape) - 1)
    step = max(1, BLOCK_BYTES // inner[split])
    inner_slices = tuple(slice(0, n) for n in shape[split + 1 :])
    for outer in np.ndindex(shape[:split]):
        before = tuple(slice(k, k + 1) for k in outer)
        for start in range(0, shape[split], step):
            index = (*before, slice(start, min(start + step, shape[split])), *inner_slices)
            yield index, np.asarray(array[index] if before else array[index[0]])


def _region(index: tuple[slice, ...], axes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if k in axes else part for k, part in enumerate(index))


def _reduced_shape(array: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if k in axes else n for k, n in enumerate(array.shape))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.result_type(dtype, np.float64) if dtype.kind in "fc" else dtype


def _folded(array: Any, ufunc: np.ufunc, axes: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return ``ufunc.reduce`` over axes, which stay as dimensions of extent 1."""
    total: NDArray[Any] | None = None
    narrow = np.dtype(bool)
    for index, items in _blocks(array):
        part = ufunc.reduce(items, axis=axes, dtype=dtype, keepdims=True)
        if total is None:
            narrow = part.dtype
            total = np.empty(_reduced_shape(array, axes), _wide(narrow))
        region = _region(index, axes)
        is_first = all(index[k].start == 0 for k in axes)
        total[region] = part if is_first else ufunc(total[region], part)
    assert total is not None
    return total.astype(narrow, copy=False)


def _moments(array: Any, name: str, axes: tuple[int, ...], dtype: Any, ddof: float) -> NDArray[Any]:
    """Return mean, variance or standard deviation; blocks are merged by the method of Chan, Golub and LeVeque."""
    result = np.dtype(array.dtype if dtype is None else dtype)
    result = np.dtype(np.float64) if result.kind in "biu" else result
    shape = _reduced_shape(array, axes)
    counts = np.zeros(shape)
    means = np.zeros(shape, _wide(result))
    squares = np.zeros(shape)
    for index, items in _blocks(array):
        region = _region(index, axes)
        count = math.prod(items.shape[k] for k in axes)
        mean = items.mean(axis=axes, dtype=means.dtype, keepdims=True)
        before = counts[region]
        difference = mean - means[region]
        if name != "mean":
            spread = np.square(np.abs(items - mean)).sum(axis=axes, keepdims=True)
            squares[region] += spread + np.square(np.abs(difference)) * before * (count / (before + count))
        means[region] += difference * (count / (before + count))
        counts[region] += count
    if name == "mean":
        return means.astype(result)
    found = squares / np.maximum(counts - ddof, 0)
    return (np.sqrt(found) if name == "std" else found).astype(np.zeros((), result).real.dtype)


def _positions(array: Any, name: str, axis: int | None) -> NDArray[Any]:
    """Return the first positions of extrema along an axis (None: in the flat array), with all dimensions."""
    better: Callable[..., Any] = np.greater if name == "argmax" else np.less
    axes = tuple(range(array.ndim)) if axis is None else (axis,)
    shape = _reduced_shape(array, axes)
    positions, extrema = np.zeros(shape, np.int64), np.empty(shape, array.dtype)
    done = 0
    for index, items in _blocks(array):
        if axis is None:
            offset = np.array(getattr(items, name)()).reshape((1,) * array.ndim)
            values = items.reshape(-1)[offset]
            start, done = done, done + items.size
        else:
            offset = getattr(items, name)(axis=axis, keepdims=True)
            values = np.take_along_axis(items, offset, axis)
            start = index[axis].start
        region = _region(index, axes)
        best = extrema[region]
        # the first NaN is the extremum, as with NumPy
        wins = better(values, best) | ((values != values) & (best == best)) if start else np.ones(best.shape, bool)
        extrema[region] = np.where(wins, values, best)
        positions[region] = np.where(wins, offset + start, positions[region])
    return positions
