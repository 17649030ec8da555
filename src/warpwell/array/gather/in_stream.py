"""`RowsInStream`: rows of memory that a GPU reads, copied by one kernel in the order of a stream.

Nobody waits when it begins: numbers in host memory go through pinned memory of its own, which later gathers use again
when its end was reached. A number out of range is noted by the kernel, and named by who asks for the result.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._future import Future
from ...targets import Block, memory_for
from ...targets.launch_stream import LaunchStream
from . import kernels
from .tensors import Tensor

LEAST_ROOM = 1 << 12
"""Bytes of the smallest room."""


@dataclass
class Numbers:
    """Row numbers: in host memory, an array of which nobody else knows; or in memory of the array's GPU.

    Attributes
    ----------
    shape : tuple of int
    host : ndarray of int32 or int64, or None
        Flat.
    tensor : Tensor or None
    width : int
        Bytes of a number.
    """

    shape: tuple[int, ...]
    host: NDArray[Any] | None
    tensor: Tensor | None
    width: int

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def on_host(self, stream: LaunchStream, room: Room) -> NDArray[Any]:
        """Return them in host memory; those of a GPU in `room`, in the order of a stream, for which it waits."""
        if self.host is not None:
            return self.host
        assert self.tensor is not None
        nbytes = self.size * self.width
        stream.copy(room.shared.address + 8, self.tensor.address, nbytes)
        stream.wait()
        return room.shared.view(np.dtype(np.uint8))[8 : 8 + nbytes].view(f"i{self.width}")


class Room:
    """Memory for the row numbers of a gather, pinned and on the device; its first word is set by kernels."""

    def __init__(self, device: str, nbytes: int) -> None:
        memory = memory_for(device)
        self.device, self.nbytes = device, nbytes
        self.shared: Block = memory.allocate_shared(8 + nbytes)
        self.near: Block = memory.allocate(nbytes)

    def put(self, stream: LaunchStream, numbers: Any) -> int:
        """Copy numbers to the device, in the order of a stream; return where they are."""
        self.shared.view(np.dtype(np.uint8))[8 : 8 + numbers.nbytes] = numbers.view(np.uint8)
        stream.copy(self.near.address, self.shared.address + 8, numbers.nbytes)
        return self.near.address


_free: list[Room] = []
_running: list[StreamFuture] = []
_lock = threading.Lock()


def take_room(device: str, nbytes: int) -> Room:
    """Return room for so many bytes of row numbers; `give_back` it when no work in a stream uses it."""
    size = max(LEAST_ROOM, 1 << (nbytes - 1).bit_length())
    for future in list(_running):
        future.done()  # which gives back the room of a finished gather
    with _lock:
        for room in _free:
            if room.device == device and room.nbytes == size:
                _free.remove(room)
                room.shared.words[0] = 0
                return room
    return Room(device, size)


def give_back(room: Room) -> None:
    """Let others use a room."""
    with _lock:
        _free.append(room)


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


def unit_of(*numbers: int) -> int:
    """Return the widest unit, up to 16 bytes, of which all these numbers are multiples."""
    return math.gcd(16, *numbers)


def lanes_shift(nbytes: int, unit: int, device: str) -> int:
    """Return log2 of the threads that take a row of `nbytes` bytes: up to a warp on a GPU, else one."""
    units = -(-nbytes // unit)
    return min(5, max(0, units - 1).bit_length()) if device == "cuda" else 0


class RowsInStream:
    """Copies rows of memory in the order of a stream.

    Parameters
    ----------
    device : str
    stream : LaunchStream
    source, extent, stride, nbytes : int
        Address of row 0; number of rows; bytes between them; bytes of each.
    """

    def __init__(
        self,
        device: str,
        stream: LaunchStream,
        *,
        source: int,
        extent: int,
        stride: int,
        nbytes: int,
    ) -> None:
        self._device, self._stream = device, stream
        self._source, self._extent, self._stride, self._nbytes = source, extent, stride, nbytes

    def begin(
        self,
        numbers: Numbers,
        out: int,
        over: Callable[[], None],
        wrong: Callable[[NDArray[Any]], BaseException],
        keep: Any,
        work: str = "gather",
        result: Any = None,
        settle: Callable[[], None] = lambda: None,
    ) -> Future:
        """Start to copy row ``numbers[k]`` to row k at address `out`; return a future of `result`.

        ``wrong(numbers in host memory)`` returns the exception for numbers of which one is out of range; `over` is
        called when the end of the copy is seen.
        """
        n = numbers.size
        room = take_room(self._device, n * numbers.width)
        try:
            at = 0
            if numbers.tensor is not None:
                at = numbers.tensor.address
            elif n:
                at = room.put(self._stream, numbers.host)
            unit = unit_of(self._source, self._stride, self._nbytes, out)
            shift = lanes_shift(self._nbytes, unit, self._device)
            if n:
                self._stream.launch(
                    kernels.copy_listed,
                    n << shift,
                    at,
                    numbers.width,
                    0,
                    n,
                    shift,
                    self._extent,
                    self._source,
                    self._stride,
                    self._nbytes,
                    out,
                    unit,
                    room.shared.address,
                )
            reached = self._stream.mark()
        except BaseException:
            over()
            raise

        def poll(future: Any, kept: Any = keep) -> None:
            try:
                if not reached():
                    return
                error = wrong(numbers.on_host(self._stream, room)) if room.shared.words[0] else None
                give_back(room)
            except errors.WarpwellError as failure:  # the GPU is lost
                error = failure
            with _lock:
                _running.remove(future)
            over()
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        return StreamFuture(work, poll, settle)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _free.clear()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
