"""`DeviceMemory`: a block of a device's memory on its agent; `BufferView`: the array of a buffer in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from .runtime import Runtime


class SkippedError(Exception):
    """A call cannot run because an earlier one failed, which was reported, or the program has cancelled it.

    It never leaves the agent, and the next synchronization does not report it.

    Parameters
    ----------
    cause : BaseException
        Why.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Shared(NamedTuple):
    """The part of a memory that other objects share.

    Attributes
    ----------
    number : int
    offer : object
        What opens it.
    peers : set of int
        Who may have.
    unused : callable
        Called with this and the block when the last reference goes.
    """

    number: int
    offer: Any
    peers: set[int]
    unused: Callable[[Shared, Any], None]


class DeviceMemory:
    """Memory that is allocated when it is first used, in the order of some stream.

    Calls that wait in lanes refer to it, so freeing a buffer takes effect when they are over and not before.

    Parameters
    ----------
    runtime : Runtime
    nbytes : int

    Attributes
    ----------
    shared : Shared, optional
        Once other agents write to it (`SharedMemory`).
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
        """Allocate, once. It raises what went wrong, each time."""
        if self.block is not None:
            return
        with self._lock:
            if self._failure is None and self.block is None:
                try:
                    self.block = self._runtime.allocate(self.nbytes)
                except BaseException as error:  # kept: each call that uses the memory raises it
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
    """A part of a memory as an array.

    Parameters
    ----------
    memory : DeviceMemory
    offset : int
        Bytes.
    dtype : numpy.dtype
    shape : tuple of int
    strides : tuple of int, optional
        Bytes between items, as a kernel sees them; by default C order.
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
        """Return where it begins, for work in a stream."""
        block = self.memory.ready()
        runtime.used(block, stream)
        return int(block.address) + self.offset

    def argument(self, runtime: Runtime, stream: Any) -> Any:
        """Return what a kernel receives in its place."""
        block = self.memory.ready()
        runtime.used(block, stream)
        if self._argument is None:
            self._argument = runtime.array(block, self.offset, self.dtype, self.shape, self._strides)
        return self._argument

    def operand(self, runtime: Runtime, stream: Any) -> Any:
        """Return what a Python function receives in its place: an array of its own, on the same memory."""
        block = self.memory.ready()
        runtime.used(block, stream)
        if self._operand is None:
            self._operand = runtime.operand(block, self.offset, self.dtype, self.shape)
        return self._operand()


class Missing:
    """The object for a handle that this device does not know: every use of it raises an error."""

    nbytes = 0

    def __init__(self, handle: int | str) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"there is no object {self._handle} on this device: was it freed?")
