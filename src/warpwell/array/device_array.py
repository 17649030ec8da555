"""DeviceArray: a result in GPU memory that CuPy, PyTorch and others use without a copy."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .items import BFLOAT16, code_of, on_host

DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
"""DLPack's code of a NumPy dtype, by its kind."""
DLPACK_BFLOAT = 4
_KDLCUDA = 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    """``DLManagedTensor`` of DLPack."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_alive: dict[int, Any] = {}


@_Deleter
def _delete(address: int) -> None:
    _alive.pop(address, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dltensor"


class DeviceArray:
    """An array in GPU memory (DLPack and ``__cuda_array_interface__``).

    Parameters
    ----------
    memory : object
        Bytes in GPU memory, a numba-cuda array.
    shape : tuple of int
    dtype : numpy.dtype
    offset : int
        Byte of `memory` where the first item is.
    strides : tuple of int, optional
        Bytes between items, by dimension; default: C order.
    keep : object, optional
        Object to keep alive as long as the array or an object that shares its memory.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    strides : tuple of int or None
    """

    def __init__(
        self,
        memory: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        keep: Any = None,
    ) -> None:
        self._memory = memory
        self.shape = shape
        self.dtype = dtype
        self._offset = offset
        self.strides = strides
        self._keep = keep

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def _pointer(self) -> int:
        return int(self._memory.__cuda_array_interface__["data"][0]) + self._offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface."""
        typestr = self.dtype.str
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self._pointer, False),
            "version": 3,
            "descr": self.dtype.descr,
            "strides": self.strides,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device: CUDA, and the number of the GPU."""
        return _KDLCUDA, self._ordinal

    @property
    def _ordinal(self) -> int:
        context = getattr(getattr(self._memory, "gpu_data", None), "context", None)
        return int(context.device.id) if context is not None else 0

    def __dlpack__(self, **_: Any) -> Any:
        """Return a DLPack capsule that shares the memory. The data is complete: no stream synchronization is needed."""
        code = DLPACK_BFLOAT if code_of(self.dtype) == BFLOAT16 else DLPACK_CODES.get(self.dtype.kind)
        if code is None:
            raise errors.DTypeError(f"DLPack has no items of {self.dtype}: view them as bytes with copy_to_host()")
        ndim = len(self.shape)
        shape = (ctypes.c_int64 * max(ndim, 1))(*self.shape)
        steps = None
        if self.strides is not None:
            if any(step % self.dtype.itemsize for step in self.strides):
                raise errors.DTypeError(
                    f"DLPack counts strides in items, but {self.strides} bytes are not a multiple of "
                    f"{self.dtype}'s size: copy"
                    " the field with copy_to_host(), or store the field in an array of its own"
                )
            steps = (ctypes.c_int64 * max(ndim, 1))(*(step // self.dtype.itemsize for step in self.strides))
        managed = Managed()
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device_id = self._pointer, _KDLCUDA, self._ordinal
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = ndim, code, 8 * self.dtype.itemsize, 1
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = None if steps is None else ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = _delete
        address = ctypes.addressof(managed)
        # kept until the consumer calls the deleter; a capsule without a consumer keeps the array alive
        _alive[address] = (managed, shape, steps, self._memory, self._keep)
        return _new_capsule(address, _NAME, None)

    def copy_to_host(self) -> NDArray[Any]:
        """Return the array as a NumPy array."""
        if self.strides is None:
            memory = self._memory[self._offset :] if self._offset else self._memory
            flat = np.asarray(memory.copy_to_host())
            return flat.view(np.uint8)[: self.nbytes].view(on_host(self.dtype)).reshape(self.shape)
        if 0 in self.shape:
            return np.empty(self.shape, on_host(self.dtype))
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize
        flat = np.asarray(self._memory[self._offset : self._offset + reach].copy_to_host()).view(np.uint8)
        return np.ndarray(self.shape, on_host(self.dtype), flat, strides=self.strides).copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a host copy."""
        host = self.copy_to_host()
        return host if dtype is None else host.astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]
