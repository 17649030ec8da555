"""Functions for kernels, on a GPU and on every other target.

>>> from warpwell import gpu
>>> @gpu.function
... def square(x):
...     return x * x
"""

from .array import atomic_add, fill, fill_block, fill_warp, fold, fold_block, fold_warp, map, map_block, map_warp
from .targets import device as function
from .targets.compiler import numba_cuda
from .targets.primitives import (
    barrier,
    block_index,
    block_threads,
    failed,
    grid,
    lane_id,
    reduce_warp,
    shared_array,
    thread_index,
    warp_size,
)

__all__ = [
    "atomic_add",
    "barrier",
    "block_index",
    "block_threads",
    "failed",
    "fill",
    "fill_block",
    "fill_warp",
    "fold",
    "fold_block",
    "fold_warp",
    "function",
    "grid",
    "lane_id",
    "map",
    "map_block",
    "map_warp",
    "numba_cuda",
    "reduce_warp",
    "shared_array",
    "thread_index",
    "warp_size",
]
