"""The one layer over the GPU's driver, mostly cuda.core. It knows nothing of kernels in Python.

In the order in which a launch meets them:

- `device.py`: lists GPUs; one GPU's streams, events and copies by address.
- `memory.py`: device arrays, pinned and page-locked host memory, zeroing.
- `copies.py`: NumPy arguments copied to the GPU and back.
- `nvrtc.py`: CUDA C++ compiled to machine code.
- `prepared.py`: launches with few instructions of Python.
"""

from .device import gpu_count, gpus, require_gpu
from .memory import address_of, as_array, pin, pinned
