"""`driver`: the library of the GPU's driver, for programs without cuda.bindings and for calls that these make slow.

`check` reads the results of cuda.bindings.

A program that uses only PyTorch or CuPy may not have cuda.bindings. The other GPU code is in ``targets/gpu/``.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from . import errors

_TYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuPointerGetAttribute": (c_void_p, c_int, c_void_p),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
}
"""Argument types of functions that take addresses and handles: ctypes would truncate these to 32 bits."""


@functools.cache
def driver() -> Any:
    """Return the driver's library, or None if it is not installed.

    A function that an old driver, or the layer of a pool, does not have is not an attribute of it.
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
    """Return the 16-byte UUID of a GPU or of a MIG instance, or None if the driver does not report it."""
    found = (c_ubyte * 16)()
    # The older function does not know MIG instances.
    function = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    return None if function(found, device) else bytes(found)
