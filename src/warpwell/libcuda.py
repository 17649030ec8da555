"""`driver`: the library of the GPU's driver, for programs without cuda.bindings and for calls that these make slow.

`device_name` names the GPU of a thread in the same way for all programs. `check` reads the results of cuda.bindings.

A program that uses only PyTorch or CuPy may not have cuda.bindings. The other GPU code is in ``targets/gpu/``.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, byref, c_int, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from . import errors

_TYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
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


def orders_calls() -> bool:
    """Return True if the driver's library is one of Warpwell's that orders the calls of this process."""
    library = driver()
    try:
        return library is not None and c_int.in_dll(library, "ww_orders_calls").value == 1
    except ValueError:  # another library
        return False


NO_GPU = "host"
"""Name of the device of a thread without a GPU."""


def current_context() -> int:
    """Return the calling thread's context, or 0."""
    library = driver()
    if library is None:
        return 0
    found = c_void_p()
    return (found.value or 0) if library.cuCtxGetCurrent(byref(found)) == 0 else 0


def device_name(device: int | None) -> str:
    """Return the name of a GPU, from its UUID.

    Parameters
    ----------
    device : int or None
        Number of the GPU. None: the GPU of the calling thread, else the first one, else `NO_GPU`.

    Raises
    ------
    DeviceNotFoundError
        This process sees no such GPU.
    """
    library, number = driver(), c_int()
    if library is None or not (device is None and library.cuCtxGetDevice(byref(number)) == 0):
        if library is None or library.cuInit(0) != 0 or library.cuDeviceGet(byref(number), device or 0) != 0:
            if device is not None:
                raise errors.DeviceNotFoundError(f"this process sees no GPU {device}; see `nvidia-smi`", device="cuda")
            return NO_GPU
    uuid = uuid_of(library, number)
    if uuid is None:
        raise errors.DeviceNotFoundError("the driver does not name this GPU; see `nvidia-smi -L`", device="cuda")
    return f"gpu-{uuid.hex()}"
