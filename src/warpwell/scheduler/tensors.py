"""Arrays of other libraries (PyTorch, CuPy, JAX) as arguments of kernels: where they lie, and as arrays of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import errors
from ..targets import at_address, is_argument


def is_foreign(value: Any) -> bool:
    """Tell whether a value is an array that says by DLPack, or as device memory does, where it lies."""
    if isinstance(value, np.ndarray | np.generic) or is_argument(value):
        return False
    return any(hasattr(type(value), name) for name in ("__dlpack__", "__cuda_array_interface__"))


def located(value: Any, what: str) -> tuple[Any, np.dtype[Any]]:
    """Return the `Tensor` of an array of another library, and the dtype of its items; `what` it is, for messages.

    Its library orders what it has enqueued before the default stream of its GPU.

    Raises
    ------
    ArgumentError
        It is of no device that Warpwell knows, or has gaps, or a gradient.
    DTypeError
        NumPy has no such items.
    """
    from ..array import DLPACK_CODES
    from ..array.gather import tensor_of

    tensor = tensor_of(value, what)
    dtype = tensor.items
    if not isinstance(dtype, np.dtype):
        code, bits = tensor.items
        kind = {number: kind for kind, number in DLPACK_CODES.items()}.get(code)
        try:
            dtype = np.dtype(f"{kind}{bits // 8}")
        except TypeError:
            raise errors.DTypeError(f"{what} has {bits}-bit items that NumPy does not know: convert it first") from None
    if not tensor.contiguous or tensor.address % dtype.itemsize:
        raise errors.ArgumentError(
            f"the items of {what} do not follow one another in C order, each at a multiple of its size: make it "
            "contiguous",
            name="args",
        )
    return tensor, dtype


def size_of(tensor: Any, dtype: np.dtype[Any]) -> int:
    """Return the bytes of a `Tensor`."""
    return int(math.prod(tensor.shape) * dtype.itemsize)


def shared(args: Sequence[Any], device: str) -> tuple[Any, ...]:
    """Return arguments of a kernel; arrays that have DLPack alone become arrays over the same memory.

    Raises
    ------
    ArgumentError, DTypeError
        See `located`; or one lies on a GPU, and the kernel runs on the CPU.
    """
    return tuple(_shared(value, k, device) if _has_dlpack_alone(value) else value for k, value in enumerate(args))


def _has_dlpack_alone(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray or kind is int or kind is float or not hasattr(kind, "__dlpack__"):
        return False
    return not (any(hasattr(kind, n) for n in ("__cuda_array_interface__", "__array__")) or is_argument(value))


def _shared(value: Any, place: int, device: str) -> Any:
    tensor, dtype = located(value, f"argument {place}")
    if not tensor.on_host and device != "cuda":
        raise errors.ArgumentError(
            f"argument {place} is in the memory of a GPU, and the kernel runs on the {device}: copy it to the host",
            name="args",
        )
    made = at_address("cpu" if tensor.on_host else "cuda", tensor.address, tensor.shape, dtype, tensor.keep)
    if tensor.on_host:
        made.flags.writeable = tensor.writable
    return made
