"""Bulk reads and writes from the host: kernels on the array's device copy runs of bytes, or system calls do (`direct`).

An index becomes runs of one length, each contiguous in the file (see `warpwell.array.runs`). Only the items of the
index are read or written, with a few MiB of memory besides the result, for any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..targets import div, grid, kernel, rem, to_device
from ..targets.arrays import empty
from . import direct, from_medium
from .device_array import DeviceArray
from .items import on_host
from .runs import Runs, runs_of

_RUNS = 1 << 18
"""Runs of a launch at most: each has 8 bytes of its own."""
_BYTES = 8 << 20
"""Bytes of a launch at most, where they are copied once more."""


@kernel
def gather_units(source, starts, units, out):
    """Copy `units` units from unit ``starts[r]`` to row r of `out`; neighbouring threads copy neighbours."""
    t = grid(1)
    start = starts[div(t, units)]
    out[t] = source[start, rem(t, units)]


@kernel
def scatter_units(target, starts, units, values):
    """Copy row r of `values` to the `units` units from unit ``starts[r]``."""
    t = grid(1)
    start = starts[div(t, units)]
    target[start, rem(t, units)] = values[t]


def get(array: Any, index: Any) -> Any:
    """Return ``array[index]``: an item, or an array on the array's device."""
    runs = runs_of(array, index)
    total = runs.count * runs.nbytes
    if array.device == "cuda":
        memory = empty(array.device, max(total, 1), np.uint8)
        if not _past_the_cache(array, runs, memory):
            for at, starts, nbytes in _launches(runs, total):
                _gather(array, runs, at, starts, nbytes, memory)
        result = DeviceArray(memory, runs.shape, array.dtype)
        if not (runs.scalar or runs.inner) and runs.axis == 0:
            return result
        out = result.copy_to_host()
    else:
        raw = np.empty(total, np.uint8)
        if not direct.read(array, runs, raw):
            for at, starts, nbytes in _launches(runs, total):
                _gather(array, runs, at, starts, nbytes, raw)
        dtype = on_host(array.dtype)
        out = raw.view(dtype).reshape(runs.shape) if total else np.empty(runs.shape, dtype)
    out = np.moveaxis(out, 0, runs.axis) if runs.axis else out
    return out[()] if runs.scalar else out


def _past_the_cache(array: Any, runs: Runs, memory: Any) -> bool:
    """Read one long run from the medium to device memory; return False where kernels have to read it."""
    if runs.count != 1 or not from_medium.applies(array, runs.nbytes):
        return False
    start = runs.starts(0, 1)

    def again(low: int, high: int) -> None:
        _gather(array, runs, low, start + low, high - low, memory)

    return from_medium.to_device(array, int(start[0]), runs.nbytes, memory, again)


def whole(array: Any) -> Any:
    """Return all items as a NumPy array, without room for them on a GPU; None where `get` reads them as well."""
    runs = runs_of(array, slice(None)) if array.shape else None
    if runs is None or runs.count != 1 or not from_medium.applies(array, runs.nbytes):
        return None

    def again(out: NDArray[np.uint8], low: int, high: int) -> None:
        for at in range(low, high, _BYTES):
            nbytes = min(_BYTES, high - at)
            memory = empty(array.device, nbytes, np.uint8)
            _gather(array, runs, 0, runs.starts(0, 1) + at, nbytes, memory)
            out[at : at + nbytes] = memory.copy_to_host()

    raw = from_medium.to_host(array, int(runs.starts(0, 1)[0]), runs.nbytes, again)
    if raw is None:
        return None
    aligned = raw.ctypes.data % max(1, array.dtype.alignment) == 0
    return (raw if aligned else raw.copy()).view(array.dtype).reshape(runs.shape)


def put(array: Any, index: Any, value: Any) -> None:
    """Do ``array[index] = value``. Of values for one place the last remains, as with NumPy."""
    runs = runs_of(array, index)
    plain = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"  # others may fail where they are converted
    values = value if plain else np.asarray(value, array.dtype)
    while values.ndim > len(runs.shape) and values.shape[0] == 1:
        values = values[0]  # as NumPy assigns
    if runs.axis:
        wanted = (*runs.shape[1 : runs.axis + 1], runs.shape[0], *runs.shape[runs.axis + 1 :])
        values = np.moveaxis(np.broadcast_to(values, wanted), runs.axis, 0)
    else:
        values = np.broadcast_to(values, runs.shape)
    size = array.dtype.itemsize
    for at, starts, nbytes in _launches(runs, max(_BYTES // size, 1) * size):
        some = _items(values, at // size, (at + len(starts) * nbytes) // size)
        raw = np.ascontiguousarray(some, array.dtype).view(np.uint8)
        last = _last_of_equal(starts) if runs.repeats else None
        if last is not None:
            starts, raw = starts[last], raw.reshape(-1, nbytes)[last].reshape(-1)
        if not direct.write(array, starts, nbytes, raw):
            _scatter(array, runs, starts, nbytes, raw)


def _last_of_equal(starts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the positions of the last occurrence of each start, ascending, or None if no start repeats.

    Threads that write different runs to one place would leave a mixture of them there.
    """
    in_order = np.sort(starts)
    if not (in_order[1:] == in_order[:-1]).any():
        return None
    _, from_end = np.unique(starts[::-1], return_index=True)
    return np.sort(len(starts) - 1 - from_end)


def _launches(runs: Runs, most: int) -> Iterator[tuple[int, NDArray[np.int64], int]]:
    """Split runs into launches of at most `most` bytes; yield each one's place in the result, starts and length."""
    if not runs.nbytes:
        return
    if runs.nbytes <= most:
        some = max(1, min(_RUNS, most // runs.nbytes))
        for low in range(0, runs.count, some):
            yield low * runs.nbytes, runs.starts(low, min(low + some, runs.count)), runs.nbytes
        return
    for k in range(runs.count):
        start = runs.starts(k, k + 1)
        for offset in range(0, runs.nbytes, most):
            yield k * runs.nbytes + offset, start + offset, min(most, runs.nbytes - offset)


def _pieces(
    array: Any, runs: Runs, at: int, starts: NDArray[np.int64], nbytes: int
) -> Iterator[tuple[int, int, Any, Any, int]]:
    """Yield the parts of a launch, of one unit each: first and last byte in its result, view, starts, units."""
    alone = len(starts) == 1
    common = math.gcd(array._origin, at, int(starts[0]) if alone else runs.step)
    # a run that is alone is copied in wide units, but for what is left at its end
    end = nbytes - (nbytes % _unit(common).itemsize if alone else 0)
    if end:
        yield 0, end * len(starts), *_as_units(array, _unit(common, end), starts, end)
    if end < nbytes:
        yield end, nbytes, *_as_units(array, _unit(common, end, nbytes), starts + end, nbytes - end)


def _unit(*numbers: int) -> np.dtype[Any]:
    """Return the widest unsigned integer dtype whose size divides all these numbers of bytes."""
    for nbytes in (8, 4, 2):
        if all(n % nbytes == 0 for n in numbers):
            return np.dtype(f"u{nbytes}")
    return np.dtype(np.uint8)


def _as_units(array: Any, unit: np.dtype[Any], starts: NDArray[np.int64], nbytes: int) -> tuple[Any, Any, int]:
    """Return a view whose item [i, j] is unit i + j of the array, the starts in units, and the units of a run."""
    step, units = unit.itemsize, nbytes // unit.itemsize
    # one more than a run has: with one unit the view would have the strides of a plain array, and be compiled anew
    return array._derive((1 << 62, units + 1), unit, (step, step), 0), starts // step, units


def _gather(array: Any, runs: Runs, at: int, starts: NDArray[np.int64], nbytes: int, out: Any) -> None:
    for first, end, view, units_at, units in _pieces(array, runs, at, starts, nbytes):
        view.writable = False  # such a launch leaves nothing to write back
        into = out[at + first : at + end].view(view.dtype)
        on_device = to_device(array.device, units_at) if array.device == "cuda" else units_at
        gather_units[into.size](view, on_device, units, into)


def _scatter(array: Any, runs: Runs, starts: NDArray[np.int64], nbytes: int, values: NDArray[np.uint8]) -> None:
    for first, end, view, units_at, units in _pieces(array, runs, 0, starts, nbytes):
        some = values[first:end].view(view.dtype)
        some.flags.writeable = False  # whatever the caller's is: one compilation for both
        scatter_units[some.size](view, units_at, units, some)


def _items(values: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """Return items [low, high) in C order of an array that may be broadcast, without a copy of all of it."""
    if values.flags.c_contiguous:
        return values.reshape(-1)[low:high]
    if not any(step for step, n in zip(values.strides, values.shape, strict=True) if n > 1):
        return np.full(high - low, values[(0,) * values.ndim], values.dtype)
    return np.asarray(values.flat[low:high])
