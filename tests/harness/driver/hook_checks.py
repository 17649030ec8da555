"""Checks of NVIDIA's runtime for Python under the hook: it counts, queries and waits as the driver does."""

from __future__ import annotations

import importlib
import threading

from tests.harness.driver.calls import Cuda
from tests.harness.driver.checks import Held

INVALID_DEVICE = 101


def the_runtime_speaks_of_pooled_devices(cuda: Cuda) -> None:
    """Devices, attributes and names are the layer's, and so are errors."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    success, attribute = runtime.cudaError_t.cudaSuccess, runtime.cudaDeviceAttr
    assert runtime.cudaGetDeviceCount() == (success, 2)
    code, threads = runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMaxThreadsPerBlock, 1)
    assert (code, threads) == (success, 1024)
    code, name = runtime.cudaDeviceGetPCIBusId(32, 1)
    assert code == success and name.count(b":") == 2
    cuda.use(1)
    assert runtime.cudaGetDevice() == (success, 1)
    cuda.use(0)
    code, value = runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrWarpSize, 7)
    assert (int(code), value) == (INVALID_DEVICE, None)


def the_runtime_waits(cuda: Cuda) -> None:
    """A synchronization waits for the current device's work, and returns its error."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    held = Held(cuda)
    timer = threading.Timer(0.05, held.release)
    timer.start()
    assert runtime.cudaDeviceSynchronize() == (runtime.cudaError_t.cudaSuccess,)
    assert not held.is_pending()
    timer.join()
    cuda.launch(0, 0, "fault")
    assert runtime.cudaDeviceSynchronize() == (runtime.cudaError_t.cudaErrorIllegalAddress,)


CHECKS = (the_runtime_speaks_of_pooled_devices, the_runtime_waits)
