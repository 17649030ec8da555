"""Arrays in device memory that kernels take as plain arguments: vertex data, counters, work lists."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .gpu import memory


def to_device(device: str, values: ArrayLike) -> Any:
    """Return a copy of an array in device memory.

    Parameters
    ----------
    device : {"cpu", "cuda", "interp"}
    values : array-like

    Returns
    -------
    ndarray or numba-cuda device array
        C-ordered. A GPU's array is passed to kernels without being copied back and forth.

    Raises
    ------
    MemoryError
        The device has no room for it.
    """
    if device != "cuda":
        return np.array(values, order="C")
    host = np.ascontiguousarray(values)
    array = memory.device_array(host.shape, host.dtype)
    if host.size:
        array.copy_to_device(host)
    return array


def zeros(device: str, shape: int | tuple[int, ...], dtype: DTypeLike = np.int64) -> Any:
    """Return an array of zeros in device memory (as `to_device`)."""
    if device != "cuda":
        return np.zeros(shape, dtype)
    return memory.zeros(shape, np.dtype(dtype))


def empty(device: str, shape: int | tuple[int, ...], dtype: DTypeLike = np.int64) -> Any:
    """Return an array in device memory whose items are not set (as `to_device`)."""
    if device != "cuda":
        return np.empty(shape, dtype)
    return memory.device_array(shape, np.dtype(dtype))


def at_address(device: str, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], keep: Any = None) -> Any:
    """Return memory at an address as an array in C order, without a copy; it keeps `keep`, the memory's owner."""
    if device == "cuda":
        return memory.as_array(address, shape, dtype, None, keep)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    raw.keep = keep  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(raw), dtype).reshape(shape) if nbytes else np.empty(shape, dtype)


def to_host(array: Any) -> NDArray[Any]:
    """Return an array of any device as a NumPy array; one that is in host memory is not copied."""
    if hasattr(array, "copy_to_host"):
        return np.asarray(array.copy_to_host())
    if hasattr(array, "__cuda_array_interface__"):
        return memory.to_host(array)
    return np.asarray(array)
