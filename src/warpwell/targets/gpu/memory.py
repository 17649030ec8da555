"""Memory of the current GPU, and host memory that GPUs read: allocation, clearing, page-locking.

The packages of the ``cuda`` extra are optional, so functions import them when they are called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...libcuda import check
from .device import check_fork, is_lost_by_fork


def device_array(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a numba-cuda array in device memory; its items are not set.

    Raises
    ------
    MemoryError
        The device has no room for it.
    ForkError
        This process was forked from one that has used a GPU.
    """
    check_fork()
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    try:
        return cuda.device_array(shape, dtype)
    except CudaAPIError as error:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raise MemoryError(f"the GPU has no room for {nbytes} bytes: {error}") from error


def zeros(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a numba-cuda array that is already filled with zeros."""
    array = device_array(shape, dtype)
    if array.size:
        clear(address_of(array), array.size * array.dtype.itemsize)
    return array


def as_array(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, owner: Any
) -> Any:
    """Return device memory at an address as a numba-cuda array, which keeps `owner`."""
    from numba import cuda

    interface = {"shape": shape, "typestr": dtype, "data": (address, False), "version": 3, "strides": strides}
    return cuda.from_cuda_array_interface(interface, owner=owner, sync=False)


def address_of(array: Any) -> int:
    """Return the address of an array in device memory, of any library."""
    return int(array.__cuda_array_interface__["data"][0] or 0)


def to_host(array: Any) -> NDArray[Any]:
    """Return a copy in host memory of an array in device memory, of any library."""
    from numba import cuda

    return np.asarray(cuda.as_cuda_array(array).copy_to_host())


def clear(address: int, nbytes: int) -> None:
    """Zero memory of the current GPU, and wait for it.

    A memset of the default stream would not be ordered with the host or with non-blocking streams: it could run after
    the first copy into the new memory. And it would wait for kernels that run there.
    """
    from cuda.bindings import driver

    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        check(driver.cuMemsetD8Async(address, 0, nbytes, stream))
        check(driver.cuStreamSynchronize(stream))
    finally:
        driver.cuStreamDestroy(stream)


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Return page-locked host memory, which every GPU of the process addresses as the host does."""
    from numba import cuda

    return np.asarray(cuda.pinned_array(nbytes, np.uint8))


def pin(address: int, nbytes: int) -> Callable[[], object] | None:
    """Page-lock host memory, for all GPUs; return a function that undoes it (also at exit), or None."""
    if is_lost_by_fork():
        return None  # a GPU will not read it
    from cuda.bindings import driver
    from numba import cuda

    cuda.current_context()
    status = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
    return functools.partial(driver.cuMemHostUnregister, address) if int(status) == 0 else None


def pin_mapped(owner: Any, address: int, nbytes: int) -> Any:
    """Page-lock host memory for the current GPU until the returned object is dropped."""
    from numba import cuda

    return cuda.current_context().mempin(owner, address, nbytes, mapped=True)
