"""`driver`: the library of the GPU's driver, for programs without cuda.bindings and for calls that these make slow.

`check` reads the results of cuda.bindings.

A program that uses PyTorch or CuPy alone has none of our packages. All else of a GPU is in ``targets/gpu/``, mostly
cuda.core.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, Structure, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from . import errors

HANDLE = 64
"""Bytes that name an allocation to another process."""


class IpcHandle(Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", c_ubyte * HANDLE),)


_TYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuIpcGetMemHandle": (c_void_p, c_void_p),
    "cuIpcOpenMemHandle_v2": (c_void_p, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_void_p,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuPointerGetAttribute": (c_void_p, c_int, c_void_p),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
}
"""Of functions that take addresses and handles, which ctypes would cut to 32 bits."""


@functools.cache
def driver() -> Any:
    """Return the driver's library, None where there is none.

    What an old driver, or the layer of a pool, does not have is no attribute of it.
    """
    try:
        library = CDLL("libcuda.so.1")
    except OSError:
        return None
    for name, types in _TYPES.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = types
    return library


FAILED = "a kernel may have failed, and all later calls fail too"
"""The advice of messages about calls that the driver refuses."""


def check(result: Any, failure: type[Exception] = errors.DeviceNotFoundError) -> Any:
    """Return the values that a call of `cuda.bindings.driver` returned after its status.

    Raises
    ------
    failure
        The driver refused the call.
    """
    status, *values = result
    if int(status) != 0:
        raise failure(f"the GPU refused a call ({getattr(status, 'name', status)}): {FAILED}")
    return values[0] if len(values) == 1 else tuple(values)


def uuid_of(library: Any, device: c_int) -> bytes | None:
    """Return the 16 bytes that name a GPU, or a part of one (MIG); None where the driver does not say."""
    found = (c_ubyte * 16)()
    asked = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid  # the older one knows no parts
    return None if asked(found, device) else bytes(found)
