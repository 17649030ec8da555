"""Where device code runs: primitives, kernels and memory for `cuda`, `cpu` and `interp`.

Only `compiler/`, `gpu/` and `blocks/` import Numba, numba-cuda or CUDA's packages.

Primitives and decorators of device code:

- `primitives.py`: memory, warps, blocks and time, with their orders and scopes. It is a door of its own.
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
- `fault.py`: the flag of a launch, which `failed` reads; the fault page.
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
from .arguments import KernelArgument, begin, default_device, finish, is_argument, viewed
from .arguments.overlaps import Span, overlap, together
from .arrays import at_address, empty, to_device, to_host, zeros
from .checksum import crc32c_of
from .device import ArrayKind, StructKind, chosen, device, is_device, linked, struct_function
from .fault import LaunchFlag, PlainFlag, share_fault_page
from .gpu.device import GpuDevice, handle_of, has_cuda
from .interp.interpreter import current
from .kernel import Kernel, Launch, kernel, set_place, stamp_of
from .launch_stream import LaunchStream, stream_of, stream_on
from .memory import ALIGNMENT, Allocator, Block, memory_for, private_block, private_memory, view_of
from .native import native
from .source.cuda_source import CudaSource, SourceLaunch
from .struct import DeviceStruct, Part

__all__ = sorted(name for name in dir() if not name.startswith("_"))
