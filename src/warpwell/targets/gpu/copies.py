"""NumPy arrays as arguments of a launch on a GPU: copied there, and back when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.args import ArgHint, InOut

from .overlaps import shared_on_gpu

Pairs = list[tuple[Any, Any]]
"""Host arrays and their copies; None and the copy of several that share memory."""


class HostArray(ArgHint):
    """A NumPy array that was copied to the GPU: typed as what it is, read-only or not, and passed as its copy."""

    def __init__(self, value: Any, there: Any) -> None:
        super().__init__(value)
        self.there = there

    def to_device(self, retr: Any, stream: Any = 0) -> Any:
        """Return what the kernel is passed."""
        return InOut(self.there).to_device(retr, stream)


def copy_in(values: Sequence[Any], stream: Any) -> tuple[list[Any], Pairs]:
    """Return launch values with NumPy arrays copied in a numba-cuda stream, and the pairs to be copied back.

    Those that share memory share it on the GPU.
    """
    pairs: Pairs = []
    shared = shared_on_gpu(values) if any(isinstance(v, np.ndarray) for v in values) else {}
    if shared and stream is not None:
        cuda.default_stream().synchronize()  # which copied them; the launch's stream may not wait for it

    def there(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(there, value))
        if not isinstance(value, np.ndarray):
            return value
        if id(value) in shared:
            return shared[id(value)][0]
        copy = cuda.to_device(value, stream=stream or 0)
        pairs.append((value, copy))
        return HostArray(value, copy)

    out = [there(v) for v in values]
    spans = {id(span): span for _, span in shared.values()}.values()
    return out, pairs + [(None, span) for span in spans]


def copy_out(pairs: Pairs, stream: Any) -> None:
    """Bring copies back, and wait for it."""
    for array, there in pairs:
        if array is None:
            there.copy_to_host(None)
        elif array.flags.writeable:  # into others nothing can be copied
            there.copy_to_host(array, stream=stream or 0)
    if stream is not None:
        stream.synchronize()
