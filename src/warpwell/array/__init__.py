"""Arrays on storage that kernels subscript.

Files, in the order in which an array meets them:

- front.py         ``ww.open`` and ``ww.create``, which follow the current device
- opening.py       open or create a file: options, layout, one writer a file
- header.py        headers of ``.npy`` files: dtype, shape and offset of the data
- attachment.py    an array's part of a cache: launches, pins of the host, flush and close
- mapping.py       a file as memory: read by kernels on the CPU if no option requests a cache
- in_memory.py     a whole file in host or device memory; which pages changed
- array.py         `Array`: shape, kernels' views, host subscripts, prefetch and pins, closing
- operators.py     base of `Array` and a pool's arrays: iteration, and operators that raise
- reductions.py    `sum`, `mean`, `argmax` and so on, in bounded memory
- view.py          `ArrayView`, the struct that kernels receive; `atomic_add`
- elements.py      subscripts in kernels: check the index, compute the item's offset, read or write the item
- items.py         types of items in kernels: float16 and bfloat16 are float32 there
- spans/           `fold`, `map` and `fill` in kernels: bulk walks of runs of items
- page_set.py      `PageSet`: pages that kernels mark and the host has read in waves
- host_access.py   subscripts of the host: the runs of bytes of an index, copied past the cache or through it
- gather/           `gather` and `rows`: rows by their numbers, in the background
- device_array.py  `DeviceArray`, a result in GPU memory, for other libraries without a copy (DLPack)
"""

from .array import Array, Rows
from .device_array import DLPACK_CODES, DeviceArray
from .front import create_placed, open_placed
from .header import check_dtype, read_npy
from .items import is_bits
from .mapping import Mapping
from .opening import create, open_array
from .operators import OnStorage
from .page_set import PageSet
from .spans.calls import (
    fill,
    fill_block,
    fill_warp,
    fold,
    fold_block,
    fold_indexed_warp,
    fold_warp,
    map,
    map_block,
    map_warp,
)
from .view import ArrayView, atomic_add

__all__ = ["Array", "ArrayView", "DeviceArray", "PageSet", "Rows", "create", "open_array"]
