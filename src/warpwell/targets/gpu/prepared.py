"""`Prepared` and `PreparedForms`: launches by few instructions of Python, and launches by schedulers."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import check_kernel

Grid = tuple[int, ...]

_HEAD = struct.Struct("<7I28xqq")
"""A row: CUlaunchConfig, the function, and the address of its arguments."""


class Prepared:
    """A kernel with its arguments. A launch by numba-cuda takes ten times as long. One thread at a time uses it.

    Parameters
    ----------
    driver : module
        ``cuda.bindings.driver``.
    function : CUfunction
    name : str
        Name of the kernel, for messages.
    leading : int
        Number of integer parameters that come first; each launch passes them.
    arguments : sequence
        Remaining arguments; see `pack`.
    shared : int
        Bytes of dynamic shared memory.
    cooperative : bool
        Whether blocks wait for one another, so that all must be resident.

    Attributes
    ----------
    values : ndarray of int64
        The arguments, 8 bytes each. They may be changed between two calls of `launch`.
    """

    def __init__(
        self,
        driver: Any,
        function: Any,
        name: str,
        leading: int,
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        self.cooperative = cooperative
        self._function = function
        self._name = name
        self._count = leading
        self._shared = shared
        packed, self._addresses = pack([0] * leading + list(arguments))
        self.values = packed.view(np.int64)
        self._remaining = packed[leading:].tobytes()
        self._formats = f"<{leading}q", f"<{packed.size}q"
        self._start = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        self._extra = () if cooperative else (0,)

    def row(self, grid: Grid, threads: Grid, leading: Sequence[int]) -> NDArray[np.int64]:
        """Return the words of CUlaunchConfig, the function and the address of its arguments (not cooperative).

        A copy of the arguments follows: keep the row until its launch has ended.
        """
        size, first = self.values.nbytes, _HEAD.size
        made = bytearray(first + 2 * size)
        row = np.frombuffer(made, np.int64)
        address = _address(row) + first
        shape = *(*grid, 1, 1)[:3], *(*threads, 1, 1)[:3], self._shared
        _HEAD.pack_into(made, 0, *shape, int(self._function), address + size)
        # By `struct`: the first calls of NumPy after other code ran take longest.
        struct.pack_into(self._formats[0], made, first, *leading)
        made[first + 8 * self._count : first + size] = self._remaining
        struct.pack_into(self._formats[1], made, first + size, *range(address, address + size, 8))
        return row

    def launch(self, grid: Grid, threads: Grid, stream: Any, leading: Sequence[int]) -> None:
        """Launch the kernel in a stream, None for the default one, and return at once."""
        self.values[: self._count] = leading
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


class PreparedForms:
    """A kernel that a scheduler launches: alone ("plain"), or as workers that claim its blocks.

    Subclasses set the attributes when both are compiled. A form that is absent from `_prepared` has arguments that are
    not words; subclasses launch it by `_launch`.
    """

    _prepared: dict[str, Prepared]
    _resources: dict[str, dict[str, int]]
    _blocks_count: int
    _grid: Grid
    """Grid of the kernel alone."""
    _threads: Grid
    _worker_arguments: tuple[int, ...]
    """Leading arguments of workers after those that each launch passes."""
    _plain_arguments: tuple[int, ...]
    """Leading arguments of the kernel alone."""
    _row: NDArray[np.int64] | None = None

    def resources(self, form: str) -> dict[str, int]:
        """Return the registers per thread, shared and local bytes, threads, and resident blocks of a form."""
        return dict(self._resources[form])

    def start(self, control: int, base: int, workers: int, stream: Any, chunk: int = 1) -> None:
        """Launch `workers` workers, numbered from `base`, that claim `chunk` blocks at a time; return at once."""
        self._launch("workers", (workers,), stream, (control, base, chunk, self._blocks_count, *self._worker_arguments))

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> NDArray[np.int64] | None:
        """Return the launch of `start` as a row, to be kept until it has ended; None if arguments are not words."""
        prepared = self._prepared.get("workers")
        if prepared is None:
            return None
        leading = control, base, chunk, self._blocks_count, *self._worker_arguments
        return prepared.row((workers,), self._threads, leading)

    def plain_row(self) -> NDArray[np.int64] | None:
        """Return the launch of the kernel alone as a row; None if it is cooperative, or its arguments are not words."""
        prepared = self._prepared.get("plain")
        if self._row is None and prepared is not None and not prepared.cooperative:
            self._row = prepared.row(self._grid, self._threads, self._plain_arguments)
        return self._row

    def start_plain(self, stream: Any) -> None:
        """Launch the kernel alone, whole, and return at once."""
        self._launch("plain", self._grid, stream, self._plain_arguments)

    def _launch(self, form: str, grid: Grid, stream: Any, leading: tuple[int, ...]) -> None:
        self._prepared[form].launch(grid, self._threads, stream, leading)


def pack(values: Sequence[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return an array with 8 bytes for each value, and the addresses of its items, as a launch takes them.

    Values are NumPy scalars, ctypes values, and integers.
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
    packed = np.frombuffer(room, np.uint64)
    return packed, _address(packed) + _offsets(packed.size)


@functools.cache
def _offsets(count: int) -> NDArray[np.uint64]:
    """Return the offsets of `count` items of 8 bytes."""
    return 8 * np.arange(count, dtype=np.uint64)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # `array.ctypes` makes an object first
