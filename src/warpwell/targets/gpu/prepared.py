"""`Prepared`: launches of one compiled kernel with the same arguments, of which only leading words change."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors

Grid = tuple[int, ...]


def flat_arguments(kernel: Any, first: int, values: Sequence[Any]) -> list[Any] | None:
    """Return what a numba-cuda kernel's parameters from number `first` on become for the driver.

    None where an argument would have to be copied: such a launch takes numba-cuda's own way.
    """
    found: list[Any] = []
    copied: list[Any] = []
    for kind, value in zip(kernel.argument_types[first:], values, strict=True):
        kernel._prepare_args(kind, value, 0, copied, found)
    return None if copied else found


class Prepared:
    """A kernel that is launched with few instructions of Python: numba-cuda's own launch takes ten times as long.

    Parameters
    ----------
    kernel : numba-cuda kernel
        Compiled.
    words : int
        Leading integer parameters, given with each launch.
    arguments : list
        The others; see `flat_arguments`.
    """

    def __init__(self, kernel: Any, words: int, arguments: Sequence[Any]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._function = driver.CUfunction(int(kernel._codelibrary.get_cufunc().handle))
        self._words = words
        self._places, self._addresses = _places(words, arguments)
        self._leading = self._places.view(np.int64)

    def launch(self, grid: Grid, threads: Grid, stream: Any, words: Sequence[int]) -> None:
        """Launch it, and return at once (one thread at a time)."""
        self._leading[: self._words] = words
        handle = 0 if stream is None else int(stream.handle)
        (status,) = self._driver.cuLaunchKernel(
            self._function, *(*grid, 1, 1)[:3], *(*threads, 1, 1)[:3], 0, handle, int(self._addresses.ctypes.data), 0
        )
        if int(status):
            name = getattr(status, "name", str(status))
            raise errors.DeviceNotFoundError(f"the GPU refused a launch ({name}): a kernel may have failed")


def _places(words: int, arguments: Sequence[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return places of 8 bytes, those of the words left empty, and the addresses of all."""
    places = np.zeros(words + len(arguments), np.uint64)
    room = places.view(np.uint8)
    for k, value in enumerate(arguments, words):
        if isinstance(value, ctypes._SimpleCData):
            raw = bytes(value)
        else:
            raw = (int(value) & (2**64 - 1)).to_bytes(8, "little")
        room[8 * k : 8 * k + len(raw)] = np.frombuffer(raw, np.uint8)
    return places, places.ctypes.data + 8 * np.arange(places.size, dtype=np.uint64)
