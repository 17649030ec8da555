"""Values of stores without a schema: what a caller may pass, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import errors
from .keys import Keys, shown
from .schema import MAX_VALUE


def one_value(value: Any, key: Any) -> Any:
    """Return a value as bytes or a flat view of bytes."""
    if type(value) is not bytes:
        if isinstance(value, (str, int, float, np.number, np.bool_)) or value is None:
            raise errors.ArgumentError(
                f"the value of key {shown(key)!r} is of type {type(value).__name__}: pass bytes or an array, or create"
                " the store with a schema",
                name="value",
            )
        try:
            view = memoryview(value)
            if _holds_addresses(value, view):
                raise errors.ArgumentError(
                    f"the value of key {shown(key)!r} holds Python objects or pointers, which mean nothing on disk:"
                    " pass bytes (pickle.dumps(value), say) or an array of numbers",
                    name="value",
                )
            value = view.cast("B")
        except errors.ArgumentError:
            raise
        except (TypeError, BufferError, ValueError):
            raise errors.ArgumentError(
                f"the value of key {shown(key)!r} is of type {type(value).__name__}: pass bytes or an array in C order",
                name="value",
            ) from None
    if len(value) > MAX_VALUE:
        raise errors.ValueSizeError(
            f"the value of key {shown(key)!r} has {len(value)} bytes, and a store takes at most {MAX_VALUE}: split it",
            name="value",
            nbytes=len(value),
        )
    return value


def _holds_addresses(value: Any, view: memoryview) -> bool:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        return bool(dtype.hasobject)
    return any(code in view.format for code in "OPzZ")  # of ctypes: objects, and pointers to anything and to strings


def many_values(values: Any, keys: Keys) -> Any:
    """Return values as the log takes them: a list of buffers, or uint8 [N, nbytes]."""
    if isinstance(values, (bytes, str, dict)) or not isinstance(values, Iterable):
        raise errors.ArgumentError(
            f"values is one {type(values).__name__}: pass a list of bytes or uint8 [N, nbytes], one for each key;"
            " dicts need a store with a schema",
            name="values",
        )
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype == np.uint8:
        packed: Any = np.ascontiguousarray(values)
        if values.shape[1] > MAX_VALUE:
            one_value(packed[0], keys.row(0) if keys.size else b"")
    else:
        packed = list(values)
    if len(packed) != keys.size:
        raise errors.ArgumentError(f"{len(packed)} values for {keys.size} keys: give one for each", name="values")
    if isinstance(packed, np.ndarray) or all(type(v) is bytes and len(v) <= MAX_VALUE for v in packed):
        return packed
    return [one_value(v, keys.row(k)) for k, v in enumerate(packed)]


def row_bytes_of(out: Any, count: int, row_bytes: int | None = None) -> int:
    """Check the array that values are read into; return the size of its rows."""
    fine = (
        isinstance(out, np.ndarray)
        and out.ndim == 2
        and out.dtype == np.uint8
        and out.flags.c_contiguous
        and out.flags.writeable
    )
    if not fine or len(out) != count or (row_bytes is not None and out.shape[1] != row_bytes):
        size = "nbytes" if row_bytes is None else row_bytes
        raise errors.ArgumentError(f"out must be a writable uint8 array [{count}, {size}] in C order", name="out")
    return int(out.shape[1])
