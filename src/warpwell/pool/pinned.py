"""`pinned_empty`: host arrays that devices read and write without an intermediate copy."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._check import checked_dtype, checked_shape
from ..targets import has_cuda
from ..targets.gpu import pin
from .agent.protocol import new_id


class Pinned:
    """Host memory that stays where it is, shared and, where there is a GPU, page-locked.

    Parameters
    ----------
    nbytes : int

    Attributes
    ----------
    number : int
        What agents know it by.
    reached : dict
        For each connection that was asked, whether its agent has mapped it.
    """

    def __init__(self, nbytes: int) -> None:
        self.number = new_id()
        self.reached: dict[Any, bool] = {}
        size = max(nbytes, mmap.PAGESIZE)
        self._file = os.memfd_create("warpwell", os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, size)
            self.memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._unpin = pin(self.address, len(self.memory)) if has_cuda() else None
        self._close = os.close

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (len(self.memory),), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def path(self) -> str:
        """Where other processes of this user and host find it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        if (unpin := getattr(self, "_unpin", None)) is not None:
            unpin()
        if hasattr(self, "memory"):
            self._close(self._file)
        for connection, there in getattr(self, "reached", {}).items():
            if there:
                connection.finalizer(self.number)


def pinned_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return an array in pinned memory; its items are not set.

    A copy from it to a device reads it in place: it must not change until the stream has reached the copy (wait for an
    event, or `Stream.synchronize`).
    """
    kind, dimensions = checked_dtype(dtype), checked_shape(shape)
    nbytes = math.prod(dimensions) * kind.itemsize
    return np.asarray(Pinned(nbytes))[:nbytes].view(kind).reshape(dimensions)


def memory_of(array: NDArray[Any]) -> Pinned | None:
    """Return the memory of `pinned_empty` that an array lies in."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Pinned) else None


def is_pinned(array: NDArray[Any]) -> bool:
    """Return whether an array lies in memory of `pinned_empty`."""
    return memory_of(array) is not None
