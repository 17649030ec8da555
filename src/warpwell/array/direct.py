"""Host reads and writes of few runs without a kernel: by pread and pwrite, where the file has what kernels see.

It has in tier "mapped", where kernels and system calls share the page cache, and behind a cache while it holds nothing
that the file lacks (`Attachment.current_file`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runs import Runs

FEW = 64
"""Runs up to which a system call each is faster than a launch."""
LONG = 1 << 14
"""Bytes of a run from which it is, too, for any number of them."""


def read(array: Any, runs: Runs, out: NDArray[np.uint8]) -> bool:
    """Read runs into `out`; return False where kernels have to."""
    no_kernel = runs.count <= FEW or runs.nbytes >= LONG or array._part.forked
    file = array._part.current_file() if no_kernel else None
    if file is None:
        return False
    for low in range(0, runs.count, 1 << 16):
        for k, start in enumerate(runs.starts(low, min(low + (1 << 16), runs.count)).tolist(), low):
            file.read_into(array._origin + start, out[k * runs.nbytes : (k + 1) * runs.nbytes])
    array._part.count_host_reads(runs.count, runs.nbytes)
    return True


def row(array: Any, index: int) -> Any:
    """Return ``array[index]`` of a plain integer; None where the general way has to look at it."""
    nbytes = array._row_bytes
    if not nbytes or not -array.shape[0] <= index < array.shape[0]:
        return None
    file = array._part.current_file()
    if file is None:
        return None
    raw = np.empty(nbytes, np.uint8)
    file.read_into(array._origin + index % array.shape[0] * nbytes, raw)
    array._part.count_host_reads(1, nbytes)
    out: NDArray[Any] = raw.view(array.dtype)
    return out if array.ndim == 2 else out.reshape(array.shape[1:])[()]


def write(array: Any, starts: NDArray[np.int64], nbytes: int, values: NDArray[np.uint8]) -> bool:
    """Write runs of a mapped file, which start at these bytes; return False where kernels have to."""
    part = array._part
    if part.mapping is None or len(starts) > FEW:
        return False
    with part.launch(True):  # counted, so that the end of the program flushes
        pass
    try:
        for k, start in enumerate(starts.tolist()):
            part.medium.write(array._origin + start, values[k * nbytes : (k + 1) * nbytes])
    finally:
        part.launch_ended()
    return True
