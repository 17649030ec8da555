"""`Tensor`: address and layout of an array of any library, in host memory or on a device.

NumPy arrays have them as attributes; PyTorch, CuPy and JAX share them by DLPack, which also has bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..device_array import DLPACK_BFLOAT, DLPACK_CODES, DeviceArray, Managed
from ..items import BFLOAT16, code_of, is_contiguous, on_host

HOST = (1, 3)
"""DLPack's device types of host memory: pageable, and pinned for CUDA."""
CUDA = (2, 13)
IMMUTABLE = ("pyarrow", "jaxlib", "tensorflow")
"""Libraries with immutable arrays, which DLPack does not mark as read-only."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass
class Tensor:
    """An array of a caller.

    Attributes
    ----------
    address : int
        Address of the first item.
    shape : tuple of int
    items : tuple of int or numpy.dtype
        DLPack's code and bits of an item, or the dtype of a NumPy array.
    contiguous, writable, on_host : bool
    keep : object
        Keeps the memory.
    ordinal : int
        Number of its GPU.
    stream : int or None
        Handle of the stream that computes its items, if the owner reports it.
    """

    address: int
    shape: tuple[int, ...]
    items: Any
    contiguous: bool
    writable: bool
    on_host: bool
    keep: Any
    ordinal: int = 0
    stream: int | None = None

    @property
    def size(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return int(self.items.itemsize if isinstance(self.items, np.dtype) else self.items[1] // 8)

    @property
    def shown(self) -> str:
        """The type of an item, for messages."""
        return str(self.items) if isinstance(self.items, np.dtype) else f"{self.items[1]}-bit items of another kind"

    def require(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        """Raise unless rows of array `name` can be written here.

        Raises
        ------
        ArgumentError, DTypeError
        """
        if self.shape != shape:
            raise errors.ArgumentError(f"out has shape {self.shape}: pass one of shape {shape}", name="out")
        if not self.contiguous:
            raise errors.ArgumentError(
                "the items of out are not contiguous in C order: pass a contiguous array, and copy from it",
                name="out",
            )
        if not self.writable:
            raise errors.ArgumentError("out is read-only: pass a writable array", name="out")
        special = code_of(dtype) == BFLOAT16
        if isinstance(self.items, np.dtype):
            same = self.items == on_host(dtype) or (special and code_of(self.items) in (BFLOAT16, np.dtype("u2").str))
        else:
            code = DLPACK_BFLOAT if special else DLPACK_CODES.get(dtype.kind, -1)
            same = self.items == (code, 8 * dtype.itemsize) and dtype.isnative
        if not same:
            kind = BFLOAT16 if special else dtype
            raise errors.DTypeError(f"out has {self.shown}, but array {name!r} {kind}: pass an out of {kind}")


Indices = NDArray[Any] | Tensor
"""Row indices: an array in host memory that its owner does not change, or a tensor on the array's GPU."""


def tensor_of(array: Any, name: str, handle: int | None = None) -> Tensor:
    """Return address and layout of an array; messages have the `name` of the argument.

    `handle` is the stream that uses an array on a GPU: the owner of the array orders its own work before it.

    Raises
    ------
    ArgumentError
        The value is not an array, or is on a device that Warpwell does not know.
    """
    if isinstance(array, np.ndarray):
        flags = array.flags
        address, contiguous = int(array.ctypes.data), bool(flags.c_contiguous)
        return Tensor(address, array.shape, array.dtype, contiguous, bool(flags.writeable), True, array)
    if hasattr(array, "__cuda_array_interface__") and (
        isinstance(array, DeviceArray) or not hasattr(array, "__dlpack__")
    ):
        return _of_interface(array)
    if not hasattr(array, "__dlpack__"):
        raise errors.ArgumentError(
            f"{name} is {type(array).__name__}: pass a NumPy array, or an array of a library that has DLPack", name=name
        )
    try:
        where = int(array.__dlpack_device__()[0])
        # DLPack's number of the default stream is 1; 0 is not allowed
        on_gpu = {"stream": handle or 1} if where in CUDA else {}
        capsule = array.__dlpack__(**on_gpu) if where in (*HOST, *CUDA) else None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name} cannot be shared by DLPack ({error}): detach or copy it"
        raise errors.ArgumentError(message, name=name) from error
    if capsule is None:
        raise errors.ArgumentError(
            f"{name} is on a device of DLPack's type {where}: pass an array in host memory, or on an NVIDIA GPU",
            name=name,
        )
    tensor = managed(capsule).tensor
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    strides = None if not tensor.strides else tuple(tensor.strides[k] for k in range(tensor.ndim))
    return Tensor(
        int(tensor.data or 0) + tensor.byte_offset,
        shape,
        (tensor.code, tensor.bits * tensor.lanes),
        strides is None or is_contiguous(shape, strides),
        type(array).__module__.partition(".")[0] not in IMMUTABLE,
        where in HOST,
        (capsule, array),
        int(tensor.device_id),
    )


def _of_interface(array: Any) -> Tensor:
    """Return address and layout of an array with ``__cuda_array_interface__``."""
    interface = array.__cuda_array_interface__
    (address, read_only), shape, strides = interface["data"], tuple(interface["shape"]), interface.get("strides")
    dtype = array.dtype if isinstance(array, DeviceArray) else np.dtype(interface["typestr"])
    contiguous = strides is None or is_contiguous(shape, strides, dtype.itemsize)
    ordinal = array.__dlpack_device__()[1] if isinstance(array, DeviceArray) else 0
    return Tensor(
        int(address or 0), shape, dtype, contiguous, not read_only, False, array, ordinal, interface.get("stream")
    )


def managed(capsule: Any) -> Managed:
    """Return the content of an unused DLPack capsule, which keeps it."""
    found: Managed = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(Managed)).contents
    return found


def on_a_gpu(array: Any) -> bool:
    """Return whether an array is in a GPU's memory."""
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return hasattr(array, "__cuda_array_interface__")
    with contextlib.suppress(ValueError):  # a device without a number in DLPack; `tensor_of` reports it
        return int(array.__dlpack_device__()[0]) in CUDA
    return False


def indices_on_gpu(rows: Any, handle: int) -> Tensor:
    """Return row indices in memory of a GPU; they stay there and must not change until they were used.

    Raises
    ------
    ArgumentError, DTypeError
    """
    tensor = tensor_of(rows, "rows", handle)
    if not tensor.shape:
        raise errors.ArgumentError("rows is one number: pass a list of them", name="rows")
    if tensor.items not in (np.dtype(np.int32), np.dtype(np.int64), (0, 32), (0, 64)):
        raise errors.DTypeError(f"rows are {tensor.shown}: pass int32 or int64 row numbers")
    if not tensor.contiguous:
        raise errors.ArgumentError(
            "the items of rows are not contiguous in C order: pass a contiguous array", name="rows"
        )
    return tensor


def row_indices(rows: Any, copy: bool = True) -> NDArray[Any]:
    """Return row indices in host memory as an int32 or int64 array in C order; without `copy` a new one only if needed.

    Raises
    ------
    ArgumentError, DTypeError
    """
    try:
        plain = hasattr(rows, "__array__") or not hasattr(rows, "__dlpack__")
        found = np.asarray(rows) if plain else np.from_dlpack(rows)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise errors.ArgumentError(f"rows cannot be read as an array ({error}): pass int64 row numbers") from error
    if found.ndim == 0:
        raise errors.ArgumentError(
            f"rows is one number, {rows!r:.40}: pass a list of them, or read a[{rows!r:.20}]", name="rows"
        )
    if found.dtype == np.bool_:
        raise errors.DTypeError("rows is a mask: pass row numbers, np.flatnonzero(mask)")
    if found.size == 0 and found.dtype.kind == "f":  # np.asarray([])
        found = found.astype(np.int64)
    if found.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise errors.DTypeError(f"rows are {found.dtype}: pass int32 or int64 row numbers, rows.astype('i8')")
    return np.array(found, order="C") if copy else np.ascontiguousarray(found)
