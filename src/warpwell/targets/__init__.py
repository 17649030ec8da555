"""Where device code runs: primitives, kernels and memory for `cuda`, `cpu` and `interp`.

The only folder that imports a compiler. See ``docs/architecture.md``.
"""

from .arguments import KernelArgument, default_device, device_of
from .atomics import (
    BLOCK,
    DEVICE,
    SYSTEM,
    activemask,
    any_sync,
    as_bits,
    backoff,
    ballot,
    bits_as,
    call_cold,
    call_foreign,
    call_native,
    clock_ns,
    compare_exchange,
    copy_bytes,
    copy_wide,
    crc32c,
    div,
    element_address,
    exchange,
    failed,
    fence,
    fetch_add,
    fetch_add_as,
    fetch_and,
    fetch_or,
    ffs,
    grid,
    i64,
    interrupted,
    lane_id,
    load_acquire,
    load_acquire_as,
    load_relaxed,
    load_relaxed_as,
    load_weak_as,
    match_any,
    popc,
    pread,
    prefetch,
    pwrite,
    rem,
    shfl,
    store_relaxed,
    store_relaxed_as,
    store_release,
    store_weak_as,
    syncwarp,
    warp_size,
)
from .device import device, linked, struct_function, struct_method
from .fault import FAULT_PAGE, fault_page
from .gpu.device import has_cuda
from .kernel import Kernel, Launch, kernel
from .memory import ALIGNMENT, Allocator, Block, memory_for
from .native import NativeFunction, native
from .struct import DeviceStruct

__all__ = sorted(name for name in dir() if not name.startswith("_"))
