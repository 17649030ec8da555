"""Contexts that a program creates: the device's one context, until the last of its users gives it up."""

from __future__ import annotations

import ctypes
import threading

from tests.harness.driver.calls import Cuda
from tests.harness.driver.checks import Check, fresh, read_words

BLOCKING, DEVICE = ctypes.c_uint(4), ctypes.c_int(0)
INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT, DESTROYED, NOT_SUPPORTED = 1, 101, 201, 709, 801


def without_primary(cuda: Cuda) -> None:
    """Release the primary context of the first device, and leave no current context."""
    while cuda.code("cuDevicePrimaryCtxRelease_v2", DEVICE) == 0:
        pass
    while cuda.code("cuCtxPopCurrent_v2", None) == 0:
        pass


def current(cuda: Cuda) -> int:
    """Return the current context, or 0."""
    return cuda.out("cuCtxGetCurrent")


def filled(cuda: Cuda) -> int:
    """Return the address of four words in the current context that a kernel has set to 9."""
    cuda.load(0)
    address = cuda.alloc(16)
    cuda.launch(0, 0, "fill", address, 4, 9)
    assert read_words(cuda, address, 4) == [9] * 4
    return address


def created(cuda: Cuda) -> None:
    """A created context is current, and its destruction frees its memory."""
    without_primary(cuda)
    for version, options in (("", ()), ("_v2", ()), ("_v3", (None, ctypes.c_int(0))), ("_v4", (bytes(24),))):
        context = cuda.out(f"cuCtxCreate{version}", *options, BLOCKING, DEVICE)
        assert current(cuda) == context != 0
        assert cuda.out("cuCtxGetFlags", kind=ctypes.c_uint) == 4
        address = filled(cuda)
        cuda.cuCtxDestroy_v2(context)
        assert current(cuda) == 0
        assert cuda.code("cuCtxDestroy_v2", context) == INVALID_CONTEXT
        cuda.out("cuCtxCreate_v4", None, BLOCKING, DEVICE)
        assert cuda.code("cuMemFree_v2", address) == INVALID_VALUE
        cuda.cuCtxDestroy(context)
    fresh(cuda)


def counted(cuda: Cuda) -> None:
    """All contexts of a device are one; its memory lives until the last of them is given up."""
    without_primary(cuda)
    first = cuda.out("cuCtxCreate_v2", BLOCKING, DEVICE)
    address = filled(cuda)
    assert cuda.out("cuCtxCreate_v2", ctypes.c_uint(0), DEVICE) == first
    cuda.cuCtxDestroy_v2(first)
    assert current(cuda) == first
    assert read_words(cuda, address, 4) == [9] * 4
    assert cuda.code("cuDevicePrimaryCtxRelease_v2", DEVICE) == INVALID_CONTEXT
    assert cuda.out("cuDevicePrimaryCtxRetain", DEVICE) == first
    cuda.cuCtxDestroy_v2(first)
    cuda.cuCtxSetCurrent(first)
    assert read_words(cuda, address, 4) == [9] * 4
    cuda.cuDevicePrimaryCtxRelease_v2(DEVICE)
    assert cuda.code("cuMemFree_v2", address) == DESTROYED
    fresh(cuda)


def beside_primary(cuda: Cuda) -> None:
    """A created context that was popped leaves the primary one current, and the flags of the primary context stay."""
    cuda.cuDevicePrimaryCtxSetFlags_v2(DEVICE, BLOCKING)
    for _ in range(2):
        context = cuda.out("cuCtxCreate_v2", ctypes.c_uint(0), DEVICE)
        cuda.cuCtxPopCurrent_v2(None)
        cuda.cuCtxDestroy_v2(context)
        assert current(cuda) == cuda.contexts[0]
        cuda.cuCtxSynchronize()
    flags, is_active = ctypes.c_uint(), ctypes.c_int()
    cuda.cuDevicePrimaryCtxGetState(DEVICE, ctypes.byref(flags), ctypes.byref(is_active))
    assert (flags.value, is_active.value) == (4, 1)
    cuda.cuDevicePrimaryCtxSetFlags_v2(DEVICE, ctypes.c_uint(0))


def destroyed_elsewhere(cuda: Cuda) -> None:
    """A context that one thread destroys stays current in others, whose calls fail."""
    without_primary(cuda)
    context = cuda.out("cuCtxCreate_v2", BLOCKING, DEVICE)
    found: list[int] = []
    is_current, is_destroyed = threading.Event(), threading.Event()

    def use_elsewhere() -> None:
        cuda.cuCtxPushCurrent_v2(context)
        found.append(cuda.code("cuCtxSynchronize"))
        is_current.set()
        is_destroyed.wait()
        found.extend([cuda.code("cuCtxSynchronize"), int(current(cuda) == context)])

    thread = threading.Thread(target=use_elsewhere)
    thread.start()
    is_current.wait()
    cuda.cuCtxDestroy_v2(context)
    is_destroyed.set()
    thread.join()
    assert found == [0, DESTROYED, 1], found
    fresh(cuda)


def refused(cuda: Cuda) -> None:
    """Contexts with wrong arguments or with options are not created."""
    where = ctypes.byref(ctypes.c_uint64())
    options = (ctypes.c_uint64 * 3)(0, 1, 0)
    assert cuda.code("cuCtxCreate_v2", where, ctypes.c_uint(3), DEVICE) == INVALID_VALUE
    assert cuda.code("cuCtxCreate_v2", None, BLOCKING, DEVICE) == INVALID_VALUE
    assert cuda.code("cuCtxCreate_v2", where, BLOCKING, ctypes.c_int(99)) == INVALID_DEVICE
    assert cuda.code("cuCtxCreate_v3", where, options, ctypes.c_int(1), BLOCKING, DEVICE) == NOT_SUPPORTED
    assert cuda.code("cuCtxCreate_v4", where, options, BLOCKING, DEVICE) == NOT_SUPPORTED
    assert cuda.code("cuCtxDestroy_v2", None) == INVALID_CONTEXT
    assert cuda.code("cuCtxDestroy_v2", cuda.contexts[0]) == INVALID_CONTEXT
    assert current(cuda) == cuda.contexts[0]


CHECKS: tuple[Check, ...] = (created, counted, beside_primary, destroyed_elsewhere, refused)
