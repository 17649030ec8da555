"""CRC-32C of bytes in host memory, by compiled code that holds no interpreter lock."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..targets import crc32c as crc32c_at
from ..targets.device import seam_for

_compiled: dict[str, Any] = {}


def crc32c(data: Any, seed: int = 0) -> int:
    """Return the CRC-32C of bytes.

    Parameters
    ----------
    data : bytes-like
        Any object with a contiguous buffer: bytes, memoryview, a NumPy array in C order.
    seed : int
        CRC of what comes before them.

    Returns
    -------
    int
        0 to ``2**32 - 1``.
    """
    raw = np.frombuffer(data, np.uint8)
    return int(compiled("one", _one)(raw.ctypes.data, raw.nbytes, int(seed)))


def crc32c_many(data: Any, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the CRC-32C of many parts of a buffer.

    Parameters
    ----------
    data : bytes-like
    starts, sizes : numpy.ndarray
        int64 [N], byte offsets and lengths. They must lie inside of the buffer.

    Returns
    -------
    numpy.ndarray
        int64 [N], 0 to ``2**32 - 1``.
    """
    raw = np.frombuffer(data, np.uint8)
    starts = np.ascontiguousarray(starts, np.int64)
    sizes = np.ascontiguousarray(sizes, np.int64)
    if starts.size and (starts.min() < 0 or sizes.min() < 0 or (starts + sizes).max() > raw.nbytes):
        raise IndexError(f"a part lies outside of the buffer of {raw.nbytes} bytes")
    out = np.empty(starts.size, np.int64)
    compiled("many", _many)(raw.ctypes.data, starts, sizes, out)
    return out


def compiled(name: str, function: Any) -> Any:
    """Return the compiled form of device code (compiled or loaded once a process; no interpreter lock)."""
    if name not in _compiled:
        from ..targets.compiled import dispatcher  # imports the compiler: not before it is needed

        seam_for("cpu")
        _compiled[name] = dispatcher(function)
    return _compiled[name]


def _one(address, nbytes, seed):  # type: ignore[no-untyped-def]
    return crc32c_at(address, nbytes, seed)


def _many(address, starts, sizes, out):  # type: ignore[no-untyped-def]
    for k in range(starts.size):
        out[k] = crc32c_at(address + starts[k], sizes[k], 0)
