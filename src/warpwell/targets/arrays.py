"""Arrays in device memory that kernels take as plain arguments: vertex data, counters, work lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .memory import clear


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
    array = _allocate(host.shape, host.dtype)
    if host.size:
        array.copy_to_device(host)
    return array


def zeros(device: str, shape: int | tuple[int, ...], dtype: DTypeLike = np.int64) -> Any:
    """Return an array of zeros in device memory (as `to_device`)."""
    if device != "cuda":
        return np.zeros(shape, dtype)
    array = _allocate(shape, np.dtype(dtype))
    if array.size:
        clear(int(array.device_ctypes_pointer.value), array.size * array.dtype.itemsize)
    return array


def empty(device: str, shape: int | tuple[int, ...], dtype: DTypeLike = np.int64) -> Any:
    """Return an array in device memory whose items are not set (as `to_device`)."""
    return _allocate(shape, np.dtype(dtype)) if device == "cuda" else np.empty(shape, dtype)


def to_host(array: Any) -> NDArray[Any]:
    """Return an array of any device as a NumPy array; one that is in host memory is not copied."""
    if hasattr(array, "copy_to_host"):
        return np.asarray(array.copy_to_host())
    if hasattr(array, "__cuda_array_interface__"):
        from numba import cuda

        return np.asarray(cuda.as_cuda_array(array).copy_to_host())
    return np.asarray(array)


def _allocate(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    try:
        return cuda.device_array(shape, dtype)
    except CudaAPIError as error:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raise MemoryError(f"the GPU has no room for {nbytes} bytes: {error}") from error
