"""Where device code runs: primitives, kernels and memory for `cuda`, `cpu` and `interp`.

Only `compiler/`, `gpu/` and `blocks/` import Numba, numba-cuda or CUDA's packages.

Primitives and decorators of device code:

- `atomics.py`: the primitives of memory, warps and time, with their orders and scopes.
- `block.py`: blocks: index, barrier, shared memory.
- `device.py`: `device` and `linked`, which mark functions as device code.
- `struct.py`: `DeviceStruct`, host objects that device code receives by value.
- `native.py`: functions with a C address, for media.
- `shipped.py`: object files and PTX that are part of the wheel.

In the order in which a launch meets them:

- `kernel.py`: `Kernel` and `Launch`: the user's call.
- `signature.py`: checks arguments and shape before a compilation; the grid.
- `arguments/`: objects that may be arguments; the device of a launch; arguments that share memory.
- `bounds.py`: bounds checks of NumPy and device arrays: the switch and the error. An index is compared in
  `compiler/checked_arrays.py` and `interp/checked_numpy.py`; of an array on storage, in `array/elements.py`.
- `fault.py`: the flag of a launch, which `failed` asks; the fault page.
- `compiler/`: compilation, and launches on `cpu` and `cuda`.
- `interp/`: launches on `interp`, with weak memory.
- `blocks/`: launches block by block, for schedulers: where blocks are claimed.
- `source/`: kernels in CUDA C++.
- `launch_stream.py`: copies and launches in order, concurrently with the rest of the process.

Memory:

- `memory.py`: device memory, and memory that host and device share.
- `arrays.py`: arrays in device memory.
- `gpu/`: the GPU's driver.

For the host:

- `compile_lock.py`: a fork waits for compilations.
- `bus_error.py`: mapped files that fail read as zeros, instead of SIGBUS.
- `checksum.py`: CRC-32C in Python.
"""

from . import compile_lock as compile_lock
from .arguments import KernelArgument, default_device
from .arrays import to_device, to_host, zeros
from .atomics import (
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
    compare_exchange_acquire,
    copy_bytes,
    copy_foreign,
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
    fetch_min_as,
    fetch_or,
    fetch_or_as,
    ffs,
    grid,
    i64,
    interrupted,
    items_at,
    items_of_array,
    lane_id,
    load_acquire,
    load_acquire_as,
    load_pair,
    load_passing_as,
    load_relaxed,
    load_relaxed_as,
    load_weak_as,
    popc,
    pread,
    prefetch,
    pwrite,
    reduce_warp,
    rem,
    scratch,
    seat,
    shfl,
    shfl_as,
    store_pair,
    store_relaxed,
    store_relaxed_as,
    store_release,
    store_weak_as,
    syncwarp,
    take_seat,
    warp_size,
)
from .device import ArrayKind, StructKind, chosen, device, linked, struct_function, struct_method
from .fault import LaunchFlag
from .gpu.device import GpuDevice, has_cuda
from .kernel import Kernel, Launch, kernel
from .memory import ALIGNMENT, Allocator, Block, memory_for, private_block
from .native import native
from .struct import DeviceStruct

__all__ = sorted(name for name in dir() if not name.startswith("_"))
