"""Host memory of the program: `pinned_empty`, and `HostArrays`, the NumPy arguments of launches."""

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
    """Shared host memory at a fixed address; page-locked if this machine has a GPU.

    Parameters
    ----------
    nbytes : int

    Attributes
    ----------
    number : int
        Identifier of the memory in messages to agents.
    mapped : dict of AgentConnection to bool
        Whether the agent could map the memory, for each agent that has tried.
    """

    def __init__(self, nbytes: int) -> None:
        self.number = new_id()
        self.mapped: dict[Any, bool] = {}
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
        """Path of the memory for other processes of this user on this host."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        if (unpin := getattr(self, "_unpin", None)) is not None:
            unpin()
        if hasattr(self, "memory"):
            self._close(self._file)
        for connection, is_mapped in getattr(self, "mapped", {}).items():
            if is_mapped:
                connection.free_later(self.number)


def pinned_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return an uninitialized array in pinned memory.

    A copy to a device reads the array in place. Do not modify it until the copy has completed (wait for an event, or
    call `Stream.synchronize`).
    """
    kind, dimensions = checked_dtype(dtype), checked_shape(shape)
    nbytes = math.prod(dimensions) * kind.itemsize
    return np.asarray(Pinned(nbytes))[:nbytes].view(kind).reshape(dimensions)


def memory_of(array: NDArray[Any]) -> Pinned | None:
    """Return the memory that contains an array of `pinned_empty` or a view of one, else None."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Pinned) else None


class HostArrays:
    """Buffers with the contents of NumPy arrays. Arrays that share memory on the host share it on the device.

    Parameters
    ----------
    device : Device
    stream : Stream or None
        The stream of all copies.
    args : sequence
        Arguments of launches. Arguments other than arrays are ignored.
    """

    def __init__(self, device: Any, stream: Any, args: Sequence[Any]) -> None:
        self._stream = stream
        self._arrays = {id(a): a for a in args if isinstance(a, np.ndarray)}
        self._buffers: dict[int, Any] = {}
        self._spans: list[tuple[Span, Any]] = []
        for group in together(list(self._arrays.values())):
            span = Span(group)
            memory = device.empty(span.pad + span.bytes.size, np.uint8, stream)
            memory[span.pad :].copy_from(span.bytes, stream)
            self._spans.append((span, memory))
            for array in span.arrays:
                self._buffers[id(array)] = memory.view_at(
                    span.offset_of(array), array.dtype, array.shape, array.strides
                )
        self._separate = [array for key, array in self._arrays.items() if key not in self._buffers]
        for array in self._separate:
            self._buffers[id(array)] = device.to_device(array, stream)

    def replace_arrays(self, args: Sequence[Any]) -> list[Any]:
        """Return launch arguments with each array replaced by its buffer."""
        return [self._buffers.get(id(a), a) for a in args]

    def copy_back(self) -> None:
        """Copy the contents after the launch to all writable arrays, and wait for the copies."""
        for span, memory in self._spans:
            if any(array.flags.writeable for array in span.arrays):
                span.copy_back(memory.copy_to_host(stream=self._stream))
        for array in self._separate:
            if array.flags.writeable:
                self._buffers[id(array)].copy_to_host(array, self._stream)

    def fetch(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the writable arrays, each with its contents after the launch. The arrays are not modified."""
        for span, memory in self._spans:
            yield from span.changed(memory.copy_to_host(stream=self._stream))
        for array in self._separate:
            if array.flags.writeable:
                yield array, self._buffers[id(array)].copy_to_host(stream=self._stream)

    def free(self) -> None:
        """Free the buffers after the launch."""
        for buffer in (*self._buffers.values(), *(memory for _, memory in self._spans)):
            buffer.free()
