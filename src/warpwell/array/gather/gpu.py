"""Rows of memory that a GPU reads: one kernel copies them in the order of a stream, and no host thread waits.

Row indices in host memory are copied to the device through an `IndexBuffer`, which later gathers use again after the
stream has passed it. The kernel records an index out of range, and the call that takes the result raises the error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._future import Future
from ...targets import Block, LaunchStream, memory_for
from . import kernels
from .host import require_in_range, row_bytes
from .tensors import Indices, Tensor

MIN_BUFFER_BYTES = 1 << 12
"""Size of the smallest index buffer."""
HEADER_BYTES = 8
"""Size of the word in front of the pinned memory of an index buffer."""


class IndexBuffer:
    """Pinned memory and device memory of the same size, for lists of rows. A kernel may set the first pinned word."""

    def __init__(self, device: str, nbytes: int) -> None:
        memory = memory_for(device)
        self.device, self.nbytes = device, nbytes
        self.pinned: Block = memory.allocate_shared(HEADER_BYTES + nbytes)
        self.on_device: Block = memory.allocate(nbytes)

    def to_device(self, stream: LaunchStream, indices: Indices) -> int:
        """Return the device address of row indices; an array is copied here in the order of a stream."""
        if isinstance(indices, Tensor):
            return indices.address
        nbytes = indices.nbytes
        self.pinned.view(np.dtype(np.uint8))[HEADER_BYTES : HEADER_BYTES + nbytes] = indices.reshape(-1).view(np.uint8)
        stream.copy(self.on_device.address, self.pinned.address + HEADER_BYTES, nbytes)
        return self.on_device.address

    def to_host(self, stream: LaunchStream, indices: Indices) -> NDArray[Any]:
        """Return row indices in host memory, one-dimensional; a tensor is copied here in the order of a stream."""
        if isinstance(indices, Tensor):
            return self.read(stream, indices.address, indices.size, f"i{indices.itemsize}")
        return indices.reshape(-1)

    def read(self, stream: LaunchStream, address: int, n: int, dtype: str) -> NDArray[Any]:
        """Copy N items from the device in the order of a stream, and wait; return a view of the pinned memory."""
        nbytes = n * np.dtype(dtype).itemsize
        stream.copy(self.pinned.address + HEADER_BYTES, address, nbytes)
        stream.wait()
        return self.pinned.view(np.dtype(np.uint8))[HEADER_BYTES : HEADER_BYTES + nbytes].view(dtype)


_free_buffers: list[IndexBuffer] = []
_running: list[StreamFuture] = []
_lock = threading.Lock()


def acquire_buffer(device: str, nbytes: int) -> IndexBuffer:
    """Return an index buffer of at least N bytes; call `release_buffer` when no work in a stream uses it."""
    size = max(MIN_BUFFER_BYTES, 1 << (nbytes - 1).bit_length())
    for future in list(_running):
        future.done()  # this call releases the buffer of a finished gather
    with _lock:
        for buffer in _free_buffers:
            if buffer.device == device and buffer.nbytes == size:
                _free_buffers.remove(buffer)
                buffer.pinned.words[0] = 0
                return buffer
    return IndexBuffer(device, size)


def release_buffer(buffer: IndexBuffer) -> None:
    """Let later gathers use an index buffer."""
    with _lock:
        _free_buffers.append(buffer)


class StreamFuture(Future):
    """The result of work in a stream; `result` calls `settle` after its end, outside of locks."""

    def __init__(self, work: str, poll: Callable[[Future], None], settle: Callable[[], None]) -> None:
        super().__init__(work, poll)
        self._settle = settle
        with _lock:
            _running.append(self)

    def _wait(self, timeout: float | None) -> None:
        super()._wait(timeout)
        self._settle()


def copy_in_stream(
    array: Any,
    stream: LaunchStream,
    indices: Indices,
    source: int,
    out: int,
    *,
    settle: Callable[[], None],
    work: str,
    result: Any,
    keep: Any,
) -> Future:
    """Start to copy row ``indices[k]`` of memory to row k at address `out`; return a future of `result`.

    Parameters
    ----------
    source : int
        Address of row 0.
    settle, work
        As for `StreamFuture`.
    keep : object
        An object to keep alive until the end of the copy.
    """
    n, nbytes, extent = indices.size, row_bytes(array), array.shape[0]
    buffer = acquire_buffer(array.device, n * indices.itemsize)
    if n and nbytes:
        # without a row, the kernel reads memory that exists
        copy = kernels.Copy.of(n, nbytes, source if extent else out, array._strides[0], out)
        rows = buffer.to_device(stream, indices), indices.itemsize, 0, extent
        stream.launch(kernels.copy_from_memory, copy.threads, *rows, *copy, buffer.pinned.address)
    reached = stream.mark()

    def poll(future: Any, reference: Any = keep) -> None:
        error = None
        try:
            if not reached():
                return
            if buffer.pinned.words[0] or not nbytes:
                require_in_range(array, buffer.to_host(stream, indices))
            release_buffer(buffer)
        except errors.WarpwellError as failure:  # an index is out of range, or the GPU is lost
            error = failure
        with _lock:
            _running.remove(future)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    return StreamFuture(work, poll, settle)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _free_buffers.clear()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
