"""Warpwell: arrays on storage, many times larger than the GPU's memory, that kernels in Python subscript.

>>> import warpwell as ww
>>> @ww.kernel
... def in_degree(edges, degree):
...     i = ww.grid(1)
...     if i < edges.size:
...         ww.atomic_add(degree, edges[i], 1)
"""

from . import kv, pool, scheduler
from .array import Array, DeviceArray, atomic_add, create
from .array import open_array as open  # reads as ww.open, like io.open
from .cache import Cache, Statistics
from .pool.device import broadcast
from .pool.devices import current_device, devices
from .pool.front import empty, empty_like, to_device, zeros
from .pool.pinned import pinned_empty
from .targets import (
    backoff,
    clock_ns,
    default_device,
    device,
    failed,
    grid,
    kernel,
    lane_id,
    warp_size,
)
from .targets.block import barrier, block_index, block_threads, shared_array, thread_index
from .targets.cuda_source import CudaSource
from .targets.run_cuda import numba_cuda

__version__ = "0.1.0.dev0"

__all__ = [
    "Array",
    "Cache",
    "CudaSource",
    "DeviceArray",
    "Statistics",
    "atomic_add",
    "backoff",
    "barrier",
    "block_index",
    "block_threads",
    "broadcast",
    "clock_ns",
    "create",
    "current_device",
    "default_device",
    "device",
    "devices",
    "empty",
    "empty_like",
    "failed",
    "grid",
    "kernel",
    "kv",
    "lane_id",
    "numba_cuda",
    "open",
    "pinned_empty",
    "pool",
    "scheduler",
    "shared_array",
    "to_device",
    "thread_index",
    "warp_size",
    "zeros",
]
