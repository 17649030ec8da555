"""`DeviceMemory`: a block of a device's memory on its agent; `BufferView`: the array of a buffer in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from .runtime import Runtime


class SkippedError(Exception):
    """A call cannot run, because an earlier call failed (which was reported), or because the program has cancelled it.

    The agent does not send this error, and the next synchronization does not report it.

    Parameters
    ----------
    cause : BaseException
        The failure of the earlier call, or the reason for the cancellation.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Shared(NamedTuple):
    """How other agents access a block of device memory.

    Attributes
    ----------
    number : int
        Identifier of the block in messages.
    offer : object
        The data with which `PeerAccess.open` opens the block.
    peers : set of int
        Ranks of the agents that may have opened the block.
    unused : callable
        Called with this object and the block when the last reference is dropped.
    """

    number: int
    offer: Any
    peers: set[int]
    unused: Callable[[Shared, Any], None]


class DeviceMemory:
    """Memory that is allocated at its first use, in the order of the stream of that use.

    Queued calls refer to it, so the memory of a freed buffer is freed after these calls.

    Parameters
    ----------
    runtime : Runtime
    nbytes : int

    Attributes
    ----------
    shared : Shared, optional
        Set when the memory is first offered to another agent; see `PeerMemory`.
    """

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.nbytes = nbytes
        self._runtime = runtime
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self.block: Any = None
        self.shared: Shared | None = None

    def __del__(self) -> None:
        if self.shared is not None:
            self.shared.unused(self.shared, self.block)

    def allocate(self) -> None:
        """Allocate the memory once. After a failure, each call raises that failure."""
        if self.block is not None:
            return
        with self._lock:
            if self._failure is None and self.block is None:
                try:
                    self.block = self._runtime.allocate(self.nbytes)
                except BaseException as error:  # each call that uses the memory raises it
                    self._failure = error.with_traceback(None)
            if self._failure is not None:
                raise self._failure.with_traceback(None)

    def ready(self) -> Any:
        """Return the block; raise `SkippedError` if it could not be allocated."""
        if self.block is None:
            try:
                self.allocate()
            except BaseException as error:
                raise SkippedError(error) from None
        return self.block


class BufferView:
    """An array in device memory.

    Parameters
    ----------
    memory : DeviceMemory
    offset : int
        Offset of the array in the memory, in bytes.
    dtype : numpy.dtype
    shape : tuple of int
    strides : tuple of int, optional
        Strides for kernels, in bytes. Default: C order.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._strides = strides
        self.memory = memory
        self.offset = offset
        self.dtype = dtype
        self.shape = shape
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._argument: Any = None
        self._operand: Any = None

    def address(self, runtime: Runtime, stream: Any) -> int:
        """Return the address of the array, for work in a stream."""
        block = self.memory.ready()
        runtime.used(block, stream)
        return int(block.address) + self.offset

    def argument(self, runtime: Runtime, stream: Any) -> Any:
        """Return the argument of a kernel for the array."""
        block = self.memory.ready()
        runtime.used(block, stream)
        if self._argument is None:
            self._argument = runtime.array(block, self.offset, self.dtype, self.shape, self._strides)
        return self._argument

    def operand(self, runtime: Runtime, stream: Any) -> Any:
        """Return the argument of a Python function: a new array object in the same memory."""
        block = self.memory.ready()
        runtime.used(block, stream)
        if self._operand is None:
            self._operand = runtime.operand(block, self.offset, self.dtype, self.shape)
        return self._operand()


class Missing:
    """Stands for a handle without an object on this device: every use raises an error."""

    nbytes = 0

    def __init__(self, handle: int | str) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"object {self._handle} does not exist on this device: was it freed?")
