"""Arguments of kernels other than numbers, NumPy arrays and arrays in device memory.

- argument.py  `KernelArgument`: the interface of host objects that may be arguments; the device of a launch
- columns.py   `viewed`: columns of pandas, Polars and Arrow, as read-only arrays over their memory
- overlaps.py  `together`, `overlap`, `Span`: NumPy arguments that share memory
"""

from .argument import (
    KernelArgument,
    begin,
    default_device,
    device_of,
    finish,
    is_argument,
    participants,
)
from .columns import viewed
