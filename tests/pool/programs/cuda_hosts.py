"""A CUDA program that copies bytes to all devices and back while hosts are lost, and continues with the others."""

import ctypes
import time

import warpwell as ww

driver = ctypes.CDLL("libcuda.so.1")
SIZE = ctypes.c_size_t(5 << 19)
UNAVAILABLE = 46


def check(status: int) -> None:
    if status:
        raise SystemExit(f"the driver says {status}")


def copies(ordinal: int) -> int:
    """Copy 2.5 MiB to a device and back; return the driver's code."""
    source, read = bytes([ordinal, 7, 8, 9, 1]) * (1 << 19), ctypes.create_string_buffer(SIZE.value)
    check(driver.cuCtxSetCurrent(contexts[ordinal]))
    code = driver.cuMemcpyHtoD_v2(addresses[ordinal], source, SIZE)
    code = code or driver.cuMemcpyDtoH_v2(read, addresses[ordinal], SIZE)
    assert code or read.raw == source
    return int(code)


def live() -> list[int]:
    return [k for k in range(count.value) if copies(k) == 0]


check(driver.cuInit(0))
count = ctypes.c_int()
check(driver.cuDeviceGetCount(ctypes.byref(count)))
contexts, addresses = [], []
for ordinal in range(count.value):
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    check(driver.cuCtxSetCurrent(context))
    check(driver.cuMemAlloc_v2(ctypes.byref(address), SIZE))
    contexts.append(context)
    addresses.append(address)
print("right", *live(), flush=True)
print("agents", len(ww.devices()), flush=True)
for last in (3, 2):
    end = time.monotonic() + 120
    while (code := copies(last)) == 0 and time.monotonic() < end:
        time.sleep(0.01)
    check(driver.cuDevicePrimaryCtxReset_v2(last))
    print("lost", code, driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), SIZE), flush=True)
    print("right", *live(), flush=True)
