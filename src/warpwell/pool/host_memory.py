"""Host memory of the application: `pinned_empty`, and `HostArrays`, the NumPy arguments of launches."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._check import checked_dtype, checked_shape
from ..targets import Span, has_cuda, together
from ..targets.gpu import pin
from .agent.protocol import new_id


class Pinned:
    """Host memory that agents can map; page-locked if there is a GPU.

    Parameters
    ----------
    nbytes : int

    Attributes
    ----------
    number : int
        The number of the memory on agents.
    reached : dict
        Whether the agent of each connection has mapped it.
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
        """A path for other processes of this user and host."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        if (unpin := getattr(self, "_unpin", None)) is not None:
            unpin()
        if hasattr(self, "memory"):
            self._close(self._file)
        for connection, is_mapped in getattr(self, "reached", {}).items():
            if is_mapped:
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
    """Return the memory of `pinned_empty` that contains an array."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Pinned) else None


def is_pinned(array: NDArray[Any]) -> bool:
    """Return whether an array is in memory of `pinned_empty`."""
    return memory_of(array) is not None


class HostArrays:
    """Buffers for NumPy arrays, one each. Arrays that share memory in this process share it on the device.

    Parameters
    ----------
    device : Device
    stream : Stream or None
    args : sequence
        Arguments of launches; only arrays are replaced.
    """

    def __init__(self, device: Any, stream: Any, args: Sequence[Any]) -> None:
        self._stream = stream
        self._arrays = {id(a): a for a in args if isinstance(a, np.ndarray)}
        self._buffers: dict[int, Any] = {}
        self._spans: list[tuple[Span, Any]] = []
        for group in together(list(self._arrays.values())):
            span = Span(group)
            shared = device.empty(span.pad + span.bytes.size, np.uint8, stream)
            shared[span.pad :].copy_from(span.bytes, stream)
            self._spans.append((span, shared))
            for array in span.arrays:
                self._buffers[id(array)] = shared.part(span.offset_of(array), array.dtype, array.shape, array.strides)
        self._alone = [array for key, array in self._arrays.items() if key not in self._buffers]
        for array in self._alone:
            self._buffers[id(array)] = device.to_device(array, stream)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """Return launch arguments with buffers for the arrays."""
        return [self._buffers.get(id(a), a) for a in args]

    def bring_back(self) -> None:
        """Copy to the writable arrays after the launch, and wait for it."""
        for span, shared in self._spans:
            if any(array.flags.writeable for array in span.arrays):
                span.bring_back(shared.copy_to_host(stream=self._stream))
        for array in self._alone:
            if array.flags.writeable:
                self._buffers[id(array)].copy_to_host(array, self._stream)

    def fetch(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the writable arrays with their new contents, and change no array."""
        for span, shared in self._spans:
            yield from span.changed(shared.copy_to_host(stream=self._stream))
        for array in self._alone:
            if array.flags.writeable:
                yield array, self._buffers[id(array)].copy_to_host(stream=self._stream)

    def free(self) -> None:
        """Free the memory after the launch."""
        for buffer in (*self._buffers.values(), *(shared for _, shared in self._spans)):
            buffer.free()
