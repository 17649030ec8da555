"""NumPy arrays as arguments of a launch on a GPU: copied there, and back when it is done.

One rule: arrays that share memory on the host share it on the GPU, where they are views of one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.args import ArgHint, InOut
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray

from ..arguments.overlaps import Span, together
from . import memory
from .device import check_fork, wait_default

Pairs = list[tuple[Any, Any]]
"""Host arrays and their copies; arrays that share memory have the same `SpanOnGpu`."""


class HostArray(ArgHint):
    """A NumPy array that was copied to the GPU: it has its own type, read-only or not, and its copy is passed."""

    def __init__(self, value: Any, device_copy: Any) -> None:
        super().__init__(value)
        self.device_copy = device_copy

    def to_device(self, retr: Any, stream: Any = 0) -> Any:
        """Return the array to pass to the kernel."""
        return InOut(self.device_copy).to_device(retr, stream)


class SpanOnGpu:
    """The copy of a `Span` on the current GPU."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._memory = memory.device_array(span.pad + span.bytes.size, np.dtype(np.uint8))
        self._memory[span.pad :].copy_to_device(span.bytes)
        self._address = memory.address_of(self._memory)

    def array(self, array: Any) -> Any:
        """Return one of the arrays on the GPU."""
        address = self._address + self._span.offset_of(array)
        return memory.as_array(address, array.shape, array.dtype, array.strides, self._memory)

    def copy_to_host(self) -> None:
        """Copy all arrays of the span back."""
        self._span.copy_back(self._memory.copy_to_host())


def copy_in(values: Sequence[Any], stream: Any) -> tuple[list[Any], Pairs]:
    """Return launch values with NumPy arrays copied in a numba-cuda stream, and the pairs to be copied back."""
    pairs: Pairs = []
    shared = _shared(values)
    if shared and stream is not None:
        wait_default()  # it copied them, and the launch's stream may not wait for it

    def copied(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(copied, value))
        if not isinstance(value, np.ndarray):
            return value
        array = _copied(value, shared, pairs, stream)
        return array if id(value) in shared else HostArray(value, array)

    return [copied(v) for v in values], pairs


def to_gpu(values: Sequence[Any]) -> tuple[list[Any], Pairs]:
    """Return values with NumPy arrays copied to the GPU (the copies are complete), and the pairs to be copied back."""
    check_fork()
    pairs: Pairs = []
    shared = _shared(values)

    def copied(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _copied(value, shared, pairs)
        foreign = hasattr(value, "__cuda_array_interface__") and not is_cuda_ndarray(value)
        return cuda.as_cuda_array(value) if foreign else value

    out = [copied(v) for v in values]
    wait_default()  # streams of executors do not wait for the default one
    return out, pairs


def copy_out(pairs: Pairs, stream: Any = None) -> None:
    """Copy arrays back, and wait until they are copied."""
    spans: set[SpanOnGpu] = set()
    for array, device_copy in pairs:
        if not array.flags.writeable:
            continue  # nothing can be copied into it
        if isinstance(device_copy, SpanOnGpu):
            if device_copy not in spans:
                spans.add(device_copy)
                device_copy.copy_to_host()
        elif _is_whole(array):
            device_copy.copy_to_host(array, stream=stream or 0)
        else:
            values = device_copy.copy_to_host(stream=stream or 0)
            if stream is not None:
                stream.synchronize()
            array[...] = values
    if stream is not None:
        stream.synchronize()


def _copied(array: Any, shared: dict[int, tuple[Any, SpanOnGpu]], pairs: Pairs, stream: Any = None) -> Any:
    """Return a copy of an array without gaps between its items, or its part of memory that several arrays share."""
    if id(array) in shared:
        copy, span = shared[id(array)]
        pairs.append((array, span))
        return copy
    copy = cuda.to_device(array if _is_whole(array) else np.ascontiguousarray(array), stream=stream or 0)
    pairs.append((array, copy))
    return copy


def _is_whole(array: Any) -> bool:
    return bool(array.flags.c_contiguous or array.flags.f_contiguous)


def _shared(values: Sequence[Any]) -> dict[int, tuple[Any, SpanOnGpu]]:
    """Return arrays on the current GPU for those NumPy arrays among values that share memory, by their ids."""
    found: dict[int, tuple[Any, SpanOnGpu]] = {}
    for group in together(values):
        span = Span(group)
        copy = SpanOnGpu(span)
        found |= {id(array): (copy.array(array), copy) for array in span.arrays}
    return found
