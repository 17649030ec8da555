"""`shared_on_gpu`: NumPy arguments that share memory, on the current GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..overlaps import Span, together


class SpanOnGpu:
    """The copy of a `Span` on the current GPU."""

    def __init__(self, span: Span) -> None:
        from numba import cuda

        self._span = span
        self._there = cuda.device_array(span.pad + span.bytes.size, np.uint8)
        self._there[span.pad :].copy_to_device(span.bytes)

    def array(self, array: Any) -> Any:
        """Return one of its arrays there."""
        from numba import cuda

        address = int(self._there.__cuda_array_interface__["data"][0]) + self._span.place(array)
        about = {"shape": array.shape, "typestr": array.dtype, "data": (address, False), "version": 3,
                 "strides": array.strides}  # fmt: skip
        return cuda.from_cuda_array_interface(about, owner=self._there, sync=False)

    def copy_to_host(self, array: Any) -> None:
        """Bring all of its arrays back, whichever is asked for; the others bring the same."""
        self._span.bring_back(self._there.copy_to_host())


def shared_on_gpu(values: Sequence[Any]) -> dict[int, tuple[Any, SpanOnGpu]]:
    """Return arrays on the current GPU for those NumPy arrays among launch values that share memory, by their ids."""
    found: dict[int, tuple[Any, SpanOnGpu]] = {}
    for group in together(values):
        span = Span(group)
        copy = SpanOnGpu(span)
        found |= {id(array): (copy.array(array), copy) for array in span.arrays}
    return found
