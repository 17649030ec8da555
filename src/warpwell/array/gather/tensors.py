"""`Tensor`: where the items of an array of any library lie, in host memory or on a device.

NumPy arrays say it themselves; others (PyTorch, CuPy, JAX) say it by DLPack, which also has bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..device_array import DLPACK_BFLOAT, DLPACK_CODES, DeviceArray, Managed
from ..items import BFLOAT16, code_of, on_host

HOST = (1, 3)
"""DLPack's numbers of host memory: plain, and pinned for CUDA."""
CUDA = (2, 13)
IMMUTABLE = ("pyarrow", "jaxlib", "tensorflow")
"""Libraries whose arrays nobody may change; what they share by DLPack does not say it."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass
class Tensor:
    """An array that somebody gave.

    Attributes
    ----------
    address : int
        Of the first item.
    shape : tuple of int
    items : tuple of int or numpy.dtype
        DLPack's code and bits of an item; of a NumPy array its dtype.
    contiguous, writable, on_host : bool
    keep : object
        What keeps the memory.
    ordinal : int
        The GPU in whose memory it is.
    stream : int or None
        Handle of the stream in which its items are being computed, if its owner says so.
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

    def require(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        """Raise unless rows of array `name` can be written here.

        Raises
        ------
        ArgumentError, DTypeError
        """
        if self.shape != shape:
            raise errors.ArgumentError(f"out has shape {self.shape}, and the rows have {shape}: give that", name="out")
        if not self.contiguous:
            raise errors.ArgumentError(
                "the items of out do not follow one another in C order: give an array that is "
                "contiguous, and copy from it",
                name="out",
            )
        if not self.writable:
            raise errors.ArgumentError("out is read-only: give an array that may be written", name="out")
        special = code_of(dtype) == BFLOAT16
        if isinstance(self.items, np.dtype):
            same = self.items == on_host(dtype) or (special and code_of(self.items) in (BFLOAT16, np.dtype("u2").str))
        else:
            code = DLPACK_BFLOAT if special else DLPACK_CODES.get(dtype.kind, -1)
            same = self.items == (code, 8 * dtype.itemsize) and dtype.isnative
        if not same:
            shown = self.items if isinstance(self.items, np.dtype) else f"{self.items[1]}-bit items of another kind"
            kind = BFLOAT16 if special else dtype
            raise errors.DTypeError(f"out has {shown}, and array {name!r} {kind}: give an out of {kind}")


def tensor_of(given: Any, name: str, handle: int | None = None) -> Tensor:
    """Return where the items of an array lie; `name` is the argument's, for messages.

    `handle` is that of the stream in which an array of a GPU is used: who owns it orders its own work before.

    Raises
    ------
    ArgumentError
        It is no array, or of a device that Warpwell does not know.
    """
    if isinstance(given, np.ndarray):
        flags = given.flags
        return Tensor(
            int(given.ctypes.data),
            given.shape,
            given.dtype,
            bool(flags.c_contiguous),
            bool(flags.writeable),
            True,
            given,
        )
    if isinstance(given, DeviceArray):
        return Tensor(
            given.__cuda_array_interface__["data"][0],
            given.shape,
            given.dtype,
            given.strides is None or _follows(given.shape, given.strides, given.dtype.itemsize),
            True,
            False,
            given,
            given.__dlpack_device__()[1],
        )
    if not hasattr(given, "__dlpack__"):
        if hasattr(given, "__cuda_array_interface__"):  # numba-cuda
            return _of_interface(given)
        raise errors.ArgumentError(
            f"{name} is {type(given).__name__}: give a NumPy array, or an array of a library that has DLPack", name=name
        )
    try:
        where = int(given.__dlpack_device__()[0])
        # 1 is the default stream in DLPack, 0 is nothing there
        on_gpu = {"stream": handle or 1} if where in CUDA else {}
        capsule = given.__dlpack__(**on_gpu) if where in (*HOST, *CUDA) else None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name} cannot be shared by DLPack ({error}): detach or copy it"
        raise errors.ArgumentError(message, name=name) from error
    if capsule is None:
        raise errors.ArgumentError(
            f"{name} is on a device of DLPack's kind {where}: give an array in host memory, or of a GPU of NVIDIA's",
            name=name,
        )
    tensor = managed(capsule).tensor
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    strides = None if not tensor.strides else tuple(tensor.strides[k] for k in range(tensor.ndim))
    return Tensor(
        int(tensor.data or 0) + tensor.byte_offset,
        shape,
        (tensor.code, tensor.bits * tensor.lanes),
        strides is None or _follows(shape, strides),
        type(given).__module__.partition(".")[0] not in IMMUTABLE,
        where in HOST,
        (capsule, given),
        int(tensor.device_id),
    )


def _of_interface(given: Any) -> Tensor:
    """Return where the items of an array with ``__cuda_array_interface__`` lie."""
    about = given.__cuda_array_interface__
    address, read_only = about["data"]
    shape, dtype, strides = tuple(about["shape"]), np.dtype(about["typestr"]), about.get("strides")
    return Tensor(
        int(address or 0),
        shape,
        dtype,
        strides is None or _follows(shape, strides, dtype.itemsize),
        not read_only,
        False,
        given,
        0,
        about.get("stream"),
    )


def managed(capsule: Any) -> Managed:
    """Return what a DLPack capsule holds that nobody has taken, and that keeps it."""
    found: Managed = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(Managed)).contents
    return found


def _follows(shape: tuple[int, ...], strides: tuple[int, ...], step: int = 1) -> bool:
    """Return whether items `step` apart follow one another in C order with these strides."""
    if 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def on_a_gpu(given: Any) -> bool:
    """Return whether an array is in a GPU's memory."""
    if isinstance(given, np.ndarray) or not hasattr(given, "__dlpack_device__"):
        return hasattr(given, "__cuda_array_interface__")
    with contextlib.suppress(ValueError):  # a device that DLPack has no number for; `tensor_of` says so
        return int(given.__dlpack_device__()[0]) in CUDA
    return False


def numbers_on_gpu(rows: Any, handle: int) -> Tensor:
    """Return row numbers in a GPU's memory; they stay there, and are to be left alone until they were used.

    Raises
    ------
    ArgumentError, DTypeError
    """
    tensor = tensor_of(rows, "rows", handle)
    if not tensor.shape:
        raise errors.ArgumentError("rows is one number: give a list of them", name="rows")
    if tensor.items not in (np.dtype(np.int32), np.dtype(np.int64), (0, 32), (0, 64)):
        shown = tensor.items if isinstance(tensor.items, np.dtype) else f"{tensor.items[1]}-bit items of another kind"
        raise errors.DTypeError(f"rows are {shown}: give int32 or int64 row numbers")
    if not tensor.contiguous:
        raise errors.ArgumentError(
            "the items of rows do not follow one another in C order: give an array that is contiguous", name="rows"
        )
    return tensor


def row_numbers(rows: Any, copy: bool = True) -> NDArray[Any]:
    """Return row numbers in host memory as an int32 or int64 array, C order; a new one, which nobody else changes.

    Without `copy` it is a new one only where that is needed.

    Raises
    ------
    ArgumentError, DTypeError
    """
    try:
        plain = hasattr(rows, "__array__") or not hasattr(rows, "__dlpack__")
        found = np.asarray(rows) if plain else np.from_dlpack(rows)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise errors.ArgumentError(f"rows cannot be read as an array ({error}): give int64 row numbers") from error
    if found.ndim == 0:
        raise errors.ArgumentError(
            f"rows is one number, {rows!r:.40}: give a list of them, or read a[{rows!r:.20}]", name="rows"
        )
    if found.dtype == np.bool_:
        raise errors.DTypeError("rows is a mask: give row numbers, np.flatnonzero(mask)")
    if found.size == 0 and found.dtype.kind == "f":  # np.asarray([])
        found = found.astype(np.int64)
    if found.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise errors.DTypeError(f"rows are {found.dtype}: give int32 or int64 row numbers, rows.astype('i8')")
    return np.array(found, order="C") if copy else np.ascontiguousarray(found)
