"""`Prepared`: launches of one compiled kernel with the same arguments, of which only leading words change."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from .device import check

Grid = tuple[int, ...]

_HEAD = struct.Struct("<7I28xqq")
"""A row: CUlaunchConfig, the function, and where its arguments are."""

_SHAPE_ERRORS = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_NOT_FOUND",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
)
"""What the driver says of a launch that it could never run; what it says else, it says of the GPU."""


class Prepared:
    """A kernel that is launched with few instructions of Python: numba-cuda's own launch takes ten times as long.

    Parameters
    ----------
    driver : module
        ``cuda.bindings.driver``.
    function : CUfunction
    name : str
        Of the kernel, for messages.
    words : int
        Leading integer parameters, given with each launch.
    arguments : sequence
        The others; see `pack`.
    shared : int
        Bytes of dynamic shared memory.
    cooperative : bool
        Whether blocks wait for one another, so that all must be resident.
    """

    def __init__(
        self,
        driver: Any,
        function: Any,
        name: str,
        words: int,
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        self._function = function
        self._name = name
        self._words = words
        self._shared = shared
        self._places, self._addresses = pack([0] * words + list(arguments))
        self._leading = self._places.view(np.int64)
        self._own = self._places[words:].tobytes()
        self._formats = f"<{words}q", f"<{self._places.size}q"
        self._start = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        self._extra = () if cooperative else (0,)

    def row(self, grid: Grid, threads: Grid, words: Sequence[int]) -> NDArray[np.int64]:
        """Return the words of CUlaunchConfig, the function and the address of its arguments (not cooperative).

        The arguments are this object's own, so all rows of it launch with the same `words`.
        """
        self._leading[: self._words] = words
        made = bytearray(_HEAD.size)
        self._configure(made, grid, threads, _address(self._addresses))
        return np.frombuffer(made, np.int64)

    def own_row(self, grid: Grid, threads: Grid, words: Sequence[int]) -> NDArray[np.int64]:
        """Return what `row` does, with arguments of its own behind it: keep it until its launch has ended."""
        size, first = self._places.nbytes, _HEAD.size
        made = bytearray(first + 2 * size)
        row = np.frombuffer(made, np.int64)
        at = _address(row) + first
        self._configure(made, grid, threads, at + size)
        # not by NumPy, whose first calls after others ran take longest
        struct.pack_into(self._formats[0], made, first, *words)
        made[first + 8 * self._words : first + size] = self._own
        struct.pack_into(self._formats[1], made, first + size, *range(at, at + size, 8))
        return row

    def _configure(self, row: bytearray, grid: Grid, threads: Grid, arguments: int) -> None:
        shape = *(*grid, 1, 1)[:3], *(*threads, 1, 1)[:3], self._shared
        _HEAD.pack_into(row, 0, *shape, int(self._function), arguments)

    def launch(self, grid: Grid, threads: Grid, stream: Any, words: Sequence[int]) -> None:
        """Launch it, and return at once (one thread at a time)."""
        self._leading[: self._words] = words
        handle = 0 if stream is None else int(stream.handle)
        result = self._start(
            self._function,
            *(*grid, 1, 1)[:3],
            *(*threads, 1, 1)[:3],
            self._shared,
            handle,
            int(self._addresses.ctypes.data),
            *self._extra,
        )
        if int(result[0]):
            check_kernel(result, self._name)


def check_kernel(result: Any, name: str) -> Any:
    """Return what a call of the driver about a kernel gave besides its status.

    Raises
    ------
    ArgumentError
        The kernel cannot run so on this GPU.
    DeviceNotFoundError
        The GPU is lost.
    """
    status = getattr(result[0], "name", str(result[0]))
    if status in _SHAPE_ERRORS:
        raise errors.ArgumentError(f"the GPU refused kernel {name!r} ({status}): see its blocks, threads and options")
    return check(result)


def pack(values: Sequence[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return places of 8 bytes that hold values, and their addresses, which is what a launch takes.

    Values are NumPy scalars, ctypes values, and addresses and words as Python integers.
    """
    room = bytearray(8 * max(1, len(values)))
    for k, value in enumerate(values):
        if isinstance(value, np.generic):
            raw = value.tobytes()
        elif isinstance(value, ctypes._SimpleCData):
            raw = bytes(value)
        else:
            raw = (int(value) & (2**64 - 1)).to_bytes(8, "little")
        room[8 * k : 8 * k + len(raw)] = raw
    places = np.frombuffer(room, np.uint64)
    return places, _address(places) + _offsets(places.size)


@functools.cache
def _offsets(count: int) -> NDArray[np.uint64]:
    """Return the offsets of so many places."""
    return 8 * np.arange(count, dtype=np.uint64)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # `array.ctypes` makes an object first
