"""Large arrays among the arguments and results of calls: how they travel as bulk data, beside the message."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import pack_dtype, unpack_dtype

LARGE = 256 << 10
"""Bytes from which an array travels as bulk data: smaller ones arrive as soon within the message."""


def is_large(thing: Any) -> bool:
    """Return whether something is an array that travels as bulk data."""
    return type(thing) is np.ndarray and thing.nbytes > LARGE and not thing.dtype.hasobject


def flat(array: NDArray[Any]) -> tuple[NDArray[Any], tuple[Any, ...]]:
    """Return an array as contiguous bytes, not copied where they are, and what `shaped` needs besides."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    whole = np.ascontiguousarray(array.T if fortran else array)
    return whole, (array.nbytes, pack_dtype(array.dtype), array.shape, fortran, array.flags.writeable)


def shaped(memory: NDArray[np.uint8], dtype: Any, shape: Any, fortran: bool, writeable: bool) -> NDArray[Any]:
    """Return the array whose bytes have come."""
    array = np.ndarray(shape, unpack_dtype(dtype), memory, order="F" if fortran else "C")
    array.flags.writeable = writeable
    return array
