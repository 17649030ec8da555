"""Bulk reads and writes from the host: gathers and scatters of rows, by kernels on the array's device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..targets import div, grid, kernel, rem
from ..targets.arrays import empty, to_device, to_host
from .device_array import DeviceArray


@kernel
def gather_units(source, rows, units, out):
    """Copy row ``rows[r]`` of `units` units to row r of `out`; neighbouring threads take neighbouring units."""
    t = grid(1)
    row = rows[div(t, units)]
    out[t] = source[row, rem(t, units)]


@kernel
def scatter_units(target, rows, units, values):
    """Copy row r of `values` to row ``rows[r]``."""
    t = grid(1)
    row = rows[div(t, units)]
    target[row, rem(t, units)] = values[t]


def get(array: Any, index: Any) -> Any:
    """Return ``array[index]``: an item, or an array on the array's device."""
    first, rest = _split(array, index)
    if first is None:
        return _gather_all(array, rest)
    rows, scalar, shape = first
    out = _gather(array, rows)
    if isinstance(out, DeviceArray):
        if rest or scalar:
            host = out.copy_to_host()
            host = host[0] if scalar else host.reshape(shape + array.shape[1:])
            return host[rest if scalar else (slice(None),) * len(shape) + rest] if rest else host
        return DeviceArray(out._memory, shape + array.shape[1:], array.dtype)
    if scalar:
        return out[0][rest] if rest else out[0]
    out = out.reshape(shape + array.shape[1:])
    return out[(slice(None),) * len(shape) + rest] if rest else out


def put(array: Any, index: Any, value: Any) -> None:
    """Do ``array[index] = value``."""
    first, rest = _split(array, index)
    if first is None:
        one = _one(array)
        current = np.asarray(to_host(_gather(one, np.zeros(1, np.int64)))).reshape(())
        current[rest] = value
        _scatter(one, np.zeros(1, np.int64), current.reshape(1))
        return
    rows, scalar, shape = first
    if len(rows) == 0:
        return
    row_shape = array.shape[1:]
    if rest:
        current = np.asarray(to_host(_gather(array, rows)))
        target = current[0] if scalar else current.reshape(shape + row_shape)
        target[rest if scalar else (slice(None),) * len(shape) + rest] = value
        values = current
    else:
        wanted = row_shape if scalar else shape + row_shape
        values = np.broadcast_to(np.asarray(value, array.dtype), wanted)
    _scatter(array, rows, np.ascontiguousarray(values, array.dtype))


def _split(array: Any, index: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an index into rows of the first dimension and what NumPy does with the rest."""
    parts = index if isinstance(index, tuple) else (index,)
    if not array.shape:
        return None, parts
    if Ellipsis in [p for p in parts if p is Ellipsis]:
        where = next(k for k, p in enumerate(parts) if p is Ellipsis)
        fill = (slice(None),) * (array.ndim - (len(parts) - 1))
        parts = parts[:where] + fill + parts[where + 1 :]
    if len(parts) > array.ndim:
        raise IndexError(f"{len(parts)} indices for array {array.name!r} of {array.ndim} dimensions")
    first, rest = (parts[0], tuple(parts[1:])) if parts else (slice(None), ())
    if not isinstance(first, slice) and not all(isinstance(p, slice | int | np.integer) for p in rest):
        # NumPy pairs index arrays with one another; rows are gathered first here, which would cross them
        raise errors.ArgumentError(
            f"array {array.name!r} takes an index array in its first dimension alone: gather a[idx] first, "
            "then index the result"
        )
    extent = array.shape[0]
    if isinstance(first, slice):
        rows = np.arange(*first.indices(extent), dtype=np.int64)
        return (rows, False, rows.shape), rest
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        if not -extent <= first < extent:
            raise errors.IndexRangeError(
                f"index {first} is out of range for array {array.name!r} of shape {array.shape}",
                array=array.name, index=int(first),
            )  # fmt: skip
        return (np.array([int(first) % extent], np.int64), True, ()), rest
    indices = to_host(first)
    if indices.dtype == np.bool_:
        if indices.shape != (extent,):
            raise errors.ArgumentError(f"a mask of shape {indices.shape} for {extent} rows")
        indices = np.flatnonzero(indices)
    if indices.size == 0:
        indices = indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise errors.DTypeError(f"array {array.name!r} is indexed by integers, slices or masks, not {indices.dtype}")
    rows = indices.astype(np.int64).ravel()
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    if rows.size and not (-extent <= low and high < extent):
        bad = low if low < -extent else high
        raise errors.IndexRangeError(
            f"index {bad} is out of range for array {array.name!r} of shape {array.shape}",
            array=array.name, index=bad,
        )  # fmt: skip
    return (np.where(rows < 0, rows + extent, rows), False, indices.shape), rest


def _unit(array: Any, row_bytes: int) -> np.dtype[Any]:
    """Return the widest unsigned integer in which rows can be copied."""
    for nbytes in (8, 4, 2):
        if all(n % nbytes == 0 for n in (row_bytes, array._origin, array._strides[0])):
            return np.dtype(f"u{nbytes}")
    return np.dtype(np.uint8)


def _as_units(array: Any) -> tuple[Any, np.dtype[Any], int]:
    """Return the array as rows of units, the unit, and the units of a row."""
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    unit = _unit(array, row_bytes)
    units = row_bytes // unit.itemsize
    shape = (array.shape[0], units)
    return array._derive(shape, unit, (array._strides[0], unit.itemsize), 0), unit, units


def _contiguous_rows(array: Any, rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Return an array whose rows lie in one piece, and its rows that make up `rows`.

    The fields of records with several dimensions do not: there each item, or inner array, is a row.
    """
    wanted = array.dtype.itemsize
    split = array.ndim
    while split > 1 and array._strides[split - 1] == wanted:
        wanted *= array.shape[split - 1]
        split -= 1
    if split == 1:
        return array, rows
    each = math.prod(array.shape[1:split])
    shape = (array.shape[0] * each, *array.shape[split:])
    strides = (array._strides[split - 1], *array._strides[split:])
    flat = rows[:, np.newaxis] * each + np.arange(each)
    return array._derive(shape, array.dtype, strides, 0), flat.ravel()


def _gather(array: Any, rows: NDArray[np.int64]) -> Any:
    result = (len(rows), *array.shape[1:])
    array, rows = _contiguous_rows(array, rows)
    source, unit, units = _as_units(array)
    total = len(rows) * units
    if array.device == "cuda":
        out = empty(array.device, max(total, 1), unit)
        if total:
            gather_units[total](source, to_device(array.device, rows), units, out)
        return DeviceArray(out, result, array.dtype)
    out = np.empty(total, unit)
    if total:
        gather_units[total](source, rows, units, out)
    return out.view(array.dtype).reshape(result) if total else np.empty(result, array.dtype)


def _scatter(array: Any, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
    array, rows = _contiguous_rows(array, rows)
    target, unit, units = _as_units(array)
    flat = values.reshape(-1).view(np.uint8).view(unit)
    if flat.size:
        scatter_units[flat.size](target, rows, units, flat)


def _gather_all(array: Any, rest: tuple[Any, ...]) -> Any:
    """Return the item of an array without dimensions."""
    return np.asarray(to_host(_gather(_one(array), np.zeros(1, np.int64))))[0][rest]


def _one(array: Any) -> Any:
    """Return an array without dimensions as one of shape (1,)."""
    return array._derive((1,), array.dtype, (array.dtype.itemsize,), 0)


