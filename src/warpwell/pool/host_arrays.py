"""`HostArrays`: the NumPy arguments of launches on a device of the pool, which are copied there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..targets import Span, together


class HostBuffer(Protocol):
    """What is needed of a `Buffer`."""

    def copy_from(self, source: Any, stream: Any = None) -> None:
        """Set its contents."""

    def copy_to_host(self, out: Any = None, stream: Any = None) -> NDArray[Any]:
        """Return its contents."""

    def part(self, offset: int, dtype: Any, shape: Any, strides: Any) -> HostBuffer:
        """Return another array in its memory."""

    def free(self) -> None:
        """Give its memory back."""

    def __getitem__(self, index: Any) -> HostBuffer: ...


class HostDevice(Protocol):
    """What is needed of a `Device`."""

    def empty(self, shape: Any, dtype: Any = ..., stream: Any = None) -> HostBuffer:
        """Return a buffer whose items are not set."""

    def to_device(self, array: Any, stream: Any = None) -> HostBuffer:
        """Return a copy of an array."""


class HostArrays:
    """Buffers in place of NumPy arrays, one for each; those that share memory here share it there.

    Parameters
    ----------
    device : Device
    stream : Stream or None
    args : sequence
        Of launches; what is no array stays as it is.
    """

    def __init__(self, device: HostDevice, stream: Any, args: Sequence[Any]) -> None:
        self._stream = stream
        self._arrays = {id(a): a for a in args if isinstance(a, np.ndarray)}
        self._buffers: dict[int, HostBuffer] = {}
        self._spans: list[tuple[Span, HostBuffer]] = []
        for group in together(list(self._arrays.values())):
            span = Span(group)
            whole = device.empty(span.pad + span.bytes.size, np.uint8, stream)
            whole[span.pad :].copy_from(span.bytes, stream)
            self._spans.append((span, whole))
            for array in span.arrays:
                self._buffers[id(array)] = whole.part(span.offset_of(array), array.dtype, array.shape, array.strides)
        self._alone = [array for key, array in self._arrays.items() if key not in self._buffers]
        for array in self._alone:
            self._buffers[id(array)] = device.to_device(array, stream)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """Return launch arguments with buffers in place of the arrays."""
        return [self._buffers.get(id(a), a) for a in args]

    def bring_back(self) -> None:
        """Copy to the arrays, but for those that are read-only, behind the launch; wait for it."""
        for span, whole in self._spans:
            if any(array.flags.writeable for array in span.arrays):
                span.bring_back(whole.copy_to_host(stream=self._stream))
        for array in self._alone:
            if array.flags.writeable:
                self._buffers[id(array)].copy_to_host(array, self._stream)

    def fetch(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the arrays that may be written, with what is to be: none is changed."""
        for span, whole in self._spans:
            yield from span.changed(whole.copy_to_host(stream=self._stream))
        for array in self._alone:
            if array.flags.writeable:
                yield array, self._buffers[id(array)].copy_to_host(stream=self._stream)

    def free(self) -> None:
        """Give the memory back, behind the launch."""
        for buffer in (*self._buffers.values(), *(whole for _, whole in self._spans)):
            buffer.free()
