"""Arrays of other libraries (PyTorch, CuPy, JAX) as arguments of kernels: their memory, and Warpwell arrays over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import errors
from ..targets import at_address, is_argument


def is_foreign(value: Any) -> bool:
    """Return True if a value is an array of another library with DLPack or the CUDA array interface."""
    if isinstance(value, np.ndarray | np.generic) or is_argument(value):
        return False
    return any(hasattr(type(value), name) for name in ("__dlpack__", "__cuda_array_interface__"))


def located(value: Any, label: str) -> tuple[Any, np.dtype[Any]]:
    """Return the `Tensor` of an array of another library, and the dtype of its items.

    The other library orders the work that it has enqueued before the default stream of its GPU. Messages name the
    array as `label`.

    Raises
    ------
    ArgumentError
        The array is on an unsupported device, has gaps, or requires a gradient.
    DTypeError
        NumPy does not support the type of the items.
    """
    from ..array import DLPACK_CODES
    from ..array.gather import tensor_of

    tensor = tensor_of(value, label)
    dtype = tensor.items
    if not isinstance(dtype, np.dtype):
        code, bits = tensor.items
        kind = {number: kind for kind, number in DLPACK_CODES.items()}.get(code)
        try:
            dtype = np.dtype(f"{kind}{bits // 8}")
        except TypeError:
            raise errors.DTypeError(
                f"{label} has {bits}-bit items, a type that NumPy does not have: convert it first"
            ) from None
    if not tensor.contiguous or tensor.address % dtype.itemsize:
        raise errors.ArgumentError(
            f"the items of {label} must be contiguous in C order and aligned to their size: make the array contiguous",
            name="args",
        )
    return tensor, dtype


def shared(args: Sequence[Any], device: str) -> tuple[Any, ...]:
    """Return arguments of a kernel. Arrays that support only DLPack become arrays over the same memory.

    Raises
    ------
    ArgumentError, DTypeError
        See `located`. Also if an array is in GPU memory and the kernel runs on the CPU.
    """
    return tuple(_shared(value, k, device) if _has_only_dlpack(value) else value for k, value in enumerate(args))


def _has_only_dlpack(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray or kind is int or kind is float or not hasattr(kind, "__dlpack__"):
        return False
    return not (any(hasattr(kind, n) for n in ("__cuda_array_interface__", "__array__")) or is_argument(value))


def _shared(value: Any, index: int, device: str) -> Any:
    tensor, dtype = located(value, f"argument {index}")
    if not tensor.on_host and device != "cuda":
        raise errors.ArgumentError(
            f"argument {index} is in the memory of a GPU, but the kernel runs on the {device}: copy it to the host",
            name="args",
        )
    array = at_address("cpu" if tensor.on_host else "cuda", tensor.address, tensor.shape, dtype, tensor.keep)
    if tensor.on_host:
        array.flags.writeable = tensor.writable
    return array
