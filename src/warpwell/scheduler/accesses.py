"""Memory that the arguments of a launch use, as address ranges: which tasks must run in order follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..targets import is_argument
from ..targets.compiler import written_arguments
from .callables import Call
from .data_order import Access


def accesses_of(launch: Any, arguments: Sequence[Any]) -> list[Access]:
    """Return the memory that the arrays among the arguments of a launch use.

    A strided array counts from its first to its last byte, an array in a tuple or list as an array. A function that
    enqueues work may write all of its arrays.
    """
    found = []
    written: list[bool] | None = None
    is_call = isinstance(launch, Call)
    for k, value in enumerate(launch.arguments if is_call else arguments):
        kind = type(value)
        if kind is int or kind is float or isinstance(value, np.generic):
            continue
        for access in _accesses(value):
            if access.writes and not is_call:
                if written is None:
                    written = written_arguments(launch.kernel, arguments)
                access = access._replace(writes=written[k])
            found.append(access)
    return found


def _accesses(value: Any) -> Iterator[Access]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _accesses(item)
        return
    access = _access(value)
    if access is not None and access.start < access.end:
        yield access


def _access(value: Any) -> Access | None:
    """Return the memory of an array, and whether the array is writable; None for any other object."""
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            start = value.__array_interface__["data"][0]
            return Access(start, start + value.nbytes, value.flags.writeable)
        return Access(*byte_bounds(value), value.flags.writeable)
    if is_argument(value):
        if not hasattr(value, "byte_range"):  # not an array
            return None
        held_by, start, end = value.byte_range
        return Access(start, end, value.writable, held_by)
    try:
        if hasattr(value, "data_ptr") and hasattr(value, "element_size"):  # a tensor of PyTorch
            size = int(value.element_size())
            strides = [size * int(stride) for stride in value.stride()]
            return _strided(int(value.data_ptr()), tuple(value.shape), strides, size, True)
        interface = value.__cuda_array_interface__
        start, read_only = interface["data"]
        size = np.dtype(interface["typestr"]).itemsize
        return _strided(int(start or 0), interface["shape"], interface.get("strides"), size, not read_only)
    except Exception:  # not an array, or a tensor that does not export its memory
        return None


def _strided(start: int, shape: Sequence[int], strides: Sequence[int] | None, size: int, writable: bool) -> Access:
    """Return the memory from the first to the last byte of an array."""
    if 0 in shape:
        return Access(start, start, writable)
    if strides is None:
        return Access(start, start + size * int(np.prod(shape, dtype=np.int64)), writable)
    spans = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    first, last = sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)
    return Access(start + first, start + last + size, writable)
