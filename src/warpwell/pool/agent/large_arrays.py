"""Large arrays among the arguments and results of calls, which are sent as bulk data, outside of the message."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import pack_dtype, unpack_dtype

LARGE = 256 << 10
"""Size in bytes above which an array is sent as bulk data. Below it, sending it in the message is as fast."""


def is_large(value: Any) -> bool:
    """Return True for an array that is sent as bulk data."""
    return type(value) is np.ndarray and value.nbytes > LARGE and not value.dtype.hasobject


def flat(array: NDArray[Any]) -> tuple[NDArray[Any], tuple[Any, ...]]:
    """Return an array as contiguous bytes, without a copy if it is contiguous, and the other arguments of `shaped`."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    contiguous = np.ascontiguousarray(array.T if fortran else array)
    return contiguous, (array.nbytes, pack_dtype(array.dtype), array.shape, fortran, array.flags.writeable)


def shaped(memory: NDArray[np.uint8], dtype: Any, shape: Any, fortran: bool, writeable: bool) -> NDArray[Any]:
    """Return the array with the received bytes."""
    array = np.ndarray(shape, unpack_dtype(dtype), memory, order="F" if fortran else "C")
    array.flags.writeable = writeable
    return array
