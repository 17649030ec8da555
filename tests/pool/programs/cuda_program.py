"""A CUDA program that knows nothing of warpwell: copies bytes to each device and back, and then waits to be killed."""

import ctypes
import time

driver = ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    if status:
        raise SystemExit(f"the driver says {status}")


check(driver.cuInit(0))
count = ctypes.c_int()
check(driver.cuDeviceGetCount(ctypes.byref(count)))
for ordinal in range(count.value):
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    check(driver.cuCtxSetCurrent(context))
    source, read = bytes([ordinal, 7]) * (1 << 20), ctypes.create_string_buffer(2 << 20)
    check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(len(source))))
    check(driver.cuMemcpyHtoD_v2(address, source, ctypes.c_size_t(len(source))))
    check(driver.cuMemcpyDtoH_v2(read, address, ctypes.c_size_t(len(source))))
    print("device", ordinal, read.raw == source, flush=True)
assert driver.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(8), 1) == 801
print("waits", flush=True)
time.sleep(60)
