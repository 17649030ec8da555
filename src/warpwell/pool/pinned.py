"""`pinned_empty`: host arrays that devices copy from and to without a copy in between."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..targets.kernel import has_cuda
from ..targets.pool_memory import pin, unpin


class Pinned:
    """Host memory that stays where it is, shared and, where there is a GPU, page-locked.

    Parameters
    ----------
    nbytes : int
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self.locked = has_cuda() and pin(self.address, len(self.memory))
        self._unpin = unpin

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (len(self.memory),), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        if getattr(self, "locked", False):
            self._unpin(self.address)


def pinned_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return an array in pinned memory; its items are not set.

    A copy from it to a device does not copy it first: it is lent, and must not change until the stream of the copy
    has come so far (an event, or `Stream.synchronize`).
    """
    kind = np.dtype(dtype)
    dimensions = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = int(np.prod(dimensions, dtype=np.int64)) * kind.itemsize
    return np.asarray(Pinned(nbytes))[:nbytes].view(kind).reshape(dimensions)


def is_pinned(array: NDArray[Any]) -> bool:
    """Tell whether an array lies in memory of `pinned_empty`."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, Pinned)
