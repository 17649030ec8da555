"""Arrays on storage that kernels subscript.

Files, in the order in which an array meets them:

- front.py         ``ww.open`` and ``ww.create``, which follow the current device
- opening.py       open or create a file: options, layout, one writer a file
- header.py        headers of ``.npy`` files: dtype, shape and where the data starts
- npz.py           one array of a ``.npz`` file, read row by row
- attachment.py    an array's part of a cache: launches, pins of the host, flush and close
- in_memory.py     all of a file in host or device memory, and which pages changed
- array.py         `Array`: shape, kernels' views, host subscripts, residency, life
- on_storage.py    what it shares with arrays of a pool: iteration, and refused operators
- view.py          `ArrayView`, what kernels receive; `atomic_add`
- elements.py      subscripts in kernels: check the index, find the item, hit or miss
- bulk.py          host reads and writes, by kernels that copy runs of bytes
- runs.py          where in the file the items of an index lie
- device_array.py  `DeviceArray`, a result in GPU memory that other libraries take
"""

from .array import Array
from .device_array import DeviceArray
from .opening import create, open_array
from .view import ArrayView, atomic_add

__all__ = ["Array", "ArrayView", "DeviceArray", "atomic_add", "create", "open_array"]
